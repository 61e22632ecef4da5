"""Fine-tuning leaves out and counts turns that cannot be trained, and they change nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowtrain.config.options import parse
from flowtrain.records import Trajectory, Turn, UserError
from flowtrain.rft import loop as command

Spoil = Callable[[Turn], list[Turn]]


def with_call(turn: Turn, **changes: Any) -> Turn:
    """The turn with changes to its planner's call."""
    return replace(turn, calls={"planner": replace(turn.calls["planner"], **changes)})


BAD: list[Spoil] = [
    lambda turn: [with_call(turn, response_ids=(), logprobs=())],
    lambda turn: [with_call(turn, prompt_ids=turn.calls["planner"].prompt_ids * 100)],
    lambda turn: [with_call(turn, logprobs=(math.nan,) * len(turn.calls["planner"].response_ids))],
]


def imitate(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[int, Turn], list[Turn]],
    *options: str,
) -> int:
    """Fine-tune in `place` on a few rollouts, of which the first turn goes through `spoil`."""

    def demonstrate(*args: object) -> list[Trajectory]:
        found = real(*args)
        return [
            replace(t, turns=(*spoil(number, t.turns[0]), *t.turns[1:]))
            for number, t in enumerate(found)
        ]

    few = [
        *("--rft.num_rollouts", "12", "--rft.num_steps", "3", "--rft.batch_size", "4"),
        *("--tiny.hidden_size", "32", "--tiny.num_layers", "1", "--tiny.num_heads", "2"),
        *("--tasks.num_train", "100", "--run.device", "cpu", "--run.threads", "1"),
    ]
    config = parse(["--config", "configs/quickstart.toml", "--run.dir", str(place), *few, *options])
    with monkeypatch.context() as patched:
        real = command.demonstrate
        patched.setattr(command, "demonstrate", demonstrate)
        return command.rft(config)


def test_turns_that_cannot_be_trained_are_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is, bit by bit, the one that never saw them."""

    def marred(number: int, turn: Turn) -> list[Turn]:
        return BAD[number](turn) if number < len(BAD) else [turn]

    def without(number: int, turn: Turn) -> list[Turn]:
        return [] if number < len(BAD) else [turn]

    weight = ("--rft.prompt_weight", "0.2")
    assert imitate(tmp_path / "marred", monkeypatch, marred, *weight) == 0
    assert "turns, left out: 1 empty, 1 too_long, 1 logprob" in capsys.readouterr().out
    assert imitate(tmp_path / "without", monkeypatch, without, *weight) == 0
    assert "left out" not in capsys.readouterr().out
    models = [tmp_path / name / "model" / "model.safetensors" for name in ("marred", "without")]
    assert models[0].read_bytes() == models[1].read_bytes()
    ours, theirs = (json.loads(path.with_name("rft.json").read_text()) for path in models)
    assert ours["num_excluded"] == {"empty": 1, "too_long": 1, "logprob": 1}
    assert theirs["num_excluded"] == {}
    assert ours["num_turns"] == theirs["num_turns"] > 9


def test_no_turn_left_is_said_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = r"left a rank without a demonstration: 12 of 12 .* 0 turns, left out: \d+ too_long"
    options = ("--tiny.max_positions", "16", "--rollout.max_new_tokens", "2")
    with pytest.raises(UserError, match=message):
        imitate(tmp_path / "run", monkeypatch, lambda _, turn: [turn], *options)


def test_a_run_whose_loss_is_no_number_any_more_ends_with_what_to_look_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next three steps are skipped."""
    skipped = "^step 4: 3 optimizer steps in a row were skipped"
    options = ("--rft.num_steps", "9", "--rft.lr", "1e30")
    with pytest.raises(UserError, match=f"{skipped}.* grad_norm, ratio_max and logprob_mismatch"):
        imitate(tmp_path / "run", monkeypatch, lambda _, turn: [turn], *options)
