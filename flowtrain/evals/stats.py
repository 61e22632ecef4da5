"""Counts of a set of rollouts that add up over ranks, and the shares and means that people read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flowtrain.agents.planner import NO_TOOL
from flowtrain.training.world import World
from flowtrain.types import Trajectory

_COUNTS = (
    *("rollouts", "failed", "reward", "turns", "malformed", "tool_errors", "response_tokens", "prompt_tokens"),
    *("out_of_turns", "out_of_time", "stragglers"),
)


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Shares and means over rollouts or turns."""

    num_rollouts: int
    failed_rollouts: int
    """Those that a frozen module failed; they have no reward."""
    straggler_rollouts: int
    """Those that the others did not wait for; out of time, too."""
    reward_mean: float
    """Of those that did not fail."""
    turns_mean: float
    malformed_share: float
    """Turns whose action could not be read or named no tool."""
    tool_error_share: float
    """Turns whose tool gave an error."""
    response_len_mean: float
    """Tokens per planner response."""
    prompt_len_mean: float
    """Tokens per planner prompt."""
    out_of_turns_share: float
    """Rollouts that the turn limit ended."""
    out_of_time_share: float
    """Rollouts that time or the model's positions ended."""
    tool_shares: dict[str, float]
    """Turns by tool; what is missing to 1 was malformed."""

    @classmethod
    def of(cls, trajectories: Iterable[Trajectory], tool_names: Sequence[str], world: World) -> RolloutStats:
        """Over the rollouts of all ranks; collective."""
        counts = dict.fromkeys([*_COUNTS, *tool_names], 0.0)
        for trajectory in trajectories:
            _count(trajectory, counts)
        total = dict(zip(counts, world.sum(list(counts.values())), strict=True))
        rollouts, turns = max(total["rollouts"], 1), max(total["turns"], 1)
        return cls(
            num_rollouts=int(total["rollouts"]),
            failed_rollouts=int(total["failed"]),
            straggler_rollouts=int(total["stragglers"]),
            reward_mean=total["reward"] / max(total["rollouts"] - total["failed"], 1),
            turns_mean=total["turns"] / rollouts,
            malformed_share=total["malformed"] / turns,
            tool_error_share=total["tool_errors"] / turns,
            response_len_mean=total["response_tokens"] / turns,
            prompt_len_mean=total["prompt_tokens"] / turns,
            out_of_turns_share=total["out_of_turns"] / rollouts,
            out_of_time_share=total["out_of_time"] / rollouts,
            tool_shares={name: total[name] / turns for name in tool_names},
        )

    def metrics(self) -> dict[str, float]:
        """Flat, for the log; tools as tool_share/<name>."""
        plain = {name: getattr(self, name) for name in self.__slots__ if name not in ("tool_shares", "num_rollouts")}
        return plain | {f"tool_share/{name}": share for name, share in self.tool_shares.items()}


def _count(trajectory: Trajectory, counts: dict[str, float]) -> None:
    assert trajectory.reward is not None or trajectory.error
    counts["rollouts"] += 1
    counts["failed"] += bool(trajectory.error)
    counts["reward"] += trajectory.reward or 0.0
    counts["turns"] += len(trajectory.turns)
    counts["out_of_turns"] += trajectory.truncated == "turns"
    counts["out_of_time"] += trajectory.truncated in ("time", "prompt", "straggler")
    counts["stragglers"] += trajectory.truncated == "straggler"
    for turn in trajectory.turns:
        counts["response_tokens"] += len(turn.response_ids)
        counts["prompt_tokens"] += len(turn.prompt_ids)
        if turn.action is None or turn.action.tool_name.startswith(NO_TOOL):
            counts["malformed"] += 1
        else:
            counts["tool_errors"] += turn.result.error is not None
            counts[turn.action.tool_name] += 1
