"""Rejection-sampling fine-tuning:  python -m flowtrain.rft --config configs/quickstart.toml
--run.dir runs/warm

Collect rollouts from a scripted expert or from the policy itself, keep those that scored, and
imitate what `train.policy` said in them (also as the refiner, with `roles.refiner = "policy"`). The
flow, the tools, the scorer, the packing and the trainer are those of `train.py`; only the loss is
-log p.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from flowkernels import LossSpec

from flowtrain import report
from flowtrain.agents.base import Agent
from flowtrain.agents.collect import collect
from flowtrain.agents.demonstrations import refinements
from flowtrain.agents.expert import scripted
from flowtrain.agents.flow import Flow
from flowtrain.agents.tool_calling import ToolCallingAgent
from flowtrain.algorithms import filter_samples
from flowtrain.config import Config
from flowtrain.config.command import INTERRUPTED, Interrupt, run_command
from flowtrain.engines.chat_engines import POLICY
from flowtrain.rewards import score
from flowtrain.run.components import RunComponents, lock_run_dir
from flowtrain.run.policy_trainer import make_trainer, publish_start
from flowtrain.tasks.sets import TaskSet
from flowtrain.training.balance import balance
from flowtrain.training.cost import ForwardCost
from flowtrain.training.lr_schedule import learning_rate
from flowtrain.training.model import export, full_weights
from flowtrain.training.trainer import OptimSpec
from flowtrain.training.tree import pack_rows
from flowtrain.training.world import World, end_process
from flowtrain.types import Call, Sample, Task, TrainBatch, Trajectory, UserError
from flowtrain.utils.files import put_folder, remove, sync_tree
from flowtrain.utils.seeds import derive_seed
from flowtrain.weights import WeightStore
from flowtrain.weights.files import writing_tensors


def rft(config: Config) -> int:
    """Collect demonstrations, keep the good ones, imitate them, export to `run.dir`/model."""
    with ExitStack() as cleanup:
        world = World.join(config.run.device)
        cleanup.callback(world.leave)
        cleanup.enter_context(lock_run_dir(config, world))
        if config.rft.batch_size % world.size:
            raise UserError(
                f"rft.batch_size={config.rft.batch_size} must be a multiple of the {world.size} "
                "ranks that torchrun started"
            )
        components = RunComponents.prepare(
            config,
            world,
            fictional=config.rft.fictional,
            scripted=not _asks_policy(config),
        )
        cleanup.callback(components.close)
        return _run(components, cleanup.enter_context(Interrupt()), cleanup)


def _run(components: RunComponents, interrupt: Interrupt, cleanup: ExitStack) -> int:
    config = components.config
    started = time.monotonic()
    agent, run_dir = _open(components, cleanup)
    components.show_sources()
    demonstrations = _demonstrate(components, agent)
    kept = [
        trajectory
        for trajectory in demonstrations
        if not trajectory.error
        and (config.rft.keep == "all" or trajectory.reward == config.reward.high)
    ]
    shape = components.model.config
    batch = filter_samples(
        TrainBatch(_imitated(components, agent, kept)),
        shape.max_position_embeddings,
        shape.vocab_size,
    )
    counts = _count(components, demonstrations, kept, batch)
    last_step = _imitate(components, batch.samples, run_dir, interrupt)
    facts = {"seconds": time.monotonic() - started, **counts, "num_steps": last_step}
    _export(components, run_dir.path / "model", facts)
    return INTERRUPTED if interrupt.requested else 0


def _open(components: RunComponents, cleanup: ExitStack) -> tuple[Agent, report.RunDir]:
    """Start the engines, make the run folder, and load the weights through a store in it."""
    config = components.config
    if not _asks_policy(config):
        engines = components.make_no_engines()
    else:
        store = WeightStore(Path(config.run.dir) / "weights")
        engines = components.make_policy_engines({config.train.policy: store})
    for engine in engines.values():
        cleanup.callback(engine.close)
    made = components.make_agent(engines, config.agent.max_turns)
    cleanup.callback(made.close)
    agent = _expert(components, made)
    run_dir = components.open_run_dir()
    if _asks_policy(config):
        publish_start(components, store)
        engines[config.train.policy].load(0)
    return agent, run_dir


def _imitated(
    components: RunComponents, agent: Agent, kept: Sequence[Trajectory]
) -> tuple[Sample, ...]:
    """Return what the trained policy said in the kept rollouts, as samples."""
    config, tokenizer = components.config, components.tokenizer
    calls = [turn.calls.get(config.train.policy) for t in kept for turn in t.turns]
    samples = [_sample(call, config.rft.prompt_weight) for call in calls if call is not None]
    if config.train.policy == "planner" and config.roles.refiner == POLICY:
        # The same weights learn both, each from what it read.
        assert isinstance(agent, Flow), "other agents have no roles"
        samples += refinements(
            agent, kept, tokenizer, tokenizer.eos_token_id, config.agent.max_result_chars
        )
    return tuple(samples)


def _count(
    components: RunComponents,
    demonstrations: Sequence[Trajectory],
    kept: Sequence[Trajectory],
    batch: TrainBatch,
) -> dict[str, Any]:
    """Print and return what was kept, over all ranks; collective.

    Raises UserError where a rank has nothing to imitate.
    """
    config, world = components.config.rft, components.world
    reward = sum(t.reward or 0 for t in demonstrations)
    own = [len(kept), reward, len(batch.samples), *batch.num_filtered.values()]
    num_kept, reward, num_samples, *counts = world.sum(own)
    num_filtered = {
        str(reason): round(number)
        for reason, number in zip(batch.num_filtered, counts, strict=True)
        if number
    }
    left_out = ", ".join(f"{number} {reason}" for reason, number in num_filtered.items())
    turns = f"{num_samples:.0f} turns" + (f", left out: {left_out}" if left_out else "")
    if world.max([not batch.samples])[0]:
        raise UserError(
            f"rft.keep={config.keep!r} left a rank without a demonstration: {num_kept:.0f} of "
            f"{config.num_rollouts} rollouts were kept, {turns}"
        )
    if world.is_main:
        mean = reward / config.num_rollouts
        print(
            f"{config.num_rollouts} rollouts, mean reward {mean:.3f}, kept {num_kept:.0f}: {turns}"
        )
    return {
        "num_rollouts": config.num_rollouts,
        "num_turns": num_samples,
        "num_excluded": num_filtered,
    }


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


def _expert(components: RunComponents, agent: Agent) -> Agent:
    """Return the agent that demonstrates: the policies' own, or one with scripts in their place."""
    config = components.config
    if config.rft.expert == "policy":
        return agent
    if not isinstance(agent, Flow | ToolCallingAgent):
        raise UserError(
            "rft.expert='scripted' plays the planner of agent.name='agentflow' or the policy of "
            f"'tools', and it is {config.agent.name!r}, so use 'policy'"
        )
    unplanned = next((task for task in components.tasks.train if not task.plan), None)
    if unplanned is not None:
        raise UserError(
            f"rft.expert='scripted' needs tasks with a plan; tasks.name={config.tasks.name!r} has "
            "none, so use 'policy'"
        )
    ends = {name: policy.tokenizer.eos_token_id for name, policy in components.policies.items()}
    return scripted(agent, config.rft.expert_error, ends)


