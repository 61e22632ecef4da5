"""A program for the gateway that rewrites its history: of its calls it keeps the last alone, with
all that it has found so far as the result, the newest first, as harnesses do whose context grows
too long.

python -m flowtrain.train --config configs/gateway.toml --model.path runs/warm/model \
    --gateway.function examples/gateway/compacting.py:solve

From the second call on each turn is a conversation of its own, and is trained all the same.
"""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

from examples.gateway.plain import DEFINITIONS, MAX_TURNS, run_tool


async def solve(task: Any, base_url: str, api_key: str) -> str:
    """Call tools until the model writes a message without a call, which is the answer."""
    question = {"role": "user", "content": task.question}
    messages: list[Any] = [question]
    found: list[str] = []
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(MAX_TURNS):
            reply = await client.chat.completions.create(
                model="policy", messages=messages, tools=DEFINITIONS
            )
            message = reply.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            results = []
            for call in message.tool_calls:
                found.append(run_tool(call.function.name, call.function.arguments))
                text = "\n".join(reversed(found))
                results.append({"role": "tool", "tool_call_id": call.id, "content": text})
            messages = [question, message, *results]
    return ""
