"""The states of stateful tools: a session per rollout, and snapshots that its branches begin with.

A branch that leaves a rollout in turn t goes on from the tools' states at the end of turn t - 1.
Those are kept by the rollout's seed from the time that the rollout makes them until the group is
done.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from flowtrain.config import Agent as Options
from flowtrain.tools import Snapshot, StatefulTool, Tool, ToolCard, ToolSession
from flowtrain.types import BranchStart, ToolResult
from flowtrain.utils.errors import foreign

_log = logging.getLogger(__name__)
_SNAPSHOT_S = 30.0
"""Seconds in which a tool must take a snapshot, or restore one."""


class StateNotKept(Exception):
    """A branch cannot begin: the state of a tool at its place is not there; the text says why."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A snapshot, or None for a tool that had not been called by then."""

    snapshot: Snapshot | None
    since: float


class Snapshots:
    """Snapshots by rollout and turn, within bounds; safe to use from several threads.

    What does not fit is not kept, and branches from there fail: they are counted and not trained.
    """

    def __init__(self, max_number: int, max_mb: int, lifetime_s: float) -> None:
        self._max_number, self._max_bytes, self._lifetime_s = max_number, max_mb << 20, lifetime_s
        self._kept: dict[int, dict[int, dict[str, _Kept]]] = {}
        """By the rollout's seed, turn and tool; turns at whose end a state is as before share it.
        """
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    @classmethod
    def of(cls, agent: Options) -> Snapshots:
        """Make room for as many as `[agent]` says."""
        return cls(agent.max_snapshots, agent.snapshot_memory_mb, agent.snapshot_lifetime_s)

    def __len__(self) -> int:
        """Return how many states are held."""
        with self._lock:
            return len(self._held())

    def keep(self, seed: int, turn: int, states: Mapping[str, Snapshot | None]) -> bool:
        """Keep the states of a rollout's tools at the end of a turn; False: there is no room."""
        with self._lock:
            held = self._held()
            held |= {id(each): each for each in states.values() if each is not None}
            if len(held) > self._max_number:
                return False
            if sum(each.num_bytes for each in held.values()) > self._max_bytes:
                return False
            now = time.monotonic()
            kept = {name: _Kept(each, now) for name, each in states.items()}
            self._kept.setdefault(seed, {})[turn] = kept
            self._watch()
            return True

    def at(self, seed: int, turn: int) -> Mapping[str, Snapshot | None]:
        """Return the states at the end of a turn; raises StateNotKept."""
        with self._lock:
            states = self._kept.get(seed, {}).get(turn)
        if states is None:
            raise StateNotKept(
                f"the state of its tools after turn {turn} was not kept: there are at most "
                f"agent.max_snapshots={self._max_number} in agent.snapshot_memory_mb="
                f"{self._max_bytes >> 20}, for agent.snapshot_lifetime_s={self._lifetime_s:g}"
            )
        return {name: each.snapshot for name, each in states.items()}

    @contextmanager
    def held(self, seeds: Collection[int] | None = None) -> Iterator[None]:
        """Free the snapshots of these rollouts, or of all, when the block ends, however it does."""
        try:
            yield
        finally:
            with self._lock:
                before = self._held()
                for seed in list(self._kept) if seeds is None else seeds:
                    self._kept.pop(seed, None)
                self._free(before)

    def _held(self) -> dict[int, Snapshot]:
        """The snapshots, each once."""
        return {
            id(each.snapshot): each.snapshot
            for turns in self._kept.values()
            for states in turns.values()
            for each in states.values()
            if each.snapshot is not None
        }

    def _free(self, before: Mapping[int, Snapshot]) -> None:
        """Close those that were held before and are held no longer."""
        after = self._held()
        with ExitStack() as closing:
            for key in before.keys() - after.keys():
                closing.callback(before[key].close)
        if not self._kept and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = threading.Timer(self._lifetime_s, self._expire)
            self._timer.daemon = True
            self._timer.start()

    def _expire(self) -> None:
        """Free what is too old; a group that is still not done has to do without."""
        with self._lock:
            self._timer = None
            before, oldest = self._held(), time.monotonic() - self._lifetime_s
            for seed, turns in list(self._kept.items()):
                for turn, states in list(turns.items()):
                    if all(each.since <= oldest for each in states.values()):
                        del turns[turn]
                if not turns:
                    del self._kept[seed]
            self._free(before)
            if self._kept:
                self._watch()


