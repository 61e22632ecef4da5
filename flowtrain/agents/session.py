"""The session of a rollout, and the base class of agents written as a plain program.

A program samples from the session's policies and uses its tools; the session records each call as a
turn, enforces the limits and builds the trajectory. A branch runs the program again and replays its
parent's calls and tool results up to the branch point, so only a program that repeats its requests
can branch. AgentFlow's flow uses no session, because its modules share an explicit memory.
"""

from __future__ import annotations

import asyncio
import copy
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

from flowtrain.agents.base import AgentContext
from flowtrain.agents.deadlines import Cutoff, Deadline, TurnsEnded
from flowtrain.agents.policy import Policy, PromptTooLong, opening
from flowtrain.inference.protocol import EngineError
from flowtrain.records import (
    MAX_TOOL_CALLS,
    BranchStart,
    Call,
    FinishReason,
    PolicyName,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    UserError,
    Verdict,
)
from flowtrain.tasks.sub_goals import Hints
from flowtrain.tools.base import Tool, run_tool
from flowtrain.utils.seeds import derive_seed
from flowtrain.utils.text import encodable, final_answer

_MAX_ERROR = 300
_GRACE_S = 5.0
"""Seconds after the rollout's deadline in which a program may still answer."""
_ToolRequest = tuple[str, Mapping[str, object], str]
"""Name, arguments and id of a tool call."""


