"""Does the refiner learn? It copies any of the passages on more than half of its turns, and must
find out that the one that was looked for pays.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from test_learning import config, with_plans, write_questions

from flowtrain.agents.base import Agent
from flowtrain.agents.collect import collect
from flowtrain.agents.expert import ScriptedPlanner
from flowtrain.agents.flow import Flow
from flowtrain.agents.planner import PolicyPlanner
from flowtrain.config.command import Interrupt
from flowtrain.rewards import score
from flowtrain.rft.loop import _run as fine_tune
from flowtrain.run.components import RunComponents
from flowtrain.run.learner import Learner
from flowtrain.run.placement import Placement
from flowtrain.training.tree import pack
from flowtrain.training.world import World
from flowtrain.types import Group
from flowtrain.weights import WeightStore

REFINER = {
    "roles": {"refiner": "own"},
    "train": {"policy": "refiner", "lr": 3e-4},
    "agent": {"tools": ["Search", "Base_Generator"], "num_passages": 3, "max_turns": 1},
    "policies": {"refiner": {"max_new_tokens": 20}},
    "rft": {"num_rollouts": 1000, "num_steps": 400, "keep": "all", "expert_error": 0.0},
}
NUM_STEPS = 14


def prepared(
    place: Path, run: str, cleanup: ExitStack, **sections: dict[str, object]
) -> RunComponents:
    """The planner is scripted, so that no model of it is needed."""
    world = World.join("cpu")
    cleanup.callback(world.leave)
    components = RunComponents.prepare(
        config(place, run, 1, **REFINER, **sections), world, scripted=True
    )
    cleanup.callback(components.close)
    return dataclasses.replace(components, tasks=with_plans(components.tasks))


def reward(groups: Sequence[Group]) -> float:
    rewards = [t.reward or 0.0 for group in groups for t in group.trajectories]
    return sum(rewards) / len(rewards)


def right_share(groups: Sequence[Group]) -> float:
    """Share of the evidence that is the passage that was looked for, word for word."""
    turns = [turn for group in groups for t in group.trajectories for turn in t.turns]
    right = sum(
        turn.action is not None
        and turn.result.output in turn.retrieved
        and turn.result.output.startswith(f"The {turn.action.sub_goal} is ")
        for turn in turns
    )
    return right / len(turns)


def scripted(components: RunComponents, flow: Agent) -> Flow:
    assert isinstance(flow, Flow) and isinstance(flow.planner, PolicyPlanner)
    return dataclasses.replace(
        flow, planner=ScriptedPlanner(flow.planner, 0.0, components.tokenizer.eos_token_id)
    )


def test_the_refiner_learns_what_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowtrain.agents.expert.WRONG_PASSAGE", 0.6)
    write_questions(tmp_path)
    with ExitStack() as cleanup:
        components = prepared(tmp_path, "warm", cleanup)
        interrupt = Interrupt()
        assert fine_tune(components, None, [], interrupt, cleanup) == 0  # type: ignore[arg-type]
    seen: list[list[Group]] = []
    with ExitStack() as cleanup:
        warm = {"path": str(tmp_path / "warm" / "model")}
        components = prepared(tmp_path, "run", cleanup, model=warm)
        store = WeightStore(tmp_path / "weights")
        engines = components.make_policy_engines({"refiner": store})
        for engine in engines.values():
            cleanup.callback(engine.close)
        flow = scripted(components, components.make_agent(engines, 1))
        world = components.world
        placement = Placement(world, world, world)
        learner = Learner.make(components, placement, store, Path("checkpoints"))
        learner.publish(0)
        order = random.Random(0)
        for step in range(NUM_STEPS + 1):
            engines["refiner"].load(step)
            tasks = order.sample(components.tasks.train, 8)
            seen.append(score(collect(flow, tasks, group_size=8, seed=step)))
            rows = pack(
                components.algorithm.advantages(seen[-1]).samples,
                components.config.train.num_minibatches,
                components.config.train.token_budget,
            )
            learner.train(step + 1, learner.ref_logprobs(learner.old_logprobs(rows)), sampled=[])
            learner.publish(step + 1)
    print(
        [
            (t.turns[0].result.output, t.turns[0].retrieved, t.turns[0].action)
            for t in seen[0][0].trajectories[:4]
        ]
    )
    first, last = seen[0], [group for groups in seen[-3:] for group in groups]
    assert 0.2 < right_share(first) < 0.75, "there is something to learn"
    assert right_share(last) > right_share(first) + 0.1
    assert reward(last) > reward(first) + 0.1
    calls = [turn.calls["refiner"] for t in seen[-1][0].trajectories for turn in t.turns]
    assert {span.version for call in calls for span in call.spans} == {NUM_STEPS}
