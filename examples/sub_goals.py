"""Give questions sub-goals, as algorithm.name = "infoflow" needs them, by a model behind an
OpenAI-compatible endpoint (InfoFlow, arXiv 2510.26575, had Gemini name them; the prompt is ours):

OPENAI_BASE_URL=... OPENAI_API_KEY=... python examples/sub_goals.py --model gemini-2.5-pro \
    --in rows.jsonl --out annotated.jsonl

Rows that hold InfoSeek's tree (`root`) need no model. A second call goes on where one has stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from flowtrain.records import SubGoal, Task, UserError
from flowtrain.tasks import sub_goals
from flowtrain.tasks.files import load_tasks

NUM_ATTEMPTS = 3
"""Replies per row; one that cannot be used is asked again, with the reason."""
KEYS = ("question_key", "answer_key", "scorer")
PROMPT = """A researcher with a search engine will be asked the question below. List what has to be
found out on the way to the answer: the intermediate entities, dates or numbers, in the order in
which they are needed.

Question: {question}
Answer: {answer}
{passages}
- List neither the answer nor anything that the question itself names.
- "names": how texts name the finding, as short as possible; further spellings after the first.
- "weight": a number above 0; the more of the later steps need the finding, the higher.
- "query": what to type into the search engine to find it, without its names and the answer.
- A question that takes a single search has none: reply {{"sub_goals": []}}.

Reply with this JSON object alone:
{{"sub_goals": [{{"names": ["..."], "weight": 1, "query": "..."}}]}}"""


def checked(task: Task, goals: Sequence[SubGoal]) -> list[SubGoal]:
    """Return them with weights that sum to 1. Raises UserError where one gives something away."""
    total = sum(goal.weight for goal in goals)
    goals = [replace(goal, weight=goal.weight / total) for goal in goals]
    answers = set(map(sub_goals.spaced, task.answers))
    if any(answers & set(map(sub_goals.spaced, goal.names)) for goal in goals):
        raise UserError("a sub-goal is the answer itself")
    sub_goals.check(asked := replace(task, sub_goals=tuple(goals)))
    if len(sub_goals.sought(asked)) < len(goals):
        raise UserError("the question itself names a sub-goal")
    return goals


def from_tree(task: Task) -> list[SubGoal] | None:
    """Return the entities below the answer in InfoSeek's tree, the deepest first, each with a
    weight in proportion to 1 + the steps that build on it; None for a row without one.
    """
    level, depth, found = task.extra.get("root", {}).get("children") or [], 1, dict[str, SubGoal]()
    if not level:
        return None
    while level:
        for node in level:
            goal = SubGoal((str(node.get("entity")),), 1.0 + depth, node.get("question") or "")
            said = sub_goals.spaced(goal.query)
            if any(sub_goals.spaced(name) in said for name in (*goal.names, *task.answers)):
                goal = replace(goal, query="")
            if goal.names[0] not in ("None", *task.answers):
                found[goal.names[0]] = goal
        level, depth = [child for node in level for child in node.get("children") or []], depth + 1
    question = sub_goals.spaced(task.question)
    named = [goal for goal in found.values() if sub_goals.spaced(goal.names[0]) not in question]
    return checked(task, sorted(named, key=lambda goal: -goal.weight))


async def ask(client: AsyncOpenAI, model: str, task: Task) -> list[SubGoal]:
    """Ask until a reply can be used. Raises UserError for the last one that cannot."""
    passages = task.extra.get("context") or task.extra.get("paragraphs") or ""
    told = f"Passages that matter: {json.dumps(passages)[:16_000]}\n" if passages else ""
    text = PROMPT.format(question=task.question, answer=" | ".join(task.answers), passages=told)
    messages: list[Any] = [{"role": "user", "content": text}]
    for _ in range(NUM_ATTEMPTS):
        answer = await client.chat.completions.create(model=model, messages=messages)
        reply = answer.choices[0].message.content or ""
        try:
            listed = json.loads(reply[reply.find("{") : reply.rfind("}") + 1])["sub_goals"]
            goals = [SubGoal(tuple(g["names"]), float(g["weight"]), g["query"]) for g in listed]
            return checked(task, goals)
        except (UserError, ValueError, ArithmeticError, LookupError, TypeError) as error:
            problem = f"It cannot be used: {type(error).__name__}: {error}. Reply with the JSON."
        messages += [
            {"role": "assistant", "content": reply},
            {"role": "user", "content": problem},
        ]
    raise UserError(problem)


async def annotate(tasks: Sequence[Task], out: Path, model: str, together: int) -> int:
    """Append each task with sub-goals to `out` as soon as it has them; return how many failed."""
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    done = {json.loads(line)["id"] for line in lines}
    places, failed = asyncio.Semaphore(together), list[str]()

    async def one(task: Task) -> None:
        async with places:
            try:
                goals = from_tree(task)
                goals = await ask(client, model, task) if goals is None else goals
            except Exception as error:  # noqa: BLE001  # of one row: the others go on
                failed.append(task.id)
                print(f"failed: {task.id}: {error}", file=sys.stderr)
                return
        row = {"id": task.id, "question": task.question, "answer": task.answers}
        row |= {"scorer": task.scorer, "sub_goals": [asdict(goal) for goal in goals]}
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    async with AsyncOpenAI() as client:
        await asyncio.gather(*(one(task) for task in tasks if task.id not in done))
    return len(failed)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("--in", dest="rows", required=True, help="whatever tasks.path may be")
    add("--out", type=Path, required=True, help="rows with sub_goals, for tasks.path")
    add("--model", default="", help="not needed where all rows hold trees")
    add("--together", type=int, default=16, help="rows asked at a time")
    for key in KEYS:
        add(f"--{key}", default="", help=f"tasks.{key}")
    given = vars(parser.parse_args(argv))
    keys = {key: given[key] for key in KEYS}
    tasks = load_tasks(given["rows"], **keys, keeps_columns=True)
    return 1 if asyncio.run(annotate(tasks, given["out"], given["model"], given["together"])) else 0


if __name__ == "__main__":
    sys.exit(main())
