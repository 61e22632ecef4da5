"""Counts of rollouts that add up over ranks, and the shares and means derived from them."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flowtrain.records import Call, Trajectory, Turn
from flowtrain.utils.prefixes import num_shared

_COUNTS = (
    *("rollouts", "finished", "reward", "squared_reward"),
    *("turns", "malformed", "tool_errors", "stragglers"),
    *("response_tokens", "sampled_tokens", "prompt_tokens", "sub_goals", "hinted"),
    *("out_of_turns", "out_of_time", "out_of_positions", "segments", "read", "reread"),
    "rewritten",
)
_RATIOS = {
    "reward_mean": ("reward", "finished"),
    "turns_mean": ("turns", "rollouts"),
    "malformed_share": ("malformed", "turns"),
    "tool_error_share": ("tool_errors", "turns"),
    "response_len_mean": ("response_tokens", "turns"),
    "sub_goal_mean": ("sub_goals", "rollouts"),
    "hinted_share": ("hinted", "rollouts"),
    "prompt_len_mean": ("prompt_tokens", "turns"),
    "segments_mean": ("segments", "rollouts"),
    "reread_share": ("reread", "read"),
    "out_of_turns_share": ("out_of_turns", "rollouts"),
    "out_of_time_share": ("out_of_time", "rollouts"),
    "out_of_positions_share": ("out_of_positions", "rollouts"),
}
"""Name of a mean or share to the two counts that it divides."""


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Shares and means over rollouts or turns."""

    num_rollouts: int
    failed_rollouts: int
    """Rollouts that a frozen module failed; they have no reward."""
    straggler_rollouts: int
    """Rollouts that were cut off as stragglers; these also count as out of time."""
    reward_mean: float
    """Mean over rollouts that did not fail."""
    reward_std: float
    """Their population standard deviation."""
    turns_mean: float
    malformed_share: float
    """Turns whose action could not be read or named no tool."""
    tool_error_share: float
    """Turns whose tool gave an error."""
    response_len_mean: float
    """Tokens per planner response."""
    num_sampled_tokens: int
    """Response tokens over all ranks, without what branches took over from other rollouts."""
    sub_goal_mean: float
    """Importance of the sub-goals that a rollout reached; 0 where tasks have none."""
    reward_density: float
    """Rewards of answers per 1000 response tokens (InfoFlow's rho)."""
    hinted_share: float
    """Rollouts that read a hint."""
    prompt_len_mean: float
    """Tokens per planner prompt."""
    segments_mean: float
    """Turns per rollout that extend no earlier turn: 1 for histories that only grow."""
    reread_share: float
    """Tokens of prompts that begin a further segment, among all that had to be read."""
    num_rewritten_tokens: int
    """Tokens of these prompts from where they part from what the turn before read and sampled."""
    out_of_turns_share: float
    """Rollouts that the turn limit ended."""
    out_of_time_share: float
    """Rollouts that time ended."""
    out_of_positions_share: float
    """Rollouts that the model's positions ended."""
    tool_shares: dict[str, float]
    """Calls of each tool per turn; the rest to 1 are malformed turns and answers."""

    @property
    def reward_error(self) -> float:
        """The standard error of `reward_mean`, for rollouts of different tasks."""
        return self.reward_std / math.sqrt(max(self.num_rollouts - self.failed_rollouts, 1))

    @classmethod
    def of_counts(cls, total: Mapping[str, float], tool_names: Sequence[str]) -> RolloutStats:
        """Compute the statistics from the sums of `count_rollouts`."""
        num_finished = max(total["finished"], 1)
        mean = total["reward"] / num_finished
        ratios = {name: total[a] / max(total[b], 1) for name, (a, b) in _RATIOS.items()}
        return cls(
            num_rollouts=int(total["rollouts"]),
            failed_rollouts=int(total["rollouts"] - total["finished"]),
            straggler_rollouts=int(total["stragglers"]),
            # Rounding may take the difference of rewards that are all alike below 0.
            reward_std=math.sqrt(max(0.0, total["squared_reward"] / num_finished - mean**2)),
            num_sampled_tokens=int(total["sampled_tokens"]),
            num_rewritten_tokens=int(total["rewritten"]),
            reward_density=1000 * total["reward"] / max(total["response_tokens"], 1),
            tool_shares={name: total[name] / max(total["turns"], 1) for name in tool_names},
            **ratios,
        )

    def metrics(self) -> dict[str, float]:
        """Return flat metrics for the log; tools as tool_share/<name>."""
        plain = {
            name: getattr(self, name)
            for name in self.__slots__
            if name not in ("tool_shares", "num_rollouts")
        }
        shares = {f"tool_share/{name}": share for name, share in self.tool_shares.items()}
        return plain | shares


