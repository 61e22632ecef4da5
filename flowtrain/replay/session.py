"""A replay: the half of a run that learns, fed with what the run has written down."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flowtrain.config import Config
from flowtrain.records import SampleId, TrainBatch, UserError
from flowtrain.replay.batch_digests import difference, left_out, missing
from flowtrain.replay.recorded import Recorded
from flowtrain.replay.weights import Difference, compare, differing, recorded_weights, unknown
from flowtrain.trainer import checkpoint
from flowtrain.trainer.distributed import World
from flowtrain.trainer.model.loading import whole
from flowtrain.trainer.setup.components import LearnerComponents
from flowtrain.trainer.setup.learner import Follower, Learner, make_learner
from flowtrain.trainer.setup.placement import Placement
from flowtrain.weights import WeightStore
from flowtrain.weights.format.manifest import digest_hex
from flowtrain.weights.format.tensor_shards import digests_of

Say = Callable[[str], None]


@dataclass(slots=True)
class Outcome:
    """The result of a replay, the same on every rank."""

    steps: range
    """Steps that were asked for."""
    num_steps: int = 0
    """Steps that were made again."""
    num_equal: int = 0
    """Versions whose every digest is that of the run; that before the first step counts too."""
    num_close: int = 0
    """Versions that differ by no more than the tolerance."""
    problems: list[str] = field(default_factory=list)
    """Texts of what differs or was changed, in the order of steps."""
    notes: list[str] = field(default_factory=list)
    """Why bits cannot be expected, and what was not compared."""
    seconds: float = 0.0
    """From the first step to the last."""
    largest: float | None = None
    """Largest difference of two weights, over the versions that could be compared so."""
    last_fine: int = -1
    """Newest version that is equal or close enough."""

    @property
    def is_equal(self) -> bool:
        """All that was asked for was made again, and nothing differs."""
        return not self.problems and self.last_fine == self.steps[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A replay that is under way. Methods are collective."""

    recorded: Recorded
    learner: Follower
    outcome: Outcome
    tolerance: float | None
    is_exact: bool
    """The ranks are those of the run, so every bit is expected."""
    say: Say

    @property
    def world(self) -> World:
        return self.learner.components.placement.world

    def run(self) -> None:
        """Make the steps again, until one differs."""
        steps, (lines, damage) = self.outcome.steps, self._damage()
        self.outcome.problems += lines
        started = time.monotonic()
        # Of the start, too: from other weights no step can come out the same.
        goes_on = self._check_version(steps.start - 1)
        for step in steps if goes_on else ():
            if step in damage or not self._step(step):
                break
            self.outcome.seconds = time.monotonic() - started
        self.outcome.problems += [text for texts in damage.values() for text in texts]

    def _damage(self) -> tuple[list[str], dict[int, list[str]]]:
        """Return, and say, what was changed on the disk: lines of the log, and by step its files;
        rank 0 alone looks.
        """
        lines: list[str] = []
        files: dict[int, list[str]] = {}
        if self.world.is_main:
            lines = [problem.text for problem in self.recorded.problems]
            steps_named = {problem.step for problem in self.recorded.problems}
            for step in self.outcome.steps:
                if step in self.recorded.steps:
                    if texts := self.recorded.damage(step):
                        files[step] = texts
                else:
                    is_named = step in steps_named
                    files[step] = [] if is_named else [f"step {step}: it has no line in the log"]
        lines, files_by_step = json.loads(self.world.gather_text(json.dumps([lines, files]))[0])
        for text in (*lines, *(text for texts in files_by_step.values() for text in texts)):
            self.say(text)
        return lines, {int(step): texts for step, texts in files_by_step.items()}

    def _step(self, step: int) -> bool:
        """Make a step again; False where it differs."""
        started = time.monotonic()
        learner = self.learner
        batch = learner.advantages(self.recorded.rollouts(step, self.world))
        if text := self._batch_difference(step, batch):
            return self._differs(f"step {step}: the batch differs: {text}")
        rows = learner.balance(learner.pack(batch))
        rows = learner.ref_logprobs(learner.old_logprobs(rows))
        learner.train(step, rows)
        prepared_at = time.monotonic()
        if not self._check_version(step):
            return False
        self.outcome.num_steps += 1
        seconds, compared_s = time.monotonic() - started, time.monotonic() - prepared_at
        count = f"{self.outcome.num_equal} versions equal"
        self.say(f"step {step}: {seconds:.2f} s ({compared_s:.2f} s of it comparing); {count}")
        return True

    def _batch_difference(self, step: int, batch: TrainBatch) -> str:
        """Name the first place where the batch is not that of the run, over all ranks."""
        recorded = self.recorded.batch(step)
        local_facts = {
            "found": difference(batch, recorded["samples"]),
            "trained": [sample.sample_id for sample in batch.samples],
            "left_out": left_out(batch),
        }
        rank_facts = [json.loads(text) for text in self.world.gather_text(json.dumps(local_facts))]
        trained = {SampleId(*sample_id) for facts in rank_facts for sample_id in facts["trained"]}
        found = [facts["found"] for facts in rank_facts if facts["found"]]
        differences = [(SampleId(*sample_id), text) for sample_id, text in found]
        if (missing_sample := missing(trained, recorded["samples"])) is not None:
            differences.append(missing_sample)
        if differences:
            # The first of all ranks, so that each of them says the same.
            return min(differences)[1]
        for reason, recorded_count in recorded["left_out"].items():
            count = sum(facts["left_out"].get(reason, 0) for facts in rank_facts)
            if count != recorded_count:
                return f"{count} left out as {reason}, there were {recorded_count}"
        return ""

    def _check_version(self, step: int) -> bool:
        """Compare the weights after `step` with the version of the run; False where they differ so
        much that nothing after them can be equal.
        """
        recorded_digests, outcome = self.recorded.version(step), self.outcome
        names = () if recorded_digests is None else differing(self._digests(), recorded_digests)
        if not names:
            outcome.num_equal += recorded_digests is not None
            outcome.last_fine = step
            return True
        weight_difference = self._difference(step, names)
        if weight_difference.largest is not None:
            outcome.largest = max(outcome.largest or 0.0, weight_difference.largest)
        if self.tolerance is None:
            self._differs(weight_difference.text)
            return not self.is_exact
        if weight_difference.largest is None:
            return True
        if weight_difference.largest > self.tolerance:
            return self._differs(weight_difference.text)
        outcome.num_close += 1
        outcome.last_fine = step
        return True

    def _digests(self) -> dict[str, str]:
        """Compute the digests of the weights by tensor, on every rank."""
        learner, local_digests = self.learner, {}
        if isinstance(learner, Learner):
            dtype = getattr(torch, learner.config.model.dtype)
            ranks, threads = learner.components.placement.trainers, torch.get_num_threads()
            digest_words = digests_of(learner.weights, dtype, ranks, threads)
            local_digests = {name: digest_hex(digest) for name, digest in digest_words.items()}
        digests: dict[str, str] = json.loads(self.world.gather_text(json.dumps(local_digests))[0])
        return digests

    def _difference(self, step: int, names: tuple[str, ...]) -> Difference:
        """Look for the first word that differs, where the run still has the version."""
        learner, config = self.learner, self.learner.config
        weights = {}
        if isinstance(learner, Learner):
            # Collective over the ranks that train, so before rank 0 alone compares.
            weights = whole(learner.weights)
        result = unknown(step, names)
        if self.world.is_main:
            recorded_tensors = recorded_weights(self.recorded.run, config, step)
            if recorded_tensors is not None:
                dtype = getattr(torch, config.model.dtype)
                replayed = {name: weights[name].to(dtype) for name in names if name in weights}
                result = compare(step, names, replayed, recorded_tensors)
        text = json.dumps([result.where, result.largest])
        where, largest = json.loads(self.world.gather_text(text)[0])
        return Difference(step, names, where, largest)

    def _differs(self, text: str) -> bool:
        self.outcome.problems.append(text)
        self.say(text)
        return False