class _InSession(Tool):
    """A stateful tool as one rollout has it."""

    def __init__(self, card: ToolCard, session: ToolSession) -> None:
        self._card = card
        self.session = session
        self.last: Snapshot | None = None
        self.is_changed = False
        self._one_by_one = asyncio.Lock()

    @property
    def card(self) -> ToolCard:
        return self._card

    async def execute(self, /, **arguments: object) -> str | ToolResult:
        """Calls of one response may run at once: they take their turns here, in its order."""
        async with self._one_by_one:
            self.is_changed = True
            return await self.session.execute(**arguments)


class RolloutTools:
    """The tools of one rollout."""

    def __init__(self, tools: Mapping[str, Tool], snapshots: Snapshots | None, seed: int) -> None:
        """Without `snapshots` no state is kept."""
        self.tools = tools
        self._sessions = {n: tool for n, tool in tools.items() if isinstance(tool, _InSession)}
        self._snapshots = snapshots
        self._seed = seed

    @property
    def names(self) -> Collection[str]:
        """The tools that have a session."""
        return self._sessions.keys()

    async def end_turn(self, turn: int) -> None:
        """Keep the states at the end of a turn, the first of which is 0."""
        if self._snapshots is None or not self._sessions:
            return
        states: dict[str, Snapshot | None] = {}
        is_kept = False
        try:
            async with asyncio.timeout(_SNAPSHOT_S):
                for name, tool in self._sessions.items():
                    is_new = tool.is_changed
                    states[name] = await tool.session.snapshot() if is_new else tool.last
            is_kept = self._snapshots.keep(self._seed, turn, states)
        # A tool is foreign code; branches from here fail and are counted.
        except Exception:  # noqa: BLE001
            _log.warning("the state of %s could not be kept", name, exc_info=True)
        finally:
            for name, state in states.items():
                tool = self._sessions[name]
                if is_kept:
                    tool.last, tool.is_changed = state, False
                elif state is not None and state is not tool.last:
                    state.close()


async def _session(name: str, tool: StatefulTool, state: Snapshot | None) -> ToolSession:
    """Open a session, or restore one; raises StateNotKept where the tool fails to."""
    with foreign(f"{name} has no session", StateNotKept):
        if state is None:
            return tool.open_session()
        async with asyncio.timeout(_SNAPSHOT_S):
            return await tool.restore(state)


NO_STATES = RolloutTools({}, None, 0)
"""Of a rollout whose tools have no states."""


@asynccontextmanager
async def rollout_tools(
    tools: Mapping[str, Tool], snapshots: Snapshots | None, seed: int, start: BranchStart | None
) -> AsyncIterator[RolloutTools]:
    """Give each stateful tool a session for the rollout, and close them at the end of the block.

    A rollout that begins with its task keeps its states in `snapshots`, if there are any; a branch
    begins with those of its parent, and raises StateNotKept where they are not there.
    """
    stateful = {name: tool for name, tool in tools.items() if isinstance(tool, StatefulTool)}
    if not stateful:
        yield RolloutTools(tools, None, seed)
        return
    with ExitStack() as closing:
        states: Mapping[str, Snapshot | None] = {}
        if start is not None and start.point.turn:
            if snapshots is None:
                raise StateNotKept("the states of its tools were not kept")
            states = snapshots.at(start.parent.seed, start.point.turn - 1)
        of_rollout: dict[str, Any] = dict(tools)
        for name, tool in stateful.items():
            state = states.get(name)
            session = await _session(name, tool, state)
            closing.callback(session.close)
            of_rollout[name] = _InSession(tool.card, session)
        yield RolloutTools(of_rollout, snapshots if start is None else None, seed)
