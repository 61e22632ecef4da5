"""vLLM takes sparse deltas in place: a weight transfer engine named "sparse_delta", found through
the entry point `vllm.general_plugins`.

    WeightTransferConfig(backend="sparse_delta")
    init_weight_transfer_engine(WeightTransferInitRequest({"location": "runs/7/weights",
    "verify_every": 0}))       once start_weight_update()
    update_weights(WeightTransferUpdateRequest({"version": 8, "stage": True}))      if at all:
    fetches in the background pause_generation(mode="keep", clear_cache=True)
    update_weights(WeightTransferUpdateRequest({"version": 8}))
    finish_weight_update(weight_version="8") resume_generation()

When `update_weights` raises, the weights are those of the version before, and `resume_generation`
alone goes on. There are two exceptions, which `WeightReports.held_weights` tells: an anchor from
which the deltas did not lead on, whose version it then is; and a full load that broke off in the
middle, None, after which nothing may be resumed before another update. Never update an engine that
sleeps: its weights are not in memory.

With `clear_cache=True` what runs is preempted: its tokens stay, their keys and values are computed
anew by the new weights, and so every later token is sampled by the new weights alone, which is what
a trainer recomputes. `clear_cache=False` spares that and keeps what the old weights made for the
requests that run; give each prompt a `cache_salt` that names the version then, lest new prompts
find it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
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

from flowtrain.types import UserError
from flowtrain.weights.ranks import Alone, Ranks, together
from flowtrain.weights.reader import Loaded, WeightReader
from flowtrain.weights.remote import open_source
from flowtrain.weights.strided_view import BoxTarget, Plan
from flowtrain.weights.target import HostTensors, Target
from flowtrain.weights.tensor_shards import Digest, add
from flowtrain.weights.vllm_plan import make_plan, prove

BACKEND = "sparse_delta"
PATCHED = range(25, 33)
"""Minor versions of vLLM 0.x whose packing of linear weights on a CPU is patched; 0.25.1 and 0.32
were read, and agree."""
_PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""Quantisation methods that leave a parameter as the loader wrote it."""
_log = logging.getLogger(__name__)


def register() -> None:
    """What vLLM calls in each of its processes, perhaps more than once."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, SparseDeltaEngine)
        if vllm.platforms.current_platform.is_cpu():
            keep_linear_weights_plain()


def keep_linear_weights_plain() -> None:
    """The one patch of vLLM, and only on a CPU: there it packs linear weights after loading, and
    empties the parameters.

    Engines that do not use this backend pack as before. No option of vLLM does the same.
    """
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        config = get_current_vllm_config_or_none()
        transfer = None if config is None else config.weight_transfer_config
        if transfer is None or transfer.backend != BACKEND or layer.weight.dim() != 2:
            pack(layer, remove_weight)
            return
        if vllm.__version_tuple__[0] != 0 or vllm.__version_tuple__[1] not in PATCHED:
            known = f"0.{PATCHED[0]} to 0.{PATCHED[-1]}"
            raise RuntimeError(
                f"how vLLM {vllm.__version__} packs linear weights on a CPU is not known to this "
                f"flowtrain; install vLLM {known}"
            )
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = dispatch


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Of `init_weight_transfer_engine`."""

    location: str
    """Folder of the store, or its URL."""
    verify_every: int = 0
    """Updates between two comparisons of all words with the digests of the version; 0: never."""
    token: str = field(default="", repr=False)
    """For a URL that asks for one."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Of `update_weights`."""

    version: int
    stage: bool = False
    """Fetch and check it in the background, and change nothing yet."""


@dataclass(frozen=True, slots=True)
class WorkerRanks:
    """The workers that hold one model between them; see `Ranks`."""

    rank: int
    size: int

    def gather_text(self, text: str) -> list[str]:
        texts = [text]
        for group in (get_tp_group(), get_pp_group()):
            said: list[Any] = [None] * group.world_size
            dist.all_gather_object(said, texts, group=group.cpu_group)
            texts = [each for part in said for each in part]
        return texts