def replay(
    run: Path, first: int | None, last: int | None, tolerance: float | None, say: Say
) -> Outcome:
    """Make the steps `first` to `last` of a run again; collective. None: from its first step, and
    to its last.

    Raises UserError for steps that the log has not, or from which nothing can begin.
    """
    recorded = Recorded.read(run)
    steps = _steps(recorded, first, last)
    with _open(recorded, steps) as (learner, notes):
        world = learner.components.placement.world
        outcome = Outcome(steps, notes=notes)
        is_exact = not notes
        for note in notes:
            say(note)
        Session(
            recorded=recorded,
            learner=learner,
            outcome=outcome,
            tolerance=tolerance,
            is_exact=is_exact,
            say=say if world.is_main else lambda _: None,
        ).run()
    if outcome.problems and is_exact and (note := _on_threads(recorded, steps)):
        notes.append(note)
        say(note)
    return outcome


def _steps(recorded: Recorded, first: int | None, last: int | None) -> range:
    """Check the steps that are asked for against those on record."""
    if not recorded.steps:
        raise UserError(f"{recorded.folder} has no step yet")
    known_steps = range(min(recorded.steps), max(recorded.steps) + 1)
    first = known_steps.start if first is None else first
    last_alike = recorded.last_alike(recorded.life_of(first))
    for key, step in (("--from", first), ("--to", last)):
        if step is not None and (step not in known_steps or recorded.is_hole(step)):
            raise UserError(
                f"{key} {step} is not recorded; recorded steps: {_ranges(recorded.steps)}"
            )
    if last is not None and last < first:
        raise UserError(f"--to {last} is before --from {first}")
    if last is not None and last > last_alike:
        raise UserError(
            f"--to {last}: the run continued with other options, or without log.replay, after "
            f"step {last_alike}; replay up to this step, then continue with --from"
        )
    return range(first, (last_alike if last is None else last) + 1)


