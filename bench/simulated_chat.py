"""The policy of `bench.gateway`: an engine that is SIMULATED, behind a real tokenizer and template.

A response takes as long as it is told to, no core, and no token of it is sampled.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

from bench.gateway_clients import LAST, MOST, TOOLS, TURNS, text
from flowtrain.agents.base import AgentContext
from flowtrain.agents.policy import Policy
from flowtrain.config import Config
from flowtrain.records import Call, FinishReason, Sampling, VersionSpan
from flowtrain.trainer.toy import new_tokenizer

_CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "%s"}}\n</tool_call>'
_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ messages[0].content }}\n\n# Tools\n\nYou may call "
    "functions, which are described here:\n<tools>{% for tool in tools %}\n{{ tool | tojson }}"
    "{% endfor %}\n</tools>\n\nFor each call, return a json object within "
    "<tool_call></tool_call>:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
    "{% endif %}{% for message in messages if not (tools and message.role == 'system') %}"
    "{% if message.role == 'tool' %}<|im_start|>user\n"
    "<tool_response>\n{{ message.content }}\n</tool_response>{% else %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""After Qwen2.5's."""


@dataclass(slots=True)
class SimulatedEngine:
    """Answers a fixed time after it was asked, with ids that are at hand."""

    said: tuple[int, ...]
    """A text and a call of a tool."""
    answer: tuple[int, ...]
    seconds: float = 0.0
    num_calls: int = 0
    longest: int = 0
    """Tokens of the longest prompt."""
    version: int = 0
    max_tokens: int = 1 << 20

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Call:
        self.num_calls += 1
        self.longest = max(self.longest, len(prompt_ids))
        if self.seconds:
            await asyncio.sleep(self.seconds)
        ids = self.answer if sampling.max_new_tokens == LAST else self.said
        spans = (VersionSpan(0, len(ids), 0),)
        return Call(tuple(prompt_ids), ids, (-1.0,) * len(ids), spans, FinishReason.STOP)


@functools.cache
def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Return the same one for all cases, as a run has one."""
    tokenizer = new_tokenizer([text(seed, 1000) for seed in range(100)] + [str(TOOLS)], 4096)
    special = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", _TEMPLATE
    return tokenizer


def make_context() -> tuple[AgentContext, SimulatedEngine]:
    """Return what the agent needs, with an engine that is simulated."""
    tokenizer = chat_tokenizer()
    said, answer = (
        tuple(tokenizer.encode(f"{each}<|im_end|>", add_special_tokens=False))
        for each in (f"{text(2, 50)}\n{_CALL % text(3, 12)}", text(4, 60))
    )
    engine = SimulatedEngine(said, answer)
    config = Config.model_validate(
        {
            "agent": {"name": "gateway", "max_turns": TURNS, "rollout_timeout_s": 3600.0},
            "gateway": {"command": ["true"]},
        }
    )
    sampled: Any = engine  # it is asked for no more than samples
    policy = Policy(sampled, tokenizer, MOST, 1.0, request_timeout_s=600.0)
    return AgentContext(config, {"planner": policy}, {}, {}, TURNS), engine
