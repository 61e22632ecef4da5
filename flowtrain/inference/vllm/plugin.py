"""Sparse deltas in vLLM: a weight transfer engine named "sparse_delta" that updates weights in
place. vLLM finds it through the entry point `vllm.general_plugins`.

    WeightTransferConfig(backend="sparse_delta")
    # Once:
    init_weight_transfer_engine(WeightTransferInitRequest({"location": "runs/7/weights"}))
    # For each version, the first update_weights only if it shall be fetched in the background:
    start_weight_update()
    update_weights(WeightTransferUpdateRequest({"version": 8, "stage": True}))
    pause_generation(mode="keep", clear_cache=True)
    update_weights(WeightTransferUpdateRequest({"version": 8}))
    finish_weight_update(weight_version="8")
    resume_generation()

When `update_weights` raises, the weights are those of the version before, and `resume_generation`
goes on with them. There are two exceptions, which `WeightReports.held_weights` reports: when deltas
from a full snapshot fail, the weights are those of the snapshot's version; when a full load breaks
off in the middle, the version is None, and another update must come before generation resumes.
Never update an engine that sleeps: its weights are not in memory.

With `clear_cache=True` vLLM preempts the running requests: their tokens stay, and their keys and
values are computed again by the new weights. So every later token is sampled by the new weights
alone, which is what a trainer recomputes. `clear_cache=False` is faster and keeps the old keys and
values for running requests; then give each prompt a `cache_salt` that names the version, so that
new prompts do not reuse them.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import vllm
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from flowtrain.inference.vllm.layouts import (
    keep_convolutions_plain,
    note_update,
    pack_copies_of_experts,
    refuse_rearranged,
    watch_processing,
)
from flowtrain.inference.vllm.plan import make_plan, prove
from flowtrain.inference.vllm.sharded_target import LoadPlan, ShardedTarget
from flowtrain.records import UserError
from flowtrain.utils.errors import text_of
from flowtrain.utils.net.serving import TOKEN_VARIABLE
from flowtrain.weights.format.manifest import Digest, add, digest_hex
from flowtrain.weights.load.reader import Loaded, WeightReader
from flowtrain.weights.load.target import HostTensors, Target
from flowtrain.weights.ranks import Ranks, SingleRank, on_all_ranks
from flowtrain.weights.stores.remote import open_source

BACKEND = "sparse_delta"
PATCHED = range(25, 33)
"""Minor versions of vLLM 0.x whose packing of linear weights on a CPU is patched; the code of
0.25.1 and 0.32 was compared and agrees."""
_log = logging.getLogger(__name__)


def register() -> None:
    """Register the engine. vLLM calls this in each of its processes, perhaps more than once."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, SparseDeltaEngine)
        watch_processing(_is_used)
        if vllm.platforms.current_platform.is_cpu():
            keep_linear_weights_plain()
            pack_copies_of_experts(_is_used)


def keep_linear_weights_plain() -> None:
    """Keep vLLM on a CPU from packing linear weights after loading, which empties the parameters,
    and convolutions, whose words it reorders.

    No option does the same. Engines that do not use this backend pack as before.
    """
    from vllm.model_executor.layers import utils

    pack, reads_plain = utils.dispatch_cpu_unquantized_gemm, keep_convolutions_plain()

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if not _is_used() or (layer.weight.dim() != 2 and not reads_plain):
            pack(layer, remove_weight)
            return
        if vllm.__version_tuple__[0] != 0 or vllm.__version_tuple__[1] not in PATCHED:
            versions = f"0.{PATCHED[0]} to 0.{PATCHED[-1]}"
            raise RuntimeError(
                f"how vLLM {vllm.__version__} packs linear weights on a CPU is not known to this "
                f"flowtrain; install vLLM {versions}"
            )
        if layer.weight.dim() == 2:
            layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = dispatch


def _is_used() -> bool:
    """Return whether the model that vLLM loads now takes its weights by this backend."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    transfer = None if config is None else config.weight_transfer_config
    return transfer is not None and transfer.backend == BACKEND


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Arguments of `init_weight_transfer_engine`."""

    location: str
    """Folder or URL of the store."""
    verify_every: int = 0
    """Updates between two comparisons of all words with the digests of the version; 0: never."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Arguments of `update_weights`."""

    version: int
    stage: bool = False
    """Fetch and check the version in the background, and change nothing yet."""


@dataclass(frozen=True, slots=True)
class WorkerRanks:
    """The workers that hold the shards of one model; see `Ranks`."""

    rank: int
    size: int

    def gather_text(self, text: str) -> list[str]:
        texts = [text]
        # Over the tensor-parallel group, then over the stages: the texts are in order of rank.
        for group in (get_tp_group(), get_pp_group()):
            gathered: list[Any] = [None] * group.world_size
            dist.all_gather_object(gathered, texts, group=group.cpu_group)
            texts = [text for group_texts in gathered for text in group_texts]
        return texts


