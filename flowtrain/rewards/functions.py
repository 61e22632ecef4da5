"""Rewards by user-written functions, alone or in a weighted sum with built-in scorers.

A function runs in this process, not in the sandbox. Each call has a deadline. A plain function runs
in its own thread; all async functions share a separate event loop, so that no function blocks the
event loop of a node, and their clients persist between steps.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import reprlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat

from flowtrain.config import Reward
from flowtrain.records import PolicyName, Task, Trajectory, UserError
from flowtrain.records.checks import part_problem
from flowtrain.rewards.scorers import SCORERS, by_rule, check
from flowtrain.tasks.sub_goals import solved_weight
from flowtrain.tools.blocking import BlockingPool
from flowtrain.utils import plugins
from flowtrain.utils.errors import user_error
from flowtrain.utils.text import encodable
from flowtrain.utils.threads import LoopThread

FAILURES = ("exception", "timeout", "value")
"""Reasons for which a function fails a rollout, as the end of `scored_by`."""
MAX_CONCURRENCY = 32
"""Largest number of concurrent calls per rank."""
MAX_LOST = 64
"""Number of further threads that may be lost to functions that never return, because a thread
cannot be killed."""

_MAX_ERROR = 300
_loop = LoopThread("reward functions")
"""Event loop of async functions, separate so that a blocking one delays no rollout."""
_log = logging.getLogger(__name__)


def failure_of(scored_by: str) -> str:
    """Return the entry of FAILURES at the end of `scored_by`, or ""."""
    reason = scored_by.rpartition(": ")[2]
    return reason if reason in FAILURES else ""


class ByPolicy(dict[str, float]):
    """A reward, or a part of one, with a value per policy; 0 for policies that are not named.

    Example: return ByPolicy(solver=float(is_right), verifier=float(verdict == is_right))
    """


_Parts = dict[str, float | tuple[float, ...] | ByPolicy]
"""Parts by name; a tuple has one number per turn."""
_Arguments = tuple[Task, str, Trajectory]


class _Failed(Exception):
    """Raised for a call without a valid reward."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class _Function(NamedTuple):
    """A reward function of the config."""

    name: str
    part: str
    """Name of the part, if the function returns a number."""
    weight: float
    call: Callable[[Task, str, Trajectory], Any]
    is_async: bool