def count_rollouts(
    trajectories: Iterable[Trajectory], tool_names: Sequence[str]
) -> dict[str, float]:
    """Count what adds up over rollouts and over ranks."""
    counts = dict.fromkeys([*_COUNTS, *tool_names], 0.0)
    for rollout in trajectories:
        assert rollout.reward is not None or rollout.error
        counts["rollouts"] += 1
        counts["finished"] += rollout.reward is not None
        counts["reward"] += rollout.reward or 0.0
        counts["squared_reward"] += (rollout.reward or 0.0) ** 2
        counts["turns"] += len(rollout.turns)
        counts["sampled_tokens"] += rollout.num_sampled_tokens
        counts["sub_goals"] += rollout.sub_goals or 0.0
        counts["hinted"] += rollout.hint_turn is not None
        counts["out_of_turns"] += rollout.truncated == "turns"
        counts["out_of_time"] += rollout.truncated in ("time", "straggler")
        counts["out_of_positions"] += rollout.truncated == "prompt"
        counts["stragglers"] += rollout.truncated == "straggler"
        calls = [turn.call for turn in rollout.turns]
        known_tokens = _known_tokens([(call.prompt_ids, call.response_ids) for call in calls])
        for number, (turn, num_known) in enumerate(zip(rollout.turns, known_tokens, strict=True)):
            _count_tokens(counts, turn.call, num_known, calls[number - 1] if number else None)
            _count_tools(counts, turn, tool_names)
    return counts


def _count_tokens(
    counts: dict[str, float], call: Call, num_known: int, previous: Call | None
) -> None:
    """Count a turn's tokens; an earlier turn has read and sampled the first `num_known` of its
    prompt, as all that it has.
    """
    num_prompt, begins_segment = len(call.prompt_ids), not num_known
    counts["segments"] += begins_segment
    counts["read"] += num_prompt - num_known
    if begins_segment and previous is not None:
        before = previous.prompt_ids + previous.response_ids
        counts["reread"] += num_prompt
        counts["rewritten"] += num_prompt - num_shared(before, call.prompt_ids)
    counts["prompt_tokens"] += num_prompt
    counts["response_tokens"] += len(call.response_ids)


def _count_tools(counts: dict[str, float], turn: Turn, tool_names: Sequence[str]) -> None:
    """Count the tools that a turn asked for."""
    # An environment or a program may have tools that no list names.
    known_names = [tool_call.name for tool_call in turn.tool_calls if tool_call.name in tool_names]
    is_error = any(tool_call.result.error is not None for tool_call in turn.tool_calls)
    counts["malformed"] += bool(turn.problem)
    counts["tool_errors"] += is_error and (bool(known_names) or not turn.problem)
    for name in known_names:
        counts[name] += 1


def _known_tokens(calls: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[int]:
    """Return the length of the longest earlier (prompt, response) that each prompt begins with."""
    num_known, earlier = [], list[tuple[Sequence[int], Sequence[int]]]()
    for prompt, response in calls:
        # The longest first: where a history only grows, it is the first that is compared.
        known = (_num(pair) for pair in earlier if _begins_with(prompt, *pair))
        num_known.append(next(known, 0))
        insort(earlier, (prompt, response), key=lambda pair: -_num(pair))
    return num_known


def _num(pair: tuple[Sequence[int], Sequence[int]]) -> int:
    return sum(map(len, pair))


def _begins_with(ids: Sequence[int], prompt: Sequence[int], response: Sequence[int]) -> bool:
    """Return whether ids begin with a prompt and its response; of the two the response, which is
    short, is looked at first.
    """
    num, end = len(prompt), len(prompt) + len(response)
    return (
        end <= len(ids)
        and tuple(ids[num:end]) == tuple(response)
        and tuple(ids[:num]) == tuple(prompt)
    )