class SparseDeltaEngine(WeightTransferEngine):
    """Keeps the model of one worker at a version of a store."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    loaded: Loaded | None
    """What the last update did."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Find out where the model has the store's tensors, and prove it.

        Raises:
            UserError: the store is empty, or this model cannot be updated in place; the text names
                the tensor or the option.
        """
        if "://" not in init_info.location and not Path(init_info.location).is_dir():
            raise UserError(
                f"location={init_info.location!r} must be the folder or the URL of a weight store"
            )
        cache = TemporaryDirectory(prefix="flowtrain-weights-")
        source = open_source(init_info.location, Path(cache.name), init_info.token)
        refuse_unsupported(self.model, self.vllm_config)
        tp, pp = get_tp_group(), get_pp_group()
        size = tp.world_size * pp.world_size
        ranks: Ranks = (
            Alone()
            if size == 1
            else WorkerRanks(pp.rank_in_group * tp.world_size + tp.rank_in_group, size)
        )
        head = together(ranks, source.head)
        if head is None:
            raise UserError(
                f"the weight store {init_info.location} is empty; publish a version before vLLM is "
                "told of it"
            )
        tensors = [*self.model.parameters(), *self.model.buffers()]
        plan = make_plan(source.manifest(head).layout, self.model.load_weights, tensors, ranks)
        prove(plan, self.model.load_weights, tensors, ranks)
        for name, why in plan.dense.items():
            _log.warning(
                "%r is loaded whole at every update, through the model's loader, and kept on the "
                "host: %s",
                name,
                why,
            )
        self.reader = WeightReader(
            source, self._target(plan, ranks), torch.get_num_threads(), init_info.verify_every
        )
        self.cache, self.loaded = cache, None

    def _target(self, plan: Plan, ranks: Ranks) -> Target:
        """Where every tensor is one run of CPU memory, those are the reader's own tensors; else
        through boxes.
        """
        self.boxes = BoxTarget(
            plan,
            ranks,
            lambda found: self.model.load_weights(found.items()),
            torch.get_num_threads(),
        )
        views = {}
        for name, found in plan.boxes.items():
            spec = plan.layout[name]
            if (
                len(found) == 1
                and found[0].is_run
                and found[0].num_words == spec.num_words
                and found[0].words.device.type == "cpu"
            ):
                views[name] = found[0].live().view(spec.torch_dtype).view(spec.shape)
        return (
            HostTensors(views, torch.get_num_threads())
            if ranks.size == 1 and views.keys() == plan.layout.keys()
            else self.boxes
        )

    def start_weight_update(self) -> None:
        if not hasattr(self, "reader"):
            raise UserError(
                "init_weight_transfer_engine must be called before start_weight_update: it says "
                "where the weight store is"
            )

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # where vLLM's own would fail
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Raises StoreError, and the weights are as before."""
        if update_info.stage:
            self.reader.stage(update_info.version)
        else:
            self.loaded = self.reader.load(update_info.version)

    def finish_weight_update(self) -> None:
        """The update has taken effect already."""

    def digests(self) -> dict[str, Digest]:
        """Of the weights as they are now, by the names of the store, from all words of all workers."""
        return self.boxes.digests()

    def shutdown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.cleanup()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """vLLM 0.25 asks for it. Trainers publish to the store."""
        raise NotImplementedError(
            "the trainer publishes to the weight store; vLLM pulls from there"
        )


class WeightReports:
    """Methods of a worker for `collective_rpc`: pass
    `worker_extension_cls="flowtrain.weights.vllm_plugin.WeightReports"`.
    """

    weight_transfer_engine: Any

    def held_weights(self) -> dict[str, Any]:
        """The version that the weights are, None when unknown; and what the last update did."""
        reader = getattr(self.weight_transfer_engine, "reader", None)
        loaded = getattr(self.weight_transfer_engine, "loaded", None)
        report = (
            {}
            if loaded is None
            else {
                "mode": loaded.mode,
                "reason": loaded.reason,
                "seconds": loaded.seconds,
                **loaded.metrics(),
            }
        )
        return {"version": reader.version if reader else None, **report}

    def staged_weights(self) -> bool:
        """Nothing is being staged any more."""
        return bool(self.weight_transfer_engine.reader.is_staged)

    def digest_weights(self) -> dict[str, str]:
        """The digests of all tensors as they are now, in 32 hex digits each, as manifests write
        them.
        """
        return {
            name: "".join(f"{part:016x}" for part in add(digest))
            for name, digest in self.weight_transfer_engine.digests().items()
        }


def refuse_unsupported(model: torch.nn.Module, config: Any) -> None:
    """Raises UserError where what the model computes with is not what its loader writes: that, no
    probe of the loader can see.
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
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        weight = getattr(module, "weight", None)
        packed = (
            vllm.platforms.current_platform.is_cpu()
            and isinstance(weight, torch.Tensor)
            and weight.dim() > 2
        )
        if method is not None and (type(method).__name__ not in _PLAIN or packed):
            raise UserError(
                f"sparse_delta does not support {name!r}: {type(method).__name__} may rearrange "
                "its weights after loading"
            )
