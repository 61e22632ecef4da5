"""Write conversations in which the tools of configs/tools.toml answer questions about made-up
entities, and guess too often, for rft.conversations:

python -m examples.tool_calls runs/shown.jsonl [number]
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowtrain.agents.agentflow.generator import last_result
from flowtrain.agents.agentflow.memory import Memory, MemoryEntry
from flowtrain.agents.chat.tool_calling import definition
from flowtrain.config.options import parse
from flowtrain.records import Task
from flowtrain.tasks.sets import task_set
from flowtrain.tools import Tool, run_tool
from flowtrain.tools.registry import make_tools
from flowtrain.utils.event_loop import run_to_end

SHARE_OF_GUESSES = 0.55  # of the calls; a guess ends a conversation, with what was guessed


def main(path: str, number: str = "20000") -> None:
    config = parse(["--config", "configs/tools.toml"])
    assert config is not None
    tasks = task_set(config, fictional=True)
    tools = make_tools(config, tasks)
    rng = random.Random(0)
    # Long ones more often, because few of them reach their last turn.
    weights = [(1 - SHARE_OF_GUESSES) ** (-0.75 * (task.num_turns - 1)) for task in tasks.train]
    drawn = rng.choices(tasks.train, weights, k=int(number))

    async def every() -> list[dict[str, Any]]:
        shown = (conversation(task, tools, random.Random(n)) for n, task in enumerate(drawn))
        return await asyncio.gather(*shown)

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(f"{json.dumps(row)}\n" for row in run_to_end(every())))
    for tool in tools.values():
        tool.close()


async def conversation(task: Task, tools: Mapping[str, Tool], rng: random.Random) -> dict[str, Any]:
    """Follow the plan of a task up to a guess, and answer with the last result."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
    memory = Memory()
    for place, step in enumerate(task.plan):
        name = "Base_Generator" if rng.random() < SHARE_OF_GUESSES else step.tool_name
        arguments = {"query": step.sub_goal}
        found = (await run_tool(tools[name], arguments, timeout_s=60.0, max_chars=400)).text
        memory = memory.add(MemoryEntry(name, step.sub_goal, "", found))
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        call = {"id": f"{place:09}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": found})
        if name == "Base_Generator":
            break
    messages.append({"role": "assistant", "content": last_result(memory)})
    return {"messages": messages, "tools": [definition(tool.card) for tool in tools.values()]}


if __name__ == "__main__":
    main(*sys.argv[1:])
