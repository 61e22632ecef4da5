"""The power goes between any two file operations: what was saved and published is there."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from flowtrain.logging.jsonl import cut_lines, read_lines
from flowtrain.records import UserError
from flowtrain.trainer import checkpoint
from flowtrain.weights import WeightStore, pull
from tests.attacks.durable_run import CONFIG, LINES_PER_STEP, MANIFEST, DurableRun, tiny, weights
from tests.attacks.file_ops import (
    EXTREMES,
    Disk,
    Op,
    Tree,
    _parse,
    all_of_it,
    by_chance,
    lay_out,
    tree_of,
    watch,
)
from tests.attacks.tally import Tally
from tests.weights.weight_samples import same_bits

LOG = "run/metrics.jsonl"
NUM_RANDOM = 1
"""States drawn at each operation, beside the extremes."""
SHARE = 0.15
"""Of the states, those that are looked at outside of `make attack`."""
RESUMED = 0.02
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


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is resumed on a made-up disk need not wait for the real one."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@dataclass
class Promised:
    """What has been promised by some operation."""

    begun: bool = False
    saved: int = -1
    published: int = -1
    logged: int = 0

    def note(self, mark: str) -> None:
        *words, number = mark.split() if " " in mark else (mark, "0")
        match " ".join(words):
            case "begun":
                self.begun = True
            case "saved":
                self.saved = int(number)
            case "published":
                self.published = int(number)
            case "logged":
                self.logged = int(number)
            case "rolled back":
                self.published = min(self.published, int(number) - 1)
                self.logged = min(self.logged, int(number))
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
    for last in (max(step, promised.logged), step):
        cut_lines(log, last or -1)
        lines = [record["step"] for record in read_lines(log)] if log.exists() else []
        if lines != [each for each in range(1, last + 1) for _ in range(LINES_PER_STEP)]:
            return f"of {last} steps there are lines of {sorted(set(lines))}"
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
    """Every state that a cut may leave: of each prefix the extremes, and some by chance."""
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


def problems_in(
    ops: list[Op],
    root: Path,
    folder: Path,
    seed: int,
    *,
    resumed: float,
    start: int = 0,
    share: float = 1.0,
) -> Iterator[str]:
    """Yield what is wrong ("" mostly) in a share of the states after operation `start`."""
    parts, rng, before, run = tiny(), random.Random(seed), Tree(), folder / "run"
    folder.mkdir()
    for number, tree, promised in states(ops, root, seed):
        if number <= start or rng.random() >= share:
            continue
        lay_out(tree, folder, before)
        where = f"seed {seed}, after operation {number}, {ops[number - 1]}"
        found = check(where, lambda promised=promised: problem_of(run, promised))
        before = tree | {path: (folder / path).read_bytes() for path in (LOG,) if path in tree}
        if not found and rng.random() < resumed:
            found = check(f"{where}, resumed", lambda: goes_on(run, parts))
            before = tree_of(folder)
        yield found
    shutil.rmtree(folder)


def test_what_was_promised_survives_a_power_cut(
    played: Played, campaign: Iterator[int], tally: Tally, tmp_path: Path
) -> None:
    for seed in campaign:
        share = 1.0 if "ATTACK_MINUTES" in os.environ else SHARE
        cuts = problems_in(
            played.ops, played.root, tmp_path / "cut", seed, resumed=RESUMED, share=share
        )
        found = [*cuts]
        problems = [each for each in found if each]
        tally.add("power cuts", len(found), len(problems))
        assert not problems, f"{len(problems)} of {len(found)}: " + "\n".join(problems[:5])


def test_without_one_of_the_syncs_it_would_not(played: Played, tmp_path: Path) -> None:
    """The disk of these tests is bad enough, and no sync is in vain."""

    def kind(op: Op) -> str:
        path = op.path.removeprefix(str(played.root))
        return re.sub(r"\.[0-9a-f]{8}$", "", re.sub(r"\d{8}", "N", path))

    kinds = dict.fromkeys(kind(op) for op in played.ops if op.kind == "sync")
    assert len(kinds) > 15
    for number, left_out in enumerate(kinds):
        is_out = [op.kind == "sync" and kind(op) == left_out for op in played.ops]
        ops = [op for op, out in zip(played.ops, is_out, strict=True) if not out]
        folder, first = tmp_path / f"cut{number}", is_out.index(True)
        found = problems_in(ops, played.root, folder, 0, resumed=0.0, start=first)
        assert any(found), f"nothing is lost without the sync of {left_out}"


INDEX = """
import json, sys
from pathlib import Path
from flowtrain.config.search import Corpus
from flowtrain.tools.retrieval.index import ensure_index

