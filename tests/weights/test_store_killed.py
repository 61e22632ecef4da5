"""kill -9 of a publisher and a reader at hundreds of points: one version is seen each time."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from weight_samples import Weights, chain, empty_like, same_bits

from flowtrain.weights import Publisher, SnapshotPolicy, WeightReader, WeightStore, pull

NUM_RANDOM = 24
CALLS = {
    "open",
    "os.rename",
    "os.mkdir",
    "os.remove",
    "os.rmdir",
    "shutil.rmtree",
    "os.listdir",
    "os.scandir",
}
"""Audit events around which a process is killed; what they announce has not happened yet."""

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture(scope="module")
def versions() -> list[Weights]:
    return [chain(version) for version in range(60)]


def in_child(
    work: Callable[[], None],
    kill_at: int | None = None,
    kill_after_s: float | None = None,
    begun: Callable[[], bool] = lambda: True,
) -> tuple[int, int]:
    """Fork, work, be killed at the n-th file operation or later. Returns signal and operations."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        seen = 0

        def hook(event: str, _: object) -> None:
            nonlocal seen
            if event in CALLS:
                seen += 1
                if seen == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        code = 1
        try:
            sys.addaudithook(hook)
            os.write(write, b"r")
            work()
            os.write(write, seen.to_bytes(4, "little"))
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    assert os.read(read, 1) == b"r"
    if kill_after_s is not None:
        while not begun():
            time.sleep(0.0005)
        time.sleep(kill_after_s)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    count = os.read(read, 4)
    os.close(read)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed by itself"
    return (os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0), int.from_bytes(count, "little")


def go_on(store: WeightStore, versions: list[Weights], up_to: int) -> None:
    """Do what a restarted trainer does."""
    head = store.head()
    publisher = Publisher(store, policy=SnapshotPolicy(max_deltas=3))
    if head is not None:
        assert publisher.resume(versions[head], head)
    for version in range(0 if head is None else head + 1, up_to):
        publisher.publish(versions[version], version)
        store.collect_garbage(keep=2)


def check_one_version(
    store: WeightStore, versions: list[Weights], reader: WeightReader, own: Weights
) -> int:
    """A new reader and one that was there before both hold exactly HEAD."""
    head = store.head()
    if head is None:
        return -1
    assert same_bits(pull(store, head), versions[head])
    reader.load(head)
    assert same_bits(own, versions[head]) and reader.damaged() == []
    return head


def test_a_publisher_killed_at_every_file_operation(
    tmp_path: Path, versions: list[Weights]
) -> None:
    """Five versions with snapshots, deltas, a skip and garbage."""
    go_on(
        WeightStore(tmp_path / "imports"), versions, 6
    )  # what is imported on the way opens files, too, but only once
    signalled, num_operations = in_child(
        lambda: go_on(WeightStore(tmp_path / "whole"), versions, 6)
    )
    assert signalled == 0 and num_operations > 100
    heads = set()
    for kill_at in range(1, num_operations + 1, 7):
        store = WeightStore(tmp_path / f"killed{kill_at}")
        own = empty_like(versions[0])
        reader = WeightReader(store, own)
        found = in_child(lambda store=store: go_on(store, versions, 6), kill_at=kill_at)[0]
        assert found == signal.SIGKILL
        heads.add(check_one_version(store, versions, reader, own))
        go_on(store, versions, 7)
        assert check_one_version(store, versions, reader, own) == 6
    assert heads == {-1, 0, 1, 2, 3, 4, 5}, "kills fell into every version"


def test_a_publisher_killed_at_random_moments(store: WeightStore, versions: list[Weights]) -> None:
    """One store that survives all of it; a reader follows."""
    rng, own = random.Random(0), empty_like(versions[0])
    reader, kills, moved = WeightReader(store, own), 0, 0

    def has_moved() -> bool:
        return (store.head() or 0) > before

    while kills < NUM_RANDOM:
        before = store.head() or 0
        if before > 50:
            store.rollback(-1)
            before = 0
        # Every other clock starts at the first new version, however slow this machine is.
        code, *_ = in_child(
            lambda: go_on(store, versions, 60),
            kill_after_s=rng.uniform(0.0005, 0.06),
            begun=has_moved if kills % 2 else lambda: True,
        )
        kills += code == signal.SIGKILL
        moved += check_one_version(store, versions, reader, own) > before
    assert moved >= NUM_RANDOM // 2, "some got a version out before they died"


def test_a_reader_killed_at_random_moments_leaves_the_store_as_it_is(
    store: WeightStore, versions: list[Weights]
) -> None:
    go_on(store, versions, 12)
    before = {path: path.read_bytes() for path in sorted(store.root.rglob("*")) if path.is_file()}
    rng = random.Random(1)

    def follow() -> None:
        own = empty_like(versions[0])
        reader = WeightReader(store, own)
        while True:
            for version in store.versions():
                reader.load(version)

    for _ in range(NUM_RANDOM // 3):
        assert in_child(follow, kill_after_s=rng.uniform(0.0005, 0.01))[0] == signal.SIGKILL
    expected = {path: path.read_bytes() for path in sorted(store.root.rglob("*")) if path.is_file()}
    assert before == expected
    head = store.head()
    assert head == 11 and same_bits(pull(store, head), versions[head])
