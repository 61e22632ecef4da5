"""Who demonstrates in fine-tuning (`rft.expert`), whom that needs, and on which tasks."""

from __future__ import annotations

import random
from collections.abc import Sequence

from flowtrain.agents.agentflow.flow import Flow
from flowtrain.agents.agentflow.scripts import scripted
from flowtrain.agents.agentflow.teacher import taught
from flowtrain.agents.base import Agent
from flowtrain.config import Config
from flowtrain.config.train import EXPERTS
from flowtrain.evaluation.evaluator import roll_out
from flowtrain.inference.chat_engines import POLICY, TEACHER
from flowtrain.records import PolicyName, Task, Trajectory, UserError
from flowtrain.tasks.sets import TaskSet
from flowtrain.trainer.setup.components import RunComponents
from flowtrain.utils.seeds import derive_seed


def make_expert(components: RunComponents, agent: Agent) -> Agent:
    """Return the agent that demonstrates: the policies' own, or one with scripts or a teacher in
    their place.
    """
    config = components.config
    if config.rft.expert not in EXPERTS:
        teacher = components.chats.roles.get(TEACHER)
        # Without a teacher all of its rollouts are there.
        return taught(agent, teacher, config, components.tools) if teacher else agent
    if config.rft.expert == "policy":
        return agent
    if not isinstance(agent, Flow):
        raise UserError(
            "rft.expert='scripted' requires agent.name='agentflow', which is "
            f"{config.agent.name!r}; use rft.expert='policy' or rft.conversations"
        )
    unplanned = next((task for task in components.tasks.train if not task.plan), None)
    if unplanned is not None:
        raise UserError(
            f"rft.expert='scripted' needs tasks with a plan; tasks.name={config.tasks.name!r} has "
            "none; use rft.expert='policy'"
        )
    return scripted(agent, config.rft.expert_error)


def asked_policies(config: Config) -> tuple[PolicyName, ...]:
    """Name the policies that someone asks: the expert, a role, or the flow beside a teacher."""
    if config.rft.expert == "policy" or POLICY in config.roles.model_dump().values():
        return config.policy_names
    if config.rft.expert == "scripted":
        return ()
    return tuple(name for name in config.policy_names if name != config.train.policy)


def draw_tasks(tasks: TaskSet, config: Config) -> list[Task]:
    """Draw long tasks more often, because an expert that errs seldom reaches their last turn.

    The weights make all turns nearly equally frequent.
    """
    rng = random.Random(derive_seed(config.run.seed, "rft"))
    reach = 1 - config.rft.expert_error if config.rft.expert == "scripted" else 1.0
    turns = [max(reach, 0.1) ** (-0.75 * (max(task.num_turns, 1) - 1)) for task in tasks.train]
    weights = [a * b for a, b in zip(turns, tasks.draw_weights(), strict=True)]
    return rng.choices(tasks.train, weights, k=config.rft.num_rollouts)


def demonstrate(components: RunComponents, agent: Agent) -> Sequence[Trajectory]:
    """Collect and score this rank's share of the rollouts of an expert that is no teacher."""
    config = components.config
    tasks, seed = draw_tasks(components.tasks, config), derive_seed(config.run.seed, "rft")
    return roll_out(components, agent, tasks, seed, "the expert")
