"""The two logs of a run: numbers per step (`MetricsLog`) and every rollout in full
(`TrajectoryLog`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from flowtrain.logging.jsonl import append_lines, cut_lines, json_value, read_lines
from flowtrain.logging.loggers import Logger, open_tensorboard
from flowtrain.records import (
    Call,
    Group,
    PolicyName,
    Sample,
    SampleId,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)
from flowtrain.utils.prefixes import num_shared


class MetricsLog:
    """Writes the metrics of each step to metrics.jsonl, TensorBoard, and loggers."""

    def __init__(
        self,
        run_dir: Path,
        resume_step: int = 0,
        tensorboard: bool = True,
        loggers: Sequence[Logger] = (),
    ) -> None:
        """Open the log, and cut what an earlier process logged after `resume_step`, the step of the
        checkpoint that is resumed. `loggers` are closed with it.
        """
        self.path = Path(run_dir) / "metrics.jsonl"
        cut_lines(self.path, resume_step)
        boards = open_tensorboard(run_dir, resume_step) if tensorboard else ()
        self._loggers: list[Logger] = [*boards, *loggers]

    def log(self, metrics: Mapping[str, float | int]) -> None:
        """Append one line, keys in the given order; "step" must be among them. A non-finite number
        is written as null. Late metrics may belong to an earlier step.
        """
        assert "step" in metrics, f"metrics without a step: {sorted(metrics)}"
        record = {**json_value(metrics), "step": int(metrics["step"])}
        append_lines(self.path, [record])
        numbers = {
            key: value
            for key, value in record.items()
            if key != "step" and isinstance(value, int | float)
        }
        for logger in self._loggers:
            logger.log(record["step"], numbers)

    def last_step(self, key: str) -> int:
        """Return the last step whose metrics have the key; -1: there is none."""
        if not self.path.exists():
            return -1
        return max((line["step"] for line in read_lines(self.path) if key in line), default=-1)

    def close(self) -> None:
        """End all loggers; a second call does nothing."""
        with ExitStack() as cleanup:
            while self._loggers:
                cleanup.callback(self._loggers.pop(0).close)


class TrajectoryLog:
    """Writes every rollout of one rank, one line each, so that people can read what the planner did
    and jq can count it.
    """

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        resume_step: int,
        name: str = "trajectories",
        num_ranks: int = 1,
    ) -> None:
        """Cut what an earlier process logged after `resume_step`, rank 0 also what ranks did that
        are no more.

        Rank 0 writes <name>.jsonl, rank r its own file, rank -1 none.
        """
        self.path = Path(run_dir) / (f"{name}.jsonl" if rank == 0 else f"{name}.rank{rank}.jsonl")
        cut_lines(self.path, resume_step)
        if rank == 0:
            current = {f"{name}.rank{other}.jsonl" for other in range(num_ranks)}
            for path in Path(run_dir).glob(f"{name}.rank*.jsonl"):
                if path.name not in current:
                    cut_lines(path, resume_step)

    def log(
        self,
        step: int,
        version: int,
        groups: Sequence[Group],
        samples: Sequence[Sample] = (),
        policy: PolicyName = "planner",
    ) -> None:
        """Append the trajectories of `groups`.

        Args:
            version: the weight version current when the step's rollouts began.
            samples: what is trained of the calls of `policy`.
        """
        trained_samples = {sample.sample_id: sample for sample in samples}
        lines = []
        for group in groups:
            for member, trajectory in enumerate(group.trajectories):
                record = trajectory_record(trajectory, group.index)
                for number, turn in enumerate(record["turns"]):
                    sample = trained_samples.get(SampleId(group.index, member, number))
                    if sample is not None:
                        call = turn if policy == turn["policy"] else turn[policy]
                        call["training"] = {
                            "advantage": round(fmean(sample.advantages), 5),
                            "minibatch": sample.minibatch,
                        }
                lines.append({"step": step, "version": version, **record})
        if lines:
            append_lines(self.path, lines)


def trajectory_record(trajectory: Trajectory, group_index: int) -> dict[str, Any]:
    """Convert a trajectory to plain JSON values."""
    task = trajectory.task
    return {
        "task_id": task.id,
        "question": task.question,
        "answers": list(task.answers),
        "kind": task.kind,
        "num_turns": task.num_turns,
        "scorer": task.scorer,
        "group_index": group_index,
        "seed": trajectory.seed,
        "reward": trajectory.reward,
        **({"policy_rewards": dict(rewards)} if (rewards := trajectory.policy_rewards) else {}),
        "answer": trajectory.answer,
        "scored_by": trajectory.scored_by,
        **({"reward_parts": dict(parts)} if (parts := trajectory.reward_parts) else {}),
        "truncated": trajectory.truncated,
        "error": trajectory.error,
        "analysis": trajectory.analysis,
        "output": trajectory.output,
        **({} if trajectory.branch is None else {"branch": asdict(trajectory.branch)}),
        **({"rescued": list(rules)} if (rules := trajectory.rescued) else {}),
        **({} if trajectory.sub_goals is None else {"sub_goals": round(trajectory.sub_goals, 4)}),
        **({} if trajectory.hint_turn is None else {"hint_turn": trajectory.hint_turn}),
        "seconds": round(trajectory.seconds, 3),
        "turns": [
            _turn_record(turn, previous)
            for turn, previous in zip(trajectory.turns, (None, *trajectory.turns), strict=False)
        ],
    }


def _turn_record(turn: Turn, previous: Turn | None) -> dict[str, Any]:
    """Convert a turn. The call that it began with stands among its fields, those of other policies
    by name. Of its prompt only those ids are written that the turn before has not.
    """
    call = turn.call
    num_known = 0 if previous is None else num_shared(previous.call.prompt_ids, call.prompt_ids)
    return {
        "policy": turn.policy,
        "response_text": call.text,
        "action": turn.action and asdict(turn.action),
        "tool_calls": [_tool_call_record(tool_call) for tool_call in turn.tool_calls],
        "problem": turn.problem,
        **({"evidence": turn.evidence} if turn.evidence else {}),
        "verdict": turn.verdict.value,
        "verdict_text": turn.verdict_text,
        **_call_record(call),
        "prompt_shared": num_known,
        "prompt_ids": list(call.prompt_ids[num_known:]),
        "seconds": round(turn.seconds, 3),
        "plan_s": round(turn.plan_s, 3),
        # Calls of one response run at once.
        "tool_s": round(max([0.0, *(tool.result.seconds for tool in turn.tool_calls)]), 3),
        **({"rescued": list(turn.rescued)} if turn.rescued else {}),
        **{name: _call_record(other) for name, other in turn.calls.items() if name != turn.policy},
    }


def _tool_call_record(tool_call: ToolCall) -> dict[str, Any]:
    """Convert a call of a tool that a response asked for."""
    return {
        "name": tool_call.name,
        "arguments": tool_call.arguments,
        "id": tool_call.id,
        "result": tool_call.result.text,
        "is_error": tool_call.result.error is not None,
        "seconds": round(tool_call.result.seconds, 3),
        **({"note": tool_call.note} if tool_call.note else {}),
        **_code_seconds(tool_call.result),
    }


def _code_seconds(result: ToolResult) -> dict[str, float]:
    """Return the times of the code that the tool ran, if any."""
    if not result.wall_s:
        return {}
    return {"code_wall_s": round(result.wall_s, 3), "code_cpu_s": round(result.cpu_s, 3)}


def _call_record(call: Call) -> dict[str, Any]:
    """Convert a call, without its texts."""
    return {
        "spans": [[span.start, span.end, span.version] for span in call.spans],
        "finish_reason": call.finish_reason.value,
        "num_prompt_tokens": len(call.prompt_ids),
        "response_ids": list(call.response_ids),
        "response_logprobs": [round(logprob, 5) for logprob in call.logprobs],
        "training": None,
    }
