"""A reward of your own in two parts: how close a number comes, and how long the response was.

python -m flowtrain.train --tasks.name file --tasks.path gsm8k.jsonl --reward.low -0.2 \
    --agent.name single --model.path Qwen/Qwen2.5-0.5B-Instruct \
    --reward.function examples/my_reward.py:score

A row of GSM8K: {"question": "Natalia sold ...", "answer": "Natalia sold 48 / 2 ... #### 72"}.
"""

from __future__ import annotations

import re

from flowtrain.records import Task, Trajectory

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_MAX_TOKENS, _PENALTY = 200, 0.2


def score(task: Task, answer: str, trajectory: Trajectory) -> dict[str, float]:
    """Return how close the answer is, from 0 to 1, and a penalty."""
    wanted, given = _last_number(task.answers[0]), _last_number(answer)
    return {
        "closeness": 0.0 if wanted is None or given is None else 1 / (1 + abs(given - wanted)),
        "length": -_PENALTY * min(trajectory.num_sampled_tokens / _MAX_TOKENS, 1.0),
    }


def _last_number(text: str) -> float | None:
    """Read the last number of a text, which is where GSM8K has its result."""
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None
