"""The launcher starts processes in order, passes signals on and ends everything; over SSH too.

A fake `ssh` runs commands on this machine, and the processes are scripts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from plans import PLAN, ROOT, fake_python, fake_ssh, write_plan

TOKEN = "secret-of-the-tests"
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    python = fake_python(tmp_path)
    _, path = fake_ssh(tmp_path)
    plan = write_plan(tmp_path, plan=PLAN.replace("{python}", python))
    running: list[subprocess.Popen[str]] = []

    def begin(*words: str) -> subprocess.Popen[str]:
        running.append(
            subprocess.Popen(
                [sys.executable, "-m", "flowtrain.launch", str(plan), *words],
                cwd=tmp_path,
                env={**os.environ, **path, "A_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def calls(folder: Path, first: str) -> list[str]:
    path = folder / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if line.startswith(first)]


def wait_for(is_so: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60.0
    while not is_so():
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.01)


def all_run(folder: Path) -> bool:
    return len(calls(folder, "started")) == 6


def test_the_rest_ends_when_the_trainer_is_done(start: Start, tmp_path: Path) -> None:
    launcher = start()
    wait_for(lambda: all_run(tmp_path), launcher)
    (tmp_path / "done").touch()
    out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 7 and err == ""
    started = [line.split()[3] for line in calls(tmp_path, "started")]
    assert started[:2] == ["flowtrain.dataflow", "flowtrain.weights"]
    assert sorted(started[2:]) == [*["flowtrain.node"] * 3, "flowtrain.train"]
    assert all(line.split()[1] == TOKEN for line in calls(tmp_path, "started"))
    ended = [line.split()[1] for line in calls(tmp_path, "ended")]
    assert ended == [*["flowtrain.node"] * 3, "flowtrain.weights", "flowtrain.dataflow"]
    assert "[service]         serving it at http://x:1\n" in out
    assert "[launch] trainer-planner ended with code 7; see logs/trainer-planner.log\n" in out
    assert "[launch] eu-1 ended as asked, with code 3; see logs/eu-1.log\n" in out
    assert (tmp_path / "logs" / "service.log").read_text() == "serving it at http://x:1\n"
    assert (tmp_path / "ssh.txt").read_text().count("BatchMode=yes") == 2


def test_the_token_is_in_no_command_line_and_no_log(start: Start, tmp_path: Path) -> None:
    launcher = start()
    wait_for(lambda: all_run(tmp_path), launcher)
    seen = b"".join(
        path.read_bytes()
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if os.access(path, os.R_OK)
    )
    (tmp_path / "done").touch()
    out, _ = launcher.communicate(timeout=60)
    logs = "".join(path.read_text() for path in (tmp_path / "logs").iterdir())
    assert b"flowtrain.node" in seen and TOKEN.encode() not in seen
    assert TOKEN not in (tmp_path / "ssh.txt").read_text() + out + logs


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_everybody_the_servers_last(
    number: int, start: Start, tmp_path: Path
) -> None:
    launcher = start()
    wait_for(lambda: all_run(tmp_path), launcher)
    launcher.send_signal(number)
    out, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 3, "the code of the trainer"
    ended = [line.split()[1] for line in calls(tmp_path, "ended")]
    assert sorted(ended[:4]) == [*["flowtrain.node"] * 3, "flowtrain.train"]
    assert ended[4:] == ["flowtrain.weights", "flowtrain.dataflow"]
    assert out.count("ended as asked, with code 3") == 6


def test_nobody_outlives_a_launcher_that_is_killed(start: Start, tmp_path: Path) -> None:
    launcher = start()
    wait_for(lambda: all_run(tmp_path), launcher)
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 30.0
    while len(calls(tmp_path, "ended")) < 6:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_service_that_does_not_start_ends_the_run(start: Start, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho it is broken\nexit 5\n")
    launcher = start()
    out, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 5
    assert "[service]         it is broken\n" in out and "service ended with code 5" in out
    assert not (tmp_path / "logs" / "trainer-planner.log").exists()


def test_an_end_before_its_time_is_said_and_nothing_starts_again(
    start: Start, tmp_path: Path
) -> None:
    launcher = start()
    wait_for(lambda: all_run(tmp_path), launcher)
    (tmp_path / "broken").touch()
    assert launcher.stdout is not None
    lines = iter(launcher.stdout.readline, "")
    assert next(line for line in lines if "ended" in line).startswith(
        "[launch] service ended with code 5; see logs/service.log"
    )
    assert launcher.poll() is None and len(calls(tmp_path, "started")) == 6
    (tmp_path / "done").touch()
    launcher.communicate(timeout=60)
    assert launcher.returncode == 7


def test_check_tries_every_host(start: Start, tmp_path: Path) -> None:
    (tmp_path / "python").write_text('#!/bin/sh\necho "$*" >>calls\necho flowtrain 1.2\n')
    checker = start("--check")
    out, _ = checker.communicate(timeout=60)
    assert checker.returncode == 0 and out == "here fine: flowtrain 1.2\nfar fine: flowtrain 1.2\n"
    assert "flowtrain.train --config run.toml" in (tmp_path / "calls").read_text()
    (tmp_path / "run.toml").unlink()
    checker = start("--check")
    out, _ = checker.communicate(timeout=60)
    assert checker.returncode == 1 and out.startswith("here failed: exit code 1\nfar fine")
