"""The log of an evaluation: whole lines, what counts as done, and what a killed process leaves."""

from __future__ import annotations

import json
from pathlib import Path

import make
import pytest
from make import call

from flowtrain.config.options import parse
from flowtrain.engines.chat import Usage
from flowtrain.evals.records import Key, RecordLog, rollout_record
from flowtrain.evals.run import _config_pins as config_pins
from flowtrain.metrics.pins import check_same
from flowtrain.types import Action, Task, ToolResult, Trajectory, UserError, Verdict

TASK = Task("7", "What is 1 plus 1?", ("2",))


def trajectory(answer: str = "2", reward: float | None = 1.0, error: str = "") -> Trajectory:
    said = call((8, 9), (5, 6, 7), (-0.5, -0.25), text="text")
    action, found = Action("", "", "1 + 1", "Python_Coder"), ToolResult("2")
    turn = make.turn(
        said, action, command="command", result=found, verdict=Verdict.STOP, seconds=0.5
    )
    fields = {"reward": reward, "scored_by": "math", "error": error, "seconds": 1.5, "seed": 42}
    return make.rollout(turn, task=TASK, answer=answer, **fields)


def record(benchmark: str = "aime24", trial: int = 1, **changes: object) -> dict[str, object]:
    key = Key("policy", 10, benchmark, "7", trial)
    return rollout_record(key, 3, trajectory(**changes), Usage(70, 5, 0.5), {"em": 1.0})  # type: ignore[arg-type]


def test_a_line_holds_all_there_is_to_know(tmp_path: Path) -> None:
    log = RecordLog(tmp_path)
    log.append(record())
    (line,) = map(json.loads, log.path.read_text().splitlines())
    expected = ("aime24", "7", 1, 1, 3)
    keys = "benchmark", "pid", "trial", "step", "group_index"
    assert tuple(line[key] for key in keys) == expected
    expected = ("What is 1 plus 1?", ["2"], "2", 1.0)
    assert (line["question"], line["answers"], line["answer"], line["reward"]) == expected
    expected = ("math", 42, 1.5, "")
    assert (line["scored_by"], line["seed"], line["seconds"], line["error"]) == expected
    assert (line["planner"], line["max_turns"], line["metrics"]) == ("policy", 10, {"em": 1.0})
    assert line["usage"] == {"prompt_tokens": 70, "reply_tokens": 5, "cost": 0.5}
    (turn,) = line["turns"]
    expected = ([5, 6, 7], "text", "command", "2")
    assert (turn["prompt_ids"], turn["response_text"], turn["command"], turn["result"]) == expected
    assert (turn["verdict"], turn["num_prompt_tokens"]) == ("STOP", 3)
    assert (turn["response_ids"], turn["seconds"]) == ([8, 9], 0.5)


def test_what_is_read_back_is_what_was_appended(tmp_path: Path) -> None:
    log = RecordLog(tmp_path)
    for trial in (1, 2):
        log.append(record(trial=trial))
    log.append(record("amc23", reward=0.0))
    assert RecordLog(tmp_path).entries == log.entries
    assert log.done == {
        Key("policy", 10, "aime24", "7", 1),
        Key("policy", 10, "aime24", "7", 2),
        Key("policy", 10, "amc23", "7", 1),
    }, "the same pid in two benchmarks"
    expected = [1.0, 1.0, 0.0]
    assert [entry.outcome and entry.outcome.reward for entry in log.entries.values()] == expected


def test_a_failed_rollout_is_not_done_and_the_last_line_counts(tmp_path: Path) -> None:
    log = RecordLog(tmp_path)
    log.append(record(reward=None, error="generator: no answer"))
    assert (
        log.done == set()
        and RecordLog(tmp_path).entries[Key("policy", 10, "aime24", "7", 1)].error
        == "generator: no answer"
    )
    log.append(record())
    assert RecordLog(tmp_path).done == {Key("policy", 10, "aime24", "7", 1)}


@pytest.mark.parametrize("num_bytes", [1, 40, -1])
def test_a_torn_last_line_is_dropped_and_the_next_one_is_whole(
    tmp_path: Path, num_bytes: int
) -> None:
    log = RecordLog(tmp_path)
    log.append(record(trial=1))
    whole = log.path.read_bytes()
    log.append(record(trial=2))
    log.path.write_bytes(whole + log.path.read_bytes()[len(whole) :][:num_bytes])
    again = RecordLog(tmp_path)
    # Without its newline alone the second line is all there.
    assert again.done == {
        Key("policy", 10, "aime24", "7", trial) for trial in ((1, 2) if num_bytes == -1 else (1,))
    }
    again.append(record(trial=3))
    assert RecordLog(tmp_path).done == again.done
    assert [json.loads(line)["trial"] for line in log.path.read_text().splitlines()][-1] == 3


# ---- pins


def test_the_same_config_is_the_same_and_folders_do_not_matter() -> None:
    one, two = (
        config_pins(parse(["--run.dir", run, "--rollout.max_in_flight", number]))
        for run, number in (("a", "1"), ("b", "2"))
    )  # type: ignore[arg-type]
    check_same(Path("x"), one, two)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("agent.prompt", "compact", 'agent.prompt was "full", is "compact"'),
        ("model.path", "other", 'model.path was "tiny", is "other"'),
        ("roles.judge", "gpt", 'roles.judge was "none", is "gpt"'),
        ("engines.gpt.model", "x", 'engines.gpt.model was absent, is "x"'),
        ("judge.mode", "judge-only", 'judge.mode was "rules-first", is "judge-only"'),
        ("rollout.max_new_tokens", "9", "rollout.max_new_tokens was 2048, is 9"),
    ],
)
def test_what_differs_is_named(option: str, value: str, said: str) -> None:
    begun, now = config_pins(parse([])), config_pins(parse([f"--{option}", value]))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="runs/x was begun with other settings") as error:
        check_same(Path("runs/x"), begun, now)
    assert said in str(error.value) or (
        "engines.gpt" in str(error.value) and option.startswith("engines")
    )


def test_of_many_differences_three_are_named() -> None:
    told = r"a was 1, is 2; b was 1, is 2; c\.x was 1, is absent; go back to them or choose"
    with pytest.raises(UserError, match=told):
        check_same(
            Path("x"),
            {"a": 1, "b": 1, "c": {"x": 1}},
            {"a": 2, "b": 2, "d": {"y": 1}, "e": None, "f": 0},
        )
