"""The example whose second answer is best read off a thought, if that is still there."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from make import Engine
from test_release import loaded

from flowtrain.agents.agentflow.build import make_policy
from flowtrain.agents.base import AgentContext
from flowtrain.agents.chat.tool_calling import ToolCallingAgent
from flowtrain.config import Config
from flowtrain.inference.token_chat import pass_to_template
from flowtrain.records import Task
from flowtrain.trainer.model import loading

EXAMPLE = Path(__file__).parents[2] / "examples" / "thinking" / "sums.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sums")
    loaded(EXAMPLE).main(str(folder))
    return folder


@pytest.mark.parametrize("reads_thoughts", [True, False])
def test_a_second_question_is_asked_with_the_thought_or_without(
    folder: Path, reads_thoughts: bool
) -> None:
    shown = [json.loads(line) for line in (folder / "shown.jsonl").read_text().splitlines()]
    told = [message["content"] for message in shown[1]["messages"]]
    task = json.loads((folder / "tasks.jsonl").read_text().splitlines()[0])
    tokenizer = loading.load_tokenizer(str(folder / "model"))
    agent: dict[str, Any] = {"name": "tools", "environment": f"{EXAMPLE}:Sums", "max_turns": 2}
    if reads_thoughts:
        pass_to_template(tokenizer, {"preserve_thinking": True})
    else:
        agent["history"] = "as_deployed"
    config = Config.model_validate({"agent": agent})
    ToolCallingAgent.check(config, tokenizer)
    engine = Engine.of(tokenizer, told[1], told[3])
    policy = make_policy(config, "planner", engine, tokenizer)
    player = ToolCallingAgent(AgentContext(config, {"planner": policy}, {}, {}, 2))
    done = asyncio.run(player.run(Task("t", task["question"], (task["answer"],)), 0))
    assert done.reported == {"reward": 1.0} and done.answer == task["answer"]
    thought = told[1] if reads_thoughts else "ok"
    expected = f"u:{told[0]}\na:{thought}<|end|>\nu:{told[2]}\na:"
    assert engine.prompts == [f"u:{told[0]}\na:", expected]