@dataclass(frozen=True, slots=True)
class RewardFunctions:
    """The reward functions of a run."""

    options: Reward
    policies: tuple[PolicyName, ...]
    """The policies of the run; a rollout's `reward` belongs to the first one."""
    functions: tuple[_Function, ...]
    gate: asyncio.Semaphore
    pool: BlockingPool
    """The threads of plain functions."""
    warned: set[str] = field(default_factory=set)
    """Kinds of failures already reported; metrics count further ones."""

    @classmethod
    def load(
        cls, options: Reward, policies: tuple[PolicyName, ...] = ("planner",)
    ) -> RewardFunctions | None:
        """Return the imported functions of `reward.function`; None if unset.

        Raises UserError for a missing function, or one without the parameters (task, answer,
        trajectory).
        """
        if not options.function:
            return None
        functions = tuple(_load(name, weight) for name, weight in options.function.items())
        parts = [function.part for function in functions]
        if twins := [
            function for place, function in enumerate(functions) if function.part in parts[:place]
        ]:
            raise UserError(
                f"reward.function={twins[0].name!r}: two functions have the part name "
                f"{twins[0].part!r}"
            )
        pool = BlockingPool(MAX_CONCURRENCY + MAX_LOST, "reward")
        return cls(options, policies, functions, asyncio.Semaphore(MAX_CONCURRENCY), pool)

    @property
    def name(self) -> str:
        """Return the names of all functions, for `scored_by`."""
        return " + ".join(function.name for function in self.functions)

    def check(self, tasks: Sequence[Task]) -> None:
        """Raise UserError for a task that one of the built-in scorers cannot score."""
        for function in self.functions:
            if function.name not in SCORERS:
                continue
            for task in tasks:
                if not task.answers:
                    raise UserError(
                        f"task {task.id!r}: reward.function={function.name!r} needs an answer, "
                        "but the task has none"
                    )
                check(replace(task, scorer=function.name))

    async def score(self, trajectory: Trajectory) -> Trajectory:
        """Return the rollout with `reward`, `reward_parts` and `scored_by` filled, or failed; 32 at
        a time.
        """
        if trajectory.error:
            return trajectory
        async with self.gate:
            return await self._score(trajectory)

    async def _score(self, trajectory: Trajectory) -> Trajectory:
        reached = solved_weight(trajectory.task, trajectory.turns, trajectory.output)
        trajectory = replace(trajectory, sub_goals=reached)
        try:
            parts, terms, turn_rewards = await self._call_all(trajectory)
            rewards = {policy: self._total(terms, policy) for policy in self.policies}
        except _Failed as failure:
            self._warn(failure)
            scored_by = f"{self.name}: {failure.reason}"
            return replace(trajectory, scored_by=scored_by, error=str(failure))
        return replace(
            trajectory,
            reward=rewards[self.policies[0]],
            policy_rewards=rewards if any(isinstance(x, ByPolicy) for x in terms) else {},
            reward_parts=parts,
            turn_rewards=turn_rewards,
            scored_by=self.name,
        )

    def _total(self, terms: Sequence[float | ByPolicy], policy: PolicyName) -> float:
        """Return a policy's total reward. Raises _Failed if out of bounds."""
        total = _sum([x.get(policy, 0.0) if isinstance(x, ByPolicy) else x for x in terms])
        reward = self.options.bounded(total)
        if reward is None:
            whose = "" if len(self.policies) == 1 else f" for {policy}"
            raise _Failed(
                "value",
                f"the reward of {self.name}{whose} is {total:g}, not from {self.options.low:g} to "
                f"{self.options.high:g} (reward.low, reward.high)",
            )
        return reward

    async def _call_all(
        self, trajectory: Trajectory
    ) -> tuple[dict[str, float], list[float | ByPolicy], tuple[float, ...]]:
        """Call each function; return the parts by name (of one policy as "part/policy"), the
        weighted parts, and the turn rewards.
        """
        parts: dict[str, float] = {}
        terms: list[float | ByPolicy] = []
        turn_parts: list[tuple[float, ...]] = []
        for function in self.functions:
            for name, part in (await self._call(function, trajectory)).items():
                if name in parts:
                    text = f"reward function {function.name}: another function returns {name!r} too"
                    raise _Failed("value", text)
                if isinstance(part, ByPolicy):
                    if strangers := part.keys() - set(self.policies):
                        text = (
                            f"{name!r} has a reward for {strangers.pop()!r}, which is no policy "
                            "of this run"
                        )
                        raise _Failed("value", f"reward function {function.name}: {text}")
                    parts |= {f"{name}/{policy}": x for policy, x in part.items()}
                    terms.append(ByPolicy({p: function.weight * x for p, x in part.items()}))
                    continue
                if isinstance(part, tuple):
                    if len(part) != len(trajectory.turns):
                        text = f"{name!r} has {len(part)} numbers for {len(trajectory.turns)} turns"
                        raise _Failed("value", f"reward function {function.name}: {text}")
                    turn_parts.append(tuple(function.weight * number for number in part))
                    part = _sum(part)
                parts[name] = part
                terms.append(function.weight * part)
        if problem := part_problem(parts):
            raise _Failed("value", f"{self.name}: {problem}")
        return parts, terms, tuple(map(_sum, zip(*turn_parts, strict=True)))

    async def _call(self, function: _Function, trajectory: Trajectory) -> _Parts:
        """Call one function; return its parts."""
        arguments = trajectory.task, trajectory.answer, trajectory
        try:
            running: asyncio.Future[_Parts]
            if function.name in SCORERS:
                running = asyncio.ensure_future(_attempt_async(function, arguments))
            elif function.is_async:
                running = asyncio.wrap_future(_loop.start(_attempt_async(function, arguments)))
            else:
                call = functools.partial(_attempt, function, arguments)
                running = asyncio.ensure_future(self.pool.run(call))
            return await self._in_time(running)
        except _Failed as failure:
            text = f"reward function {function.name}: {failure}"
            raise _Failed(failure.reason, text) from failure

    async def _in_time(self, running: asyncio.Future[_Parts]) -> _Parts:
        """Wait for the parts until the deadline."""
        try:
            # Unlike asyncio.timeout, this tells a cancellation inside from one of our own task.
            await asyncio.wait({running}, timeout=self.options.timeout_s)
            if not running.done():
                raise _Failed("timeout", f"no reward within {self.options.timeout_s:g} s")
        finally:
            running.cancel()
        if running.cancelled():
            raise _Failed("exception", "the function cancelled itself")
        return running.result()

    def _warn(self, failure: _Failed) -> None:
        """Warn of the first failure of each kind."""
        if failure.reason not in self.warned:
            self.warned.add(failure.reason)
            _log.warning(
                "%s; the rollout fails and is counted as reward_failures/%s",
                failure,
                failure.reason,
            )


