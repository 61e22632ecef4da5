"""Ranks wait for rollouts, and only a while for a collective. As a script, this is the ranks."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from ranks import fork, launch

from flowtrain.config import Config
from flowtrain.config.command import run_command
from flowtrain.trainer import balance as balancing
from flowtrain.trainer import heartbeat
from flowtrain.trainer.distributed import World
from flowtrain.utils.commands import end_process

pytestmark = pytest.mark.dist

CLOCK_S = 1.0
SIZE = 3
WRONG = [
    ({"WORLD_SIZE": ""}, "WORLD_SIZE='' in the environment is not a number"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' in the environment is not a number"),
    ({"RANK": "x"}, "RANK='x' in the environment is not a number"),
    ({"LOCAL_WORLD_SIZE": ""}, "LOCAL_WORLD_SIZE='' in the environment is not a number"),
    ({"RANK": "1"}, "RANK=1 must be below WORLD_SIZE=1"),
    ({"RANK": "1", "WORLD_SIZE": "2"}, "WORLD_SIZE=2 needs MASTER_ADDR"),
    ({"WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "WORLD_SIZE=2 needs MASTER_PORT"),
    (
        {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "x"},
        "the ranks cannot meet: WORLD_SIZE=2, MASTER_ADDR='localhost', MASTER_PORT='x': ValueError",
    ),
]


def exchanges(world: World) -> bool:
    """Whether rows reach their rank, and over the group of messages."""
    groups, send = [], dist.all_to_all_single

    def noted(*tensors: Any, group: Any) -> None:
        groups.append(group)
        send(*tensors, group=group)

    dist.all_to_all_single = noted  # type: ignore[assignment]
    received = balancing._exchange([bytes([world.rank] * rank) for rank in range(SIZE)], world)
    dist.all_to_all_single = send
    expected = [bytes([rank] * world.rank) for rank in range(SIZE)]
    return received == expected and groups == [world.control]


def run(out: Path) -> None:
    """Keep the others waiting in every way, longer than the clock of training."""
    world = World.join("cpu", timeout_s=CLOCK_S)
    pair = world.subworld([0, 1])
    assert world.mesh.device_type == "cpu", "not that of an accelerator which nobody asked for"
    found: dict[str, object] = {}
    for name, late, wait in (
        ("sum", 2, lambda: world.sum([world.rank])[0]),
        ("gather", 0, lambda: world.gather_text(str(world.rank))),
        ("barrier", 1, lambda: world.barrier()),
        ("part", 1, lambda: pair.sum([1.0])[0] if pair.is_member else 2.0),
    ):
        if world.rank == late:
            time.sleep(2 * CLOCK_S)  # a rollout that takes longer
        found[name] = wait()
    found["exchange"] = exchanges(world)
    for name, each in (("part_hangs", pair), ("hangs", world)):
        world.barrier()
        if each.rank == 0:
            started = time.monotonic()
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(1), group=each.group)
            found[name] = time.monotonic() - started < 20 * CLOCK_S
    (out / f"{world.rank}.json").write_text(json.dumps(found))
    world.barrier()
    end_process(0)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    out = tmp_path_factory.mktemp("world")
    launch(__file__, [(SIZE, (str(out),))])
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(SIZE)]


def test_ranks_wait_longer_for_each_other_than_the_clock_of_training(
    found: list[dict[str, object]],
) -> None:
    for each in found:
        assert each["sum"] == 3.0 and each["gather"] == ["0", "1", "2"] and each["part"] == 2.0


def test_rows_go_from_host_to_host(found: list[dict[str, object]]) -> None:
    assert all(each["exchange"] for each in found)


def test_a_collective_of_training_that_hangs_ends_the_rank(found: list[dict[str, object]]) -> None:
    assert found[0]["hangs"] and found[0]["part_hangs"]


def lose(out: Path, lost: int) -> None:
    """Freeze a rank, as a host that hangs: its connections stay open."""
    heartbeat.BEAT_S, heartbeat.MOST_SILENT = 0.05, 20
    world = World.join("cpu", timeout_s=CLOCK_S)

    def ended(code: int) -> NoReturn:
        (out / str(lost)).write_text(str(code))
        os.kill(pid, signal.SIGCONT)
        end(0)

    end, os._exit = os._exit, ended
    pid = int(world.gather_text(str(os.getpid()))[lost])
    if world.rank == lost:
        os.kill(pid, signal.SIGSTOP)
        end(0)
    world.barrier()


def test_a_rank_that_is_lost_ends_the_others(tmp_path: Path) -> None:
    """Also the one whose process has the store that all met at."""
    launch(__file__, [(2, (str(tmp_path), "0")), (2, (str(tmp_path), "1"))])
    assert [(tmp_path / str(lost)).read_text() for lost in range(2)] == [str(os.EX_TEMPFAIL)] * 2


def test_beats_without_a_sign_are_counted_and_an_end_in_order_is_none() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(milliseconds=1))
    here, there = (heartbeat.Heartbeat(store, rank, 2) for rank in range(2))
    for _ in range(3):  # there is busy or begins late, but not for so long
        for _ in range(heartbeat.MOST_SILENT - 1):
            here.tell()
            assert not here.misses()
        there.tell()
        here.tell()
        assert not here.misses()
    assert [here.misses() for _ in range(heartbeat.MOST_SILENT)][-2:] == [False, True]
    there.start()
    there.close()
    here.tell()
    assert not any(here.misses() for _ in range(2 * heartbeat.MOST_SILENT))


if __name__ == "__main__":
    fork(lambda out, lost="": lose(Path(out), int(lost)) if lost else run(Path(out)))


@pytest.mark.parametrize(("environment", "told"), WRONG)
def test_an_environment_in_which_no_ranks_meet_is_one_line_of_every_rank(
    environment: dict[str, str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def body(config: Config) -> int:
        World.join("cpu")
        return 0

    assert run_command("flowtrain.test", body, []) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"flowtrain.test: {told}") and error.count("\n") == 1
