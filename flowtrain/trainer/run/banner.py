"""Say what a command is about to do, in a few lines for the person who started it."""

from __future__ import annotations

from pathlib import Path

import torch

from flowtrain import __version__
from flowtrain.logging.fingerprints import changes
from flowtrain.trainer.model.fused_layers import fused_text
from flowtrain.trainer.setup.components import RunComponents
from flowtrain.trainer.setup.placement import Placement


def train_banner(components: RunComponents, placement: Placement, start_step: int) -> str:
    """Say what is trained on what and where; `start_step`: the step after which a run goes on."""
    config = components.config
    rollout, train, trainers = config.rollout, config.train, placement.trainers
    each_step = f"each {rollout.num_questions} questions x {rollout.group_size} rollouts"
    samplers = f"{rollout.engine} on {placement.samplers.size} ranks"
    if config.dataflow.url:
        samplers = f"nodes of {config.dataflow.url}"
    device = trainers.device.type
    device += f", {torch.get_num_threads()} threads each" * (device == "cpu")
    rows = {
        "ranks": f"sampled by {samplers}, trained by {trainers.size} ({device})",
        "steps": f"{train.num_steps}, {each_step}"
        + f", after step {start_step}" * (start_step > 0),
        "fused": fused_text(components.model) or "no layers",
    }
    names = (config.word_for(name) for name in (train.policy, *config.trained_beside))
    title = f"{components.algorithm} trains the {' and the '.join(names)}"
    return _banner(components, title, rows)


def rft_banner(components: RunComponents) -> str:
    """Say who demonstrates what to which model, and where the result will be."""
    config, rft = components.config, components.config.rft
    policy = config.word_for(config.train.policy)
    steps = f"{rft.num_steps} steps" if rft.num_steps else f"{rft.num_epochs:g} epochs"
    steps += f" (train.token_budget = {config.train.row_budget})"
    then = "no more" if rft.collect_only else f"then imitated for {steps}"
    rows = {"next": f"{rft.num_rollouts:,} rollouts are made, {then}"}
    return _banner(components, f"the {policy} imitates demonstrations ({rft.expert})", rows)


def _banner(components: RunComponents, title: str, rows: dict[str, str]) -> str:
    config, tasks, agent = components.config, components.tasks, components.config.agent
    num_all = sum(parameter.numel() for parameter in components.model.parameters())
    adapter = f", LoRA of rank {config.lora.rank}" if config.lora.rank else ""
    num_train = sum(len(found) for _, found in tasks.mixture.values()) or len(tasks.train)
    num_held_out = sum(map(len, tasks.held_out.values()))
    tools = ", ".join(agent.tools) or "no tools"
    shown = {
        "model": f"{config.model.path}, {num_all:,} parameters, {config.model.dtype}{adapter}",
        "tasks": f"{config.tasks.name}, {num_train:,} to train on, {num_held_out:,} held out",
        "agent": f"{agent.name}, at most {agent.max_turns} turns, {tools}",
        **rows,
        "folder": config.run.dir,
    }
    if changed := changes(Path(config.run.dir), config):
        shown["change"] = changed
    lines = [f"  {name:6}  {value}" for name, value in shown.items()]
    return "\n".join([f"flowtrain {__version__}: {title}", *lines])
