from __future__ import annotations

import io
import sys

import pytest

from flowtrain.report import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(progress: Progress, steps: range) -> None:
    for step in steps:
        progress.update(
            {"step": step, "reward_mean": step / 100, "kl": 0.001, "tokens_per_s": 1234.5}
        )
    progress.close()
    progress.close()


def test_a_log_file_gets_a_line_every_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    run(Progress(100, 0, True), range(1, 101))
    output = capsys.readouterr()
    lines = output.err.splitlines()
    steps = [line.partition("/")[0] for line in lines]
    assert steps == [f"step {step}" for step in (1, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100)]
    assert (
        "reward 1.000 (mean of 10: 0.955), KL 0.001, 1,234 tokens/s" in lines[-1]
        and "ETA 00:00" in lines[-1]
    )
    assert output.out == "" and "held-out" not in output.err


def test_a_resumed_run_goes_on_from_its_step(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(4, 2, True)
    progress.update({"step": 2, "eval_reward": 0.25})
    progress.update({"step": 3, "reward_mean": float("nan")})
    first, second = capsys.readouterr().err.splitlines()
    assert first == "step 2/4 (50%), ETA unknown, held-out 0.250"
    assert second.startswith("step 3/4 (75%), ETA 00:0") and second.endswith(", held-out 0.250")


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = Progress(10, 5, True)
    progress.note("checkpoint written")
    progress.update({"step": 6, "reward_mean": 0.5, "eval_reward": 0.125})
    run(progress, range(7, 11))
    text = terminal.getvalue()
    assert "checkpoint written\n" in text
    assert " 50%|" in text.split("\r")[1]
    last = text.rstrip().split("\r")[-1]
    assert "10/10" in last and "reward 0.100" in last and "held-out 0.125" in last


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(10, 0, False)
    progress.note("hello")
    run(progress, range(1, 11))
    assert capsys.readouterr() == ("", "")


def test_notes_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    Progress(10, 0, True).note("hello")
    assert capsys.readouterr() == ("", "hello\n")