class RolloutEnded(Exception):
    """A limit ended the rollout; `reason` is a value of `Trajectory.truncated`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Session:
    """The state of a running rollout, for the coroutines of one event loop.

    `answer_so_far` becomes the answer if a limit ends the rollout. `engine_error` holds a permanent
    failure of the policy's engine, which ends the run. `repeats_tools` makes a branch call its
    parent's tools again, for tools with state of their own per rollout. `must_report` fails a
    rollout that ends without a `report`, for tasks that no rule can score.
    """

    def __init__(
        self,
        task: Task,
        seed: int,
        context: AgentContext,
        *,
        tools: Mapping[str, Tool] | None = None,
        start: BranchStart | None = None,
        hints: Hints | None = None,
    ) -> None:
        """`tools` replaces the tools of the context."""
        self.task = task
        self.seed = seed
        self.policies = context.policies
        self.tools = context.tools if tools is None else tools
        self.hint_turn: int | None = None
        self.answer_so_far = ""
        self.engine_error: EngineError | None = None
        self.repeats_tools = False
        self.must_report = False
        self._options = context.config.agent
        self._max_turns = context.max_turns
        self._start = start
        self._hints = hints
        self._deadline = Deadline(self._options.rollout_timeout_s)
        self._num_calls = self._num_waiting = 0
        self._turns: dict[int, Turn] = {}
        self._places: dict[int, int] = {}
        self._reported: dict[str, float] = {}
        self._turn_rewards: tuple[float, ...] = ()

    @property
    def policy(self) -> Policy:
        """Return the run's first policy, the only one of most agents."""
        return next(iter(self.policies.values()))

    def policy_of(self, name: PolicyName = "") -> Policy:
        """Return a policy by name; "" is the first. Raises UserError for an unknown name."""
        if not name:
            return self.policy
        if name not in self.policies:
            names = ", ".join(self.policies)
            raise UserError(f"this run has no policy {name!r}; [policies] defines {names}")
        return self.policies[name]

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Return the turns so far, in request order."""
        return tuple(self._turns[number] for number in sorted(self._turns))

    @property
    def reported(self) -> Mapping[str, float]:
        return self._reported

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        return self._turn_rewards

    def left_s(self) -> float:
        """Return the remaining time of the rollout in seconds."""
        return self._deadline.left_s()

    async def sample(
        self,
        prompt_ids: tuple[int, ...],
        *,
        policy: PolicyName = "",
        max_new_tokens: int | None = None,
        stop_strings: tuple[str, ...] = (),
    ) -> Call:
        """Sample a response from `policy` ("": the first), record it as a turn and return the call.
        `Policy.sample` documents the other arguments.

        Raises RolloutEnded when the rollout has no turns, time or model positions left. A failed or
        cancelled call records no turn.
        """
        target = self.policy_of(policy)
        name = policy or next(iter(self.policies))
        number = self._next_call()
        self._num_waiting += 1
        try:
            return await self._sample(
                number, name, target, prompt_ids, max_new_tokens, stop_strings
            )
        finally:
            self._num_waiting -= 1

    async def _sample(
        self,
        number: int,
        name: PolicyName,
        policy: Policy,
        prompt_ids: tuple[int, ...],
        max_new_tokens: int | None,
        stop_strings: tuple[str, ...],
    ) -> Call:
        if self._start is not None and number < self._start.point.turn:
            return self._record(number, _replay(self._start.parent.turns[number], name, prompt_ids))
        prefix = None
        if self._start is not None and number == self._start.point.turn:
            parent_turn = _replay(self._start.parent.turns[number], name, prompt_ids)
            prefix = opening(parent_turn.call, self._start.point.token)
        started = time.monotonic()
        try:
            call = await policy.sample(
                prompt_ids,
                seed=derive_seed(self.seed, number),
                deadline_s=self.left_s(),
                prefix=prefix,
                max_new_tokens=max_new_tokens,
                stop_strings=stop_strings,
            )
        except PromptTooLong:
            raise RolloutEnded("prompt") from None
        except EngineError as error:
            self.engine_error = error
            raise
        took_s = time.monotonic() - started
        return self._record(number, Turn({name: call}, None, Verdict.CONTINUE, took_s, took_s))

    def _next_call(self) -> int:
        """Return the next response's number, from 0. Raises RolloutEnded without turns or time."""
        # Responses under way count, or calls side by side would exceed the limit.
        if len(self._turns) + self._num_waiting >= self._max_turns:
            raise RolloutEnded("turns")
        if not self.left_s():
            raise RolloutEnded("time")
        self._num_calls += 1
        return self._num_calls - 1

    async def use_tool(
        self, call: Call, name: str, arguments: Mapping[str, object], id: str = ""
    ) -> ToolResult:
        """Run one tool and return its result; see `use_tools`."""
        (result,) = await self.use_tools(call, [(name, arguments, id)])
        return result

    async def use_tools(self, call: Call, wanted: Sequence[_ToolRequest]) -> list[ToolResult]:
        """Run the tool calls of a response concurrently, record them in its turn and return the
        results in order.

        An unknown tool, wrong arguments and failures become results with an error, which the policy
        can read.

        Args:
            wanted: name, arguments and id of each call, in the order of the response.
        """
        if self._is_again(call):  # a turn before the branch point, whose results are the parent's
            results = _replay_results(self._turn(call), wanted)
            if self.repeats_tools:
                await self._repeat(wanted, results)
            return results
        if len(wanted) > MAX_TOOL_CALLS:
            raise ValueError(f"a turn holds at most {MAX_TOOL_CALLS} calls of tools")
        started = time.monotonic()
        results = await self._run_tools(wanted)
        if unknown := [name for name, _, _ in wanted if name not in self.tools]:
            self.record_malformed(call, f"there is no tool {unknown[0]!r}")
        for (name, arguments, id), result in zip(wanted, results, strict=True):
            self.record_tool(call, ToolCall(name, json.dumps(arguments), result, id))
        self._amend(call, seconds=self._turn(call).seconds + time.monotonic() - started)
        return results

    def record_tool(self, call: Call, used: ToolCall) -> None:
        """Record a tool call that ran outside the session, in the turn that requested it."""
        if self._is_again(call):
            return
        earlier_calls = self._turn(call).tool_calls
        if len(earlier_calls) == MAX_TOOL_CALLS:
            raise ValueError(f"a turn holds at most {MAX_TOOL_CALLS} calls of tools")
        self._amend(call, tool_calls=(*earlier_calls, used))

    def record_malformed(self, call: Call, problem: str) -> None:
        """Record the reason why a response cannot be parsed; the turn counts as malformed."""
        self._amend(call, problem=problem)

    def hint(self) -> str:
        """Return a hint if the rollout is stuck, at most once; otherwise ""."""
        if self._hints is None or self.hint_turn is not None:
            return ""
        turns = self.turns
        if hint := self._hints.give(self.task, turns, self.seed):
            self.hint_turn = len(turns)
        return hint

    def report(self, /, **parts: float) -> None:
        """Report named parts of the reward, for programs that compute it themselves."""
        self._reported |= parts

    def report_turns(self, rewards: Sequence[float]) -> None:
        """Report one reward per turn, in addition to the parts of `report`."""
        self._turn_rewards = tuple(rewards)

    def _record(self, number: int, turn: Turn) -> Call:
        call = turn.call
        self._places[id(call)] = number  # by identity, because two responses may be equal
        self._turns[number] = turn
        return call

    def _turn(self, call: Call) -> Turn:
        return self._turns[self._places[id(call)]]

    def _is_again(self, call: Call) -> bool:
        """Return whether the turn, with its tool calls, is copied from the parent."""
        return self._start is not None and self._places[id(call)] < self._start.point.turn

    def _amend(self, call: Call, **fields: Any) -> None:
        self._turns[self._places[id(call)]] = replace(self._turn(call), **fields)

    async def _run_tools(self, requests: Sequence[_ToolRequest]) -> list[ToolResult]:
        return await asyncio.gather(*(self._run_tool(name, args) for name, args, _ in requests))

    async def _repeat(self, requests: Sequence[_ToolRequest], results: list[ToolResult]) -> None:
        """Call tools as the parent did."""
        new_results = await self._run_tools(requests)
        if [result.text for result in new_results] != [result.text for result in results]:
            raise ValueError(
                "it cannot branch: a tool returned a different result than for its parent"
            )

    async def _run_tool(self, name: str, arguments: Mapping[str, object]) -> ToolResult:
        tool = self.tools.get(name)
        if tool is None:
            names = ", ".join(self.tools) or "none"
            return ToolResult(error=f"there is no tool {name!r}; there are: {names}")
        timeout_s = self.left_s()
        if not tool.card.keeps_time:
            timeout_s = min(self._options.tool_timeout_s, timeout_s)
        return await run_tool(tool, arguments, timeout_s, self._options.max_result_chars)


