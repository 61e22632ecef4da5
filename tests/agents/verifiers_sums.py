"""A small environment of the package `verifiers`: sums, with a harness that asks twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=0.75)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.25)
    async def brief(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 5)


class Sums(vf.Taskset[SumTask]):
    def load(self) -> Iterator[SumTask]:
        for n in range(20):
            data = SumData(prompt=f"What is {n} plus 1?", answer=str(n + 1), name=f"sum {n}")
            yield SumTask(data, self.config.task)


class AskTwice(vf.Harness[vf.HarnessConfig]):
    """Asks in this process, and asks again whether that is sure."""

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
            for question in ("Are you sure?", ""):
                reply = await client.post(
                    f"{endpoint}/chat/completions",
                    json={"model": ctx.model, "messages": messages},
                    timeout=60.0,
                )
                if reply.status_code != 200:
                    return vf.ProgramResult(1, "", reply.text)
                messages.append(reply.json()["choices"][0]["message"])
                messages.append({"role": "user", "content": question})
        return vf.ProgramResult(0, "", "")


__all__ = ["AskTwice", "Sums"]
