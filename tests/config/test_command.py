"""Shared behaviour of the commands: exit codes, messages, help, interrupts."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flowtrain.config import Config
from flowtrain.config import command as commands
from flowtrain.config.command import Interrupt, run_command
from flowtrain.records import Outage, UserError


def command(monkeypatch: pytest.MonkeyPatch, argv: list[str], body: Callable[[Config], int]) -> int:
    monkeypatch.setattr(sys, "argv", ["prog", *argv])
    return run_command("flowtrain.test", body)


def test_run_command_returns_the_exit_code_of_its_body(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command(monkeypatch, ["--run.seed", "4"], lambda config: config.run.seed) == 4


@pytest.mark.parametrize(("kind", "code"), [(UserError, 2), (Outage, 75)])
def test_a_user_error_is_one_line_and_exit_code_2_an_outage_75(
    kind: type[UserError],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def body(config: Config) -> int:
        raise kind("the disk is on fire")

    assert command(monkeypatch, [], body) == code
    assert capsys.readouterr() == ("", "flowtrain.test: the disk is on fire\n")


def test_under_torchrun_only_rank_0_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert command(monkeypatch, ["--nonsense", "1"], lambda config: 0) == 2
    assert command(monkeypatch, ["--help"], lambda config: 0) == 0
    assert capsys.readouterr() == ("", "")


def test_a_name_that_is_too_long_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "x" * 300
    assert command(monkeypatch, ["--run.dir", f"runs/{name}"], lambda config: 0) == 2
    told = f"run.dir='runs/{name}': a name has 300 bytes, and files may have 255"
    assert told in capsys.readouterr().err

    def body(config: Config) -> int:
        return len(Path(config.tasks.path).read_text())

    argv = ["--tasks.name", "file", "--tasks.path", name]
    assert command(monkeypatch, argv, body) == 2
    error = capsys.readouterr().err
    assert error == f"flowtrain.test: {name!r} is too long for a file name\n"


def test_help_prints_and_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def body(config: Config) -> int:
        raise AssertionError

    for topic, option in (([], "--train.lr "), (["all"], "--train.beta2 "), (["log"], "--log.")):
        assert command(monkeypatch, ["--help", *topic], body) == 0
        assert option in capsys.readouterr().out
    assert command(monkeypatch, ["--help", "logs"], body) == 2
    assert "--help logs: unknown section" in capsys.readouterr().err


def test_an_interrupt_is_exit_code_130_and_our_own_mistakes_are_not_hidden(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(config: Config) -> int:
        raise KeyboardInterrupt

    def broken(config: Config) -> int:
        raise ValueError("a bug")

    assert command(monkeypatch, [], interrupted) == 130
    assert capsys.readouterr().err == "flowtrain.test: interrupted\n"
    assert command(monkeypatch, [], lambda config: 130) == 130
    assert capsys.readouterr().err == "flowtrain.test: interrupted\n"
    with pytest.raises(ValueError, match="a bug"):
        command(monkeypatch, [], broken)


ENDS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", ENDS)
def test_an_interrupt_asks_once_and_the_next_one_ends_the_process(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun passes on what the terminal has sent already, so two signals at once are one."""
    now = [100.0]
    monkeypatch.setattr(commands.time, "monotonic", lambda: now[0])
    before = [signal.getsignal(each) for each in ENDS]
    with Interrupt() as interrupt:
        interrupt.defer()
        assert not interrupt.requested
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert interrupt.requested
        now[0] += 10
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert [signal.getsignal(each) for each in ENDS] == before


@pytest.mark.parametrize("number", ENDS)
def test_while_a_command_starts_the_first_interrupt_ends_it(number: signal.Signals) -> None:
    with Interrupt() as interrupt:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        signal.raise_signal(number)  # torchrun's echo, while the command cleans up
    assert interrupt.requested


def test_torchrun_is_told_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also while its variables are out of sight, as they are while a vLLM starts."""

    def body(config: Config) -> int:
        monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
        monkeypatch.delenv("RANK")
        raise UserError("the disk is on fire")

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("RANK", "1")
    assert command(monkeypatch, [], body) == 2
    told = json.loads((tmp_path / "error.json").read_text())
    assert told["message"] == "flowtrain.test: the disk is on fire"
    assert isinstance(told["timestamp"], int)


def test_under_nohup_the_end_of_the_terminal_ends_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            signal.raise_signal(signal.SIGHUP)
        assert not interrupt.requested
    finally:
        signal.signal(signal.SIGHUP, before)
