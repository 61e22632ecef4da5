"""The parts of a run that evaluations use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from flowtrain.agents.base import Agent
from flowtrain.config import Config
from flowtrain.engines.protocol import Engine
from flowtrain.rewards import RewardFunctions
from flowtrain.tasks.sets import TaskSet
from flowtrain.tools import Tool
from flowtrain.training.world import World


class Parts(Protocol):
    """Parts of a run, or of a node, that evaluations use."""

    @property
    def config(self) -> Config: ...
    @property
    def world(self) -> World: ...
    @property
    def tasks(self) -> TaskSet: ...
    @property
    def tools(self) -> Mapping[str, Tool]: ...
    @property
    def reward_functions(self) -> RewardFunctions | None: ...
    def make_agent(
        self, engines: Mapping[str, Engine], max_turns: int, temperature: float | None = None
    ) -> Agent:
        """Build the agent that `agent.name` asks for; close it when done."""
