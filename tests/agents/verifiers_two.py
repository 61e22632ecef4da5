"""An environment of the package `verifiers` with two agents."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from verifiers_sums import AskTwice, Sums


class TwoConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()


class Two(vf.Env[TwoConfig]):
    async def run(self, task: Any, agents: vf.Agents) -> None:
        await agents.solver.run(task)


__all__ = ["AskTwice", "Sums", "Two"]
