"""The comparison with TRL: what it computes by hand, and a step of either side on a tiny model."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bench import trl as bench
from bench import trl_sides as sides
from flowtrain.records import Task, Trajectory
from flowtrain.trainer import toy
from flowtrain.trainer.model import loading as models

TEMPLATE = (
    "{% for message in messages %}{{ '<|user|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|bot|>' }}{% endif %}"
)
SMALL = (
    *("--rollout.num_questions", "2", "--rollout.group_size", "4", "--rollout.max_new_tokens", "6"),
    *("--agent.instructions", "Be brief.", "--train.lr", "1e-3"),
    *("--threads", "1", "--steps", "1", "--rounds", "1"),
    *("--reward.function", f"{__file__}:by_length"),
)


def by_length(task: Task, answer: str, trajectory: Trajectory) -> float:
    """A reward in place of the config's: a random model gives no right answers."""
    return len(answer) % 5 / 4


def result(*steps: float, prompts: Sequence[str] = ()) -> sides.Result:
    """A run that trained all the time, 10 tokens a step."""
    stages = dict.fromkeys(sides.STAGES, 0.0)
    notes = {"tokens": 10.0, "reward_mean": 0.5}
    lines = [{**stages, "training": step, "step": step, **notes} for step in steps]
    return sides.Result(lines, 2 * 10**9, list(prompts), "model")


def test_time_goes_to_the_innermost_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(sides.time, "monotonic", lambda: now)
    watch = sides.Stopwatch()
    now = 1.0
    with watch("training"):
        now = 3.0
        with watch("sampling"):
            now = 10.0
        now = 14.0
    now = 15.0
    expected = {"training": 6.0, "sampling": 7.0, "rest": 2.0, "step": 15.0}
    assert watch.lap() == {**dict.fromkeys(sides.STAGES, 0.0), **expected}
    now = 17.0
    assert watch.lap()["step"] == 2


def test_steps_are_compared_in_pairs_without_the_first() -> None:
    results = {
        ("flowtrain", 0): result(50.0, 1.0, 2.0),
        ("TRL", 0): result(90.0, 2.0, 8.0),
        ("flowtrain", 1): result(50.0, 10.0, 10.0),
        ("TRL", 1): result(90.0, 30.0, 20.0),
    }
    ours, theirs = bench.table(results, {}, threads=2)
    assert (ours["side"], theirs["side"]) == ("flowtrain", "TRL")
    assert theirs["x flowtrain"] == 2.5, "the median of 2, 4, 3 and 2"
    assert ours["x flowtrain"] == 1 and ours["step s"] == 6 and ours["training s"] == 6
    assert {f"{stage} s" for stage in (*sides.STAGES, "step")} < set(ours)
    assert ours["peak GB"] == 2 and ours["tokens/s"] == pytest.approx((10 / 2 + 1) / 2)
    assert bench.ratio({key: result(3.0) for key in results}, "TRL") == 1, "one step is all"


def test_held_out_rewards_are_those_of_all_rounds() -> None:
    rewards = {("flowtrain", 0): [0.0, 1.0], ("flowtrain", 1): [1.0, 1.0], ("", 0): [0.0]}
    results = {("flowtrain", 0): result(1.0), ("flowtrain", 1): result(1.0)}
    [row] = bench.table(results, rewards, threads=1)
    assert row["held-out"] == "0.750 +- 0.250"


def test_other_prompts_end_the_comparison() -> None:
    bench.check_prompts({"TRL": result(1.0, prompts="ab"), "flowtrain": result(2.0, prompts="ab")})
    with pytest.raises(SystemExit, match="prompts differ"):
        bench.check_prompts({"TRL": result(prompts="ab"), "flowtrain": result(prompts="ba")})
    assert sides.digest([[1, 2], [3], [1, 2]]) == sides.digest([[3], [1, 2]]) != sides.digest([[3]])


def test_trl_is_left_out_where_it_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert bench._arguments([]).rivals == ["flowtrain"]
    assert capsys.readouterr().out == "left out: TRL: it is not installed here\n"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--algorithm.kl_coef", "0.1"), "--algorithm.kl_coef 0.1: the comparison fixes it at 0"),
        (("--stepz", "3"), "--section.key value, not --stepz 3"),
        (("--train.lr",), "--section.key value, not --train.lr"),
    ],
)
def test_options_that_are_not_open_end_the_command(words: Sequence[str], problem: str) -> None:
    with pytest.raises(SystemExit, match=problem):
        bench._arguments(words)


# ---- with TRL


