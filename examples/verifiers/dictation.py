"""An environment of the package `verifiers`: it orders digits or letters, and rewards the share of
a reply's characters that are what was ordered. Its harness asks once, in this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import verifiers.v1 as vf

ORDERS = {"digits": str.isdecimal, "letters": str.isalpha}
NUM_TASKS = 64


class Order(vf.Task[vf.TaskData]):
    @vf.reward
    async def obeyed(self, trace: vf.Trace) -> float:
        is_ordered = ORDERS[self.data.prompt_text]
        return sum(map(is_ordered, trace.last_reply)) / max(len(trace.last_reply), 1)


class Dictation(vf.Taskset[Order]):
    def load(self) -> Iterator[Order]:
        for number in range(NUM_TASKS):
            order = list(ORDERS)[number % len(ORDERS)]
            yield Order(vf.TaskData(prompt=order, name=f"{order} {number}"), self.config.task)


class AskOnce(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> vf.ProgramResult:
        messages = [{"role": "user", "content": data.prompt_text}]
        async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {secret}"}) as client:
            body = {"model": ctx.model, "messages": messages}
            reply = await client.post(f"{endpoint}/chat/completions", json=body, timeout=60.0)
        failed = reply.status_code != 200
        return vf.ProgramResult(int(failed), "", reply.text if failed else "")


__all__ = ["AskOnce", "Dictation"]
