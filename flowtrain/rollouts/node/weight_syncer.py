"""Load the weights that trainers publish into the engines of a node while rollouts go on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from flowtrain.inference.protocol import Engine, EngineError
from flowtrain.records import Outage, UserError
from flowtrain.rollouts.contract import PolicyState
from flowtrain.weights import Source, StoreError

_log = logging.getLogger(__name__)
_RETRY_S = 2.0
"""Seconds between two looks at a store that lags behind its trainer."""


class PoliciesChanged(Exception):
    """A policy that was frozen is trained now, so its engine must be built again."""


class WeightSyncer:
    """Keeps the engines at the announced versions, each policy at its own pace. Belongs to one
    event loop; engines load on threads, so that sampling goes on.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        stores: Mapping[str, Source],
        layouts: Mapping[str, str],
        patience_s: float = math.inf,
    ) -> None:
        """All by policy; a policy without a store is frozen. `patience_s`: seconds until the first
        weights must be there.
        """
        self._engines = engines
        self._stores = stores
        self._layouts = layouts
        self._patience_s = patience_s
        self._announced: dict[str, int] = {}
        self._news = {policy: asyncio.Event() for policy in stores}
        self._loaded: set[str] = set()
        self.is_damaged = False
        """Set once a load has found weights that something else had changed."""
        self._threads = ThreadPoolExecutor(max(1, len(stores)), thread_name_prefix="follow")

    @property
    def versions(self) -> dict[str, int]:
        """Return the weight versions that the engines sample with, by policy."""
        return {policy: engine.version for policy, engine in self._engines.items()}

    def on_policy_state(self, policies: Mapping[str, PolicyState]) -> None:
        """Take in what the dataflow says about its policies.

        Raises:
            UserError: a policy has another model than this node.
            PoliciesChanged: a policy was frozen.
        """
        for policy, state in policies.items():
            if policy not in self._engines:
                continue
            if state.layout != self._layouts[policy]:
                raise UserError(
                    f"the {policy} of this node is another model than the trainer's: weights or "
                    f"tokens differ (layout {self._layouts[policy]} here, {state.layout} there); "
                    "see model.path and policies.NAME.path"
                )
            if policy not in self._stores:
                raise PoliciesChanged(policy)
            if self._announced.get(policy) != state.version:
                self._announced[policy] = state.version
                self._news[policy].set()

    def obstacle(self, max_staleness: int) -> str:
        """Return why no sample made now could be trained; "" if it could."""
        for policy in self._stores:
            if policy not in self._loaded:
                return f"no weights of the {policy} yet"
            announced = self._announced.get(policy, 0)
            loaded_version = self._engines[policy].version
            if announced - loaded_version > max_staleness:
                return (
                    f"the {policy}'s weights here are of version {loaded_version}, the trainer's "
                    f"of {announced}"
                )
        return ""

    async def run(self) -> None:
        """Follow the trainers until cancelled. Raises EngineError, also for damaged weights, and
        Outage when the first weights do not come, or cannot be loaded, within the patience.
        """
        async with asyncio.TaskGroup() as tasks:
            for policy in self._stores:
                tasks.create_task(self._follow(policy))

    async def _follow(self, policy: str) -> None:
        loop = asyncio.get_running_loop()
        last_lag = ""
        deadline = loop.time() + self._patience_s
        while True:
            self._news[policy].clear()  # before the load, so that no later news are missed
            lag = await loop.run_in_executor(self._threads, self._catch_up, policy)
            if lag != last_lag:
                version = self._engines[policy].version
                _log.warning("%s", lag or f"the {policy}'s weights are at version {version} now")
                last_lag = lag
            if policy not in self._loaded and loop.time() > deadline:
                raise Outage(
                    f"{lag}, after dataflow.wait_s={self._patience_s:g} seconds; check --store"
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_S if lag else None):
                    await self._news[policy].wait()

    def _catch_up(self, policy: str) -> str:
        """Load the announced version, or the newest before it that the store has. Returns what is
        still missing, or "".
        """
        store = self._stores[policy]
        engine = self._engines[policy]
        announced = self._announced.get(policy)
        try:
            newest = store.head()
            if newest is None:
                return f"{store} holds no weights of the {policy} yet"
            version = newest if announced is None else min(announced, newest)
            if policy not in self._loaded or version != engine.version:
                engine.load(version)
                self._loaded.add(policy)
                if engine.metrics().get("weights_damaged"):
                    self.is_damaged = True
                    raise EngineError(
                        f"something had changed the {policy}'s weights before version {version} "
                        "was loaded, nobody knows since when: this node disowns its groups"
                    )
        except StoreError as error:
            if policy not in self._loaded:
                return f"no weights of the {policy} yet: {error}"
            return f"the {policy} stays at version {engine.version}: {error}"
        if announced is not None and version < announced:
            return (
                f"{store} is at version {newest} of the {policy}, the trainer at {announced}: "
                f"sampling continues with {version}"
            )
        return ""

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
