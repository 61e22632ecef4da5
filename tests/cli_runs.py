"""Runs of the two commands for the tests of the command line, in forks of a warm process.

What a fork could hide (a fresh interpreter, its exit, torchrun) the tests try with real
subprocesses. Nor do they predict the memory of activations, which takes a third of such a run;
`trainer/setup/test_memory_plan.py` does.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import forks
import pytest
import torch
from ports import free_port
from safetensors.torch import load_file
from toy_options import FLOW

from flowtrain.__main__ import COMMANDS

TINY = (
    *("--tiny.hidden_size", "32", "--tiny.num_layers", "1", "--tiny.num_heads", "2"),
    *("--tasks.num_train", "400", "--eval.num_tasks", "4"),
    *("--eval.every", "0", "--rollout.num_questions", "4", "--rollout.group_size", "8"),
    *("--rollout.max_new_tokens", "24", "--algorithm.equal_groups", "drop"),
    *("--run.threads", "1", "--run.device", "cpu", "--log.tensorboard", "false"),
)
SMALL = (*FLOW, *TINY)
"""AgentFlow on the tiny model; TINY is for other agents."""
RFT = (
    *("--rft.num_rollouts", "300", "--rft.num_steps", "120", "--rft.lr", "1e-2"),
    *("--rft.warmup_steps", "10", "--rft.keep", "all"),
)
NUM_STEPS = 6

KILL = """
import importlib, os, signal

def arm(module, path, number, after):
    owner, name = importlib.import_module(module), path.rpartition(".")[2]
    for part in path.split(".")[:-1]:
        owner = getattr(owner, part)
    real, calls = getattr(owner, name), []
    def fatal(*args, **kwargs):
        calls.append(0)
        if len(calls) == number and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(owner, name, fatal)

arm({module!r}, {path!r}, {number}, {after})
"""
"""Python that kills the process before or after the `number`-th call of a function."""
AFTER_STEP_3 = KILL.format(
    module="flowtrain.trainer.run.run_logger", path="RunLogger.log", number=3, after=True
)

RUN = """
flowtrain.trainer.setup.memory_plan.activations = lambda *_, **__: (0, 0)
flowtrain.utils.waiting.PATIENCE_S = 3600.0  # tests compare what is printed, on any machine
if not job["with_picture"]:
    flowtrain.logging.page.curves.plot_curves = lambda *_: None
os.chdir(job["cwd"])
os.environ.update(job["env"])
if job["max_file_bytes"]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (job["max_file_bytes"],) * 2)
sys.argv = [job["module"], *job["argv"]]
exec(job["before"])
runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
"""
"""Runs the command of a job."""


@dataclass(frozen=True)
class Process:
    """A command under way, with its output in files."""

    pid: int
    out: Path
    err: Path
    poll: Callable[[], int | None]

    def wait(self, timeout_s: float = 60.0) -> int:
        """The exit code, or minus the signal that ended it."""
        deadline = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                for number in (signal.SIGABRT, signal.SIGKILL):  # the first shows what threads do
                    if self.poll() is None:
                        os.kill(self.pid, number)
                        time.sleep(1.0)
                raise AssertionError(
                    f"still running after {timeout_s} s: {self.err.read_text()[-4000:]}"
                )
            time.sleep(0.02)
        return code

    def wait_for(self, is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_so():
            assert self.poll() is None and time.monotonic() < deadline, self.err.read_text()[-2000:]
            time.sleep(0.005)


class Server:
    """Starts commands in forks of one warm process."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def start(
        self,
        module: str,
        *argv: object,
        before: str = "",
        max_file_bytes: int = 0,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        with_picture: bool = False,
    ) -> Process:
        """`before` is Python that runs first; `max_file_bytes` is how large a file may grow, which
        is how a disk gets full here. Drawing curves.png takes longer than the rest.
        """
        self._count += 1
        out, err = self._folder / f"{self._count}.out", self._folder / f"{self._count}.err"
        out.touch(), err.touch()
        name, _ = COMMANDS.get(module, (f"flowtrain.{module}", ""))
        job = {"module": name, "argv": [*map(str, argv)], "before": before}
        job |= {"cwd": cwd or self._folder, "env": env or {}, "with_picture": with_picture}
        pid = forks.ask(code=RUN, out=out, err=err, max_file_bytes=max_file_bytes, **job)
        return Process(pid, out, err, lambda: forks.ask(poll=pid))

    def start_ranks(
        self,
        size: int,
        *argv: object,
        before: Sequence[str] = (),
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        module: str = "train",
    ) -> list[Process]:
        """A command on as many ranks, without torchrun; `before` has Python for each of them."""
        where = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
        }
        each = before or ("",) * size
        envs = [{**(env or {}), **where, "RANK": str(rank)} for rank in range(size)]
        return [
            self.start(module, *argv, env=envs[rank], before=each[rank], cwd=cwd)
            for rank in range(size)
        ]

    def resume(self, run: Path, *argv: object) -> str:
        """Resume a run to its end; return what is on stdout."""
        code, lines, out = self.run("train", *argv, "--run.dir", run, "--resume", "auto")
        assert (code, lines) == (0, []), "\n".join(lines)
        return out

    def run(self, module: str, *argv: object, **options: Any) -> tuple[int, list[str], str]:
        """(exit code, lines on stderr without progress, stdout)"""
        process = self.start(module, *argv, **options)
        code = process.wait()
        lines = [
            line
            for line in process.err.read_text().splitlines()
            if not line.startswith(("step ", "rollout "))
        ]
        return code, lines, process.out.read_text()


