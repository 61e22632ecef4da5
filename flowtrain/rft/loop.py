"""Rejection-sampling fine-tuning:  python -m flowtrain.rft --config configs/quickstart.toml
--run.dir runs/warm

Collect rollouts from a scripted expert, from a teacher or from the policy itself, keep those that
scored, and imitate what `train.policy` said in them (also as the refiner, with
`roles.refiner = "policy"`). The flow, the tools, the scorer, the packing and the trainer are those
of `train.py`; only the loss is -log p. With `rft.conversations` a file's replies are imitated.

A teacher's rollouts are written down as they end (`rft/demonstrations.py`): `--resume auto` asks
for the others alone, and begins the training anew.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flowtrain.agents.agentflow.demonstrations import refinements
from flowtrain.agents.agentflow.flow import Flow
from flowtrain.agents.agentflow.teacher import is_readable
from flowtrain.agents.base import Agent
from flowtrain.config import Config
from flowtrain.config.command import INTERRUPTED, Interrupt
from flowtrain.config.train import EXPERTS
from flowtrain.evaluation.rollout_log import Question, ask, cost_text
from flowtrain.inference.chat_engines import POLICY, TEACHER
from flowtrain.logging import ProgressLine, RunDir, atomic_write_text
from flowtrain.records import Sample, TrainBatch, Trajectory, UserError
from flowtrain.rewards.shortcuts import REASONS, shortcut
from flowtrain.rft.conversations import imitate_file
from flowtrain.rft.demonstrations import DemonstrationLog, open_log
from flowtrain.rft.demonstrators import asked_policies, demonstrate, draw_tasks, make_expert
from flowtrain.rft.imitation import fit, listed, named, sample_of, trainable
from flowtrain.trainer.distributed import World
from flowtrain.trainer.run.run_logger import rft_banner
from flowtrain.trainer.setup.components import LearnerComponents, RunComponents, lock_run_dir
from flowtrain.trainer.setup.learner import publish_start
from flowtrain.trainer.setup.placement import Placement
from flowtrain.utils.seeds import derive_seed
from flowtrain.utils.text import printable
from flowtrain.weights import WeightStore

REJECTIONS = ("failed", "reward", *REASONS)
"""Why a rollout is not kept: a frozen module failed, `rft.keep`, and the rules of `rft.screen`."""


def rft(config: Config) -> int:
    """Collect demonstrations, keep the good ones, imitate them, export to `run.dir`/model."""
    with ExitStack() as cleanup:
        world = World.join(config.run.device, config.run.collective_timeout_s)
        cleanup.callback(world.leave)
        cleanup.enter_context(lock_run_dir(config, world))
        placement = Placement.colocated(world)
        if config.rft.batch_size % world.size:
            raise UserError(
                f"rft.batch_size={config.rft.batch_size} must be a multiple of the {world.size} "
                "ranks that torchrun started"
            )
        if config.rft.conversations:
            interrupt = cleanup.enter_context(Interrupt())
            return imitate_file(LearnerComponents.load(config, placement), interrupt)
        log = None if config.rft.expert in EXPERTS else open_log(config)
        missing_numbers = [] if log is None else log.missing(config.rft.num_rollouts, world.size)
        interrupt = cleanup.enter_context(Interrupt())
        components = RunComponents.prepare(
            config,
            placement,
            asked_policies=asked_policies(config),
            extra_roles={TEACHER: config.rft.expert} if missing_numbers else {},
            fictional=config.rft.fictional,
        )
        cleanup.callback(components.close)
        return _run(components, log, missing_numbers, interrupt, cleanup)


def _run(
    components: RunComponents,
    log: DemonstrationLog | None,
    missing_numbers: Sequence[int],
    interrupt: Interrupt,
    cleanup: ExitStack,
) -> int:
    config = components.config
    started = time.monotonic()
    agent, run_dir = _open(components, {} if log is None else log.facts, cleanup)
    if components.world.is_main:  # now that nothing can be refused any more
        print(rft_banner(components), flush=True)
    components.show_sources()
    demonstrations: Sequence[Trajectory]
    if log is None:  # they are not kept, so nothing is lost when they are interrupted
        demonstrations = demonstrate(components, agent)
        interrupt.defer()
    else:
        interrupt.defer()
        demonstrations = _learn_from_teacher(components, agent, log, missing_numbers, interrupt)
        if missing_numbers and interrupt.requested:
            print(
                f"{log.num_done} of {config.rft.num_rollouts} rollouts are in {log.path}; "
                "--resume auto collects the others"
            )
            return INTERRUPTED
    kept_rollouts, num_rejected = _select(config, demonstrations)
    samples, num_malformed = _imitated(components, agent, kept_rollouts)
    batch = trainable(components, samples)
    counts = _count(components, demonstrations, num_rejected, num_malformed, batch)
    if log is not None:
        counts["usage"] = asdict(log.usage)
        if components.world.is_main:
            print(f"usage of all models: {cost_text(log.usage)}")
    if config.rft.collect_only:
        return 0
    _check_any(components, batch, counts)
    return fit(components, batch, counts, run_dir, interrupt, started)


def _open(
    components: RunComponents, facts: Mapping[str, Any], cleanup: ExitStack
) -> tuple[Agent, RunDir]:
    """Start the engines, make the run folder, and load the weights through a store in it."""
    config = components.config
    policy, asked = config.train.policy, asked_policies(config)
    store = WeightStore(Path(config.run.dir) / "weights")
    engines = components.make_policy_engines({policy: store}, asked)
    policy_agent = components.make_agent(engines, config.agent.max_turns)
    cleanup.callback(policy_agent.close)
    agent = make_expert(components, policy_agent)
    run_dir = components.open_run_dir(facts)
    if facts and components.world.is_main:  # for the viewer, of the rollouts that are logged
        tokenizer = components.policies[config.first_policy].tokenizer
        atomic_write_text(run_dir.tokenizer, tokenizer.backend_tokenizer.to_str())
    if policy in asked:
        publish_start(components, store)
        engines[policy].load(0)
    return agent, run_dir


def _select(
    config: Config, demonstrations: Sequence[Trajectory]
) -> tuple[list[Trajectory], Counter[str]]:
    """Return the rollouts to imitate, and the counts of the others by one of REJECTIONS."""
    reasons = [_rejection(config, trajectory) for trajectory in demonstrations]
    kept = [rollout for rollout, reason in zip(demonstrations, reasons, strict=True) if not reason]
    return kept, Counter(filter(None, reasons))


def _rejection(config: Config, trajectory: Trajectory) -> str:
    if trajectory.error:
        return "failed"
    if config.rft.keep == "scored" and trajectory.reward != config.reward.high:
        return "reward"
    return shortcut(trajectory) if config.rft.screen == "shortcuts" else ""


def _imitated(
    components: RunComponents, agent: Agent, kept_rollouts: Sequence[Trajectory]
) -> tuple[list[Sample], int]:
    """Return what the trained policy said in the kept rollouts, as samples, and the number of a
    teacher's replies that could not be read, which nobody imitates.
    """
    config, tokenizer = components.config, components.tokenizer
    policy = config.train.policy
    turns = [turn for rollout in kept_rollouts for turn in rollout.turns if policy in turn.calls]
    readable_turns = turns
    if config.rft.expert not in EXPERTS:
        readable_turns = [turn for turn in turns if is_readable(turn, policy)]
    samples = [sample_of(turn.calls[policy], config.rft.prompt_weight) for turn in readable_turns]
    if policy == "planner" and config.roles.refiner == POLICY:
        # The same weights learn both, each from what it read.
        assert isinstance(agent, Flow), "other agents have no roles"
        samples += refinements(agent, kept_rollouts, tokenizer, config.agent.max_result_chars)
    return samples, len(turns) - len(readable_turns)


def _count(
    components: RunComponents,
    demonstrations: Sequence[Trajectory],
    rejected: Counter[str],
    num_malformed: int,
    batch: TrainBatch,
) -> dict[str, Any]:
    """Print and return what was kept and what was not, over all ranks; collective."""
    config, world = components.config.rft, components.world
    reward = sum(rollout.reward or 0 for rollout in demonstrations)
    reasons = [rejected[reason] for reason in REJECTIONS]
    local = [reward, len(batch.samples), *reasons, num_malformed, *batch.num_filtered.values()]
    reward, num_samples, *counts = world.sum(local)
    num_rejected = named(REJECTIONS, counts)
    num_excluded = named(("malformed", *batch.num_filtered), counts[len(REJECTIONS) :])
    num_kept = config.num_rollouts - sum(num_rejected.values())
    if world.is_main:
        mean = reward / config.num_rollouts
        print(
            f"{config.num_rollouts} rollouts, mean reward {mean:.3f}, kept {num_kept}"
            f"{listed(' (rejected: {})', num_rejected)}: {num_samples:.0f} turns"
            f"{listed(', left out: {}', num_excluded)}"
        )
    return {
        "num_rollouts": config.num_rollouts,
        "num_kept": num_kept,
        "num_rejected": num_rejected,
        "num_turns": num_samples,
        "num_excluded": num_excluded,
    }


def _check_any(components: RunComponents, batch: TrainBatch, counts: dict[str, Any]) -> None:
    """Raise UserError where a rank has nothing to imitate; collective."""
    config = components.config.rft
    if components.world.max([not batch.samples])[0]:
        raise UserError(
            f"rft.keep={config.keep!r} left a rank without a demonstration: {counts['num_kept']} "
            f"of {config.num_rollouts} rollouts were kept"
            f"{listed(' (rejected: {})', counts['num_rejected'])}, {counts['num_turns']:.0f} turns"
            f"{listed(', left out: {}', counts['num_excluded'])}"
        )


def _learn_from_teacher(
    components: RunComponents,
    agent: Agent,
    log: DemonstrationLog,
    missing_numbers: Sequence[int],
    interrupt: Interrupt,
) -> list[Trajectory]:
    """Collect the teacher's rollouts that are missing, and read this rank's share of all."""
    config, world = components.config, components.world
    tasks = draw_tasks(components.tasks, config)
    log.check(tasks)
    if missing_numbers:
        num_done = len(tasks) - len(missing_numbers)
        seed = derive_seed(config.run.seed, "rft")
        # A number has a seed of its own, so that it does not matter which others are asked for.
        seeds = {number: derive_seed(seed, number, tasks[number].id) for number in missing_numbers}
        ask(
            [Question(n, n, agent, tasks[n], seeds[n]) for n in missing_numbers],
            log,
            max_in_flight=config.rollout.max_in_flight,
            progress=ProgressLine(len(tasks), num_done, True, unit="rollout"),
            is_over=lambda: interrupt.requested,
            scoring=components.scoring(),
        )
        if failed := log.failures:
            text = f"{len(failed)} rollouts failed ({failed[0]}); --resume auto repeats them"
            print(printable(text), file=sys.stderr)
    return list(log.read(range(world.rank, len(tasks), world.size)))
