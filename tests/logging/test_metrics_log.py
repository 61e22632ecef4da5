from __future__ import annotations

import dataclasses
import errno
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import make
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.logging import MetricsLog, TrajectoryLog, trajectory_record
from flowtrain.logging.jsonl import append_lines, cut_lines, read_lines
from flowtrain.records import (
    Group,
    Sample,
    SampleId,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    UserError,
)

FULL = "No space left on device; free some space and continue with --resume auto"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def quiet_log(folder: Path, resume_step: int = 0) -> MetricsLog:
    return MetricsLog(folder, resume_step, tensorboard=False)


def test_a_line_per_step_with_keys_in_the_given_order(tmp_path: Path) -> None:
    log = quiet_log(tmp_path)
    log.log({"reward_mean": 0.5, "step": 1, "kl": 0.25})
    log.log({"step": 2})
    found = (tmp_path / "metrics.jsonl").read_text()
    assert found == '{"reward_mean": 0.5, "step": 1, "kl": 0.25}\n{"step": 2}\n'


def test_non_finite_numbers_are_null(tmp_path: Path) -> None:
    quiet_log(tmp_path).log(
        {
            "step": 1,
            "a": float("nan"),
            "b": float("inf"),
            "c": float("-inf"),
            "d": np.float32("nan"),
        }
    )
    found = read(tmp_path / "metrics.jsonl")
    assert found == [{"step": 1, "a": None, "b": None, "c": None, "d": None}]


def test_numbers_of_other_libraries_are_plain(tmp_path: Path) -> None:
    quiet_log(tmp_path).log(
        {"step": np.int64(3), "a": np.float32(0.5), "b": np.int32(4), "c": True}
    )
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 3, "a": 0.5, "b": 4, "c": true}\n'


def test_a_step_is_required(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="without a step"):
        quiet_log(tmp_path).log({"reward_mean": 1.0})


