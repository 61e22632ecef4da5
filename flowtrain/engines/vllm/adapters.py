"""Versions of low-rank adapters in vLLM: each policy has one LoRA id, whose slot takes the next
version in place while requests of all policies are under way.

Methods for `collective_rpc`, in this order for each version:

    connect_adapter(number=1, record={"location": ..., "rank": ..., "alpha": ..., "layout": ...})
    stage_adapter(number=1, version=8)      # in the background, until staged_adapter(number=1)
    pause_generation(mode="keep", clear_cache=True)
    activate_adapter(number=1)
    resume_generation()

The reader writes to tensors on the host, not to the slot, so nothing that is wrong with a version
reaches what samples: `staged_adapter` tells it, and the slot is as before.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from flowtrain.net.serving import TOKEN_VARIABLE
from flowtrain.types import UserError
from flowtrain.utils.errors import text_of
from flowtrain.weights.format.layout import TensorSpec
from flowtrain.weights.load.reader import Loaded, WeightReader
from flowtrain.weights.stores.http import open_source


@dataclass(slots=True)
class _Adapter:
    """One policy's adapter in this worker."""

    tensors: dict[str, Tensor]
    """On the host, at the version of the reader."""
    reader: WeightReader
    helper: PEFTHelper
    cache: TemporaryDirectory[str]
    """Holds what was downloaded."""
    staging: Future[tuple[LoRAModel, Loaded]] | None = None
    version: int | None = None
    """The version in vLLM's slot."""


class WorkerAdapters:
    """Adds methods for `collective_rpc` to a vLLM worker that was started with `enable_lora`."""

    model_runner: Any
    _adapters: dict[int, _Adapter]
    """By LoRA id."""

    def connect_adapter(self, number: int, record: dict[str, Any]) -> None:
        """Tell where the versions of an adapter are: `record` has the location of the store, the
        fields of `AdapterSpec` and `verify_every` as `WeightReader` takes it.

        Raises UserError when vLLM cannot adapt one of the layers.
        """
        layout = {
            name: TensorSpec(dtype, tuple(shape))
            for name, (dtype, shape) in record["layout"].items()
        }
        tensors = {
            name: torch.empty(spec.shape, dtype=spec.torch_dtype) for name, spec in layout.items()
        }
        cache = TemporaryDirectory(prefix="flowtrain-adapter-")
        token = os.environ.get(TOKEN_VARIABLE, "")
        source = open_source(record["location"], Path(cache.name), token)
        reader = WeightReader(source, tensors, verify_every=record["verify_every"])
        helper = PEFTHelper(r=record["rank"], lora_alpha=record["alpha"], target_modules=[])
        adapter = _Adapter(tensors, reader, helper, cache)
        self._check_modules(self._lora_model(number, adapter))
        if not hasattr(self, "_adapters"):
            self._adapters = {}
        self._adapters[number] = adapter

    def stage_adapter(self, number: int, version: int) -> None:
        """Read and check a version in the background; what samples does not change."""
        adapter = self._adapters[number]

        def read() -> tuple[LoRAModel, Loaded]:
            loaded = adapter.reader.load(version)
            return self._lora_model(number, adapter), loaded

        pool = ThreadPoolExecutor(1)
        adapter.staging = pool.submit(read)
        pool.shutdown(wait=False)

    def staged_adapter(self, number: int) -> str | None:
        """Return what is wrong with the version that was staged, "" when nothing is, None while
        that is not known. What samples is as before.
        """
        staging = self._adapters[number].staging
        assert staging is not None, "nothing was staged"
        if not staging.done():
            return None
        # Not raised: see `WeightReports.try_update`.
        error = staging.exception()
        return "" if error is None else text_of(error)

    def activate_adapter(self, number: int) -> dict[str, float]:
        """Put the staged version into the slot; generation must be paused. Returns metrics of the
        load. When it raises, nobody may sample with this adapter any more.
        """
        adapter = self._adapters[number]
        assert adapter.staging is not None, "nothing was staged"
        lora, loaded = adapter.staging.result()
        adapter.staging, adapter.version = None, None
        manager = self._manager
        manager.remove_adapter(number)
        manager.add_adapter(lora)
        manager.activate_adapter(number)
        adapter.version = loaded.version
        return loaded.metrics()

    def held_adapter(self, number: int) -> int | None:
        """Report the version in the slot, None when that is not known."""
        return self._adapters[number].version

    @property
    def _manager(self) -> Any:
        """vLLM's manager of slots."""
        return self.model_runner.lora_manager._adapter_manager

    def _lora_model(self, number: int, adapter: _Adapter) -> LoRAModel:
        """Build what vLLM puts into a slot. It is a copy: vLLM multiplies B by the scaling."""
        model = self._manager.model
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        return LoRAModel.from_lora_tensors(
            number,
            {name: tensor.clone() for name, tensor in adapter.tensors.items()},
            adapter.helper,
            device="cpu",
            dtype=self._manager.lora_config.lora_dtype,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )

    def _check_modules(self, lora: LoRAModel) -> None:
        """Raise UserError for a layer that vLLM would leave without its adapter."""
        manager = self._manager
        parts = {name for names in manager.packed_modules.values() for name in names}
        if missing := sorted(lora.loras.keys() - parts - manager.modules.keys()):
            raise UserError(
                f"vLLM has no LoRA slot for {missing[0]!r} of this model: leave it out of "
                "lora.targets, or use lora.sync = 'merged'"
            )
