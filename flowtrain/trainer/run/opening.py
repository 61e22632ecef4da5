"""Opening of a run from its newest checkpoint or from `model.path`, and the checks before it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flowtrain.config import Config
from flowtrain.config.command import Interrupt, NothingToDo
from flowtrain.evaluation.benchmarks import load_benchmarks
from flowtrain.evaluation.evaluator import Evaluator
from flowtrain.evaluation.nodes import PoolEvaluations
from flowtrain.inference.chat_engines import teacher_role
from flowtrain.logging import RunDir, atomic_write_text
from flowtrain.logging.learning_signal import LearningSignal
from flowtrain.logging.mismatch import MismatchGate
from flowtrain.records import PolicyName, UserError
from flowtrain.rollouts.batch_source import BatchSource, connect
from flowtrain.rollouts.contract import Register
from flowtrain.trainer import checkpoint
from flowtrain.trainer.devices import MemoryPeak
from flowtrain.trainer.distributed import World
from flowtrain.trainer.run.run import Run, Shared, load
from flowtrain.trainer.run.run_logger import RunLogger, train_banner
from flowtrain.trainer.setup.components import RunComponents, lock_run_dir
from flowtrain.trainer.setup.learner import Follower, make_learner
from flowtrain.trainer.setup.placement import Placement
from flowtrain.utils.files import remove, writing
from flowtrain.utils.waiting import waiting
from flowtrain.weights import WeightStore
from flowtrain.weights.ranks import on_all_ranks

SPLITS = "splits"
"""The key of the manifest that holds the fingerprints of what the run holds out."""


@contextmanager
def open_run(config: Config, interrupt: Interrupt | None = None) -> Iterator[Run]:
    """Open a run, from its newest checkpoint or from `model.path`; closes it at the end.

    Publishes and loads version `start_step`. Raises UserError for mistakes in the config, before
    the run folder exists, and NothingToDo if all requested steps are done. Collective.
    """
    with ExitStack() as cleanup:
        yield _open(config, interrupt or Interrupt(), cleanup)


def _open(config: Config, interrupt: Interrupt, cleanup: ExitStack) -> Run:
    world = World.join(config.run.device, config.run.collective_timeout_s)
    cleanup.callback(world.leave)
    cleanup.enter_context(lock_run_dir(config, world))
    # Before anything is loaded, so that a finished run ends at once.
    check_left(config, world)
    memory = MemoryPeak(world.device)
    placement = Placement.of(config, world)
    components = RunComponents.prepare(config, placement, extra_roles=teacher_role(config))
    cleanup.callback(components.close)
    check_splits(components)
    config = components.config
    benchmarks = load_benchmarks(config)
    memory_plan = components.plan_memory()
    if placement.trainers.is_member:
        memory_plan.check(config)
    all_components = [components, *map(components.beside, config.trained_beside)]
    # Only the policies that are trained follow a store, others are frozen.
    stores = {parts.config.train.policy: _store(parts.config) for parts in all_components}
    samples_here = placement.samplers.is_member and config.samples_here
    engines = components.make_policy_engines(stores, None if samples_here else ())
    sampled = Counter[PolicyName]()
    agent = components.make_agent(engines, config.agent.max_turns, sampled=sampled)
    cleanup.callback(agent.close)
    shared = Shared(
        interrupt=interrupt,
        memory=memory,
        memory_plan=memory_plan,
        engines=engines,
        sampled=sampled,
        agent=agent,
        benchmarks=benchmarks,
    )
    first = _open_policy(shared, components, cleanup)
    runs_beside = (_open_policy(shared, parts, cleanup, first) for parts in all_components[1:])
    return replace(first, beside=tuple(runs_beside))


def _store(config: Config) -> WeightStore:
    return WeightStore(Path(config.run.dir) / "weights")


def _open_policy(
    shared: Shared, components: RunComponents, cleanup: ExitStack, first: Run | None = None
) -> Run:
    """Open the trainer of a policy: the first, or one that continues from the step of the first."""
    config, placement, world = components.config, components.placement, components.world
    if first is not None:
        cleanup.enter_context(lock_run_dir(config, world))
    facts = {"memory_plan": shared.memory_plan.parts, SPLITS: components.tasks.splits}
    run_dir = components.open_run_dir(facts)
    if world.is_main:  # turns the ids in the logs into words
        tokenizer = components.policies[config.first_policy].tokenizer
        atomic_write_text(run_dir.tokenizer, tokenizer.backend_tokenizer.to_str())
    learner = make_learner(components, _store(config), run_dir.checkpoints)
    cleanup.callback(learner.close)
    with waiting("reading the checkpoint", world.is_main):
        state = resume(run_dir, learner, None if first is None else first.start_step)
    with waiting("publishing and loading the weights", world.is_main):
        # The store may have versions of steps that the checkpoint does not know.
        learner.republish(state["step"])
        load(shared.engines[config.train.policy], state["step"], placement)
    if first is None:  # now that the config cannot be refused any more
        if world.is_main:
            print(train_banner(components, state["step"]), shared.memory_plan.text(), sep="\n")
        components.show_sources()
    logger = RunLogger(
        config, placement, run_dir, shared.memory, start_step=state["step"], is_shown=first is None
    )
    cleanup.callback(logger.close)
    evaluator = Evaluator(
        components=components, engines=shared.engines, benchmarks=shared.benchmarks
    )
    pool = None
    if config.dataflow.url:
        note = logger.progress.note
        source = BatchSource(connect(config), config, world, shared.interrupt, note)
        cleanup.callback(source.close)
        # Nodes may pull the weights from now on.
        source.register(_registration(components, state["step"]), state["dataflow"])
        pool = PoolEvaluations(source, config, world, note)
        cleanup.callback(pool.close)
        pool.resume(evaluator, logger.evaluated, state["step"])
    cursor = components.tasks.cursor(config.run.seed, state["cursor"])
    return Run(
        components=components,
        shared=shared,
        learner=learner,
        cursor=cursor if first is None else first.cursor,
        signal=LearningSignal(config, world.is_main),
        gate=MismatchGate(config, world.is_main),
        evaluator=evaluator,
        pool=pool,
        logger=logger,
        start_step=state["step"],
    )


def _registration(components: RunComponents, step: int) -> Register:
    """Return the registration of the trained policy with the dataflow, for a run that continues at
    `step`.
    """
    config, model_config = components.config, components.model.config
    spec, dtype = components.policies[config.train.policy], getattr(torch, config.model.dtype)
    return Register(
        policy=config.train.policy,
        layout=spec.layout(dtype, config.lora),
        store=config.dataflow.store or str(_store(config).root.resolve()),
        num_groups=config.rollout.num_questions,
        max_staleness=config.dataflow.max_staleness,
        vocab_size=model_config.vocab_size,
        max_positions=model_config.max_position_embeddings,
        step=step,
    )


def check_left(config: Config, world: World) -> None:
    """Raise NothingToDo for a run with more steps than requested, whose end would overwrite an
    earlier checkpoint. Writes nothing.
    """
    num_steps = config.train.num_steps

    def last_saved_step() -> int:
        if not world.is_main or config.run.resume != "auto":
            return 0
        root = RunDir(Path(config.run.dir)).checkpoints
        steps = [int(folder.name[5:13]) for folder in root.glob("step_????????*")]
        # All of a checkpoint is read to tell whether it is whole, so only where it matters.
        path = checkpoint.latest(root) if max(steps, default=0) > num_steps else None
        return 0 if path is None else int(checkpoint.load_state(path)["step"])

    num_done = round(world.max([on_all_ranks(world, last_saved_step, other_failed=UserError)])[0])
    if num_done > num_steps:
        raise NothingToDo(f"{num_done} of {num_steps} steps are done, so nothing is left to do")


def check_splits(components: RunComponents) -> None:
    """Raise UserError if a resumed run would hold out other questions than at its start, because it
    would train on held-out questions and be evaluated on trained ones. Collective.

    Runs of older versions without fingerprints pass.
    """
    run, current = components.config.run, components.tasks.splits
    manifest_path = Path(run.dir) / "manifest.json"

    def check() -> None:
        if not components.world.is_main or run.resume != "auto" or not manifest_path.exists():
            return
        recorded = json.loads(manifest_path.read_text()).get(SPLITS)
        if recorded is None or set(recorded.values()) == set(current.values()):
            return
        added = [key for key, value in current.items() if value not in recorded.values()]
        gone = [key for key, value in recorded.items() if value not in current.values()]
        raise UserError(
            f"{(added or gone)[0]} holds out other questions than at the start of {run.dir}, so "
            "the run would train on questions from its evaluation: restore the old file and "
            "tasks.held_out_share, or choose another --run.dir"
        )

    on_all_ranks(components.world, check, other_failed=UserError)


def resume(run_dir: RunDir, learner: Follower, required_step: int | None = None) -> dict[str, Any]:
    """Load the newest checkpoint, if the run resumes, or the checkpoint of `required_step`, from
    which another policy continues; return the state of the loop.
    """
    config, world = learner.config, learner.components.world

    def newest_path() -> str:
        """Rank 0 alone reads all of them."""
        if not world.is_main or config.run.resume != "auto":
            return ""
        root = run_dir.checkpoints
        with writing(root):
            for path in root.glob("step_????????*"):
                # A kill may have come before the first policy's checkpoint of this step.
                if required_step is not None and int(path.name[5:13]) > required_step:
                    remove(path)
            checkpoint_path = checkpoint.settle(root)
        if required_step and checkpoint_path != checkpoint.place(root, required_step):
            raise UserError(
                f"{root} has no complete checkpoint of step {required_step}, from which the "
                f"{config.train.policy} continues: restore it, or choose another --run.dir"
            )
        return str(checkpoint_path or "")

    path_text, *_ = world.gather_text(on_all_ranks(world, newest_path, other_failed=UserError))
    if not path_text:
        return {"step": 0, "cursor": 0, "dataflow": ""}
    path = Path(path_text)
    state = {"dataflow": "", **checkpoint.load_state(path)}
    learner.resume(path)
    if state["dataflow"] and not config.dataflow.url:
        raise UserError(
            f"dataflow.url is empty, but {path} was trained from the dataflow "
            f"{state['dataflow']!r}: set dataflow.url to its service"
        )
    return state
