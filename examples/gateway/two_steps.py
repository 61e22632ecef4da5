"""Write sums of two steps, each a call of the calculator, and demonstrations that guess too often:

python -m examples.gateway.two_steps runs/steps.jsonl runs/steps-shown.jsonl

The first file is for tasks.path, the second for rft.conversations.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from examples.gateway.plain import DEFINITIONS, run_tool
from flowtrain.tasks.facts import SIGNS

NUM_QUESTIONS, NUM_SHOWN = 2_000, 16_000
SHARE_OF_GUESSES = 0.45
"""Of the calls. A guess ends a demonstration, with a wrong answer."""


def main(questions: str, shown: str) -> None:
    rng = random.Random(0)
    drawn = dict(_draw(rng) for _ in range(NUM_QUESTIONS + NUM_SHOWN))
    asked = list(drawn)[:NUM_QUESTIONS]
    rows = []
    for question in asked:
        steps, answer = drawn[question], ""
        for step in steps:
            answer = run_tool("Python_Coder", json.dumps({"query": f"{answer}{step}"}))
        rows.append({"question": question, "answer": [answer]})
    others = [_show(question, drawn[question], rng) for question in list(drawn)[NUM_QUESTIONS:]]
    for path, lines in ((questions, rows), (shown, others)):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def _draw(rng: random.Random) -> tuple[str, tuple[str, str]]:
    """Return a question and what each call calculates; the second goes on with a result."""
    x, y, z = (rng.randrange(2, 100) for _ in range(3))
    one, two = rng.choice(["plus", "minus"]), rng.choice(list(SIGNS))
    return f"Calculate {x} {one} {y}, then {two} {z}.", (
        f"{x} {SIGNS[one]} {y}",
        f" {SIGNS[two]} {z}",
    )


def _show(question: str, steps: tuple[str, str], rng: random.Random) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    found = ""
    for number, step in enumerate(steps):
        guesses = rng.random() < SHARE_OF_GUESSES
        name = "Base_Generator" if guesses else "Python_Coder"
        arguments = json.dumps({"query": f"{found}{step}"})
        found = run_tool(name, arguments)
        function = {"name": name, "arguments": arguments}
        call = {"id": str(number), "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": str(number), "content": found})
        if guesses:
            break
    messages.append({"role": "assistant", "content": found})
    return {"messages": messages, "tools": DEFINITIONS}


if __name__ == "__main__":
    main(*sys.argv[1:3])
