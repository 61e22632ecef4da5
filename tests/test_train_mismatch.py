"""Causes of a mismatch show in the numbers of whole runs; healthy runs end as ever."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from flowtrain.config import Config
from flowtrain.config.rollout import TOP_P_CAP
from flowtrain.inference.torch_engine import TorchEngine
from flowtrain.records import Sample, UserError
from flowtrain.train import train
from flowtrain.trainer import packing as tree
from flowtrain.trainer import toy
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.setup import learner
from flowtrain.trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("no_side_effects")
Provoked = Callable[[], contextlib.AbstractContextManager[Any]]
DIGEST = "zlib.crc32(answer.encode()) % 2"
"""Chance, as far as a policy can tell."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of large random weights, questions, and a reward that is chance."""
    place = tmp_path_factory.mktemp("mismatch")
    tokenizer = toy.new_tokenizer(["Name a number like 12 or 345."], vocab_size=280)
    torch.manual_seed(0)
    model = toy.new_model(tokenizer, hidden_size=32, num_layers=2, num_heads=4, max_positions=128)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.2 / model.config.initializer_range if parameter.dim() == 2 else 1.0)
    models.export(model, tokenizer, models.full_weights(model), place / "model")
    rows = [{"question": f"Name {n}.", "number": n} for n in range(40)]
    (place / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = f"import zlib\n\ndef score(task, answer, trajectory):\n    return float({DIGEST})\n"
    (place / "chance.py").write_text(reward)
    return place


def config(place: Path, run: Path, **sections: dict[str, Any]) -> Config:
    values: dict[str, dict[str, Any]] = {
        "run": {"dir": str(run), "threads": 1, "device": "cpu"},
        "model": {"path": str(place / "model")},
        "tasks": {"name": "file", "path": str(place / "tasks.jsonl")},
        "agent": {"name": "single", "prompt": "compact", "instructions": "Go."},
        "reward": {"function": f"{place}/chance.py:score"},
        "rollout": {"num_questions": 4, "group_size": 8, "max_new_tokens": 24},
        "train": {"num_steps": 4, "lr": 1e-3},
        "eval": {"every": 0, "num_tasks": 4, "at_ends": False},
        "checkpoint": {"every": 1},
        "log": {"tensorboard": False},
    }
    return Config.model_validate(
        values | {name: values.get(name, {}) | section for name, section in sections.items()}
    )


# ---- what goes wrong


def other_temperature(ratio: float) -> Provoked:
    class Warmer(Trainer):
        def __init__(self, *args: Any, temperature: float = 1.0, **options: Any) -> None:
            super().__init__(*args, temperature=ratio * temperature, **options)

    return lambda: mock.patch.object(learner, "Trainer", Warmer)


def unknown_mask() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(tree, "_mask_tensors", lambda samples: (None, None))


def frozen_engine() -> contextlib.AbstractContextManager[Any]:
    """Weights stay at version 0 under the names of new ones."""
    load = TorchEngine._load

    def stay(self: Any, reader: Any, version: int) -> None:
        if version == 0:
            load(self, reader, version)
        self._version = version

    return mock.patch.object(TorchEngine, "_load", stay)


def engine_in_bf16() -> contextlib.AbstractContextManager[Any]:
    sample = TorchEngine._sample

    def coarsely(self: Any, requests: Any) -> None:
        exact, self._model = self._model, copy.deepcopy(self._model).bfloat16()
        sample(self, requests)
        self._model = exact

    return mock.patch.object(TorchEngine, "_sample", coarsely)


def other_prompts(alter: Callable[[tuple[int, ...]], tuple[int, ...]], every: int) -> Provoked:
    """Samples of each `every`-th question are trained behind another prompt."""
    pack = learner.pack

    def packed(samples: list[Sample], *args: Any) -> Any:
        def altered(sample: Sample) -> Sample:
            is_hit = sample.sample_id.group % every == 0
            return replace(sample, prompt_ids=alter(sample.prompt_ids)) if is_hit else sample

        return pack([altered(each) for each in samples], *args)

    return lambda: mock.patch.object(learner, "pack", packed)


@pytest.mark.parametrize(
    ("provoked", "sections", "number", "low", "high"),
    [
        (other_temperature(1.4), {}, "slope", -0.4, -0.2),
        (unknown_mask, {"rollout": {"top_k": 5}}, "one-sided", 95, 100),
        (frozen_engine, {}, "growth", 100, math.inf),
        (engine_in_bf16, {"train": {"max_mismatch_kl": 3e-6}}, "agree", 100, 100),
        (other_prompts(lambda ids: ids[1:], every=2), {}, "agree", 30, 70),
    ],
    ids=["hotter", "top_k", "stale", "bf16", "some prompts"],
)
def test_a_provoked_cause_shows_in_its_number(
    place: Path,
    tmp_path: Path,
    provoked: Provoked,
    sections: dict[str, dict[str, Any]],
    number: str,
    low: float,
    high: float,
) -> None:
    steps = {"max_mismatch_kl": 1e-3, "num_steps": 8, "lr": 1e-3}
    sections = sections | {"train": steps | sections.get("train", {})}
    with provoked(), pytest.raises(UserError) as raised:
        train(config(place, tmp_path / "run", **sections))
    told = str(raised.value)
    found = re.search(
        r"slope (\S+) over .* is (\d+)% one-sided, the KL is (\S+) times .* and (\d+)% of", told
    )
    assert found and "\n" not in told, told
    numbers = dict(zip(("slope", "one-sided", "growth", "agree"), found.groups(), strict=True))
    assert low <= float(numbers[number]) <= high, told
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert last["mismatch_kl"] > 1e-6 and f"step {last['step']}: " in told
    newest = tmp_path / "run" / "checkpoints" / f"step_{last['step']:08d}"
    assert (newest / "state" / "state.json").is_file(), "the run can be resumed"


@pytest.mark.parametrize(
    ("sections", "most"),
    [
        ({"model": {"dtype": "bfloat16"}}, 1e-3),
        ({"rollout": {"top_p": 0.8}}, 1e-10),
        (
            {
                "rollout": {"frequency_penalty": 1.2},
                "train": {"rescore": True, "num_minibatches": 1},
            },
            1.0,
        ),
    ],
    ids=["bf16", "top_p", "penalty on purpose"],
)
def test_healthy_runs_end_as_ever(
    place: Path,
    tmp_path: Path,
    sections: dict[str, dict[str, Any]],
    most: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert train(config(place, tmp_path / "run", **sections)) == 0
    assert not [each for each in caplog.records if "nats per token" in each.getMessage()]
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        step = json.loads(line)
        assert 0 <= step["mismatch_kl"] < most and step["mismatch_left_out"] == 0
        counts = [n for name, n in step.items() if name.startswith("mismatch_tokens/")]
        assert 0 < sum(counts) <= step["num_tokens"]
        if "top_p" in sections.get("rollout", {}):
            assert 1 <= step["kept_tokens_mean"] < TOP_P_CAP and step["kept_at_cap_share"] < 1
        if "train" in sections:
            # The ratio is that of the policy to itself, whatever the sampler did.
            assert step["mismatch_kl"] > 1e-3
            assert abs(step["ratio_max"] - 1) < 1e-5 and abs(step["ratio_min"] - 1) < 1e-5
