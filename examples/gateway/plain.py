"""A program for the gateway with OpenAI's own client: it answers questions with three tools.

python -m flowtrain.train --config configs/gateway.toml --model.path runs/warm/model \
    --gateway.function examples/gateway/plain.py:solve

Nothing in here knows of training: `solve` works with any endpoint that calls tools.
"""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI

from examples.gateway import tools

MAX_TURNS = 5
DEFINITIONS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": (tool.__doc__ or "").partition("\n")[0],
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}},
                "required": ["query"],
            },
        },
    }
    for name, tool in tools.TOOLS.items()
]


async def solve(task: Any, base_url: str, api_key: str) -> str:
    """Call tools until the model writes a message without a call, which is the answer."""
    messages: list[Any] = [{"role": "user", "content": task.question}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(MAX_TURNS):
            reply = await client.chat.completions.create(
                model="policy", messages=messages, tools=DEFINITIONS
            )
            message = reply.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                result = run_tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


def run_tool(name: str, arguments: str) -> str:
    given = json.loads(arguments)
    if name not in tools.TOOLS or set(given) != {"query"}:
        return "Error: there is no such tool"
    return tools.TOOLS[name](str(given["query"]))
