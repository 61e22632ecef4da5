"""Rejection-sampling fine-tuning:  python -m flowtrain.rft --config configs/quickstart.toml
--run.dir runs/warm

Collect rollouts from a scripted expert, from a teacher or from the policy itself, keep those that
scored, and imitate what `train.policy` said in them (also as the refiner, with
`roles.refiner = "policy"`). The flow, the tools, the scorer, the packing and the trainer are those
of `train.py`; only the loss is -log p.

A teacher's rollouts are written down as they end (`rft/demonstrations.py`): `--resume auto` asks
for the others alone, and begins the training anew.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flowkernels import LossSpec

from flowtrain.agents.base import Agent
from flowtrain.agents.demonstrations import refinements
from flowtrain.agents.flow import Flow
from flowtrain.agents.teacher import is_readable
from flowtrain.algorithms import filter_samples
from flowtrain.config import Config
from flowtrain.config.command import INTERRUPTED, Interrupt
from flowtrain.config.train import EXPERTS
from flowtrain.engines.chat_engines import POLICY
from flowtrain.metrics import MetricsLog, Progress, ProgressLine, RunDir, atomic_write_text
from flowtrain.rewards.shortcuts import REASONS, shortcut
from flowtrain.rft.demonstrations import (
    DemonstrationLog,
    collect_demonstrations,
    cost_text,
    open_log,
)
from flowtrain.rft.experts import asked_policies, demonstrate, draw_tasks, make_expert
from flowtrain.run.banner import rft_banner
from flowtrain.run.components import RunComponents, lock_run_dir
from flowtrain.run.learner import make_trainer, publish_start
from flowtrain.training.balance import balance
from flowtrain.training.cost import ForwardCost
from flowtrain.training.lr_schedule import learning_rate
from flowtrain.training.model import export, full_weights
from flowtrain.training.trainer import OptimSpec
from flowtrain.training.tree import pack_rows
from flowtrain.training.world import World
from flowtrain.types import (
    Call,
    FilterReason,
    Sample,
    TrainBatch,
    Trajectory,
    UserError,
)
from flowtrain.utils.files import put_folder, remove, sync_tree
from flowtrain.utils.seeds import derive_seed
from flowtrain.weights import WeightStore
from flowtrain.weights.files import writing_tensors

REJECTIONS = ("failed", "reward", *REASONS)
"""Why a rollout is not kept: a frozen module failed, `rft.keep`, and the rules of `rft.screen`."""


def rft(config: Config) -> int:
    """Collect demonstrations, keep the good ones, imitate them, export to `run.dir`/model."""
    with ExitStack() as cleanup:
        world = World.join(config.run.device, config.run.collective_timeout_s)
        cleanup.callback(world.leave)
        cleanup.enter_context(lock_run_dir(config, world))
        if config.rft.batch_size % world.size:
            raise UserError(
                f"rft.batch_size={config.rft.batch_size} must be a multiple of the {world.size} "
                "ranks that torchrun started"
            )
        log = None if config.rft.expert in EXPERTS else open_log(config)
        missing = [] if log is None else log.missing(config.rft.num_rollouts, world.size)
        interrupt = cleanup.enter_context(Interrupt())
        asked = asked_policies(config)
        components = RunComponents.prepare(
            config,
            world,
            fictional=config.rft.fictional,
            scripted=not asked,
            with_weights=not config.rft.collect_only or config.train.policy in asked,
            teacher=config.rft.expert if missing else "",
        )
        cleanup.callback(components.close)
        return _run(components, log, missing, interrupt, cleanup)


def _run(
    components: RunComponents,
    log: DemonstrationLog | None,
    missing: Sequence[int],
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
        demonstrations = _learn_from_teacher(components, agent, log, missing, interrupt)
        if missing and interrupt.requested:
            print(
                f"{log.num_done} of {config.rft.num_rollouts} rollouts are in {log.path}; "
                "--resume auto asks for the others"
            )
            return INTERRUPTED
    kept, rejected = _select(config, demonstrations)
    samples, num_malformed = _imitated(components, agent, kept)
    batch = _filter(components, samples)
    counts = _count(components, demonstrations, rejected, num_malformed, batch)
    if log is not None:
        counts["usage"] = asdict(log.usage)
        if components.world.is_main:
            print(f"asked of all models: {cost_text(log.usage)}")
    if config.rft.collect_only:
        return 0
    _check_any(components, batch, counts)
    num_batches = counts["num_turns"] / config.rft.batch_size
    num_steps = config.rft.num_steps or math.ceil(config.rft.num_epochs * num_batches)
    last_step = _imitate(components, batch.samples, num_steps, run_dir, interrupt)
    facts = {"seconds": time.monotonic() - started, **counts, "num_steps": last_step}
    _export(components, run_dir.path / "model", facts)
    return INTERRUPTED if interrupt.requested else 0


def _open(
    components: RunComponents, facts: Mapping[str, Any], cleanup: ExitStack
) -> tuple[Agent, RunDir]:
    """Start the engines, make the run folder, and load the weights through a store in it."""
    config = components.config
    policy, asked = config.train.policy, asked_policies(config)
    store = WeightStore(Path(config.run.dir) / "weights")
    engines = components.make_policy_engines({policy: store}, asked)
    for engine in engines.values():
        cleanup.callback(engine.close)
    made = components.make_agent(engines, config.agent.max_turns)
    cleanup.callback(made.close)
    agent = make_expert(components, made)
    run_dir = components.open_run_dir(facts)
    if facts and components.world.is_main:  # for the viewer, of the rollouts that are logged
        tokenizer = components.policies["planner"].tokenizer
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
    kept = [t for t, reason in zip(demonstrations, reasons, strict=True) if not reason]
    return kept, Counter(filter(None, reasons))


def _rejection(config: Config, trajectory: Trajectory) -> str:
    if trajectory.error:
        return "failed"
    if config.rft.keep == "scored" and trajectory.reward != config.reward.high:
        return "reward"
    return shortcut(trajectory) if config.rft.screen == "shortcuts" else ""


def _imitated(
    components: RunComponents, agent: Agent, kept: Sequence[Trajectory]
) -> tuple[list[Sample], int]:
    """Return what the trained policy said in the kept rollouts, as samples, and the number of a
    teacher's replies that could not be read, which nobody imitates.
    """
    config, tokenizer = components.config, components.tokenizer
    policy = config.train.policy
    turns = [turn for t in kept for turn in t.turns if policy in turn.calls]
    said = turns
    if config.rft.expert not in EXPERTS:
        said = [turn for turn in turns if is_readable(turn, policy)]
    samples = [_sample(turn.calls[policy], config.rft.prompt_weight) for turn in said]
    if policy == "planner" and config.roles.refiner == POLICY:
        # The same weights learn both, each from what it read.
        assert isinstance(agent, Flow), "other agents have no roles"
        samples += refinements(
            agent, kept, tokenizer, tokenizer.eos_token_id, config.agent.max_result_chars
        )
    return samples, len(turns) - len(said)


def _filter(components: RunComponents, samples: Sequence[Sample]) -> TrainBatch:
    """Leave out, and count, what cannot be trained or is longer than `rft.max_tokens`."""
    shape = components.model.config
    most = components.config.rft.max_tokens or math.inf
    short = tuple(s for s in samples if len(s.prompt_ids) + len(s.response_ids) <= most)
    num_long = len(samples) - len(short)
    return filter_samples(
        TrainBatch(short, num_filtered={FilterReason.TOO_LONG: num_long}),
        shape.max_position_embeddings,
        shape.vocab_size,
    )


def _count(
    components: RunComponents,
    demonstrations: Sequence[Trajectory],
    rejected: Counter[str],
    num_malformed: int,
    batch: TrainBatch,
) -> dict[str, Any]:
    """Print and return what was kept and what was not, over all ranks; collective."""
    config, world = components.config.rft, components.world
    reward = sum(t.reward or 0 for t in demonstrations)
    why_not = [rejected[reason] for reason in REJECTIONS]
    own = [reward, len(batch.samples), *why_not, num_malformed, *batch.num_filtered.values()]
    reward, num_samples, *counts = world.sum(own)
    num_rejected = _named(REJECTIONS, counts)
    num_excluded = _named(("malformed", *batch.num_filtered), counts[len(REJECTIONS) :])
    num_kept = config.num_rollouts - sum(num_rejected.values())
    if world.is_main:
        mean = reward / config.num_rollouts
        print(
            f"{config.num_rollouts} rollouts, mean reward {mean:.3f}, kept {num_kept}"
            f"{_listed(' (rejected: {})', num_rejected)}: {num_samples:.0f} turns"
            f"{_listed(', left out: {}', num_excluded)}"
        )
    return {
        "num_rollouts": config.num_rollouts,
        "num_kept": num_kept,
        "num_rejected": num_rejected,
        "num_turns": num_samples,
        "num_excluded": num_excluded,
    }


def _named(names: Sequence[str], counts: Sequence[float]) -> dict[str, int]:
    """Return the counts above 0 by name; what comes after the last name is left."""
    pairs = zip(names, counts, strict=False)
    return {str(name): round(number) for name, number in pairs if number}


def _listed(form: str, counts: Mapping[str, int]) -> str:
    """Format counts by name, or nothing where there are none."""
    listed = ", ".join(f"{number} {name}" for name, number in counts.items())
    return form.format(listed) if counts else ""


def _check_any(components: RunComponents, batch: TrainBatch, counts: dict[str, Any]) -> None:
    """Raise UserError where a rank has nothing to imitate; collective."""
    config = components.config.rft
    if components.world.max([not batch.samples])[0]:
        raise UserError(
            f"rft.keep={config.keep!r} left a rank without a demonstration: {counts['num_kept']} "
            f"of {config.num_rollouts} rollouts were kept"
            f"{_listed(' (rejected: {})', counts['num_rejected'])}, {counts['num_turns']:.0f} turns"
            f"{_listed(', left out: {}', counts['num_excluded'])}"
        )


def _export(components: RunComponents, path: Path, facts: dict[str, Any]) -> None:
    """Write the model for `from_pretrained`, and what it was made from; collective."""
    weights = full_weights(components.model)
    if not components.world.is_main:
        return
    scratch = path.with_name(f"{path.name}.writing")
    with writing_tensors(path):
        remove(scratch)
        export(components.model, components.tokenizer, weights, scratch)
        (scratch / "rft.json").write_text(json.dumps(facts))
        sync_tree(scratch)
        put_folder(scratch, path)
    print(f"model: {path}")


def _learn_from_teacher(
    components: RunComponents,
    agent: Agent,
    log: DemonstrationLog,
    missing: Sequence[int],
    interrupt: Interrupt,
) -> list[Trajectory]:
    """Collect the teacher's rollouts that are missing, and read this rank's share of all."""
    config, world = components.config, components.world
    tasks = draw_tasks(components.tasks, config)
    log.check(tasks)
    if missing:
        num_done = len(tasks) - len(missing)
        collect_demonstrations(
            agent,
            {number: tasks[number] for number in missing},
            log,
            seed=derive_seed(config.run.seed, "rft"),
            max_in_flight=config.rollout.max_in_flight,
            progress=ProgressLine(len(tasks), num_done, True, unit="rollout"),
            is_over=lambda: interrupt.requested,
            judge=components.make_judge(),
            functions=components.reward_functions,
            bounds=components.config.reward,
        )
    return list(log.read(range(world.rank, len(tasks), world.size)))


def _imitate(
    components: RunComponents,
    samples: Sequence[Sample],
    num_steps: int,
    run_dir: RunDir,
    interrupt: Interrupt,
) -> int:
    """Fine-tune with a warm-up and a linear decay; return the last step."""
    config, world, rft = components.config, components.world, components.config.rft
    trainer = make_trainer(
        components,
        world,
        loss=LossSpec("nll"),
        optim=OptimSpec(lr=rft.lr, betas=(0.9, 0.95), weight_decay=0.0, grad_clip=1.0),
    )
    cost = ForwardCost.of(components.model).flops
    seed = derive_seed(config.run.seed, "batches", world.rank)
    batches = _batches(samples, rft.batch_size // world.size, seed)
    metrics = None
    if world.is_main:
        metrics = MetricsLog(run_dir.path, tensorboard=config.log.tensorboard)
    progress = Progress(num_steps, 0, world.is_main)
    step = 0
    for step in range(1, num_steps + 1):
        trainer.set_lr(learning_rate(rft.lr, step, num_steps, rft.warmup_steps, "linear"))
        rows = [pack_rows(next(batches), config.train.token_budget)]
        stats = trainer.step(balance(rows, cost, world, num_takers=world.size), step)
        if metrics is not None and step % 10 == 0:
            metrics.log({"step": step, **stats})
        progress.update({"step": step, "loss": stats["loss"]})
        if step % 10 == 0 and world.max([interrupt.requested])[0]:
            break
    if metrics is not None:
        metrics.close()
    return step


def _sample(call: Call, prompt_weight: float) -> Sample:
    """Make a sample of a call to imitate; an empty response stays empty.

    With a prompt weight, every token but the first is a target.
    """
    prompt, response, logprobs = call.prompt_ids, call.response_ids, call.logprobs
    weights = (1.0,) * len(response)
    if prompt_weight and response:
        num_before = len(prompt) - 1
        weights = (prompt_weight,) * num_before + weights
        logprobs = (0.0,) * num_before + logprobs
        response = prompt[1:] + response
        prompt = prompt[:1]
    return Sample(prompt, response, logprobs, (1.0,) * len(response), weights)


def _batches(samples: Sequence[Sample], batch_size: int, seed: int) -> Iterator[list[Sample]]:
    """Yield batches of shuffled epochs without end."""
    order = random.Random(seed)
    queue: list[Sample] = []
    while True:
        while len(queue) < batch_size:
            queue += order.sample(samples, len(samples))
        yield queue[:batch_size]
        queue = queue[batch_size:]
