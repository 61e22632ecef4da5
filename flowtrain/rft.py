"""Rejection-sampling fine-tuning:  python -m flowtrain.rft --config configs/quickstart.toml
--run.dir runs/warm

Collect rollouts from a scripted expert or from the policy itself, keep those that scored, imitate
what `train.policy` said in them, as the refiner too where that is the planner (`roles.refiner =
"policy"`). The flow, the tools, the scorer, the packing and the trainer are those of `train.py`;
only the loss is -log p.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from flowkernels import LossSpec

from flowtrain import report
from flowtrain.agents.collect import collect
from flowtrain.agents.demonstrations import refinements
from flowtrain.agents.expert import EARLY_STOP, ScriptedPlanner, ScriptedVerifier
from flowtrain.agents.flow import Flow
from flowtrain.agents.planner import PolicyPlanner
from flowtrain.agents.verifier import PolicyVerifier
from flowtrain.algorithms import filter_samples
from flowtrain.config import Config
from flowtrain.config.command import INTERRUPTED, Interrupt, run_command
from flowtrain.engines.chat_engines import POLICY
from flowtrain.rewards import score
from flowtrain.run.components import RunComponents, saving
from flowtrain.tasks.sets import TaskSet
from flowtrain.training.lr_schedule import learning_rate
from flowtrain.training.model import export, full_weights, named_weights
from flowtrain.training.trainer import OptimSpec
from flowtrain.training.tree import pack_rows
from flowtrain.training.world import World, end_process
from flowtrain.types import Call, Sample, Task, TrainBatch, Trajectory, UserError
from flowtrain.utils.seeds import derive_seed
from flowtrain.weights import WeightStore


def rft(config: Config) -> int:
    """Collect, keep, imitate, export to `run.dir`/model."""
    with ExitStack() as cleanup:
        world = World.join(config.run.device)
        cleanup.callback(world.leave)
        if config.rft.batch_size % world.size:
            raise UserError(
                f"rft.batch_size={config.rft.batch_size} must be a multiple of the {world.size} "
                "ranks that torchrun started"
            )
        components = RunComponents.prepare(
            config, world, fictional=config.rft.fictional, scripted=not _samples(config)
        )
        cleanup.callback(components.close)
        return _run(components, cleanup.enter_context(Interrupt()), cleanup)


def _run(components: RunComponents, interrupt: Interrupt, cleanup: ExitStack) -> int:
    config, world, rft = components.config, components.world, components.config.rft
    store = WeightStore(Path(config.run.dir) / "weights")
    engines = (
        components.make_policy_engines({config.train.policy: store})
        if _samples(config)
        else components.make_no_engines()
    )
    for engine in engines.values():
        cleanup.callback(engine.close)
    flow = _expert(components, components.make_flow(engines, config.agent.max_turns))
    run_dir = components.open_run_dir()
    started = time.monotonic()
    if _samples(config):  # through the store, as in training
        with saving(store.root):
            components.make_publisher(store, components.world).publish(
                named_weights(components.model), 0
            )
        engines[config.train.policy].load(0)
    demonstrations = _demonstrate(components, flow)
    kept = [t for t in demonstrations if not t.error and (rft.keep == "all" or t.reward == 1)]
    policy = config.train.policy
    calls = [turn.calls[policy] for t in kept for turn in t.turns if policy in turn.calls]
    imitated = [_sample(call, rft.prompt_weight) for call in calls]
    if (config.train.policy, config.roles.refiner) == (
        "planner",
        POLICY,
    ):  # the same weights learn both, each from what it read
        imitated += refinements(
            flow,
            kept,
            components.tokenizer,
            components.tokenizer.eos_token_id,
            config.agent.max_result_chars,
        )
    batch = filter_samples(
        TrainBatch(tuple(imitated)),
        int(components.model.config.max_position_embeddings),
    )
    samples, num_rewarded = batch.samples, sum(t.reward or 0 for t in demonstrations)
    num_kept, num_rewarded, num_samples, *counts = world.sum(
        [len(kept), num_rewarded, len(samples), *batch.num_filtered.values()]
    )
    num_excluded = {
        reason: round(number)
        for reason, number in zip(batch.num_filtered, counts, strict=True)
        if number
    }
    left_out = (
        ", left out: " + ", ".join(f"{number} {reason}" for reason, number in num_excluded.items())
        if num_excluded
        else ""
    )
    if world.max([not samples])[0]:
        raise UserError(
            f"rft.keep={rft.keep!r} left a rank without a demonstration: {num_kept:.0f} of "
            f"{rft.num_rollouts} rollouts were kept, "
            f"{num_samples:.0f} turns{left_out}"
        )
    if world.is_main:
        mean_reward = num_rewarded / rft.num_rollouts
        print(
            f"{rft.num_rollouts} rollouts, mean reward {mean_reward:.3f}, kept {num_kept:.0f}: "
            f"{num_samples:.0f} turns{left_out}"
        )
    last_step = _imitate(components, samples, run_dir, interrupt)
    weights = full_weights(components.model)
    if world.is_main:
        counted = {
            "num_rollouts": rft.num_rollouts,
            "num_turns": num_samples,
            "num_excluded": num_excluded,
            "num_steps": last_step,
        }
        facts = {"seconds": time.monotonic() - started, **counted}
        with saving(run_dir.path / "model"):
            export(components.model, components.tokenizer, weights, run_dir.path / "model")
            (run_dir.path / "model" / "rft.json").write_text(json.dumps(facts))
        print(f"model: {run_dir.path / 'model'}")
    return INTERRUPTED if interrupt.requested else 0


def _expert(components: RunComponents, flow: Flow) -> Flow:
    """Who demonstrates: the policies, or scripts in their place."""
    config = components.config
    if config.rft.expert == "policy":
        return flow
    unplanned = next((task for task in components.tasks.train if not task.plan), None)
    if unplanned is not None:
        raise UserError(
            f"rft.expert='scripted' needs tasks with a plan; tasks.name={config.tasks.name!r} has "
            "none, so use 'policy'"
        )
    ends = {name: policy.tokenizer.eos_token_id for name, policy in components.policies.items()}
    assert isinstance(flow.planner, PolicyPlanner)
    flow = replace(
        flow, planner=ScriptedPlanner(flow.planner, config.rft.expert_error, ends["planner"])
    )
    if isinstance(flow.verifier, PolicyVerifier):
        flow = replace(flow, verifier=ScriptedVerifier(flow.verifier, EARLY_STOP, ends["verifier"]))
    return flow


def _samples(config: Config) -> bool:
    """Whether anyone asks a policy: the expert, or a role."""
    return config.rft.expert == "policy" or POLICY in config.roles.model_dump().values()


def _demonstrate(components: RunComponents, flow: Flow) -> list[Trajectory]:
    """This rank's share of scored rollouts."""
    config, world = components.config, components.world
    tasks = _balanced(components.tasks, config)
    groups = collect(
        flow,
        tasks,
        group_size=1,
        seed=derive_seed(config.run.seed, "rft"),
        max_in_flight=config.rollout.max_in_flight,
        rank=world.rank,
        num_ranks=world.size,
    )
    return [
        trajectory
        for group in score(groups, components.make_judge())
        for trajectory in group.trajectories
    ]


