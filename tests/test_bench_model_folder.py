"""The benchmarks on a model folder: its rollouts, and what `bench.step`, `bench.delta`,
`bench.memory` and `bench.rollout` measure on them, with a tiny random model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("zstandard", reason="needs pip install 'flowtrain[bench]'")

from bench import delta, memory, model_folder, rollout, step
from bench.delta_updates import measure_updates
from bench.delta_weights import Step
from bench.model_folder import ModelFolder
from bench.step_batches import agentflow
from bench.step_paths import work
from flowtrain.rewards import gym
from flowtrain.training.cost import ForwardCost
from flowtrain.training.model import load_tokenizer
from flowtrain.training.tree import pack_rows
from flowtrain.types import Task, UserError

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
    monkeypatch.setattr(model_folder, "questions", lambda number, families=(): asked[:number])
    monkeypatch.setattr(rollout, "questions", lambda number: asked[:number])
    monkeypatch.setattr(model_folder, "checked", by_number)
    return str(path)


def by_number(task: Task, answers: Sequence[str]) -> list[float]:
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
    monkeypatch.setattr(model_folder, "checked", lambda task, answers: [0.5] * len(answers))
    with pytest.raises(UserError, match="0 of 10 questions have rollouts with different rewards"):
        ModelFolder.load(folder).rollouts(1, group_size=2, max_new_tokens=2)


def test_a_folder_without_a_chat_template_is_refused(tiny_path: str) -> None:
    with pytest.raises(UserError, match="has no chat template"):
        ModelFolder.load(tiny_path)


def test_questions_are_of_reasoning_gym_and_its_checker_scores_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("reasoning_gym", reason="needs pip install 'flowtrain[gym]'")
    tasks = model_folder.questions(6)
    assert [task.kind for task in tasks] == ["chain_sum", "leg_counting"] * 3

    async def score(task: Task, answer: str) -> tuple[float, str]:
        return float(answer in task.answers), gym.NAME

    monkeypatch.setattr(gym, "score", score)
    assert model_folder.checked(tasks[0], [tasks[0].answers[0], "none"]) == [1.0, 0.0]


# ---- step


def test_a_step_on_own_rollouts_has_the_same_gradient_on_every_path(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl", reason="needs pip install 'flowtrain[bench]'")
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
    rows = pack_rows(batch.samples, token_budget=300, share=False)
    counted = work(batch, argparse.Namespace(token_budget=16384, batch_size=8))["packed"]
    assert counted.num_tokens == sum(len(row.input_ids_N) for row in rows)
    assert counted.flops == 3 * sum(map(ForwardCost.of(batch.model).flops, rows))


# ---- delta


def test_updates_are_those_that_the_reader_got(folder: str) -> None:
    seen: list[Step] = []
    rows = measure_updates(folder, [1e-3, 1e-2], num_steps=5, num_questions=2, use=seen.append)
    assert [step.name for step in seen] == [
        f"lr {lr}, step {number}" for lr in ("0.001", "0.01") for number in (1, 3, 5)
    ]
    for row, first, last in zip(rows, seen[::3], seen[2::3], strict=True):
        assert len(row["densities"]) == 5
        for density, looked_at in ((row["densities"][0], first), (row["densities"][-1], last)):
            pairs = zip(looked_at.old, looked_at.new, strict=True)
            changed = sum(int((a != b).sum()) for a, b in pairs)
            assert density == changed / sum(map(len, looked_at.old)) > 0
    starts = [np.concatenate(step.old) for step in seen[::3]]
    assert (starts[0] == starts[1]).all(), "each learning rate starts from the folder"
    assert rows[1]["mean"] > rows[0]["mean"] > 0


def test_the_tables_of_real_updates(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "delta.json"
    words = ("--model", folder, "--steps", "2", "--lrs", "1e-3", "--questions", "2")
    run(delta.main, monkeypatch, *words, "--repeats", "1", "--json", str(path))
    tables = {
        name: [row for row in rows_of(path) if row["table"] == name]
        for name in ("updates", "size", "speed")
    }
    assert [row["weights"] for row in tables["size"]] == ["lr 0.001, step 1", "lr 0.001, step 2"]
    assert [row["level"] for row in tables["speed"]] == [1, 2] * 2
    assert len(tables["updates"]) == 1
    assert tables["size"][1]["density %"] == pytest.approx(tables["updates"][0]["last"])
    assert 0 < tables["size"][0]["level 2"] < tables["size"][0]["astraflow"]


# ---- memory


def test_the_losses_of_the_head_have_the_same_gradients() -> None:
    torch.manual_seed(0)
    target_T = torch.randint(0, 50, (12,))
    hidden_TD, weight_VD = torch.randn(12, 8), torch.randn(50, 8)
    found = []
    for loss in memory.HEAD_LOSSES.values():
        hidden, weight = (x.clone().requires_grad_() for x in (hidden_TD, weight_VD))
        loss(hidden, weight_VD=weight, target_T=target_T).backward()
        assert hidden.grad is not None and weight.grad is not None
        found.append(torch.cat([hidden.grad, weight.grad]))
    assert float(found[2].abs().max()) > 0.01
    for each in found[:2]:
        torch.testing.assert_close(each, found[2], rtol=1e-4, atol=1e-6)


def test_only_the_linear_loss_of_a_folder_is_predicted(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:

    def ten_bytes(run: Callable[[], Any], device: torch.device) -> int:
        run()
        return 10

    # This process has been larger before, so nothing of so small a model is seen to grow.
    monkeypatch.setattr(memory.MemoryPeak, "num_bytes", lambda self: 10)
    monkeypatch.setattr(memory, "extra_bytes", ten_bytes)
    linear, whole = (
        memory.measure(memory.FolderCase(folder, 32, linear_loss)) for linear_loss in (True, False)
    )
    assert linear["model"] == "tiny"
    assert linear["predicted_mb"] > linear["head_mb"] > 0 and "predicted_mb" not in whole
    heads = [memory.measure_head(memory.HeadCase(folder, 8, loss)) for loss in memory.HEAD_LOSSES]
    assert ["predicted_mb" in row for row in heads] == [True, False, False]
    vocab, width = heads[0]["vocab"], 32
    chunk, hidden = 8 * vocab * 4, 2 * 8 * width * 4
    assert heads[0]["predicted_mb"] == (4 * vocab * width + chunk + hidden) / 1e6


def test_a_head_that_is_not_fused_has_all_logits() -> None:
    """Measured as the bench does, on logits of 134 MB."""
    torch.manual_seed(0)
    weight_VD, hidden_TD = (torch.randn(n, 8, requires_grad=True) for n in (2**16, 512))
    target_T = torch.zeros(512, dtype=torch.int64)
    cpu = torch.device("cpu")
    linear, whole, plain = (
        memory.extra_bytes(
            lambda loss=loss: loss(hidden_TD, weight_VD=weight_VD, target_T=target_T).backward(),
            cpu,
        )
        for loss in memory.HEAD_LOSSES.values()
    )
    assert linear < 90e6 < 130e6 < whole < plain


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
