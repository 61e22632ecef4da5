"""Bring a version of the weights into a running vLLM: as sparse deltas of its weights, or as an
adapter in a LoRA slot. What can be done while vLLM samples is done before it pauses.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from flowtrain.inference.vllm.process import VllmModel
from flowtrain.records import UserError
from flowtrain.utils.errors import user_error
from flowtrain.utils.net.serving import TOKEN_VARIABLE
from flowtrain.weights.format.manifest import AdapterSpec
from flowtrain.weights.load.reader import Loaded, WeightReader
from flowtrain.weights.stores.remote import open_source

_POLL_S = 0.01


class Updates(Protocol):
    """Brings the weights of one policy to versions of its store. Methods run on vLLM's loop."""

    @property
    def adapter(self) -> Any:
        """vLLM's request for the LoRA slot that holds the weights; None: they are the model's."""

    async def stage(self, version: int) -> None:
        """Fetch and check a version while vLLM samples. Raises StoreError when that shows that it
        cannot be reached, UserError when this vLLM cannot take weights of the store at all.
        """

    async def apply(self, version: int) -> None:
        """Change the weights, while generation is paused. Raises any exception; `held` then tells
        whether the weights are as before.
        """

    async def held(self) -> list[int | None]:
        """Report the version that each worker holds, None where it is unknown."""

    async def finish(self, version: int) -> None:
        """Tell vLLM that all workers hold the version."""

    async def metrics(self) -> dict[str, float]:
        """Return the metrics of the last update."""


@dataclass(slots=True)
class SparseUpdates:
    """All weights of the model, by the plug-in `plugin`; it raises what is wrong with
    a version in `apply`, and then the weights are as before.
    """

    llm: Any
    location: str
    """Folder or URL of the store."""
    verify_every: int = 0
    """See `WeightReader`."""
    adapter: None = None
    _is_connected: bool = False

    async def stage(self, version: int) -> None:
        await self._connect()
        start = self.llm.start_weight_update
        await start(**_supported(start, is_checkpoint_format=False))
        await self._update(version, stage=True)
        while not all(await self.llm.collective_rpc("staged_weights")):
            await asyncio.sleep(_POLL_S)

    async def apply(self, version: int) -> None:
        await self._update(version)

    async def held(self) -> list[int | None]:
        return [report["version"] for report in await self.llm.collective_rpc("held_weights")]

    async def finish(self, version: int) -> None:
        finish = self.llm.finish_weight_update
        await finish(**_supported(finish, weight_version=str(version)))

    async def metrics(self) -> dict[str, float]:
        report, *_ = await self.llm.collective_rpc("held_weights")
        return {key: value for key, value in report.items() if key.startswith("weights_")}

    async def _connect(self) -> None:
        """Tell vLLM where the store is, once there is a version in it."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        info = {"location": self.location, "verify_every": self.verify_every}
        if not self._is_connected:
            request = WeightTransferInitRequest(init_info=info)
            with user_error("vLLM cannot take its weights from the store", Exception):
                await self.llm.init_weight_transfer_engine(request)
            self._is_connected = True

    async def _update(self, version: int, stage: bool = False) -> None:
        info = {"version": version, "stage": stage}
        call = self.llm.collective_rpc("try_update", kwargs={"update_info": info})
        if errors := [error for error in await call if error]:
            raise RuntimeError(errors[0])


@dataclass(slots=True)
class AdapterUpdates:
    """The adapter of one policy: read and checked in this process, and taken by vLLM from a folder
    as peft writes it. `stage` raises the problems of a version.
    """

    llm: Any
    number: int
    """The policy's LoRA id, from 1 on."""
    policy: str
    location: str
    """Folder or URL of its store."""
    spec: AdapterSpec
    verify_every: int = 0
    """See `WeightReader`."""
    adapter: Any = None
    _folder: TemporaryDirectory[str] = field(
        default_factory=lambda: TemporaryDirectory(prefix="flowtrain-adapter-")
    )
    _tensors: dict[str, Tensor] = field(default_factory=dict)
    """At the version of the reader."""
    _reader: WeightReader | None = None
    _loaded: Loaded | None = None
    _held: int | None = None

    def __post_init__(self) -> None:
        config = {"r": self.spec.rank, "lora_alpha": self.spec.alpha, "bias": "none"}
        config |= {"peft_type": "LORA", "target_modules": self.spec.targets}
        self._path("adapter_config.json").write_text(json.dumps(config))
        self.adapter = self._request()

    async def stage(self, version: int) -> None:
        if self._reader is None:
            call = self.llm.collective_rpc("unadapted_layers", kwargs={"layers": self.spec.modules})
            if missing := [name for names in await call for name in names]:
                raise UserError(
                    f"vLLM has no LoRA slot for {missing[0]!r} of this model: leave it out of "
                    "lora.targets, or use lora.sync = 'merged'"
                )
        self._loaded = await asyncio.to_thread(self._read, version)

    async def apply(self, version: int) -> None:
        self._held = None  # until vLLM has taken it
        self._path("staged").replace(self._path("adapter_model.safetensors"))
        await self.llm.add_lora(self._request(load_inplace=True))
        self._held = version

    async def held(self) -> list[int | None]:
        return [self._held]

    async def finish(self, version: int) -> None:
        """Do nothing: vLLM's own version number covers all its weights, not an adapter."""

    async def metrics(self) -> dict[str, float]:
        return {} if self._loaded is None else self._loaded.metrics()

    def _request(self, **options: Any) -> Any:
        """Requests that sample name the slot without `load_inplace`, which would load it anew at
        every step.
        """
        from vllm.lora.request import LoRARequest

        return LoRARequest(self.policy, self.number, self._folder.name, **options)

    def _read(self, version: int) -> Loaded:
        """Bring the tensors here to a version, and write them down for `apply`."""
        if self._reader is None:
            token = os.environ.get(TOKEN_VARIABLE, "")
            with user_error("vLLM cannot take adapters from the store", OSError):
                source = open_source(self.location, self._path("cache"), token)
            self._tensors = {
                name: torch.empty(spec.shape, dtype=spec.torch_dtype)
                for name, spec in self.spec.layout.items()
            }
            self._reader = WeightReader(source, self._tensors, verify_every=self.verify_every)
        loaded = self._reader.load(version)
        save_file(self._tensors, self._path("staged"))
        return loaded

    def _path(self, name: str) -> Path:
        return Path(self._folder.name) / name


