"""Open a run: all parts, from its newest checkpoint or from `model.path`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from flowtrain.agents.base import Agent
from flowtrain.algorithms import load_algorithm
from flowtrain.config import Config
from flowtrain.config.command import Interrupt
from flowtrain.evaluation.evaluator import Evaluator
from flowtrain.evaluation.metrics import load_benchmarks
from flowtrain.evaluation.nodes import PoolEvaluations
from flowtrain.inference.chat_engines import ChatEngines
from flowtrain.inference.protocol import Engine
from flowtrain.logging import atomic_write_text
from flowtrain.logging.learning_signal import LearningSignal
from flowtrain.logging.mismatch import MismatchGate
from flowtrain.records import PolicyName, Task, UserError
from flowtrain.rewards import Judge
from flowtrain.rollouts.batch_source import open_batch_source
from flowtrain.trainer.devices import MemoryPeak
from flowtrain.trainer.distributed import World
from flowtrain.trainer.run.banner import train_banner
from flowtrain.trainer.run.resume import SPLITS, check_left, check_splits, resume
from flowtrain.trainer.run.run import Run, load
from flowtrain.trainer.run.run_logger import RunLogger
from flowtrain.trainer.setup.components import RunComponents, load_trained_policy, lock_run_dir
from flowtrain.trainer.setup.learner import Learner
from flowtrain.trainer.setup.memory_plan import MemoryPlan
from flowtrain.trainer.setup.placement import Placement
from flowtrain.trainer.setup.token_budget import with_token_budget
from flowtrain.utils.waiting import waiting
from flowtrain.weights import WeightStore
from flowtrain.weights.ranks import together


def beside(components: RunComponents, policy: PolicyName) -> RunComponents:
    """Load another policy that the run trains: the same parts, but for what learns; collective.
    They are not closed.
    """
    algorithm = load_algorithm(components.config.beside(policy))
    config, world = algorithm.config, components.world
    algorithm.check_agent(components.agent_kind)
    with waiting(f"loading {config.model.path}", world.is_main):
        load = partial(load_trained_policy, config, components.tasks, world.is_main)
        tokenizer, model = together(world, load, other_failed=UserError)
    return replace(
        components,
        algorithm=algorithm,
        tokenizer=tokenizer,
        model=model,
        chats=ChatEngines({}, {}),  # which the first policy's parts count
    )


@contextmanager
def open_run(config: Config, interrupt: Interrupt | None = None) -> Iterator[Run]:
    """Open a run, from its newest checkpoint or from `model.path`; closes it at the end.

    Version `start_step` is then published and loaded. Raises UserError for what the config gets
    wrong, before the run folder is made, and NothingToDo where more steps are done than asked for.
    Collective.
    """
    with ExitStack() as cleanup:
        yield _open(config, interrupt or Interrupt(), cleanup)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flow:
    """Holds what all policies of a run have in common."""

    placement: Placement
    interrupt: Interrupt
    memory: MemoryPeak
    memory_plan: MemoryPlan
    stores: Mapping[str, WeightStore]
    engines: dict[str, Engine]
    sampled: Counter[PolicyName]
    agent: Agent
    judge: Judge | None
    benchmarks: Mapping[str, Sequence[Task]]
    cleanup: ExitStack


def _open(config: Config, interrupt: Interrupt, cleanup: ExitStack) -> Run:
    world = World.join(config.run.device, config.run.collective_timeout_s)
    cleanup.callback(world.leave)
    cleanup.enter_context(lock_run_dir(config, world))
    check_left(config, world)
    memory = MemoryPeak(world.device)
    placement = Placement.of(config, world)
    components = RunComponents.prepare(config, world)
    cleanup.callback(components.close)
    check_splits(components)
    components = with_token_budget(components, placement)
    config = components.config
    benchmarks = load_benchmarks(config)
    memory_plan = components.plan_memory(placement)
    if placement.trainers.is_member:
        memory_plan.check(config)
    every = [components, *(beside(components, name) for name in config.trained_beside)]
    # Only the policies that are trained follow a store, others are frozen.
    stores = {
        each.config.train.policy: WeightStore(Path(each.config.run.dir) / "weights")
        for each in every
    }
    engines = (
        components.make_policy_engines(stores)
        if placement.samplers.is_member and config.samples_here
        else components.make_no_engines()
    )
    judge = components.make_judge()
    sampled = Counter[PolicyName]()
    agent = components.make_agent(engines, config.agent.max_turns, sampled=sampled)
    cleanup.callback(agent.close)
    flow = _Flow(
        placement=placement,
        interrupt=interrupt,
        memory=memory,
        memory_plan=memory_plan,
        stores=stores,
        engines=engines,
        sampled=sampled,
        agent=agent,
        judge=judge,
        benchmarks=benchmarks,
        cleanup=cleanup,
    )
    first = _open_policy(flow, components)
    return replace(first, beside=tuple(_open_policy(flow, each, first) for each in every[1:]))


def _open_policy(flow: _Flow, components: RunComponents, first: Run | None = None) -> Run:
    """Open what trains a policy: the first, or one that goes on from the step of the first."""
    config, placement, cleanup = components.config, flow.placement, flow.cleanup
    world, policy = placement.world, config.train.policy
    if first is not None:
        cleanup.enter_context(lock_run_dir(config, world))
    facts = {"memory_plan": flow.memory_plan.parts, SPLITS: components.tasks.splits}
    run_dir = components.open_run_dir(facts)
    if world.is_main:  # turns the ids in the logs into words
        tokenizer = components.policies[config.first_policy].tokenizer
        atomic_write_text(run_dir.tokenizer, tokenizer.backend_tokenizer.to_str())
    learner = Learner.make(components, placement, flow.stores[policy], run_dir.checkpoints)
    cleanup.callback(learner.close)
    with waiting("reading the checkpoint", world.is_main):
        at = None if first is None else first.start_step
        state = resume(config, run_dir, learner, world, at)
    with waiting("publishing and loading the weights", world.is_main):
        learner.republish(state["step"])
        load(flow.engines[policy], state["step"], placement)
    if first is None:  # now that the config cannot be refused any more
        if world.is_main:
            banner = train_banner(components, placement, state["step"])
            print(banner, flow.memory_plan.text(), sep="\n")
        components.show_sources()
    logger = RunLogger(
        components,
        placement,
        run_dir,
        memory=flow.memory,
        start_step=state["step"],
        is_shown=first is None,
    )
    cleanup.callback(logger.close)
    evaluator = Evaluator(
        components=components,
        engines=flow.engines,
        judge=flow.judge,
        samplers=placement.samplers,
        benchmarks=flow.benchmarks,
    )
    pool = None
    if config.dataflow.url:
        source = open_batch_source(
            config,
            world,
            components.registration(state["step"]),
            trained_from=state["dataflow"],
            interrupt=flow.interrupt,
            note=logger.progress.note,
        )
        cleanup.callback(source.close)
        pool = PoolEvaluations(source, config, world, logger.progress.note)
        cleanup.callback(pool.close)
        pool.resume(evaluator, logger.evaluated, state["step"])
    cursor = components.tasks.cursor(config.run.seed, state["cursor"])
    return Run(
        config=config,
        components=components,
        algorithm=components.algorithm,
        placement=placement,
        interrupt=flow.interrupt,
        engines=flow.engines,
        agent=flow.agent,
        sampled=flow.sampled,
        judge=flow.judge if first is None else None,  # which is asked, and counted, once
        learner=learner,
        cursor=cursor if first is None else first.cursor,
        signal=LearningSignal(config, world.is_main),
        gate=MismatchGate(config, world.is_main),
        evaluator=evaluator,
        pool=pool,
        logger=logger,
        run_dir=run_dir,
        memory_plan=flow.memory_plan,
        start_step=state["step"],
    )
