"""A program for the gateway with the OpenAI Agents SDK: it answers questions with three tools.

pip install openai-agents
python -m flowtrain.train --config configs/gateway.toml --model.path runs/warm/model

Nothing in here knows of training: `solve` works with any endpoint that calls tools.
"""

from __future__ import annotations

from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from openai import AsyncOpenAI

from examples.gateway import tools

MAX_TURNS = 5
_TOOLS = [
    function_tool(tool, name_override=name, strict_mode=False) for name, tool in tools.TOOLS.items()
]


async def solve(task: Any, base_url: str, api_key: str) -> str:
    """Run the agent, which calls tools until its model writes a message without a call."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        model = OpenAIChatCompletionsModel("policy", client)
        agent = Agent(name="researcher", model=model, tools=_TOOLS)
        try:
            result = await Runner.run(
                agent,
                task.question,
                max_turns=MAX_TURNS,
                run_config=RunConfig(tracing_disabled=True),
            )
        # The model went on for too long, or called a tool that there is not.
        except (MaxTurnsExceeded, ModelBehaviorError):
            return ""
    return str(result.final_output)