def _sum(terms: Sequence[float]) -> float:
    """Return the exactly rounded sum of floats; NaN on overflow."""
    try:
        return math.fsum(terms)
    except (OverflowError, ValueError):
        return math.nan


def _sum_of(part: float | tuple[float, ...] | ByPolicy) -> float:
    """Return the sum of a part over turns or policies."""
    if isinstance(part, ByPolicy):
        return _sum(list(part.values()))
    return _sum(part) if isinstance(part, tuple) else part


def _attempt(function: _Function, arguments: _Arguments) -> _Parts:
    """Call a plain function, in a thread."""
    with _explained():
        return _parts(function, function.call(*arguments))


async def _attempt_async(function: _Function, arguments: _Arguments) -> _Parts:
    """Call an async function."""
    with _explained():
        return _parts(function, await function.call(*arguments))


@contextmanager
def _explained() -> Iterator[None]:
    """Raise _Failed instead of a function's error, with its source line, in one line."""
    try:
        yield
    except _Failed:
        raise
    # Foreign code may fail in any way, and may not end this process.
    except (Exception, SystemExit) as error:
        (*_, line) = traceback.format_exception_only(error)
        *_, place = traceback.extract_tb(error.__traceback__)
        text = encodable(" ".join(line.split()))[:_MAX_ERROR]
        where = f"{Path(place.filename).name}, line {place.lineno}"
        raise _Failed("exception", f"{text} ({where})") from error


def _parts(function: _Function, value: object) -> _Parts:
    """Return the parts of a function's result. Raises _Failed for anything but numbers."""
    if isinstance(value, ByPolicy):
        value = {function.part: value}
    if not isinstance(value, Mapping):
        if not isinstance(value, SupportsFloat):
            raise _Failed(
                "value", f"it returned {_shown(value)}, not a number or a mapping of names to them"
            )
        value = {function.part: value}
    parts: _Parts = {}
    for name, part in value.items():
        if isinstance(part, ByPolicy):
            if not all(isinstance(n, SupportsFloat) for n in part.values()):
                raise _Failed("value", f"its part {_shown(name)} is {_shown(part)}, not numbers")
            parts[str(name)] = ByPolicy({policy: float(n) for policy, n in part.items()})
            continue
        numbers = part if isinstance(part, list | tuple) else [part]
        if not isinstance(name, str) or not all(isinstance(n, SupportsFloat) for n in numbers):
            raise _Failed("value", f"its part {_shown(name)} is {_shown(part)}, not a number")
        parts[name] = float(part) if numbers is not part else tuple(map(float, numbers))
    sums = {name: _sum_of(part) for name, part in parts.items()}
    if problem := "it returned an empty mapping" if not parts else part_problem(sums):
        raise _Failed("value", problem)
    return parts


def _shown(value: object) -> str:
    return encodable(reprlib.repr(value))


async def _built_in(scorer: str, task: Task, answer: str, trajectory: Trajectory) -> float:
    """Score as a built-in scorer does."""
    reward, _ = await by_rule(replace(task, scorer=scorer), answer)
    return reward


def _load(name: str, weight: float) -> _Function:
    origin = f"reward.function={name!r}"
    if name in SCORERS:
        call = functools.partial(_built_in, name)
        return _Function(name, name, weight, call, is_async=True)
    if not plugins.names_object(name):
        raise UserError(
            f"{origin} may be {plugins.OBJECT} of a function, or a built-in scorer: "
            f"{', '.join(SCORERS)}"
        )
    attribute, function = plugins.load_object(name, origin)
    if not callable(function):
        raise UserError(f"{origin}: {attribute!r} is {_shown(function)}, not a function")
    with user_error(f"{origin} must take (task, answer, trajectory)", TypeError, ValueError):
        inspect.signature(function).bind(None, None, None)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )
    return _Function(name, attribute, weight, function, is_async)
