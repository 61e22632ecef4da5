"""Bring a version of the weights into a running vLLM: as sparse deltas of its weights, or as an
adapter in a LoRA slot. What can be done while vLLM samples is done before it pauses.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from flowtrain.engines.vllm.process import VllmModel
from flowtrain.utils.errors import user_error
from flowtrain.weights.format.adapters import AdapterSpec
from flowtrain.weights.format.manifest import StoreError

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
        await start(**_accepted(start, is_checkpoint_format=False))
        await self._update(version, stage=True)
        while not all(await self.llm.collective_rpc("staged_weights")):
            await asyncio.sleep(_POLL_S)

    async def apply(self, version: int) -> None:
        await self._update(version)

    async def held(self) -> list[int | None]:
        return [report["version"] for report in await self.llm.collective_rpc("held_weights")]

    async def finish(self, version: int) -> None:
        finish = self.llm.finish_weight_update
        await finish(**_accepted(finish, weight_version=str(version)))

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
    """The adapter of one policy, by `adapters`; it raises what is wrong with a version
    in `stage`.
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
    _is_connected: bool = False
    _metrics: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        from vllm.lora.request import LoRARequest

        # vLLM would look at the path for an adapter that is in no slot.
        path = f"the slot of {self.policy}"
        self.adapter = LoRARequest(self.policy, self.number, lora_path=path)

    async def stage(self, version: int) -> None:
        await self._connect()
        await self._call("stage_adapter", version=version)
        while None in (problems := await self._call("staged_adapter")):
            await asyncio.sleep(_POLL_S)
        if any(problems):
            raise StoreError(next(filter(None, problems)))

    async def apply(self, version: int) -> None:
        self._metrics, *_ = await self._call("activate_adapter")

    async def held(self) -> list[int | None]:
        return list(await self._call("held_adapter"))

    async def finish(self, version: int) -> None:
        """Do nothing: a version of vLLM's own is that of all its weights."""

    async def metrics(self) -> dict[str, float]:
        return dict(self._metrics or {})

    async def _connect(self) -> None:
        layout = {name: (spec.dtype, spec.shape) for name, spec in self.spec.layout.items()}
        record = {"location": self.location, "verify_every": self.verify_every, "layout": layout}
        record |= {"rank": self.spec.rank, "alpha": self.spec.alpha}
        if not self._is_connected:
            with user_error("vLLM cannot take adapters from the store", Exception):
                await self._call("connect_adapter", record=record)
            self._is_connected = True

    async def _call(self, method: str, **arguments: Any) -> list[Any]:
        answers: list[Any] = await self.llm.collective_rpc(
            method, kwargs={"number": self.number, **arguments}
        )
        return answers


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
    """Names of those that began before the first adapter, and go on without one."""

    async def begin_spans(self, llm: Any, version: int) -> None:
        """Note how many tokens each request of the policy has at the update; a request that vLLM is
        still taking in has none.
        """
        states = llm.output_processor.request_states
        before: dict[str, int] = {}
        while True:
            counts = {s.external_req_id: s.detokenizer.num_output_tokens() for s in states.values()}
            now = {name: counts.get(name, 0) for name in self.labels.keys() - self.bare}
            # vLLM may still be handing out what it sampled before the pause.
            if now == before and llm.engine_core.outputs_queue.empty():
                break
            before = now
            await asyncio.sleep(0.001)
        for name, count in before.items():
            self.labels[name].append((version, count))


def policies(llm: Any, model: VllmModel) -> dict[str, Weights]:
    """Return the weights of every policy that this vLLM samples for."""
    if model.adapters is None:
        sparse = SparseUpdates(llm, model.store, model.verify_every) if model.store else None
        return {"": Weights(sparse)}
    found = {}
    for number, (name, location) in enumerate(model.adapter_stores.items(), 1):
        updates = AdapterUpdates(llm, number, name, location, model.adapters, model.verify_every)
        found[name] = Weights(updates if location else None)
    return found


def _accepted(function: Any, **options: Any) -> dict[str, Any]:
    """Select the options that this version of vLLM knows."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in known}
