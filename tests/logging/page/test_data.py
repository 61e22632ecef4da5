"""The data of the page: notes, outcomes, prompts and tokens that come out as they went in."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from flowtrain.logging import MetricsLog, TrajectoryLog
from flowtrain.logging.page.data import LoggedRun
from flowtrain.logging.page.rollouts import LONGEST_TEXT
from flowtrain.records import Action, FinishReason, Group, ToolCall, ToolResult
from flowtrain.utils.prefixes import num_shared


def data(run: Path, number: int = 100) -> dict[str, Any]:
    return LoggedRun(run).data(number)


def test_a_whole_run_has_nothing_to_note(run: Path) -> None:
    page = data(run)
    assert page["notes"] == []
    expected = ("run", 4, 4, 38, [1, 4])
    keys = "name", "step", "num_steps", "num_logged", "versions"
    assert tuple(page[key] for key in keys) == expected
    assert dict(page["facts"])["Questions per step"] == "2"
    assert dict(page["facts"])["flowtrain"] == "0123456789"
    assert page["seconds"] == {"collect": 8.0}
    assert page["config"] == (run / "config.toml").read_text()
    assert ["texts, sampled", "0.250", "0.750", "+0.500"] in page["results"]
    panels = {panel["title"]: panel["lines"] for panel in page["panels"]}
    assert panels["Reward"] == [
        {"label": "training", "is_sparse": False, "points": [[n, n / 10] for n in range(1, 5)]}
    ]
    assert [line["label"] for line in panels["Tool use"]] == ["Search"]


def test_a_rollout_comes_out_as_it_went_in(run: Path, runs: Any) -> None:
    rollouts = {rollout["id"]: rollout for rollout in data(run)["rollouts"]}
    assert len(rollouts) == 38
    group = runs.group(1, 2, "What is the capital of Chad? 2")
    for member, trajectory in enumerate(group.trajectories):
        shown = rollouts[f"train.2.1.{member}"]
        assert (shown["group"], shown["step"], shown["split"]) == ("train.2.1", 2, "train")
        assert shown["reward"] == trajectory.reward
        assert shown["seed"] == str(trajectory.seed)
        assert shown["scorer"] == "exact"
        assert shown["seconds"] == 1.5
        prompt: tuple[int, ...] = ()
        for turn, original in zip(shown["turns"], trajectory.turns, strict=True):
            call = original.calls["planner"]
            new = call.prompt_ids[num_shared(prompt, call.prompt_ids) :]
            assert turn["num_new_tokens"] == len(new)
            assert turn["prompt"] == runs.tokenizer.decode(new, skip_special_tokens=False)
            prompt = call.prompt_ids
            assert tuple(turn["response_ids"]) == call.response_ids
            assert turn["response_logprobs"] == pytest.approx(call.logprobs)
            found = "".join(turn["texts"])
            assert found == runs.tokenizer.decode(call.response_ids, skip_special_tokens=False)
            assert turn["training"]["advantage"] == trajectory.reward - 0.5
            assert turn["spans"] == [[0, 3, 6], [3, len(turn["response_ids"]), 7]]
            assert (turn["seconds"], turn["plan_s"], turn["tool_s"]) == (0.5, 0.25, 0.1)
            assert turn["verdict"] == original.verdict.value
        assert shown["turns"][1]["prompt"].startswith("1. ")
    assert rollouts["train.4.1.0"]["turns"][0]["training"] is None
    assert rollouts["held-out.4.3.0"]["split"] == "held-out"


def test_calls_of_tools_come_out_as_they_went_in_unless_too_long(run: Path, runs: Any) -> None:
    used = ToolCall("Search", '{"query": "x"}', ToolResult("y" * 20_001, seconds=0.25), "1")
    turn = runs.turn("x", action=None, tool_calls=(used,))
    trajectory = dataclasses.replace(runs.trajectory("x", 1.0, 0), turns=(turn,))
    (run / "trajectories.jsonl").unlink(), (run / "held_out.jsonl").unlink()
    TrajectoryLog(run, 0, 0).log(1, 0, [Group(0, (trajectory,))])
    (shown,) = data(run)["rollouts"][0]["turns"][0]["tool_calls"]
    assert (shown["name"], shown["arguments"], shown["seconds"]) == ("Search", used.arguments, 0.25)
    assert shown["result"].endswith(" … (1 more characters)")


def test_a_branch_tells_where_it_left_which_rollout(run: Path, runs: Any) -> None:
    TrajectoryLog(run, 0, 4).log(5, 4, [runs.branched("What is the capital of Chad?")])
    rollouts = {rollout["id"]: rollout for rollout in data(run)["rollouts"]}
    place = {"parent": 0, "turn": 1, "token": 2, "score": 2.5, "scorer": "", "version": 0}
    assert rollouts["train.5.0.2"]["branch"] == place
    assert "branch" not in rollouts["train.5.0.0"] and "branch" not in rollouts["train.1.0.0"]


def test_outcomes(runs: Any, run: Path) -> None:
    unread = Action("", "", "x", "No matched tool given: Sear")
    asks = {"action": None, "result": ToolResult()}
    failed = ToolCall("Search", "{}", ToolResult(error="timed out"))
    cut = ["wrong", "truncated"]
    endings: list[tuple[dict[str, Any], dict[str, Any], float | None, list[str]]] = [
        ({}, {}, 1.0, ["right"]),
        ({}, {}, 0.5, ["right"]),
        ({}, {}, 0.49, ["wrong"]),
        ({}, {}, None, ["unscored"]),
        ({**asks, "problem": "no action"}, {}, 0.0, ["wrong", "malformed"]),
        ({"action": unread, "problem": "no", "tool_calls": ()}, {}, 1.0, ["right", "malformed"]),
        (asks, {}, 1.0, ["right"]),  # the answer itself
        ({"result": ToolResult(error="timed out")}, {}, 1.0, ["right", "tool error"]),
        ({**asks, "tool_calls": (failed,)}, {}, 1.0, ["right", "tool error"]),
        ({"finish_reason": FinishReason.LENGTH}, {}, 0.0, cut),
        ({"finish_reason": FinishReason.DEADLINE}, {}, 0.0, cut),
        ({}, {"truncated": "prompt"}, 0.0, cut),
    ]
    trajectories = [
        dataclasses.replace(
            runs.trajectory("x", reward, 0),
            turns=(runs.turn("x"), runs.turn("x", **turn)),
            **trajectory,
        )
        for turn, trajectory, reward, _ in endings
    ]
    (run / "trajectories.jsonl").unlink(), (run / "held_out.jsonl").unlink()
    TrajectoryLog(run, 0, 0).log(1, 0, [Group(0, tuple(trajectories))])
    found = [rollout["outcomes"] for rollout in data(run)["rollouts"]]
    assert found == [outcomes for *_, outcomes in endings]


def test_fields_that_other_versions_log_are_shown(run: Path) -> None:
    log = run / "trajectories.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for record in lines:
        record |= {"scored_by": "judge", "analysis": "a" * (LONGEST_TEXT + 7), "error": "endpoint"}
        record["turns"][0]["verdict_text"] = "because"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rollout = data(run)["rollouts"][0]
    expected = ("judge", "endpoint", "because")
    assert (rollout["scored_by"], rollout["error"], rollout["turns"][0]["verdict_text"]) == expected
    assert rollout["analysis"].endswith("a … (7 more characters)")


def notes(run: Path) -> str:
    return "\n".join(data(run)["notes"])


def test_without_a_tokenizer_ids_remain(run: Path) -> None:
    (run / "tokenizer.json").unlink()
    turn = data(run)["rollouts"][0]["turns"][0]
    assert turn["texts"] is None
    assert turn["prompt"] is None
    assert turn["response_ids"]
    assert turn["num_new_tokens"] > 0
    assert "The run's tokenizer is missing" in notes(run)


def test_a_run_that_goes_on(run: Path) -> None:
    (run / "summary.json").unlink()
    with (run / "trajectories.jsonl").open("a") as file:
        file.write('{"step": 5, "vers')
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"st')
    page = data(run)
    assert page["num_logged"] == 38 and page["step"] == 4
    found = page["notes"]
    assert found == ["The run has not finished, or was interrupted: there is no summary.json yet."]


def test_a_run_that_has_just_begun(run: Path) -> None:
    for name in ("summary.json", "trajectories.jsonl", "held_out.jsonl"):
        (run / name).unlink()
    (run / "metrics.jsonl").write_text("")
    page = data(run)
    assert (page["panels"], page["rollouts"], page["step"], page["reward"]) == ([], [], None, [])
    assert "No step has been logged" in notes(run) and "No rollouts have been logged" in notes(run)


def test_the_headline_is_the_number_of_the_report(run: Path) -> None:
    """The evaluation of the last step, in the curve, is another draw."""
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(
            json.dumps({"step": step, "version": step, "eval_reward": reward}) + "\n"
            for step, reward in ((5, 0.25), (6, 0.7))
        )
    assert data(run)["reward"] == [0.25, 0.75]
    (run / "summary.json").unlink()
    assert data(run)["reward"] == [0.25, 0.7]


def test_only_an_evaluation(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, -1, tensorboard=False)
    log.log({"step": 0, "version": 0, "eval_reward": 0.25, "eval_s": 3.0})
    page = data(tmp_path)
    expected = ([0.25, 0.25], {"eval": 3.0}, [], "")
    assert (page["reward"], page["seconds"], page["facts"], page["config"]) == expected
    assert page["notes"] == ["No rollouts have been logged: only curves and results are shown."]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.toml", "a = [", "config.toml is not valid TOML"),
        ("manifest.json", "{", "manifest.json is not valid JSON"),
        ("summary.json", "nonsense", "summary.json is not valid JSON"),
        (
            "metrics.jsonl",
            'nonsense\n{"step": 1, "a": 2}\n',
            "metrics.jsonl line 1 is not a JSON object",
        ),
        (
            "trajectories.jsonl",
            'nonsense\n{"step": 1}\n',
            "trajectories.jsonl line 1 is not a JSON object",
        ),
    ],
)
def test_a_damaged_file_is_named_on_the_page_and_the_rest_is_shown(
    run: Path, name: str, text: str, message: str
) -> None:
    (run / name).write_text(text)
    page = data(run)
    assert message in "\n".join(page["notes"])
    assert page["rollouts"] and (page["panels"] or name == "metrics.jsonl")


def test_long_curves_are_thinned(run: Path) -> None:
    (run / "metrics.jsonl").write_text(
        "".join(f'{{"step": {step}, "kl": {step}}}\n' for step in range(5000))
    )
    (panel,) = data(run)["panels"]
    points = panel["lines"][0]["points"]
    assert len(points) == 1000 and points[0] == [0, 0] and points[-1] == [4999, 4999]
