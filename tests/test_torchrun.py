"""`flowtrain.torchrun`: the line that a rank ends with is the last one; signals reach the ranks."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_runs import Process, Server
from processes import run_program
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from flowtrain import torchrun

pytest_plugins = ("cli_runs",)
pytestmark = pytest.mark.dist

RANK = """
import json, os, signal, sys
from flowtrain.config.command import run_command
from flowtrain.records import Outage, UserError

rank = os.environ["RANK"]

def body(config):
    if rank == sys.argv[1]:
        {what}
    signal.pause()

sys.exit(run_command("mine", body, []))
"""


def start(server: Server, folder: Path, what: str, ranks: int, *words: str) -> Process:
    """Fork `flowtrain.torchrun`; the ranks are processes of their own all the same."""
    (folder / "rank.py").write_text(RANK.format(what=what))
    env = {"PYTHONPATH": os.pathsep.join(sys.path)}
    argv = ("--nproc_per_node", str(ranks), "rank.py", *words)
    return server.start("torchrun", *argv, cwd=folder, env=env, before="os.setsid()")


def ended(process: Process) -> tuple[int, list[str]]:
    code = process.wait(120)
    return code, process.err.read_text().splitlines()


@pytest.mark.parametrize(("rank", "kind", "code"), [(0, "UserError", 2), (1, "Outage", 75)])
def test_a_users_mistake_or_an_outage_ends_in_its_one_line(
    rank: int, kind: str, code: int, server: Server, tmp_path: Path
) -> None:
    what = f"raise {kind}('train.lr=-1 is too small')"
    process = start(server, tmp_path, what, 2, str(rank))
    prefix = "" if rank == 0 else "flowtrain.torchrun: rank 1: "
    assert ended(process) == (code, [f"{prefix}mine: train.lr=-1 is too small"])


def test_a_mistake_that_two_ranks_saw_is_said_by_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 was first, and rank 0 had ended, and spoken, when torchrun looked."""

    def fail(_arguments: Any) -> None:
        failed = {rank: ProcessFailure(rank, 1, 2, "") for rank in (0, 1)}
        failed[0].timestamp = failed[1].timestamp + 1
        raise ChildFailedError("flowtrain.train", failed)

    monkeypatch.setattr(torchrun, "run", fail)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert torchrun.main(["rank.py"]) == 2
    assert capsys.readouterr() == ("", "")


def test_the_command_line_of_a_run_is_checked_with_one_line(server: Server, tmp_path: Path) -> None:
    env = {"PYTHONPATH": os.pathsep.join(sys.path)}
    words = ("--nproc_per_node", "2", "-m", "flowtrain.train", "--train.rl", "1")
    before = "os.setsid(); os.environ.pop('OMP_NUM_THREADS')"  # of which torch has a word to say
    process = server.start("torchrun", *words, env=env, before=before)
    code, (line,) = ended(process)
    assert code == 2 and line.endswith(
        "flowtrain.train: unknown key train.rl: did you mean train.lr?"
    )


def test_an_interrupted_rank_needs_no_further_word(server: Server, tmp_path: Path) -> None:
    assert ended(start(server, tmp_path, "return 130", 2, "1")) == (130, [])


def test_other_failures_end_in_the_rank_and_its_code(server: Server, tmp_path: Path) -> None:
    code, said = ended(start(server, tmp_path, "raise RuntimeError('no such thing')", 1, "0"))
    assert code == 1 and "RuntimeError: no such thing" in said
    found = said[-1]
    assert found == "flowtrain.torchrun: rank 0 ended with exit code 1; see its output above"


def test_a_rank_that_the_system_kills_is_named(tmp_path: Path) -> None:
    """In a fresh interpreter."""
    what = "os.kill(os.getpid(), signal.SIGKILL)"
    (tmp_path / "rank.py").write_text(RANK.format(what=what))
    done = run_program(
        [sys.executable, "-m", "flowtrain.torchrun", "--nproc_per_node", "1", "rank.py", "0"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 128 + signal.SIGKILL
    assert done.stderr.splitlines() == [
        "flowtrain.torchrun: rank 0 was ended by SIGKILL, as the kernel does when memory runs out"
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_rank_which_ends_as_it_likes(
    number: signal.Signals, server: Server, tmp_path: Path
) -> None:
    what = (
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM}); "
        "open('ready', 'w').close(); "
        "got = signal.sigwait({signal.SIGINT, signal.SIGTERM}); "
        "print(got.name, 'saved', file=sys.stderr); return 130"
    )
    os.mkfifo(tmp_path / "ready")  # opening it waits for the rank
    process = start(server, tmp_path, what, 1, "0")
    with (tmp_path / "ready").open():
        os.kill(process.pid, number)
    assert ended(process) == (130, [f"{number.name} saved", "mine: interrupted"])