def _balanced(tasks: TaskSet, config: Config) -> list[Task]:
    """Draw long tasks more often, because an expert that errs seldom gets to their last turn; most
    of the way to showing all alike.
    """
    rng = random.Random(derive_seed(config.run.seed, "rft"))
    reach = 1 - config.rft.expert_error if config.rft.expert == "scripted" else 1.0
    turns = [max(reach, 0.1) ** (-0.75 * (max(task.num_turns, 1) - 1)) for task in tasks.train]
    weights = [a * b for a, b in zip(turns, tasks.draw_weights(), strict=True)]
    return rng.choices(tasks.train, weights, k=config.rft.num_rollouts)


def _imitate(
    components: RunComponents,
    samples: Sequence[Sample],
    run_dir: report.RunDir,
    interrupt: Interrupt,
) -> int:
    """Fine-tune with a warm-up and a linear decay; returns the last step."""
    config, world, rft = components.config, components.world, components.config.rft
    trainer = components.make_trainer(
        LossSpec("nll"), OptimSpec(rft.lr, (0.9, 0.95), weight_decay=0.0, grad_clip=1.0), world
    )
    batches = _batches(
        samples, rft.batch_size // world.size, derive_seed(config.run.seed, "batches", world.rank)
    )
    metrics = (
        report.MetricsLog(run_dir.path, tensorboard=config.log.tensorboard)
        if world.is_main
        else None
    )
    progress = report.Progress(rft.num_steps, 0, world.is_main)
    step = 0
    for step in range(1, rft.num_steps + 1):
        trainer.set_lr(learning_rate(rft.lr, step, rft.num_steps, rft.warmup_steps, "linear"))
        stats = trainer.step([pack_rows(next(batches), config.train.token_budget)], step)
        if metrics is not None and step % 10 == 0:
            metrics.log({"step": step, **stats})
        progress.update({"step": step, "loss": stats["loss"]})
        if step % 10 == 0 and world.max([interrupt.requested])[0]:
            break
    progress.close()
    if metrics is not None:
        metrics.close()
    return step


def _sample(call: Call, prompt_weight: float) -> Sample:
    """One call to imitate. With a prompt weight, every token but the first is a target; an empty
    response stays one.
    """
    prompt, response, logprobs = call.prompt_ids, call.response_ids, call.logprobs
    weights = (1.0,) * len(response)
    if prompt_weight and response:
        num_before = len(prompt) - 1
        weights, logprobs = (prompt_weight,) * num_before + weights, (0.0,) * num_before + logprobs
        prompt, response = prompt[:1], prompt[1:] + response
    return Sample(prompt, response, logprobs, (1.0,) * len(response), weights)


def _batches(samples: Sequence[Sample], batch_size: int, seed: int) -> Iterator[list[Sample]]:
    """Shuffled epochs without end."""
    order = random.Random(seed)
    queue: list[Sample] = []
    while True:
        while len(queue) < batch_size:
            queue += order.sample(samples, len(samples))
        batch, queue = queue[:batch_size], queue[batch_size:]
        yield batch


if __name__ == "__main__":
    end_process(run_command("flowtrain.rft", rft))
