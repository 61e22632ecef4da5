"""What a command is about to do, in a few lines for the person who started it."""

from __future__ import annotations

from collections.abc import Sequence

from flowtrain import __version__
from flowtrain.config import Config
from flowtrain.run.components import RunComponents
from flowtrain.run.placement import Placement
from flowtrain.training.world import World


def train_banner(components: RunComponents, placement: Placement, start_step: int) -> str:
    """Say what is trained on what and where, and what comes before the first step.

    `start_step`: the step after which a run goes on; 0: it begins.
    """
    config = components.config
    rollout, train = config.rollout, config.train
    each_step = f"{rollout.num_questions} questions x {rollout.group_size} rollouts"
    if config.dataflow.url:
        samplers = f"nodes of {config.dataflow.url}"
    else:
        samplers = f"{rollout.engine} on {_ranks(placement.samplers)}"
    first = "the model is measured" if config.eval.at_ends and not start_step else "training"
    after = f", after step {start_step}" if start_step else ""
    return _lines(
        f"{config.algorithm.name} trains the {train.policy}",
        [
            ("model", _model(components)),
            ("questions", _questions(components)),
            ("agent", _agent(config)),
            ("sampled by", samplers),
            ("trained by", _ranks(placement.trainers)),
            ("steps", f"{train.num_steps}, each {each_step}"),
            ("folder", config.run.dir),
            ("next", f"{first}{after} (held-out questions: {_held_out(components)})"),
        ],
    )


def rft_banner(components: RunComponents) -> str:
    """Say who demonstrates what to which model, and where the result will be."""
    config = components.config
    rft = config.rft
    steps = f"{rft.num_steps} steps" if rft.num_steps else f"{rft.num_epochs:g} epochs"
    what = "no more" if rft.collect_only else f"then imitated for {steps}"
    return _lines(
        f"the {config.train.policy} imitates demonstrations ({rft.expert})",
        [
            ("model", _model(components)),
            ("questions", _questions(components)),
            ("agent", _agent(config)),
            ("trained by", _ranks(components.world)),
            ("folder", config.run.dir),
            ("next", f"{rft.num_rollouts:,} rollouts are made, {what}"),
        ],
    )


def _lines(title: str, rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(
        [f"flowtrain {__version__}: {title}", *(f"  {name:10}  {value}" for name, value in rows)]
    )


def _model(components: RunComponents) -> str:
    config, model = components.config, components.model
    size = sum(parameter.numel() for parameter in model.parameters())
    adapter = f", LoRA of rank {config.lora.rank}" if config.lora.rank else ""
    return f"{config.model.path}, {_short(size)} parameters, {config.model.dtype}{adapter}"


def _questions(components: RunComponents) -> str:
    tasks, name = components.tasks, components.config.tasks.name
    mixture = sum(len(found) for _, found in tasks.mixture.values())
    return f"{name}, {mixture or len(tasks.train):,} to train on"


def _held_out(components: RunComponents) -> str:
    return f"{sum(map(len, components.tasks.held_out.values())):,}"


def _agent(config: Config) -> str:
    tools = ", ".join(config.agent.tools) or "no tools"
    return f"{config.agent.name}, at most {config.agent.max_turns} turns, {tools}"


def _ranks(world: World) -> str:
    count = "1 rank" if world.size == 1 else f"{world.size} ranks"
    return f"{count} ({world.device.type})"


def _short(number: int) -> str:
    for unit, power in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= power:
            return f"{number / power:.3g} {unit}"
    return str(number)