@pytest.fixture(scope="session")
def inputs(once: Callable[..., Path]) -> Path:
    """A folder with tasks that the tiny planner solves every other time as soon as it names a tool,
    so that rewards vary, and with a reward that varies within every group.
    """

    def make(path: Path) -> None:
        path.mkdir()
        values = range(10, 18)
        corpus = [
            {"name": f"Land{index}", "kind": "country", "facts": {"area": value}}
            for index, value in enumerate(values)
        ]
        (path / "corpus.json").write_text(json.dumps(corpus))
        tasks = [
            {"question": f"What is {i} plus {i % 7}?", "answer": [v for v in values if (v ^ i) & 1]}
            for i in range(40)
        ]
        (path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
        code = "def score(task, answer, trajectory):\n    return trajectory.seed % 7 / 7\n"
        (path / "by_seed.py").write_text(code)

    return once("inputs", make)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Path:
    """A folder of this process for its runs, with the inputs."""
    place = tmp_path_factory.mktemp("cli")
    for path in inputs.iterdir():
        (place / path.name).symlink_to(path)
    return place


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    forks.connection()  # which may take seconds, that all users of the fixture share
    return Server(tmp_path_factory.mktemp("server"))


@pytest.fixture(scope="session")
def warm(once: Callable[..., Path], server: Server) -> Path:
    """The run folder of a `flowtrain.rft`, whose model sometimes names tools."""

    def make(path: Path) -> None:
        code, lines, _ = server.run("rft", *SMALL, *RFT, "--run.dir", path)
        assert code == 0, lines

    return once("warm", make)


@pytest.fixture(scope="session")
def words(inputs: Path, warm: Path) -> tuple[str, ...]:
    """Options of a training run of NUM_STEPS steps; what is left to say is --run.dir."""
    return (
        *SMALL,
        *("--tasks.name", "file", "--tasks.path", str(inputs / "tasks.jsonl")),
        *("--tasks.corpus", str(inputs / "corpus.json"), "--model.path", str(warm / "model")),
        *("--train.num_steps", str(NUM_STEPS), "--train.lr", "3e-3", "--checkpoint.every", "2"),
        # Without the tool that takes time: what shares a batch then never depends on the clock, and
        # neither does any bit of the result.
        *("--agent.tools", '["Search", "Base_Generator"]'),
    )


@pytest.fixture(scope="session")
def full(once: Callable[..., Path], server: Server, words: tuple[str, ...]) -> Path:
    """The folder of a run that nothing disturbed."""

    def make(path: Path) -> None:
        code, lines, _ = server.run("train", *words, "--run.dir", path, with_picture=True)
        assert code == 0, lines

    return once("full", make)


@pytest.fixture(scope="session")
def by_seed(inputs: Path) -> tuple[str, ...]:
    """Options of a reward that varies within every group, whatever the policy says."""
    return ("--reward.function", f"{inputs / 'by_seed.py'}:score")


class Ran(NamedTuple):
    """A command that has ended: its run's folder, what it said, and what it printed."""

    path: Path
    lines: list[str]
    out: str

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The metrics of the training steps."""
        return [line for line in read(self.path / "metrics.jsonl") if line["step"] > 0]

    @property
    def rollouts(self) -> list[dict[str, Any]]:
        return read(self.path / "trajectories.jsonl")

    def json(self, name: str) -> dict[str, Any]:
        return dict(json.loads((self.path / name).read_text()))


Run = Callable[..., Ran]


@pytest.fixture
def run(server: Server, words: tuple[str, ...], tmp_path: Path) -> Run:
    """Runs a command to its end, in a folder of the test: `run("name", *argv, code=0)`; `base` are
    other options than those of `words`.
    """

    def run(
        name: str,
        *argv: object,
        code: int = 0,
        module: str = "train",
        base: Sequence[str] = words,
        **options: Any,
    ) -> Ran:
        path = tmp_path / name
        found, lines, out = server.run(module, *base, *argv, "--run.dir", path, **options)
        assert found == code, lines
        return Ran(path, lines, out)

    return run


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


CHANCE = ("seconds", "peak_memory_gb", "planned_memory_gb", "replay_log_bytes")


def timeless(record: Any) -> Any:
    """The record without what a clock, or the memory and number of ranks, decide."""
    if isinstance(record, dict):
        return {
            key: timeless(value)
            for key, value in record.items()
            if not (key.endswith("_s") or key in CHANCE)
        }
    return [timeless(item) for item in record] if isinstance(record, list) else record


def alike(ours: Any, theirs: Any) -> bool:
    """Equal, up to the rounding of floats."""
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(alike(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(alike, ours, theirs))
    return (
        ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)
        if isinstance(theirs, float)
        else ours == theirs
    )


def rows(run: Path, name: str) -> list[dict[str, Any]]:
    return [timeless(record) for record in read(run / name)]


LOGS = ("metrics.jsonl", "trajectories.jsonl", "held_out.jsonl")


def check_same_run(
    run: Path, full: Path, num_steps: int = NUM_STEPS, logs: Sequence[str] = LOGS
) -> None:
    """Apart from the time it took, a run that was resumed is the run that was not."""
    for name in logs:
        ours, theirs = rows(run, name), rows(full, name)
        assert [record["step"] for record in ours] == [record["step"] for record in theirs], name
        assert all(map(alike, ours, theirs)), name
    summaries = [timeless(json.loads((each / "summary.json").read_text())) for each in (run, full)]
    assert alike(*summaries)
    weights = [
        load_file(each / "checkpoints" / f"step_{num_steps:08d}" / "model" / "model.safetensors")
        for each in (run, full)
    ]
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-5) for name in weights[1])
    found = sorted(path.name for path in (run / "weights").iterdir())
    assert found == sorted(path.name for path in (full / "weights").iterdir())


def replayed(
    server: Server, run: Path, *argv: object, size: int = 1, before: str = ""
) -> tuple[int, dict[str, Any]]:
    """(exit code, the record that the replay prints)."""
    processes = server.start_ranks(
        size, run, "--json", *argv, module="replay", before=[before] * size
    )
    codes = [process.wait() for process in processes]
    assert set(codes) <= {0, 1} and len(set(codes)) == 1, [
        process.err.read_text()[-2000:] for process in processes
    ]
    return codes[0], json.loads(processes[0].out.read_text())


def check_equal(server: Server, run: Path, num_steps: int, *argv: object, size: int = 1) -> None:
    """A replay of a run makes every version again, bit by bit."""
    code, record = replayed(server, run, *argv, size=size)
    assert (code, record["problems"], record["notes"]) == (0, [], [])
    assert (record["num_steps"], record["num_equal"]) == (num_steps, num_steps + 1)


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""