def _ranges(steps: Collection[int]) -> str:
    """Write steps as ranges: "1 to 2, 5 to 6"."""
    starts = [step for step in sorted(steps) if step - 1 not in steps]
    ends = [step for step in sorted(steps) if step + 1 not in steps]
    return ", ".join(f"{start} to {end}" for start, end in zip(starts, ends, strict=True))


@contextmanager
def _open(recorded: Recorded, steps: range) -> Iterator[tuple[Follower, list[str]]]:
    """Build the half of the run that learns, with the weights and moments before the first step."""
    config = recorded.config(recorded.life_of(steps.start))
    start = _start(recorded, steps.start)
    world = World.join(config.run.device, config.run.collective_timeout_s)
    try:
        placement, notes = _placement(recorded, config, world, steps)
        components = LearnerComponents.load(config, placement)
        store = WeightStore(recorded.run / "weights")
        learner = make_learner(components, store, recorded.run / "checkpoints")
        if start is not None:
            learner.resume(start)
        yield learner, notes
    finally:
        world.leave()


def _start(recorded: Recorded, first: int) -> Path | None:
    """Return the checkpoint before the first step; None: the run began there, at model.path."""
    if first == 1:
        return None
    root = recorded.run / "checkpoints"
    path = checkpoint.place(root, first - 1)
    if not (path / "state" / "state.json").is_file():
        starts = sorted(int(folder.name[5:]) + 1 for folder in root.glob("step_????????"))
        raise UserError(
            f"--from {first} needs the weights and moments after step {first - 1}, but {path} is "
            f"missing; possible first steps: {sorted({1, *starts} & recorded.steps.keys())} "
            "(checkpoint.every and checkpoint.keep keep more)"
        )
    checkpoint.verify(path)
    return path


def _placement(
    recorded: Recorded, config: Config, world: World, steps: range
) -> tuple[Placement, list[str]]:
    """Place the ranks as the run did where there are as many; say why bits cannot be expected."""
    notes = []
    lines = [recorded.steps[step] for step in steps if step in recorded.steps]
    life: dict[str, Any] = dict(recorded.lives[recorded.life_of(steps.start)])
    is_same = life["num_ranks"] == world.size
    placement = Placement.of(config, world) if is_same else Placement.colocated(world)
    if not all(_has_same_sums(line, world) for line in lines):
        numbers = " and ".join(map(str, sorted({line["num_ranks"] for line in lines})))
        notes.append(
            f"{world.size} ranks replay what {numbers} trained: sums are taken in another order, "
            "so bits may differ"
        )
    machine = {"torch": torch.__version__, "device": world.device.type}
    for key, value in machine.items():
        if life["opened"][key] != value:
            notes.append(f"{key} is {value}, but was {life['opened'][key]}: bits may differ")
    return placement, notes


def _on_threads(recorded: Recorded, steps: range) -> str:
    """Say why a CPU may have come to other bits all the same; "" where nothing is known."""
    opened = recorded.lives[recorded.life_of(steps.start)]["opened"]
    if opened["device"] != "cpu" or opened["threads"] == 1:
        return ""
    return (
        f"the run computed with {opened['threads']} threads: on busy cores the order of sums may "
        "vary, which run.threads = 1 prevents"
    )


def _has_same_sums(line: Mapping[str, Any], world: World) -> bool:
    """Return whether these ranks add up in the order of those that wrote a line. A lone trainer
    that had one sampler trained the rows that both as one make.
    """
    num_ranks, num_trainers = line["num_ranks"], line["num_trainers"]
    is_pair = (num_ranks, num_trainers, world.size) == (2, 1, 1)
    return num_ranks == world.size or is_pair
