"""The benchmarks on a model folder: its rollouts, and what `bench.step`, `bench.memory` and
`bench.rollout` measure on them, with a tiny random model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import memory, model_folder, rollout, step
from bench.model_folder import ModelFolder
from bench.step_batches import agentflow
from bench.step_paths import work
from flowtrain.records import Task, UserError
from flowtrain.trainer.cost import ForwardCost
from flowtrain.trainer.model.loading import load_tokenizer
from flowtrain.trainer.packing import pack_row

TEMPLATE = "{{ messages[0]['content'] }}{% if add_generation_prompt %}: {% endif %}"


@pytest.fixture
def folder(tiny_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A tiny random model with a chat template, and questions that need no package."""
    path = tmp_path / "tiny"
    path.mkdir()
    for source in Path(tiny_path).iterdir():
        (path / source.name).symlink_to(source)
    (path / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(tiny_path)
    tokenizer.chat_template = TEMPLATE
    for file in path.glob("tokenizer*"):
        file.unlink()
    tokenizer.save_pretrained(path)
    asked = [Task(f"t-{n}", f"{n} + {n} =", (str(2 * n),)) for n in range(40)]
    monkeypatch.setattr(model_folder, "questions", lambda number: asked[:number])
    monkeypatch.setattr(rollout, "questions", lambda number: asked[:number])
    monkeypatch.setattr(ModelFolder, "_rewards", by_number)
    return str(path)


def by_number(folder: ModelFolder, task: Task, answers: Sequence[object]) -> list[float]:
    """Equal rewards for the first question, different ones for the others."""
    return [0.0 if task.id == "t-0" else number / len(answers) for number in range(len(answers))]


def run(main: Callable[[], None], monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    main()


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


# ---- rollouts


def test_rollouts_are_groups_whose_rewards_differ(folder: str) -> None:
    loaded = ModelFolder.load(folder)
    groups = loaded.rollouts(2, group_size=4, max_new_tokens=6)
    prompts = {sample.prompt_ids for group in groups for sample in group}
    assert [loaded.tokenizer.decode(ids) for ids in sorted(prompts)] == ["1 + 1 =: ", "2 + 2 =: "]
    for group in groups:
        assert len(group) == 4 and len({sample.prompt_ids for sample in group}) == 1
        assert len({sample.response_ids for sample in group}) > 1, (
            "rollouts have seeds of their own"
        )
        assert sum(sample.advantages[0] for sample in group) == pytest.approx(0, abs=1e-4)
        assert max(abs(sample.advantages[0]) for sample in group) > 0.5
        assert all(sum(sample.loss_weights) == pytest.approx(1) for sample in group)


def test_a_model_that_always_gets_the_same_reward_is_refused(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelFolder, "_rewards", lambda *given: [0.5] * len(given[-1]))
    with pytest.raises(UserError, match="0 of 10 questions have rollouts with different rewards"):
        ModelFolder.load(folder).rollouts(1, group_size=2, max_new_tokens=2)


def test_a_folder_without_a_chat_template_is_refused(tiny_path: str) -> None:
    with pytest.raises(UserError, match="has no chat template"):
        ModelFolder.load(tiny_path)


# ---- step


def test_a_step_on_own_rollouts_has_the_same_gradient_on_every_path(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl", reason="needs pip install -e '.[bench]'")
    path = tmp_path / "step.json"
    words = ("--model", folder, "--new-tokens", "5", "--repeats", "1", "--device", "cpu")
    run(step.main, monkeypatch, *words, "--json", str(path))
    tree, packed, padded, trl = rows_of(path)
    assert [row["path"] for row in (tree, packed, padded, trl)] == [
        *("tree", "packed", "transformers", "trl")
    ]
    assert tree["batch"] == "tiny, own rollouts" and tree["samples"] == 8
    assert max(row["grad_difference"] for row in (tree, packed, trl)) < 1e-4
    assert tree["tokens"] < packed["tokens"] <= padded["tokens"]


def test_what_is_counted_for_packed_samples_is_what_their_rows_need() -> None:
    batch = agentflow(3, "small", 0.02, 4, "meta")
    rows = [pack_row(batch.samples, share=False)]
    counted = work(batch, argparse.Namespace(token_budget=16384, batch_size=8))["packed"]
    assert counted.num_tokens == sum(len(row.input_ids_N) for row in rows)
    assert counted.flops == 3 * sum(map(ForwardCost.of(batch.model).flops, rows))


# ---- memory


def test_only_a_linear_loss_is_predicted(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processes of their own, which no other test has made larger before."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # which the command sets for good
    path = tmp_path / "memory.json"
    words = ("--model", folder, "--token-budget", "32", "--json", str(path))
    run(memory.main, monkeypatch, *words)
    linear, whole = rows_of(path)
    assert linear["model"] == whole["model"] == "tiny"
    parts = [value for key, value in linear.items() if key.endswith("_mb")][:-2]
    assert linear["head_mb"] > 0 and linear["predicted_mb"] == pytest.approx(sum(parts))
    assert linear["measured_mb"] > 0 < whole["measured_mb"]
    assert "predicted_mb" not in whole and "head_mb" not in whole


# ---- rollout


def test_sampling_of_a_folder(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rollout.importlib.util, "find_spec", lambda name: None)
    path = tmp_path / "rollout.json"
    words = ("--model", folder, "--batch", "9", "--new-tokens", "3", "--repeats", "1")
    run(rollout.main, monkeypatch, *words, "--json", str(path))
    rows = rows_of(path)
    assert [(row["prompts"], row["path"]) for row in rows] == [
        (prompts, rival)
        for prompts in ("distinct", "groups of 8")
        for rival in ("torch engine", "transformers generate")
    ]
    assert {row["tokens"] for row in rows} == {27} and {row["model"] for row in rows} == {"tiny"}
    assert "left out: vLLM: it is not installed" in capsys.readouterr().out