def _asks_policy(config: Config) -> bool:
    """Tell whether anyone asks a policy: the expert, or a role."""
    return config.rft.expert == "policy" or POLICY in config.roles.model_dump().values()


def _demonstrate(components: RunComponents, agent: Agent) -> list[Trajectory]:
    """Collect this rank's share of the rollouts, and score them."""
    config, world = components.config, components.world
    groups = collect(
        agent,
        _balanced(components.tasks, config),
        group_size=1,
        seed=derive_seed(config.run.seed, "rft"),
        max_in_flight=config.rollout.max_in_flight,
        rank=world.rank,
        num_ranks=world.size,
    )
    scored = score(groups, components.make_judge(), components.reward_functions)
    return [trajectory for group in scored for trajectory in group.trajectories]


def _balanced(tasks: TaskSet, config: Config) -> list[Task]:
    """Draw long tasks more often, because an expert that errs seldom reaches their last turn.

    That goes most of the way to showing all turns alike.
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
        metrics = report.MetricsLog(run_dir.path, tensorboard=config.log.tensorboard)
    progress = report.Progress(rft.num_steps, 0, world.is_main)
    step = 0
    for step in range(1, rft.num_steps + 1):
        trainer.set_lr(learning_rate(rft.lr, step, rft.num_steps, rft.warmup_steps, "linear"))
        rows = [pack_rows(next(batches), config.train.token_budget)]
        stats = trainer.step(balance(rows, cost, world, num_takers=world.size), step)
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


if __name__ == "__main__":
    end_process(run_command("flowtrain.rft", rft))