@dataclass(slots=True)
class Weights:
    """The weights that one policy samples with."""

    updates: Updates | None = None
    """None: the weights of the model's folder, for good."""
    label: int | None = None
    """The version; None before the first load."""
    salt: str = "0"
    """Tells the prefixes in vLLM's cache that these weights computed from others."""
    adapter: Any = None
    """vLLM's request for the policy's LoRA slot; None: the model without an adapter."""
    labels: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """(version, first token) of each span, by the name of a request under way."""
    bare: set[str] = field(default_factory=set)
    """Names of requests that began before the first adapter and continue without one."""

    async def begin_spans(self, llm: Any, version: int) -> None:
        """Note how many tokens each request of the policy has at the update; a request that vLLM is
        still taking in has none.
        """
        states = llm.output_processor.request_states
        previous: dict[str, int] | None = None
        while True:
            counts = {s.external_req_id: s.detokenizer.num_output_tokens() for s in states.values()}
            # vLLM may still be handing out what it sampled before the pause, a part at a time, and
            # a part may be of other policies alone.
            if counts == previous and llm.engine_core.outputs_queue.empty():
                break
            previous = counts
            await asyncio.sleep(0.001)
        for name in self.labels.keys() - self.bare:
            self.labels[name].append((version, counts.get(name, 0)))


def policies(llm: Any, model: VllmModel) -> dict[str, Weights]:
    """Return the weights of every policy that this vLLM samples for."""
    if model.adapters is None:
        sparse = SparseUpdates(llm, model.store, model.verify_every) if model.store else None
        return {"": Weights(sparse)}
    weights = {}
    for number, (name, location) in enumerate(model.adapter_stores.items(), 1):
        updates = AdapterUpdates(llm, number, name, location, model.adapters, model.verify_every)
        weights[name] = Weights(updates if location else None)
    return weights


def _supported(function: Any, **options: Any) -> dict[str, Any]:
    """Select the options that this version of vLLM knows."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in parameters}
