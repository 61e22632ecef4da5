"""A run that is killed and goes on has the bits of one that is not, on one rank and on two; and
what that takes: no random state.

One rollout at a time, so that every request is sampled in a batch of its own: which rollouts share
a batch is otherwise a matter of timing, and the last bits of their log-probs with it. The tools of
these runs have no limit of time.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import check_same
from cli_runs import AFTER_STEP_3, KILL, Server, alike, read, rows

pytest_plugins = ("cli_runs",)

NUM_STEPS = 4
EXACT = (
    *("--train.num_steps", str(NUM_STEPS), "--rollout.max_in_flight", "1", "--eval.num_tasks", "2"),
    *("--rollout.num_questions", "2", "--rollout.group_size", "2", "--algorithm.mode", "released"),
)
IN_A_CHECKPOINT = KILL.format(
    module="flowtrain.trainer.checkpoint", path="_save", number=2, after=True
)
NOISE = """
import os, random
import numpy, torch, flowtrain.trainer.run.run
real = flowtrain.trainer.run.run.Run.agent_of

def noisy(self, step):
    for seed in (torch.manual_seed, numpy.random.seed, random.seed):
        seed(int.from_bytes(os.urandom(4), "little"))
    return real(self, step)

flowtrain.trainer.run.run.Run.agent_of = noisy
"""
"""Every step begins with another state of the process's random generators."""

Run = Callable[..., Path]


@pytest.fixture(scope="module")
def run(
    server: Server,
    words: tuple[str, ...],
    by_seed: tuple[str, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    """Train on so many ranks, in a new folder or on from `start`; `code` is that of one of them."""

    def train(
        size: int,
        *argv: str,
        start: Path | None = None,
        before: tuple[str, ...] = (),
        code: int = 0,
    ) -> Path:
        path = start or tmp_path_factory.mktemp("exact") / "run"
        options = (*words, *EXACT, *by_seed, *argv, "--run.dir", path, "--resume", "auto")
        before = before or ("",) * size
        processes = server.start_ranks(size, *options, before=before)
        codes = [process.wait() for process in processes]
        assert code in codes and (code or not any(codes)), [
            process.err.read_text()[-1500:] for process in processes
        ]
        return path

    return train


@pytest.fixture(scope="module")
def whole(run: Run) -> Callable[[int], Path]:
    """The folder of the run of NUM_STEPS steps that nothing disturbed, by number of ranks."""
    made: dict[int, Path] = {}

    def of(size: int) -> Path:
        if size not in made:
            made[size] = run(size)
        return made[size]

    return of


def check_same_bits(ours: Path, theirs: Path, size: int) -> None:
    """Weights, moments, loop state, rollouts, and all metrics but those of a clock."""
    last, before = (each / "checkpoints" / f"step_{NUM_STEPS:08d}" for each in (ours, theirs))
    assert len(list((before / "state").glob("shard-*"))) == size
    check_same(last, before)
    logs = [
        "metrics.jsonl",
        "trajectories.jsonl",
        *(f"trajectories.rank{rank}.jsonl" for rank in range(1, size)),
    ]
    for name in logs:
        assert rows(ours, name) == rows(theirs, name), name
    roots = [
        json.loads((each / "weights" / f"v{NUM_STEPS:08d}" / "manifest.json").read_text())["root"]
        for each in (ours, theirs)
    ]
    assert roots[0] == roots[1]


@pytest.mark.parametrize(
    ("size", "killed", "kill"),
    [
        pytest.param(1, 0, AFTER_STEP_3, id="one rank, after step 3"),
        pytest.param(2, 0, IN_A_CHECKPOINT, id="the first of two ranks, inside a checkpoint"),
    ],
)
def test_a_killed_run_goes_on_to_the_same_bits(
    run: Run, whole: Callable[[int], Path], size: int, killed: int, kill: str
) -> None:
    """Seeds come from the run's seed and the place in the run: no generator has a state."""
    undisturbed = whole(size)
    steps = read(undisturbed / "metrics.jsonl")[1:]
    assert min(step["grad_norm"] for step in steps) > 0, "every half trains"
    before = tuple(NOISE + kill if rank == killed else NOISE for rank in range(size))
    path = run(size, before=before, code=-signal.SIGKILL)
    assert not (path / "summary.json").exists()
    check_same_bits(run(size, start=path), undisturbed, size)


def test_a_step_leaves_no_rollout_behind(run: Run, whole: Callable[[int], Path]) -> None:
    """The position among the tasks is the whole state of the loop."""
    path = whole(1)
    last = path / "checkpoints" / f"step_{NUM_STEPS:08d}" / "state" / "state.json"
    state = json.loads(last.read_text())
    assert set(state) == {"step", "cursor", "version", "files", "xxh3"}
    found = (state["step"], state["cursor"], state["version"])
    assert found == (NUM_STEPS, 2 * NUM_STEPS, NUM_STEPS)
    seen = [record["step"] for record in read(path / "trajectories.jsonl")]
    assert seen == [step for step in range(1, NUM_STEPS + 1) for _ in range(2 * 2)]


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_a_run_goes_on_with_another_number_of_ranks(
    run: Run, whole: Callable[[int], Path], first: int, then: int, tmp_path: Path
) -> None:
    """With the same rollouts, and weights up to the order of sums."""
    half, resumed_at = tmp_path / "run", NUM_STEPS - 2
    shutil.copytree(whole(first), half)
    for path in (half / "checkpoints" / f"step_{NUM_STEPS:08d}", half / "summary.json"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    path = run(then, start=half)
    ours, theirs = (
        [r for r in rows(each, "metrics.jsonl") if r["step"] > resumed_at]
        for each in (path, whole(first))
    )
    assert len(ours) == 2
    for mine, other in zip(ours, theirs, strict=True):
        compared = ("reward_mean", "turns_mean", "num_tokens", "loss", "grad_norm", "kl_ref")
        assert alike({key: mine[key] for key in compared}, {key: other[key] for key in compared})
    seeds = [
        sorted(record["seed"] for name in each.glob("trajectories*.jsonl") for record in read(name))
        for each in (path, whole(first))
    ]
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == NUM_STEPS * 4, (
        "every rollout once, none of those after the checkpoint twice"
    )