def test_resume_cuts_later_steps_and_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "a": 1}\n{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "a')
    log = quiet_log(tmp_path, resume_step=2)
    assert [row["step"] for row in read(path)] == [0, 1, 2]
    log.log({"step": 3, "a": 5})
    assert read(path)[2:] == [{"step": 2}, {"step": 3, "a": 5}]


def test_damage_in_the_middle_is_reported_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    text = '{"step": 1}\nnonsense\n{"step": 2}\n'
    path.write_text(text)
    told = r"metrics\.jsonl line 2 is not a JSON object with a step: delete this line"
    with pytest.raises(UserError, match=told):
        quiet_log(tmp_path, resume_step=2)
    assert path.read_text() == text


def test_zeros_of_a_power_cut_before_lines_that_go_are_cut(tmp_path: Path) -> None:
    """Of a step's lines, written at once, the first block may be lost and a later one not."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + bytes(20) + b': 2}\n{"step": 2}\n{"step": 3}\n')
    quiet_log(tmp_path, resume_step=1).log({"step": 2, "a": 1})
    assert read(path) == [{"step": 1}, {"step": 2, "a": 1}]


@given(st.integers(0, 6), st.integers(0, 70))
def test_cut_leaves_the_whole_lines_up_to_the_step_wherever_the_file_was_torn(
    last_step: int, length: int
) -> None:
    text = "".join(f'{{"step": {step}}}\n' for step in range(1, 6))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        path.write_text(text[:length])
        cut_lines(path, last_step)
        append_lines(path, [{"step": 99}])
        whole = min((length + 1) // len('{"step": 1}\n'), 5)
        assert [row["step"] for row in read(path)] == [*range(1, min(whole, last_step) + 1), 99]


def test_a_full_disk_is_one_clear_line_and_earlier_lines_stay(
    tmp_path: Path, fill_disk: Callable[[str], None]
) -> None:
    log = quiet_log(tmp_path)
    log.log({"step": 1, "a": 0.5})
    before = log.path.read_bytes()
    fill_disk("metrics.jsonl")
    with pytest.raises(UserError) as caught:
        log.log({"step": 2, "a": 0.25})
    assert str(caught.value) == f"cannot write {tmp_path / 'metrics.jsonl'}: {FULL}"
    assert log.path.read_bytes() == before


def test_a_torn_line_that_could_not_be_taken_back_does_not_hide_the_full_disk(
    tmp_path: Path, fill_disk: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = quiet_log(tmp_path)
    log.log({"step": 1})
    fill_disk("metrics.jsonl")

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "truncate", fail)
    with pytest.raises(UserError, match=FULL):
        log.log({"step": 2})
    assert [row["step"] for row in read_lines(log.path)] == [1]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard_gets_the_finite_numbers_and_forgets_steps_after_the_resumed_one(
    tmp_path: Path,
) -> None:
    log = MetricsLog(tmp_path)
    for step in range(4):
        log.log({"step": step, "a": step / 2, "b": float("nan")})
    assert scalars(tmp_path) == {"a": [(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.5)]}
    log.close()
    log.close()
    resumed = MetricsLog(tmp_path, resume_step=1)
    resumed.log({"step": 2, "a": 8.0})
    resumed.close()
    assert scalars(tmp_path) == {"a": [(0, 0.0), (1, 0.5), (2, 8.0)]}


def test_a_full_disk_under_tensorboard_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = MetricsLog(tmp_path)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (board,) = log._loggers
    monkeypatch.setattr(board._board, "flush", fail)
    with pytest.raises(UserError) as caught:
        log.log({"step": 1, "a": 1.0})
    assert str(caught.value) == f"cannot write {tmp_path / 'tensorboard'}: {FULL}"
    assert read(log.path) == [{"step": 1, "a": 1.0}]
    board._board.close()


def test_tensorboard_can_be_left_out(tmp_path: Path) -> None:
    quiet_log(tmp_path).log({"step": 1, "a": 1.0})
    assert not (tmp_path / "tensorboard").exists()


def test_trajectories_are_written_in_full(tmp_path: Path, trajectory: Trajectory) -> None:
    log = TrajectoryLog(tmp_path, rank=0, resume_step=0)
    log.log(3, 7, [Group(5, (trajectory, dataclasses.replace(trajectory, seed=12, reward=None)))])
    first, second = read(tmp_path / "trajectories.jsonl")
    malformed, lookup = first.pop("turns")
    assert first == {
        "step": 3,
        "version": 7,
        "task_id": "texts-17",
        "question": "What is the capital of Chad?",
        "answers": ["N'Djamena", "Ndjamena"],
        "kind": "lookup",
        "num_turns": 1,
        "scorer": "exact",
        "group_index": 5,
        "seed": 11,
        "reward": 0.75,
        "answer": "N'Djamena",
        "scored_by": "",
        "truncated": "turns",
        "error": "",
        "analysis": "",
        "output": "",
        "seconds": 1.25,
    }
    assert (second["seed"], second["reward"]) == (12, None)
    assert lookup == {
        "policy": "planner",
        "response_text": "raw response",
        "action": {
            "justification": "because",
            "context": "the question",
            "sub_goal": "Find the capital of Chad",
            "tool_name": "Lookup_Tool",
        },
        "tool_calls": [
            {
                "name": "Lookup_Tool",
                "arguments": '{"query": "Chad"}',
                "id": "",
                "result": "N'Djamena",
                "is_error": False,
                "seconds": 0.1,
            }
        ],
        "problem": "",
        "verdict": "STOP",
        "verdict_text": "",
        "spans": [[0, 1, 6], [1, 2, 7]],
        "finish_reason": "stop",
        "num_prompt_tokens": 3,
        "prompt_shared": 3,
        "prompt_ids": [],
        "response_ids": [4, 5],
        "response_logprobs": [-0.12346, -2.0],
        "training": None,
        "seconds": 0.5,
        "plan_s": 0.25,
        "tool_s": 0.1,
    }
    assert (malformed["prompt_shared"], malformed["prompt_ids"]) == (0, [1, 2, 3])
    expected = (None, [], "no action")
    assert (malformed["action"], malformed["tool_calls"], malformed["problem"]) == expected


def test_a_turn_that_ran_code_has_its_times(trajectory: Trajectory) -> None:
    used = ToolCall("Code", "{}", ToolResult("42", seconds=3.0, wall_s=1.23456, cpu_s=0.5))
    turn = dataclasses.replace(trajectory.turns[1], tool_calls=(used,))
    (line,) = trajectory_record(dataclasses.replace(trajectory, turns=(turn,)), 0)["turns"]
    (ran,) = line["tool_calls"]
    assert (line["tool_s"], ran["code_wall_s"], ran["code_cpu_s"]) == (3.0, 1.235, 0.5)


def test_calls_of_tools_are_written(trajectory: Trajectory) -> None:
    good = ToolCall("Search", '{"query": "x"}', ToolResult("y", seconds=0.5), "id-1")
    bad = ToolCall("Look", "{}", ToolResult(error="none", seconds=0.25, wall_s=0.2, cpu_s=0.1))
    turn = dataclasses.replace(trajectory.turns[1], action=None, tool_calls=(good, bad))
    (line,) = trajectory_record(dataclasses.replace(trajectory, turns=(turn,)), 0)["turns"]
    assert line["tool_s"] == 0.5
    assert line["tool_calls"] == [
        {
            "name": "Search",
            "arguments": '{"query": "x"}',
            "id": "id-1",
            "result": "y",
            "is_error": False,
            "seconds": 0.5,
        },
        {
            "name": "Look",
            "arguments": "{}",
            "id": "",
            "result": "Error: none",
            "is_error": True,
            "seconds": 0.25,
            "code_wall_s": 0.2,
            "code_cpu_s": 0.1,
        },
    ]


def with_call(turn: Turn, **changes: Any) -> Turn:
    """The turn with changes to its planner's call."""
    call = dataclasses.replace(turn.calls["planner"], **changes)
    return dataclasses.replace(turn, calls={"planner": call})


def test_of_a_prompt_what_is_new_is_written(tmp_path: Path, trajectory: Trajectory) -> None:
    prompts = ((1, 2, 3), (1, 2, 4, 5), (7,), (7, 8))
    turns = tuple(with_call(trajectory.turns[0], prompt_ids=ids) for ids in prompts)
    log = TrajectoryLog(tmp_path, rank=0, resume_step=0)
    log.log(1, 1, [Group(0, (dataclasses.replace(trajectory, turns=turns),))])
    ((*logged,),) = (record["turns"] for record in read(log.path))
    expected = [(0, [1, 2, 3]), (2, [4, 5]), (0, [7]), (1, [8])]
    assert [(turn["prompt_shared"], turn["prompt_ids"]) for turn in logged] == expected


def trained(advantages: tuple[float, ...], minibatch: int, *place: int) -> Sample:
    weights = (1.0,) * len(advantages)
    return Sample((1,), (4, 5), weights, advantages, weights, minibatch, SampleId(*place))


def test_what_training_made_of_a_turn_is_written(tmp_path: Path, trajectory: Trajectory) -> None:
    """Of the second of two members, in the group of this index."""
    log = TrajectoryLog(tmp_path, rank=0, resume_step=0)
    one = dataclasses.replace(trajectory, turns=trajectory.turns[:2])
    log.log(1, 1, [Group(7, (one, one))], [trained((-1.0, 0.0), 1, 7, 1, 1)])
    found = [[turn["training"] for turn in record["turns"]] for record in read(log.path)]
    assert found == [[None, None], [None, {"advantage": -0.5, "minibatch": 1}]]


def test_what_the_verifier_sampled_is_written_where_it_is_a_policy(
    tmp_path: Path, trajectory: Trajectory
) -> None:
    call = make.call((4, 5), (1, 2, 3), (-0.123456, -1.0), version=9)
    first = trajectory.turns[0]
    turns = (first, dataclasses.replace(first, calls={**first.calls, "verifier": call}))
    log, one = TrajectoryLog(tmp_path, rank=0, resume_step=0), [trained((0.5, 0.5), 0, 0, 0, 1)]
    log.log(1, 1, [Group(0, (dataclasses.replace(trajectory, turns=turns),))], one, "verifier")
    rule, policy = read(log.path)[0]["turns"]
    assert "verifier" not in rule and policy["training"] is None
    assert policy["verifier"] == {
        "spans": [[0, 2, 9]],
        "finish_reason": "stop",
        "num_prompt_tokens": 3,
        "response_ids": [4, 5],
        "response_logprobs": [-0.12346, -1.0],
        "training": {"advantage": 0.5, "minibatch": 0},
    }


def test_each_rank_has_its_file_and_resume_cuts_it(tmp_path: Path, trajectory: Trajectory) -> None:
    group = Group(0, (trajectory,))
    log = TrajectoryLog(tmp_path, rank=2, resume_step=0)
    for step in (1, 2, 3):
        log.log(step, step, [group, group])
    path = tmp_path / "trajectories.rank2.jsonl"
    with path.open("a") as file:
        file.write('{"step": 3, "ver')
    TrajectoryLog(tmp_path, rank=2, resume_step=2)
    assert [row["step"] for row in read(path)] == [1, 1, 2, 2]
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def test_text_of_any_kind_survives(tmp_path: Path, trajectory: Trajectory) -> None:
    odd = 'Äpfel\n"quoted"\u2028\ud800\x00'
    turn = with_call(trajectory.turns[1], logprobs=(float("-inf"), -1.0))
    turn = dataclasses.replace(turn, evidence=odd)
    log = TrajectoryLog(tmp_path, rank=0, resume_step=0)
    log.log(1, 1, [Group(0, (dataclasses.replace(trajectory, turns=(turn,)),))])
    assert "Äpfel" in log.path.read_text()
    (record,) = read_lines(log.path)
    assert record["turns"][0]["evidence"] == odd
    assert record["turns"][0]["response_logprobs"] == [None, -1.0]


def test_a_full_disk_takes_back_the_whole_step(
    tmp_path: Path, trajectory: Trajectory, fill_disk: Callable[[str], None]
) -> None:
    log = TrajectoryLog(tmp_path, rank=0, resume_step=0)
    log.log(1, 1, [Group(0, (trajectory,))])
    before = log.path.read_bytes()
    fill_disk("trajectories")
    with pytest.raises(UserError, match=rf"cannot write .*trajectories\.jsonl: {FULL}"):
        log.log(2, 2, [Group(0, (trajectory,) * 4)])
    assert log.path.read_bytes() == before


def test_subclasses_of_texts_and_numbers_are_written_as_these(tmp_path: Path) -> None:
    class Text(str):
        pass

    class Number(int):
        pass

    append_lines(tmp_path / "x", [{"step": Number(1), "text": Text("a"), Text("key"): [Number(2)]}])
    assert (tmp_path / "x").read_text() == '{"step": 1, "text": "a", "key": [2]}\n'