@pytest.fixture(scope="module")
def trl_trainer() -> ModuleType:
    pytest.importorskip("trl", reason="needs pip install -e '.[bench]'")
    return importlib.import_module("bench.trl_trainer")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat")
    tokenizer = toy.new_tokenizer(["State the final answer to: 1435 + 6061 ="], 280)
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = toy.new_model(tokenizer, hidden_size=32, num_layers=2, num_heads=4, max_positions=256)
    models.export(model, tokenizer, models.full_weights(model), path)
    rows = [{"question": f"{n} + {n % 7} =", "answer": "a"} for n in range(60)]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def taught(path: Path) -> list[str]:
    """The words that name a model, and the questions beside it."""
    return ["--model.path", str(path), "--tasks.path", str(path / "rows.jsonl"), *SMALL]


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sides run in this process, which has imported everything."""

    def run(job: sides.Job, threads: int) -> sides.Result:
        out = Path(job.out)
        out.mkdir(parents=True, exist_ok=True)
        (out / "job.json").write_text(json.dumps(asdict(job)))
        sides.main([str(out / "job.json")])
        return sides.Result(**json.loads((out / "result.json").read_text()))

    monkeypatch.setattr(bench, "run", run)


@pytest.mark.parametrize(
    ("prompt", "begin", "end"),
    [("full", "<|user|>", "<|end|><|bot|>"), ("compact", "Question: ", "\nAnswer:")],
)
@pytest.mark.usefixtures("in_process", "trl_trainer")
def test_both_sides_take_a_step_on_the_same_prompts(
    model_path: Path, tmp_path: Path, prompt: str, begin: str, end: str
) -> None:
    """The command ends with an error where the prompts' ids differ; the instructions are among
    them.
    """
    words = [*taught(model_path), "--agent.prompt", prompt]
    words += ["--held-out", "3", "--rivals", "TRL", "flowtrain"]
    bench.main([*words, "--dir", str(tmp_path), "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    theirs, ours, settings = rows[-3:]
    assert [row["run of"] for row in rows[:2]] == ["TRL", "flowtrain"]
    assert "held-out before training" in rows[2]
    assert (theirs["side"], ours["side"]) == ("TRL", "flowtrain")
    assert "'rollout.group_size': '4'" in settings["options"]
    for row in (theirs, ours):
        seconds = [row[f"{stage} s"] for stage in sides.STAGES]
        assert row["step s"] == pytest.approx(sum(seconds)) and min(seconds) >= 0
        assert min(row[f"{stage} s"] for stage in ("sampling", "reward", "training")) > 0
        assert 8 <= row["tokens"] <= 48 and 0 < row["reward"] < 1 and "held-out" in row
    assert theirs["publish s"] == theirs["load s"] == 0 < ours["publish s"]
    rollouts = [
        *map(json.loads, (tmp_path / "2-0/run/trajectories.jsonl").read_text().splitlines())
    ]
    text = models.load_tokenizer(str(model_path)).decode(rollouts[0]["turns"][0]["prompt_ids"])
    assert text == f"{begin}{rollouts[0]['question']}\n\nBe brief.{end}"


@pytest.mark.usefixtures("in_process")
def test_the_same_rollouts_move_the_weights_alike(
    model_path: Path, tmp_path: Path, trl_trainer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL trains on what flowtrain has sampled: advantages, loss and optimizer are the same."""
    words = [*taught(model_path), "--rollout.max_new_tokens", "60"]
    args = bench._arguments(words)
    ours = bench.run(bench.job_of(args, "flowtrain", 0, tmp_path), 1)
    run = tmp_path / "2-0" / "run"
    rollouts = [*map(json.loads, (run / "trajectories.jsonl").read_text().splitlines())]
    responses = [rollout["turns"][0]["response_ids"] for rollout in rollouts]
    assert len({len(each) for each in responses}) > 1, "weights by token and by sequence differ"

    def same(self: Any, prompt_ids: list[list[int]], *_: Any, **__: Any) -> Any:
        prompts = [rollout["turns"][0]["prompt_ids"] for rollout in rollouts]
        assert prompt_ids == prompts
        return responses, None

    monkeypatch.setattr(trl_trainer.GRPOTrainer, "_generate_single_turn", same)
    job = bench.job_of(args, "TRL", 0, tmp_path)
    theirs = bench.run(replace(job, micro_batch=2), 1)
    assert theirs.steps[0]["reward_mean"] == pytest.approx(ours.steps[0]["reward_mean"])
    before, mine, other = (
        load_file(Path(path) / "model.safetensors")
        for path in (model_path, ours.model, theirs.model)
    )
    moved = torch.cat([(mine[name] - before[name]).flatten() for name in mine])
    apart = torch.cat([(mine[name] - other[name]).flatten() for name in mine])
    assert float(moved.abs().max()) == pytest.approx(1e-3, rel=0.01)
    # AdamW's first step is the sign of a gradient, which rounding decides where that is tiny.
    assert float((apart.abs() > 1e-5).float().mean()) < 0.02