corpus = Path(sys.argv[1], "corpus.jsonl")
for number in range(2):
    corpus.write_text("".join(json.dumps({"text": f"a {number} {n}"}) + "\\n" for n in range(3)))
    folder, _ = ensure_index(Corpus(path=str(corpus)))
    Path(sys.argv[2], f"{number}").write_bytes((folder / "stamp.json").read_bytes())
"""
"""Builds the index of a corpus, and again when that has changed."""


def test_an_index_is_whole_or_absent(tally: Tally, tmp_path: Path) -> None:
    """An index whose stamp can be read is one that was built, and no folder is without a stamp."""
    root, stamps = tmp_path / "root", tmp_path / "stamps"
    root.mkdir(), stamps.mkdir()
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ops = watch([sys.executable, "-c", INDEX, str(root), str(stamps)], root, tmp_path, env)
    disk, name, built, num_states, torn = Disk(root), "corpus.jsonl.index", [], 0, []
    for op in ops:  # what was built, seen before anything went wrong
        disk.apply(op)
        if op.kind == "rename" and op.data.decode() == str(root / name):
            built.append(index_of(disk.after_cut(all_of_it), name))
    found = [tree["stamp.json"] for tree in built]
    assert found == [(stamps / str(number)).read_bytes() for number in range(2)]
    for number, tree, _ in states(ops, root, 0):
        num_states += 1
        if name in tree and index_of(tree, name) not in built:
            torn.append(f"after operation {number}, {ops[number - 1]}: {sorted(tree)}")
    tally.add("power cuts", num_states, len(torn))
    assert not torn, torn[:3]


def index_of(tree: Tree, name: str) -> Tree:
    """What a folder holds."""
    return {
        path.removeprefix(f"{name}/"): each for path, each in tree.items() if f"{name}/" in path
    }


def test_calls_of_threads_that_cut_each_other_off_are_read_whole(tmp_path: Path) -> None:
    """The sync is done when it returns, which is after another thread's write."""
    path, other = (str(tmp_path / name).encode().hex() for name in ("a", "b"))
    named, beside = (re.sub("..", r"\\x\g<0>", each) for each in (path, other))
    lines = [
        f'1 openat(AT_FDCWD, "{named}", O_WRONLY|O_CREAT|O_TRUNC, 0666) = 3<{named}>\n',
        f'1 write(3<{named}>, "\\x31", 1) = 1\n',
        f"1 fsync(3<{named}> <unfinished ...>\n",
        f'2 openat(AT_FDCWD, "{beside}", O_WRONLY|O_CREAT, 0666) = 4<{beside}>\n',
        f'2 write(4<{beside}>, "\\x32", 1 <unfinished ...>\n',
        "1 <... fsync resumed>)     = 0\n",
        "2 <... write resumed>)     = 1\n",
        "1 +++ exited with 0 +++\n",
    ]
    kinds = [(op.kind, Path(op.path).name) for op in _parse(lines, tmp_path, tmp_path / "marks")]
    first = [("create", "a"), ("truncate", "a"), ("write", "a")]
    assert kinds == [*first, ("create", "b"), ("sync", "a"), ("write", "b")]
