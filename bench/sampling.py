"""An agent around the policy of a model folder, for benchmarks that sample from it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from flowtrain.agents.base import Agent
from flowtrain.config.options import parse
from flowtrain.run.components import RunComponents
from flowtrain.run.learner import publish_start
from flowtrain.training.world import World
from flowtrain.weights import WeightStore


@contextmanager
def open_agent(
    options: Sequence[str], *, branches: bool = False
) -> Iterator[tuple[RunComponents, Agent]]:
    """Build what the options of a run name, on the CPU with one thread.

    Args:
        branches: the engine records the entropy of every token.
    """
    config = parse([*options, "--run.threads", "1"])
    assert config is not None, "the options ask for no help"
    with ExitStack() as cleanup:
        world = World.join("cpu")
        cleanup.callback(world.leave)
        components = RunComponents.prepare(config, world)
        cleanup.callback(components.close)
        store = WeightStore(Path(cleanup.enter_context(tempfile.TemporaryDirectory())))
        engines = components.make_policy_engines({"planner": store}, branches=branches)
        for engine in engines.values():
            cleanup.callback(engine.close)
        publish_start(components, store)
        engines["planner"].load(0)
        agent = components.make_agent(engines, config.agent.max_turns)
        cleanup.callback(agent.close)
        yield components, agent
