"""One run, one trainer: a lock is one process's, whatever happens to it and to the others."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flowtrain.records import UserError
from flowtrain.utils.lock import Lock
from flowtrain.weights import Publisher, WeightStore
from tests.attacks.tally import Tally

NUM_RACES = 20
RACER = """
import sys
from pathlib import Path
from flowtrain.records import UserError
from flowtrain.utils import lock as locks
from flowtrain.utils.lock import Lock

locks._PATIENCE_S = 0.1
lock = None
print("ready", flush=True)
for line in sys.stdin:
    try:
        if line == "release\\n":
            lock.release()
        else:
            cure = "end this process or choose another --run.dir"
            lock = Lock.of_folder(Path(line.strip()), cure)
        print("held", flush=True)
    except UserError as error:
        print(error, flush=True)
"""
"""Takes the lock of each folder that it reads, and answers "held" or why not."""


class Racer:
    """A process that takes locks when it is told to."""

    def __init__(self, before: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", before + RACER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.answer() == "ready"

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, line: object) -> None:
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        return self.process.stdout.readline().rstrip("\n")

    def take(self, folder: Path) -> str:
        self.tell(folder)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def racers() -> Iterator[list[Racer]]:
    started: list[Racer] = []
    yield started
    for racer in started:
        racer.kill()


def start(racers: list[Racer], before: str = "") -> Racer:
    racers.append(Racer(before))
    return racers[-1]


def test_of_two_processes_exactly_one_gets_a_folder(
    racers: list[Racer], tmp_path: Path, tally: Tally
) -> None:
    """The folder is new each time, or a dead process's, or was just given back."""
    pair, num_both, wins = [start(racers) for _ in range(2)], 0, [0, 0]
    for race in range(NUM_RACES):
        folder = tmp_path / f"run{race // 2}"
        order = pair if race % 2 else pair[::-1]
        for racer in order:
            racer.tell(folder)
        answers = {racer.pid: racer.answer() for racer in order}
        winners = [racer for racer in pair if answers[racer.pid] == "held"]
        num_both += len(winners) != 1
        assert len(winners) == 1, answers
        (loser,) = set(pair) - set(winners)
        assert f"process {winners[0].pid}, since 2" in answers[loser.pid]
        wins[pair.index(winners[0])] += 1
        if race % 5 == 0:
            winners[0].kill()
            pair[pair.index(winners[0])] = start(racers)
            assert loser.take(folder) == "held", "a dead process holds nothing"
            winners = [loser]
        winners[0].tell("release")
        assert winners[0].answer() == "held"
        assert not list(folder.glob("*")), "nothing is left"
    tally.add("races for a run folder", NUM_RACES, num_both)
    tally.add("holders of a run folder killed", len(racers) - 2)
    assert min(wins) > 0


def test_the_message_says_who_where_and_since_when(racers: list[Racer], tmp_path: Path) -> None:
    holder, other = start(racers), start(racers)
    assert holder.take(tmp_path) == "held"
    line = other.take(tmp_path)
    assert line.startswith(
        f"{tmp_path} is in use by python -c on host {socket.gethostname()}, "
        f"process {holder.pid}, since 20"
    )
    assert line.endswith("end this process or choose another --run.dir") and "\n" not in line


def test_a_stopped_process_still_holds_it(racers: list[Racer], tmp_path: Path) -> None:
    holder, other = start(racers), start(racers)
    assert holder.take(tmp_path) == "held"
    os.kill(holder.pid, signal.SIGSTOP)
    assert f"process {holder.pid}" in other.take(tmp_path)
    os.kill(holder.pid, signal.SIGKILL)
    holder.process.wait()
    assert other.take(tmp_path) == "held"


FORKS = """
import os, sys, time
from multiprocessing import get_context

def fork():
    if os.fork() == 0:
        os.setsid()
        os.close(1)
        time.sleep(60)
        os._exit(0)

def spawn():
    import subprocess
    subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, close_fds=False)

from flowtrain.utils import lock
real = lock.Lock.of_folder
def of_folder(*words):
    taken = real(*words)
    fork()
    spawn()
    return taken
lock.Lock.of_folder = of_folder
"""
"""Children, forked and started, that outlive the process which has the lock."""


def test_children_that_outlive_their_parent_do_not_keep_its_lock(
    racers: list[Racer], tmp_path: Path
) -> None:
    holder, other = start(racers, FORKS), start(racers)
    assert holder.take(tmp_path) == "held"
    children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
    assert len(children) == 2 and f"process {holder.pid}" in other.take(tmp_path)
    holder.kill()
    try:
        assert all(Path(f"/proc/{child}").exists() for child in children)
        assert other.take(tmp_path) == "held"
    finally:
        for child in children:
            os.kill(int(child), signal.SIGKILL)


