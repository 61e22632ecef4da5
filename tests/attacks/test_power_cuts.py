"""The power goes between any two file operations: what was saved and published is there."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from durable_run import CONFIG, LINES_PER_STEP, MANIFEST, DurableRun, tiny, weights
from file_ops import (
    EXTREMES,
    Disk,
    Op,
    Tree,
    all_of_it,
    by_chance,
    lay_out,
    tree_of,
    watch,
)

from flowtrain.report import RunDir
from flowtrain.report.jsonl import cut_lines, read_lines
from flowtrain.training import checkpoint
from flowtrain.types import UserError
from flowtrain.weights import WeightStore, pull
from tests.attacks.tally import Tally
from tests.weights.weight_samples import same_bits

NUM_RANDOM = 1
"""States drawn at each operation, beside the extremes."""
RESUMED = 0.03
"""Share of the states from which a run goes on."""


@dataclass(frozen=True)
class Played:
    """A run that was watched."""

    root: Path
    """The folder that holds the run's, "run"."""
    ops: list[Op]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    place = tmp_path_factory.mktemp("played")
    root, here = place / "root", Path(__file__).parents[2]
    root.mkdir()
    command = [sys.executable, str(Path(__file__).with_name("durable_run.py")), str(root / "run")]
    env = {**os.environ, "PYTHONPATH": f"{here}:{here / 'kernels'}"}
    return Played(root, watch(command, root, place, env))


@dataclass
class Promised:
    """What has been promised by some operation."""

    begun: bool = False
    saved: int = -1
    published: int = -1

    def note(self, mark: str) -> None:
        *words, number = mark.split() if " " in mark else (mark, "0")
        match " ".join(words):
            case "begun":
                self.begun = True
            case "saved":
                self.saved = int(number)
            case "published":
                self.published = int(number)
            case "rolled back":
                self.published = min(self.published, int(number) - 1)
            case _:
                raise ValueError(mark)


def problem_of(run: Path, promised: Promised) -> str:
    """Say what is wrong with a run after a power cut; "" when nothing is."""
    manifest = run / "manifest.json"
    if promised.begun and not manifest.exists():
        return "the run is gone"
    if manifest.exists() and (
        json.loads(manifest.read_text()) != MANIFEST or (run / "config.toml").read_text() != CONFIG
    ):
        return "the config is torn"
    found = checkpoint.latest(run / "checkpoints")
    step = checkpoint.load_state(found)["step"] if found else -1
    if step < promised.saved:
        return f"checkpoint {promised.saved} was saved, {step} is found"
    store = WeightStore(run / "weights")
    head = store.head()
    if (head if head is not None else -1) < promised.published:
        return f"version {promised.published} was published, HEAD is {head}"
    if head is not None and not same_bits(pull(store, head), weights(head)):
        return f"version {head} holds other weights"
    log = run / "metrics.jsonl"
    cut_lines(log, step)
    lines = [record["step"] for record in read_lines(log)] if log.exists() else []
    if step > 0 and lines != [each for each in range(1, step + 1) for _ in range(LINES_PER_STEP)]:
        return f"checkpoint {step} has lines of {sorted(set(lines))}"
    return ""


def goes_on(run: Path, parts: tuple[object, ...]) -> str:
    """Resume a run, and say what is wrong; "" when nothing is."""
    resumed = DurableRun(run, parts)
    start = resumed.step
    resumed.advance()
    resumed.save()
    resumed.close()
    if resumed.store.head() != start + 1 or (
        checkpoint.latest(run / "checkpoints") != run / "checkpoints" / f"step_{start + 1:08d}"
    ):
        return f"it did not get from step {start} to {start + 1}"
    return problem_of(run, Promised(True, start + 1, start + 1))


def states(ops: list[Op], root: Path, seed: int) -> Iterator[tuple[int, Tree, Promised]]:
    """Every state that a cut may leave: of each prefix the extremes, and some by chance; each
    once.
    """
    rng, disk, promised = random.Random(seed), Disk(root), Promised()
    for number, op in enumerate(ops, 1):
        if op.kind == "mark":
            promised.note(op.data.decode())
            continue
        disk.apply(op)
        chance = [by_chance(rng) for _ in range(NUM_RANDOM)]
        seen: list[Tree] = []
        for choose in (*EXTREMES, *chance):
            tree = disk.after_cut(choose)
            if tree not in seen:
                seen.append(tree)
                yield number, tree, promised


def check(name: str, action: Callable[[], str]) -> str:
    """Run a check; an error that it raises is a problem too."""
    try:
        found = action()
    except (UserError, OSError, ValueError, KeyError, AssertionError) as error:
        found = f"{type(error).__name__}: {error}"
    return found and f"{name}: {found}"


def test_the_log_is_complete(played: Played) -> None:
    """Nothing was written past it: the last state, were all of it on the disk, is the folder."""
    disk = Disk(played.root)
    for op in played.ops:
        if op.kind != "mark":
            disk.apply(op)
    assert disk.after_cut(all_of_it) == tree_of(played.root)
    assert sum(op.kind == "sync" for op in played.ops) > 50


@pytest.mark.timeout(900)
def test_what_was_promised_survives_a_power_cut(
    played: Played, campaign: Iterator[int], tally: Tally, tmp_path: Path
) -> None:
    parts, problems = tiny(), []
    for seed in campaign:
        rng, num_states, folder, before = random.Random(seed), 0, tmp_path / "cut", {}
        folder.mkdir(exist_ok=True)
        for number, tree, promised in states(played.ops, played.root, seed):
            lay_out(tree, folder, before)
            before = tree
            num_states += 1
            where = f"seed {seed}, after operation {number}, {played.ops[number - 1]}"
            found = check(where, lambda promised=promised: problem_of(folder / "run", promised))
            if not found and rng.random() < RESUMED:
                found = check(f"{where}, resumed", lambda: goes_on(folder / "run", parts))
            problems += [found] if found else []
            before = tree_of(folder)
        shutil.rmtree(folder)
        tally.add("power cuts", num_states, len(problems))
        assert not problems, f"{len(problems)} of {num_states}: " + "\n".join(problems[:5])
