"""Agents that use an MCP server's tools: the agent `tools`, and a run that names all at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from make import Engine
from toy_options import toy

from flowtrain.agents.agentflow.build import make_policy
from flowtrain.agents.base import AgentContext
from flowtrain.agents.chat.tool_calling import ToolCallingAgent
from flowtrain.agents.chat.tool_formats import FORMATS, WrittenCall
from flowtrain.records import Task, UserError
from flowtrain.tools.registry import make_tools
from flowtrain.trainer.distributed import World
from flowtrain.trainer.setup.components import RunComponents
from flowtrain.trainer.setup.placement import Placement
from flowtrain.utils.event_loop import run_to_end
from tests.agents.chat_templates import styled

HAND = Path(__file__).parent / "mcp_by_hand.py"


def options(tmp_path: Path, word: str, **agent: object) -> dict[str, object]:
    command = [sys.executable, "-S", str(HAND), word, str(tmp_path / "starts")]
    small = {"hidden_size": 24, "num_layers": 2}
    return {
        "agent": {"tools": ["Search", "hand.*"], **agent},
        "mcp": {"hand": {"command": command}},
        "tasks": {"num_train": 40},
        "eval": {"num_tasks": 4},
        "tiny": small,
        "run": {"threads": 1},
    }


def test_the_agent_tools_calls_one(tmp_path: Path) -> None:
    config = toy({**options(tmp_path, "good"), "agent": {"name": "tools", "tools": ["hand.echo"]}})
    tools = make_tools(config)
    call = FORMATS["hermes"].write([WrittenCall("hand.echo", json.dumps({"query": "Mali"}))])
    wrong = FORMATS["hermes"].write([WrittenCall("hand.echo", json.dumps({"q": 1}))])
    qwen = styled("qwen2.5")
    engine = Engine.of(qwen, wrong, call, "<answer>Mali</answer>")
    policy = make_policy(config, "planner", engine, qwen)
    agent = ToolCallingAgent(AgentContext(config, {"planner": policy}, tools, {}, 3))
    try:
        done = run_to_end(agent.run(Task("t", "Say Mali.", ("Mali",)), 1))
    finally:
        tools["hand.echo"].close()
    assert (done.error, done.answer) == ("", "Mali")
    first, second = done.turns[0].tool_calls[0].result, done.turns[1].tool_calls[0].result
    assert first.error == "hand.echo takes (query: str); got (q: int)"
    assert second.output == "Mali"
    assert '"hand.echo"' in engine.prompts[0] and '"required": ["query"]' in engine.prompts[0]


def test_a_run_names_every_tool_that_it_uses(tmp_path: Path) -> None:
    config = toy(options(tmp_path, "good"))
    components = RunComponents.prepare(
        config, Placement.colocated(World(0, 1, torch.device("cpu")))
    )
    try:
        assert tuple(components.tools) == ("Search", "hand.echo")
        agent = components.make_agent(components.make_policy_engines({}, ()), 2)
        assert agent.planner.tool_names == ("Search", "hand.echo")
    finally:
        components.close()


def test_a_server_that_may_change_the_world_cannot_be_rewound(tmp_path: Path) -> None:
    for word, is_refused in (("good", True), ("read_only", False)):
        given = {**options(tmp_path, word), "algorithm": {"name": "appo"}}
        config = toy(given)
        world = World(0, 1, torch.device("cpu"))
        if is_refused:
            with pytest.raises(UserError, match=r"rewinds rollouts; 'hand\.echo'"):
                RunComponents.prepare(config, Placement.colocated(world))
        else:
            RunComponents.prepare(config, Placement.colocated(world)).close()