class SparseDeltaEngine(WeightTransferEngine):
    """Keeps the model of one worker at a version of a store."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    loaded: Loaded | None
    """Metrics of the last update; None before the first."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Find where the model has the store's tensors, and prove it.

        Raises:
            UserError: the store is empty, or this model cannot be updated in place; the message
                names the tensor or the option.
        """
        if "://" not in init_info.location and not Path(init_info.location).is_dir():
            raise UserError(
                f"location={init_info.location!r} must be the folder or the URL of a weight store"
            )
        cache = TemporaryDirectory(prefix="flowtrain-weights-")
        token = os.environ.get(TOKEN_VARIABLE, "")
        source = open_source(init_info.location, Path(cache.name), token)
        refuse_unsupported(self.model, self.vllm_config)
        tp, pp = get_tp_group(), get_pp_group()
        size = tp.world_size * pp.world_size
        rank = pp.rank_in_group * tp.world_size + tp.rank_in_group
        ranks: Ranks = SingleRank() if size == 1 else WorkerRanks(rank, size)
        head = on_all_ranks(ranks, source.head)
        if head is None:
            raise UserError(
                f"the weight store {init_info.location} is empty; publish a version before vLLM "
                "connects to it"
            )
        tensors = [*self.model.parameters(), *self.model.buffers()]
        plan = make_plan(
            source.manifest(head).layout, self.model.load_weights, tensors, ranks=ranks
        )
        prove(plan, self.model.load_weights, tensors, ranks=ranks)
        for name, reason in plan.dense.items():
            _log.warning(
                "%r is loaded whole at every update, through the model's loader, and kept on the "
                "host: %s",
                name,
                reason,
            )
        num_threads = torch.get_num_threads()
        self.sharded = ShardedTarget(
            plan,
            ranks,
            load=lambda tensors: self.model.load_weights(tensors.items()),
            num_threads=num_threads,
        )
        # Whole tensors in host memory are written to directly, by the codec.
        plain = _plain_tensors(plan) if ranks.size == 1 else None
        target: Target = self.sharded if plain is None else HostTensors(plain, num_threads)
        self.reader = WeightReader(source, target, num_threads, verify_every=init_info.verify_every)
        self.cache = cache
        self.loaded = None

    def start_weight_update(self) -> None:
        if not hasattr(self, "reader"):
            raise UserError(
                "init_weight_transfer_engine must be called before start_weight_update: it names "
                "the weight store"
            )

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # there vLLM's own method would fail
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load or stage a version. When it raises StoreError, the weights are as before."""
        if update_info.stage:
            self.reader.stage(update_info.version)
            return
        try:
            self.loaded = self.reader.load(update_info.version)
        finally:
            note_update()

    def finish_weight_update(self) -> None:
        """Do nothing: the update has taken effect already."""

    def digests(self) -> dict[str, Digest]:
        """Read all words of all workers and return the digests by the names of the store."""
        return self.sharded.digests()

    def shutdown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.cleanup()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Refuse: vLLM 0.25 requires the method, but trainers publish to the store."""
        raise NotImplementedError(
            "the trainer publishes to the weight store; vLLM pulls from there"
        )


class WeightReports:
    """Adds methods for `collective_rpc` to a vLLM worker: pass
    `worker_extension_cls="flowtrain.inference.vllm.plugin.WeightReports"`.
    """

    weight_transfer_engine: Any
    update_weights: Any

    def try_update(self, update_info: dict[str, Any]) -> str:
        """Update as `update_weights` does, and return what went wrong instead of raising it.

        When one of several workers raises, vLLM leaves the answers of those after it unread, and
        takes them for the answers to its next call.
        """
        try:
            self.update_weights(update_info)
        except Exception as error:  # noqa: BLE001  # raised where all answers are there
            return text_of(error)
        return ""

    def held_weights(self) -> dict[str, Any]:
        """Report the version of the weights, None when unknown, and what the last update did."""
        engine = self.weight_transfer_engine
        reader = getattr(engine, "reader", None)
        loaded = getattr(engine, "loaded", None)
        report: dict[str, Any] = {"version": reader.version if reader else None}
        if loaded is not None:
            report |= {"mode": loaded.mode, "reason": loaded.reason, "seconds": loaded.seconds}
            report |= loaded.metrics()
        return report

    def staged_weights(self) -> bool:
        """Return whether staging has ended."""
        return bool(self.weight_transfer_engine.reader.is_staged)

    def digest_weights(self) -> dict[str, str]:
        """Read all words and return the digests of all tensors in hex, as manifests write them."""
        digests = self.weight_transfer_engine.digests()
        return {name: digest_hex(add(digest)) for name, digest in digests.items()}


def _plain_tensors(plan: LoadPlan) -> dict[str, torch.Tensor] | None:
    """Return the store's tensors if each one is a single run of CPU memory, else None."""
    tensors = {}
    for name, spec in plan.layout.items():
        views = plan.views.get(name, [])
        if len(views) != 1 or not views[0].is_run or views[0].num_words != spec.num_words:
            return None
        words = views[0].live()
        if words.device.type != "cpu":
            return None
        tensors[name] = words.view(spec.torch_dtype).view(spec.shape)
    return tensors


def refuse_unsupported(model: torch.nn.Module, config: Any) -> None:
    """Raise UserError for a model that computes with other weights than its loader writes, which
    watching the loader cannot show.
    """
    if getattr(config.model_config, "use_mla", False):
        raise UserError(
            "sparse_delta does not support models with latent attention (MLA): vLLM derives "
            "further weights from theirs"
        )
    if getattr(config, "lora_config", None) is not None:
        raise UserError(
            "sparse_delta does not support enable_lora: the adapters wrap the weights that it "
            "updates"
        )
    if getattr(config.model_config, "quantization", None):
        raise UserError(
            "sparse_delta does not support quantised models: their words are not those of a store"
        )
    refuse_rearranged(model)
