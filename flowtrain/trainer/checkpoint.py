"""Checkpoints: a folder per step, with the model for other programs and the state for resuming.

    checkpoints/step_00000050/
        model/    config, generation config, tokenizer, chat template and weights in model.dtype,
                  as Hugging Face has them; of a run with [lora] the adapter alone, as peft has it
        state/    master weights and optimizer: each rank's rows, by torch.distributed.checkpoint,
                  which gives them to any number of ranks; safetensors, so nothing is unpickled
            state.json    step, version, cursor, dataflow; checksums of all files

Ranks copy their part to the memory of the host and go on with training. A thread of each writes,
flushes and checks it; the main rank's renames the folder once all have. So a folder that exists was
whole, and its checksums tell whether it still is.
"""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from flowtrain.records import UserError
from flowtrain.trainer.distributed import World
from flowtrain.trainer.host_copies import HostCopies
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.model import lora
from flowtrain.trainer.model.loading import ModelFiles
from flowtrain.trainer.optimizers import Part, ShardOptimizer, part_of
from flowtrain.utils.files import make_folder, put_folder, remove, sync_tree
from flowtrain.weights.format.files import seal, writing_tensors
from flowtrain.weights.format.manifest import File, StoreError, check, checksum_of
from flowtrain.weights.ranks import gather, on_all_ranks

_log = logging.getLogger(__name__)
# It is meant so: a lone rank writes alone, and every rank reads its rows by itself.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
T = TypeVar("T")
_SCRATCH = ".writing"
_FILE_BYTES = 2**28
"""Bytes of a file of the state that a rank writes: torch makes each in memory before it writes."""


class Checkpoints:
    """Writes the checkpoints of a run in the background, one at a time."""

    def __init__(self, root: Path, world: World, *, keep: int) -> None:
        """Collective. `keep`: number of newest checkpoints to keep on disk."""
        self.root, self._keep = root, keep
        # The threads talk to each other while the run does, so not in its group.
        self._world = world.with_own_control_group()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._written: Future[None] | None = None
        self._copies = HostCopies()

    def save(
        self,
        step: int,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        optimizer: ShardOptimizer,
        state: Mapping[str, int | str],
        *,
        dtype: torch.dtype,
        on_saved: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the checkpoint of `step` once the one before is done, and delete all but the newest
        `keep`; collective. Returns when model and optimizer may change again.

        Args:
            dtype: of the weights in `model/`.
            on_saved: called from a thread on every rank once the checkpoint is on disk.
        """
        self.wait()
        files = models.gather_files(model, dtype, self._world)
        parts = _state_of(model, optimizer)
        copies = self._copies.take({name: local for name, (local, _) in parts.items()})
        tensors = {n: _wrapped(copies[n], size, self._world) for n, (_, size) in parts.items()}

        def write_shape(folder: Path) -> list[Path]:
            return models.export_shape(model, tokenizer, folder, dtype)

        def write() -> None:
            with writing_tensors(self.root):
                self._write(step, write_shape, files, tensors, state)
            on_saved()

        self._written = self._thread.submit(write)

    @property
    def oldest_step(self) -> int:
        """Step of the oldest checkpoint on disk, the last resort for resuming if newer ones are
        damaged; 0: no checkpoint.
        """
        return min((int(path.name[5:]) for path in self.root.glob("step_????????")), default=0)

    def wait(self) -> None:
        """Wait for what is being written, and raise what was raised there."""
        written, self._written = self._written, None
        try:
            if written is not None:
                written.result()
        finally:
            del written  # or it and the exception it holds would keep the whole run alive

    @property
    def has_failed(self) -> bool:
        """Return whether the newest checkpoint could not be written. Not collective."""
        written = self._written
        return written is not None and written.done() and written.exception() is not None

    def close(self) -> None:
        """Wait for what is being written, and raise what was raised there."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._copies.close()

    def _write(
        self,
        step: int,
        write_shape: Callable[[Path], list[Path]],
        files: ModelFiles,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, int | str],
    ) -> None:
        world, target = self._world, place(self.root, step)
        scratch = target.with_suffix(_SCRATCH)

        def begin() -> list[Path]:
            if not world.is_main:
                return []
            remove(scratch)
            make_folder(self.root)
            (scratch / "model").mkdir(parents=True)
            (scratch / "state").mkdir()
            return write_shape(scratch / "model")

        def end() -> None:
            if world.is_main:
                _seal(scratch, {"step": step, **state}, chain.from_iterable(records_by_rank))
                put_folder(scratch, target)
                others = sorted(self.root.glob("step_????????"))[: -self._keep]
                for old in [*others, *self.root.glob(f"*{_SCRATCH}")]:
                    remove(old)

        try:
            paths = on_all_ranks(world, begin, other_failed=OSError)
            paths += on_all_ranks(
                world, lambda: files.write(scratch / "model"), other_failed=OSError
            )
            _save(tensors, scratch / "state", world)
            paths += sorted((scratch / "state").glob(f"shard-{world.rank + 1:05d}-*"))
            records = on_all_ranks(world, lambda: _records(scratch, paths), other_failed=OSError)
            records_by_rank: list[list[Any]] = gather(world, records)
            on_all_ranks(world, end, other_failed=OSError)
        except BaseException:
            # Why it could not be written matters more than why its rest could not be deleted.
            if world.is_main:
                shutil.rmtree(scratch, ignore_errors=True)
            raise


