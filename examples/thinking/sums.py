"""A task in which earlier thinking helps: the sum of two numbers and of one that comes later.

Writes a model with random weights, conversations to imitate, and questions:

    python -m examples.thinking.sums runs/sums
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from flowtrain.records import Task
from flowtrain.tools import Tool
from flowtrain.trainer import toy
from flowtrain.trainer.model import loading

TEMPLATE = (
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- set content = m.content %}"
    "{%- if m.role == 'assistant' and loop.index0 < ns.last and not preserve_thinking %}"
    "{%- set content = content.split('</think>')[-1] %}{%- endif %}"
    "{{- m.role[0] + ':' + content + (eos_token if m.role == 'assistant' else '') + '\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- 'a:' }}{%- endif %}"
)
"""As Qwen3's, it takes the thinking out of the replies before the last question."""


class Sums:
    """Names two numbers and then a third, and wants their sum."""

    tools: Mapping[str, Tool] = {}

    def __init__(self, task: Task) -> None:
        self._first, self._more = _questions(task.question)
        self._right = task.answers[0]
        self._replies: list[str] = []

    async def open(self) -> Sequence[Mapping[str, Any]]:
        return [{"role": "user", "content": self._first}]

    async def reply(self, text: str) -> str | None:
        self._replies.append(text)
        return self._more if len(self._replies) == 1 else None

    async def reward(self) -> float:
        return float(self._replies[1:] == [self._right])

    async def close(self) -> None:
        """Free nothing."""


def _questions(text: str) -> tuple[str, str]:
    first, more = text.split(",")
    return first, more


def conversation(a: int, b: int, c: int, thinks_again: bool) -> list[dict[str, str]]:
    """Think of the first sum, say "ok", and answer: from that thought or from a new one."""
    thought = f"<think>{a + b}</think>"
    replies = (f"{thought}ok", f"{thought if thinks_again else ''}{a + b + c}")
    first, more = _questions(f"{a}+{b},+{c}")
    return [
        {"role": role, "content": text}
        for role, text in zip(
            ("user", "assistant") * 2, (first, replies[0], more, replies[1]), strict=True
        )
    ]


def main(path: str) -> None:
    folder, rng = Path(path), random.Random(0)
    sums = list(product(range(6), repeat=3))
    rng.shuffle(sums)
    folder.mkdir(parents=True, exist_ok=True)
    shown = [{"messages": conversation(*each, thinks)} for each in sums for thinks in (True, False)]
    tasks = [{"question": f"{a}+{b},+{c}", "answer": str(a + b + c)} for a, b, c in sums]
    for name, rows in (("shown", shown), ("tasks", tasks)):
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    tokenizer = toy.new_tokenizer([], 258)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = toy.new_model(tokenizer, hidden_size=96, num_layers=3, num_heads=6, max_positions=128)
    loading.export(model, tokenizer, loading.full_weights(model), folder / "model")


if __name__ == "__main__":
    main(*sys.argv[1:])
