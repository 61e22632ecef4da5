"""Waits for requests to a real vLLM to be in the middle of their responses."""

from __future__ import annotations

import asyncio

from flowtrain.engines.vllm.engine import VllmEngine


async def under_way(engine: VllmEngine, number: int, num_tokens: int = 10) -> None:
    """Wait until so many requests have so many tokens each."""
    states = engine.supervisor.runner.result()._llm.output_processor.request_states
    async with asyncio.timeout(60):
        while True:
            counts = [state.detokenizer.num_output_tokens() for state in list(states.values())]
            if sum(count >= num_tokens for count in counts) >= number:
                return
            await asyncio.sleep(0.002)