def place(root: Path, step: int) -> Path:
    """Return the folder of the checkpoint of `step`."""
    return root / f"step_{step:08d}"


# ---- what is saved


def _state_of(model: PreTrainedModel, optimizer: ShardOptimizer) -> dict[str, Part]:
    """Name this rank's parts of what is trained and of the optimizer's state."""
    weights = {name: part_of(weight) for name, weight in _weights(model).items()}
    return _named("model.", weights) | _named("optimizer.", optimizer.tensors())


def _weights(model: PreTrainedModel) -> dict[str, Tensor]:
    return lora.adapter_weights(model) if lora.has_adapter(model) else models.named_weights(model)


def _named(prefix: str, parts: Mapping[str, T]) -> dict[str, T]:
    return {prefix + name: part for name, part in parts.items()}


def _within(prefix: str, parts: Mapping[str, T]) -> dict[str, T]:
    return {n.removeprefix(prefix): part for n, part in parts.items() if n.startswith(prefix)}


def _wrapped(local: Tensor, size: torch.Size | None, world: World) -> Tensor:
    """Make rows a part of a whole tensor as torch.distributed.checkpoint knows them."""
    if size is None or world.size == 1:
        return local.detach()
    stride = torch.empty(size, device="meta").stride()
    mesh = world.control_mesh(local.device.type)
    return DTensor.from_local(
        local.detach(), mesh, [Shard(0)], run_check=False, shape=size, stride=stride
    )


# ---- files


def _save(tensors: Mapping[str, Tensor], folder: Path, world: World) -> None:
    """Write the ranks' parts of tensors; collective."""
    is_alone = world.size == 1
    # A rank's own tensors (an 8-bit optimizer's) have names that others do not know.
    sizes = dict(pair for own in gather(world, _sizes(tensors)) for pair in own)
    index, num_bytes = {}, 0
    for name, size in sizes.items():
        num_bytes += size
        index[name] = 1 + num_bytes // (_FILE_BYTES * world.size)
    writer = HuggingFaceStorageWriter(str(folder), index, save_distributed=True)
    try:
        dcp.state_dict_saver.save(
            dict(tensors), storage_writer=writer, process_group=world.control, no_dist=is_alone
        )
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        if isinstance(reason, OSError):
            raise OSError(reason.errno, reason.strerror or str(reason)) from error
        raise reason from error


def _sizes(tensors: Mapping[str, Tensor]) -> list[tuple[str, int]]:
    return [(name, tensor.numel() * tensor.itemsize) for name, tensor in tensors.items()]