class SessionAgent(ABC):
    """Base class of agents written as programs, which override `answer`.

    Implements `Agent`. Subclasses declare further abilities by class attributes such as
    `can_branch`; see `AgentKind`.
    """

    hints: Hints | None = None

    trains: ClassVar[tuple[PolicyName, ...] | None] = None
    """See `AgentKind`."""

    def __init__(self, context: AgentContext) -> None:
        self.context = context

    @abstractmethod
    async def answer(self, session: Session) -> str:
        """Answer `session.task` and return the final answer, which is then scored."""

    async def run(
        self, task: Task, seed: int, cutoff: Cutoff | None = None, start: BranchStart | None = None
    ) -> Trajectory:
        started = time.monotonic()
        session = Session(task, seed, self.context, start=start, hints=self.hints)
        answer, truncated, error = "", "", ""
        try:
            async with (cutoff or Cutoff())():
                answer = await self._answer_in_time(session)
        except RolloutEnded as ended:
            answer, truncated = session.answer_so_far, ended.reason
        except TurnsEnded:
            answer, truncated = session.answer_so_far, "straggler"
        except UserError:
            raise
        # A program is foreign code, whose crash costs one rollout: it is counted, not trained.
        except Exception as failed:  # noqa: BLE001
            if session.engine_error is not None:
                raise session.engine_error from None
            why = encodable(" ".join(f"{type(failed).__name__}: {failed}".split()))
            error = f"agent: {why[:_MAX_ERROR]}"
        text = encodable(answer)
        if session.must_report and not session.reported and not error:
            error = f"agent: cut off ({truncated or 'no limit'}) before it had a reward"
        return Trajectory(
            task=task,
            turns=_with_stop(session.turns, is_done=not truncated),
            answer=final_answer(text),
            output="" if text == final_answer(text) else text,
            seconds=time.monotonic() - started,
            seed=seed,
            truncated=truncated or _truncation(session.turns),
            error=error,
            reported=dict(session.reported),
            turn_rewards=session.turn_rewards,
            branch=None if start is None else start.point,
            hint_turn=session.hint_turn,
        )

    async def _answer_in_time(self, session: Session) -> str:
        try:
            async with asyncio.timeout(session.left_s() + _GRACE_S) as limit:
                answer: object = await self.answer(session)
        except TimeoutError:
            if limit.expired():
                raise RolloutEnded("time") from None
            raise
        if not isinstance(answer, str):
            raise TypeError(f"the answer is a {type(answer).__name__}, not a string")
        return answer

    def with_hints(self, hints: Hints | None) -> Self:
        agent = copy.copy(self)
        agent.hints = hints
        return agent

    def close(self) -> None:  # noqa: B027  # most agents hold nothing
        """Release the agent's resources."""


def _replay(turn: Turn, policy: PolicyName, prompt_ids: tuple[int, ...]) -> Turn:
    """Return the parent's turn, checking that the program repeats the request."""
    if turn.policy != policy or turn.call.prompt_ids != prompt_ids:
        raise ValueError("it cannot branch: the same task and seed led to a different prompt")
    return turn


def _replay_results(turn: Turn, requests: Sequence[_ToolRequest]) -> list[ToolResult]:
    names = [name for name, _, _ in requests]
    if [call.name for call in turn.tool_calls] != names:
        raise ValueError(
            f"it cannot branch: it asks for the tools {names}, which its parent did not"
        )
    return [call.result for call in turn.tool_calls]


def _with_stop(turns: tuple[Turn, ...], is_done: bool) -> tuple[Turn, ...]:
    """Set the verdict of the last turn to STOP if the agent, not a limit, ended the rollout."""
    return (*turns[:-1], replace(turns[-1], verdict=Verdict.STOP)) if turns and is_done else turns


def _truncation(turns: tuple[Turn, ...]) -> str:
    """Return "time" if the deadline cut the last response off."""
    return "time" if turns and turns[-1].call.finish_reason is FinishReason.DEADLINE else ""
