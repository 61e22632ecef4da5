"""The checkpoint that a resumed run goes on from, and what keeps it from going on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flowtrain.config import Config
from flowtrain.config.command import NothingToDo
from flowtrain.logging import RunDir
from flowtrain.records import UserError
from flowtrain.trainer import checkpoint
from flowtrain.trainer.distributed import World
from flowtrain.trainer.setup.components import RunComponents
from flowtrain.trainer.setup.learner import Learner
from flowtrain.utils.files import remove, writing
from flowtrain.weights.ranks import on_all_ranks

SPLITS = "splits"
"""The key of the manifest that holds the fingerprints of what the run holds out."""


def check_left(config: Config, world: World) -> None:
    """Raise NothingToDo for a run that has taken more steps than it is to have: its end would be
    written over the checkpoint of an earlier step. Writes nothing.
    """
    num_steps = config.train.num_steps

    def count() -> int:
        if not world.is_main or config.run.resume != "auto":
            return 0
        root = RunDir(Path(config.run.dir)).checkpoints
        steps = [int(path.name[5:13]) for path in root.glob("step_????????*")]
        # All of a checkpoint is read to tell whether it is whole, so only where it matters.
        found = checkpoint.latest(root) if max(steps, default=0) > num_steps else None
        return 0 if found is None else int(checkpoint.load_state(found)["step"])

    num_done = round(world.max([on_all_ranks(world, count, other_failed=UserError)])[0])
    if num_done > num_steps:
        raise NothingToDo(f"{num_done} of {num_steps} steps are done, so nothing is left to do")


def check_splits(components: RunComponents) -> None:
    """Raise UserError where a run that goes on would hold other questions out than at its start:
    it would train some of those, and be measured on some that it has trained. Collective.

    A run of a version that kept no fingerprints passes.
    """
    run, now = components.config.run, components.tasks.splits
    path = Path(run.dir) / "manifest.json"

    def check() -> None:
        if not components.world.is_main or run.resume != "auto" or not path.exists():
            return
        begun = json.loads(path.read_text()).get(SPLITS)
        if begun is None or set(begun.values()) == set(now.values()):
            return
        added = [key for key, value in now.items() if value not in begun.values()]
        gone = [key for key, value in begun.items() if value not in now.values()]
        raise UserError(
            f"{(added or gone)[0]} does not hold out what it did when {run.dir} began, so the run "
            "would train questions that it was measured on: bring the old file and "
            "tasks.held_out_share back, or choose another --run.dir"
        )

    on_all_ranks(components.world, check, other_failed=UserError)


def resume(
    config: Config, run_dir: RunDir, learner: Learner, world: World, at: int | None = None
) -> dict[str, Any]:
    """Load the newest checkpoint, if the run is to be resumed, or that of step `at`, where another
    policy of the run goes on; return the state of the loop.
    """

    def choose() -> str:
        """Rank 0 alone reads all of them."""
        if not world.is_main or config.run.resume != "auto":
            return ""
        root = run_dir.checkpoints
        with writing(root):
            for path in root.glob("step_????????*"):
                if at is not None and int(path.name[5:13]) > at:
                    remove(path)
            found = checkpoint.settle(root)
        if at and found != checkpoint.place(root, at):
            raise UserError(
                f"{root} has no whole checkpoint of step {at}, from which the "
                f"{config.train.policy} would go on: bring it back, or choose another --run.dir"
            )
        return str(found or "")

    chosen, *_ = world.gather_text(on_all_ranks(world, choose, other_failed=UserError))
    if not chosen:
        return {"step": 0, "cursor": 0, "dataflow": ""}
    path = Path(chosen)
    state = {"dataflow": "", **checkpoint.load_state(path)}
    learner.resume(path)
    if state["dataflow"] and not config.dataflow.url:
        raise UserError(
            f"dataflow.url is empty, but {path} was trained from the dataflow "
            f"{state['dataflow']!r}: name its service"
        )
    return state
