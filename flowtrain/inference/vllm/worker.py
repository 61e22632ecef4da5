"""The extension of vLLM's worker processes, which import it before the model is built.

It registers the sparse-delta plugin (without an installed flowtrain there is no entry point to find
it by), ends the process with its parent, and writes errors to a file, because vLLM tells its parent
only that there was one.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from typing import Any

from flowtrain.inference.vllm import plugin
from flowtrain.inference.vllm.process import ERROR_FILE
from flowtrain.inference.vllm.routes import RouteTable, Sizes, sizes_of
from flowtrain.inference.vllm.sampler_entropies import record

_PR_SET_PDEATHSIG = 1


class Worker(plugin.WeightReports):
    """Methods that vLLM's worker gets, called through `collective_rpc`."""

    model_runner: Any

    def unadapted_layers(self, layers: list[str]) -> list[str]:
        """List those of a model's layers that have no LoRA slot; vLLM would leave them without
        their adapter.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        if mapper is not None:
            renames = mapper.get_rename_mapper()
            layers = [renames._map_name(layer) or layer for layer in layers]
        # Fused layers, as of q, k and v, have one slot for all their parts.
        packed = {name for names in manager.packed_modules.values() for name in names}
        return sorted({*layers} - packed - manager.modules.keys())

    def record_entropies(self) -> None:
        """Let the sampler tell the entropy of every token that it draws."""
        record(self.model_runner.sampler)

    def record_routes(self) -> Sizes:
        """Begin to keep routes, where vLLM does not return them itself."""
        runner = self.model_runner
        self._routes = RouteTable(runner) if runner.device.type == "cpu" else None
        return sizes_of(runner)

    def take_routes(self, name: str, num_tokens: int) -> bytes | None:
        """See `RouteTable.take`."""
        return self._routes.take(name, num_tokens) if self._routes else None


def set_up(error_file: str) -> None:
    """Make this process one of the trainer's: see above."""
    if sys.platform == "linux":
        # However the trainer ends, its engines end with it and free their memory.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    handler = logging.FileHandler(error_file)
    handler.setLevel(logging.ERROR)
    logging.getLogger("vllm").addHandler(handler)
    plugin.register()


if ERROR_FILE in os.environ:
    set_up(os.environ[ERROR_FILE])