def test_a_forked_child_neither_holds_nor_releases_it(racers: list[Racer], tmp_path: Path) -> None:
    other = start(racers)
    lock = Lock.of_folder(tmp_path, "end it")
    if (pid := os.fork()) == 0:
        lock.release()
        try:
            Lock.of_folder(tmp_path, "end it")
        except UserError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert f"process {os.getpid()}" in other.take(tmp_path)
    lock.release()
    assert other.take(tmp_path) == "held"


def test_a_process_may_take_its_lock_again(racers: list[Racer], tmp_path: Path) -> None:
    other = start(racers)
    first, second = (Lock.of_folder(tmp_path, "end it") for _ in range(2))
    first.release()
    first.release()
    assert "in use" in other.take(tmp_path)
    del second
    assert other.take(tmp_path) == "held", "a lock that nobody refers to is given back"


def test_a_deleted_file_is_noticed_by_the_one_who_had_it(
    racers: list[Racer], tmp_path: Path
) -> None:
    other = start(racers)
    lock = Lock.of_folder(tmp_path, "end it")
    lock.check()
    (tmp_path / "lock").unlink()
    assert other.take(tmp_path) == "held", "whoever deletes it says that it is free"
    with pytest.raises(UserError, match=r"lock was deleted, so another process may be writing"):
        lock.check()
    lock.release()
    assert f"process {other.pid}," in (tmp_path / "lock").read_text(), "it is the other's"


def test_the_lock_of_a_file_that_its_holder_has_just_deleted_is_worth_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It was opened before and is locked after; the next one would lock another file."""
    real, path = fcntl.flock, tmp_path / "lock"

    def flock(*words: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        path.unlink()
        real(*words)

    monkeypatch.setattr(fcntl, "flock", flock)
    with Lock.of_folder(tmp_path, "end it") as lock:
        lock.check()


def test_a_copied_folder_is_not_locked(tmp_path: Path) -> None:
    with Lock.of_folder(tmp_path / "a", "end it"):
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        with Lock.of_folder(tmp_path / "b", "end it"):
            assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}
    assert [path.name for path in tmp_path.iterdir()] == ["b"], "what it made is gone"


def test_a_publisher_that_is_refused_leaves_the_other_ones_files(
    racers: list[Racer], tmp_path: Path
) -> None:
    other, store = start(racers), WeightStore(tmp_path)
    first, tensors = Publisher(store), {"a": torch.zeros(4)}
    first.publish(tensors, 1)
    first.close()
    assert other.take(tmp_path) == "held"
    scratch = store.begin(2)
    with pytest.raises(UserError, match=f"is in use by .*process {other.pid}"):
        Publisher(store).publish(tensors, 2)
    for refused in (lambda: store.rollback(0), lambda: store.collect_garbage(1)):
        with pytest.raises(UserError, match="is in use by"):
            refused()
    assert scratch.is_dir() and store.head() == 1


def test_a_file_system_without_locks_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UserError, match=r"cannot lock .*lock: No locks available; mount its file"):
        Lock.of_folder(tmp_path, "end it")


def test_a_holder_without_a_name_is_waited_for_and_then_refused(
    racers: list[Racer], tmp_path: Path
) -> None:
    holder, other = start(racers), start(racers)
    assert holder.take(tmp_path) == "held"
    os.truncate(tmp_path / "lock", 0)
    found = other.take(tmp_path)
    assert (
        found
        == f"{tmp_path} is in use by another process; end this process or choose another --run.dir"
    )


def test_a_reader_sees_who_holds_it_and_takes_nothing(racers: list[Racer], tmp_path: Path) -> None:
    holder, other = start(racers), start(racers)
    assert Lock.holder(tmp_path) is None and not list(tmp_path.iterdir())
    assert holder.take(tmp_path) == "held"
    found = Lock.holder(tmp_path)
    assert found is not None and f"process {holder.pid}," in found
    holder.kill()
    assert (tmp_path / "lock").exists() and Lock.holder(tmp_path) is None
    with Lock.of_folder(tmp_path, "end it"):
        found = Lock.holder(tmp_path)
        assert found is not None and f"process {os.getpid()}," in found
        assert "in use" in other.take(tmp_path), "to look is not to release"


def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(UserError, match=r"cannot write .*lock: No space left on device; free some"):
        Lock.of_folder(tmp_path / "new", "end it")
    assert not (tmp_path / "new" / "lock").exists()
    monkeypatch.undo()
    Lock.of_folder(tmp_path / "new", "end it").release()
