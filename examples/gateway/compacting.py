"""A program for the gateway that rewrites its history: after each tool it begins anew with the
question and what it has found so far, as harnesses do whose context grows too long.

python -m flowtrain.train --config configs/gateway.toml --model.path runs/warm/model \
    --gateway.function examples/gateway/compacting.py:solve

Each turn is a conversation of its own then, and is trained all the same.
"""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

from examples.gateway.plain import DEFINITIONS, MAX_TURNS, run_tool


async def solve(task: Any, base_url: str, api_key: str) -> str:
    """Call tools until the model writes a message without a call, which is the answer."""
    found: list[str] = []
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(MAX_TURNS):
            text = " ".join([task.question, *found])
            reply = await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": text}], tools=DEFINITIONS
            )
            message = reply.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                found.append(run_tool(call.function.name, call.function.arguments))
    return ""