def _records(folder: Path, paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Seal the files that this rank has written, and record them."""
    return [asdict(seal(path)) | {"name": str(path.relative_to(folder))} for path in paths]


def _seal(folder: Path, state: Mapping[str, Any], records: Iterable[dict[str, Any]]) -> None:
    """Write state.json, with the checksums of all other files, and flush everything."""
    files = {record.pop("name"): record for record in records}
    whole = {**state, "files": dict(sorted(files.items()))}
    text = json.dumps({**whole, "xxh3": _checksum_of(whole)}, indent=1)
    (folder / "state" / "state.json").write_text(text)
    sync_tree(folder)


def _checksum_of(state: Mapping[str, Any]) -> str:
    return checksum_of(json.dumps(state).encode())


# ---- what is found


def latest(root: Path) -> Path | None:
    """Return the newest complete checkpoint, skipping damaged ones with a warning. Reads all of it.

    A checkpoint that was replacing another of its step may still have its temporary name. Raises
    UserError for one of an older flowtrain, which alone can resume it.
    """
    for path in _newest_first(root):
        if (path / "state.json").exists():
            raise UserError(
                f"{path} has the layout of an older version of flowtrain: resume it with the "
                f"version in manifest.json, or start a new run with --model.path {path}"
            )
        try:
            verify(path)
            return path
        except (StoreError, OSError) as error:
            if path.suffix != _SCRATCH:
                _log.warning("skipping checkpoint %s: %s", path, error)
    return None


def settle(root: Path) -> Path | None:
    """Choose the checkpoint to resume from, as `latest` does, and rename newer ones, which are
    damaged, so that none of them counts as one of those to keep.

    Raises UserError when there are checkpoints, but none is whole: the run would begin again.
    """
    chosen = latest(root)
    damaged = [path for path in _newest_first(root) if path.suffix != _SCRATCH]
    if chosen is None:
        if damaged:
            raise UserError(
                f"no checkpoint in {root} is complete; restore one, or delete this folder to "
                "start again"
            )
        return None
    if chosen.suffix == _SCRATCH:
        scratch, chosen = chosen, chosen.with_suffix("")
        put_folder(scratch, chosen)
    for path in damaged:
        if path > chosen:
            aside = path.with_suffix(".damaged")
            remove(aside)
            path.rename(aside)
    return chosen


def _newest_first(root: Path) -> list[Path]:
    return sorted([*root.glob("step_????????"), *root.glob(f"step_????????{_SCRATCH}")])[::-1]


def load_state(path: Path) -> dict[str, Any]:
    """Return the state of the loop that was saved in `path`."""
    state = _read_state(path)
    del state["files"]
    return state


def verify(path: Path) -> None:
    """Raise StoreError for a changed file of a checkpoint. Reads all of it."""
    with ThreadPoolExecutor() as threads:
        for _ in threads.map(lambda file: check(path / file.name, file), _files(path)):
            pass


def _files(path: Path) -> list[File]:
    return [File(name, **record) for name, record in _read_state(path)["files"].items()]


def _read_state(path: Path) -> dict[str, Any]:
    """Raises StoreError when the text is not what was written."""
    file = path / "state" / "state.json"
    try:
        state: dict[str, Any] = json.loads(file.read_bytes())
        xxh3 = state.pop("xxh3")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{file} is damaged: {type(error).__name__}: {error}") from error
    if xxh3 != _checksum_of(state):
        raise StoreError(f"{file} does not have the checksum that it names")
    return state


# ---- what is resumed


def restore(path: Path, model: PreTrainedModel, optimizer: ShardOptimizer, world: World) -> None:
    """Load model and optimizer from a checkpoint of any number of ranks; collective.

    Raises UserError for a checkpoint of another model.
    """
    sizes = _saved_sizes(path)
    weights = _weights(model)
    _check_model(path, {name: tensor.shape for name, tensor in weights.items()}, sizes)
    _load(path, _named("model.", {name: part_of(x) for name, x in weights.items()}), world)
    saved = _within("optimizer.", sizes)
    if saved:
        optimizer.load(saved, lambda parts: _load(path, _named("optimizer.", parts), world))


def _saved_sizes(path: Path) -> dict[str, torch.Size]:
    entries = HuggingFaceStorageReader(str(path / "state")).read_metadata().state_dict_metadata
    return {name: entry.size for name, entry in entries.items() if hasattr(entry, "size")}


def _load(path: Path, parts: Mapping[str, Part], world: World) -> None:
    """Fill this rank's rows of tensors from a checkpoint. Not collective: each reads for itself."""
    dcp.state_dict_loader.load(
        {name: _wrapped(local, size, world) for name, (local, size) in parts.items()},
        storage_reader=HuggingFaceStorageReader(str(path / "state")),
        no_dist=True,
    )


def _check_model(
    path: Path, sizes: Mapping[str, torch.Size], saved_sizes: Mapping[str, torch.Size]
) -> None:
    saved = _within("model.", saved_sizes)
    are_adapters = [any(map(lora.is_adapter_name, names)) for names in (sizes, saved)]
    if are_adapters[0] != are_adapters[1]:
        held = "an adapter" if are_adapters[1] else "a whole model"
        raise UserError(
            f"{path} holds {held}: lora.rank differs from the training of the checkpoint"
        )
    if sizes != saved:
        differing = sorted(
            name for name in {**sizes, **saved} if sizes.get(name) != saved.get(name)
        )
        cure = "; check that lora.rank and lora.targets are unchanged" if are_adapters[0] else ""
        held = "adapter" if are_adapters[0] else "model"
        raise UserError(f"{path} holds another {held}: {differing[:3]} differ{cure}")
