"""Write sums of two steps, each a call of the calculator, and demonstrations that guess too often:

python -m examples.gateway.two_steps runs/steps.jsonl runs/steps-shown.jsonl

The first file is for tasks.path, the second for rft.conversations. In half of the demonstrations
the second result repeats the first, as compacting.py lets it.
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
SHARE_OF_GUESSES = 0.45  # of the calls; a guess ends a demonstration, with a wrong answer


def main(questions: str, shown: str) -> None:
    rng = random.Random(0)
    drawn = list(dict(_draw(rng) for _ in range(NUM_QUESTIONS + NUM_SHOWN)).items())
    asked = [_show(*one, random.Random(0), 0.0)["messages"] for one in drawn[:NUM_QUESTIONS]]
    rows = [{"question": row[0]["content"], "answer": [row[-1]["content"]]} for row in asked]
    others = [_show(*one, rng, SHARE_OF_GUESSES) for one in drawn[NUM_QUESTIONS:]]
    for path, lines in ((questions, rows), (shown, others)):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def _draw(rng: random.Random) -> tuple[str, tuple[str, str]]:
    """Return a question and what each call calculates; the second goes on with a result."""
    x, y, z = (rng.randrange(2, 100) for _ in range(3))
    one, two = rng.choice(["plus", "minus"]), rng.choice(list(SIGNS))
    steps = f"{x} {SIGNS[one]} {y}", f" {SIGNS[two]} {z}"
    return f"Calculate {x} {one} {y}, then {two} {z}.", steps


def _show(question: str, steps: tuple[str, str], rng: random.Random, guess: float) -> Any:
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    found, earlier, repeats = "", "", rng.random() < 0.5
    for step in steps:
        name = "Base_Generator" if rng.random() < guess else "Python_Coder"
        used = {"name": name, "arguments": json.dumps({"query": f"{found}{step}"})}
        found, number = run_tool(**used), str(len(messages) // 2)
        call = {"id": number, "type": "function", "function": used}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": number, "content": f"{found}{earlier}"})
        earlier = f"\n{found}" if repeats else ""
        if name == "Base_Generator":
            break
    return {"messages": [*messages, {"role": "assistant", "content": found}], "tools": DEFINITIONS}


if __name__ == "__main__":
    main(*sys.argv[1:3])
