"""Write sums and products as questions, for configs/gateway.toml:

python -m examples.gateway.questions runs/arithmetic.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from flowtrain.tasks.corpus import load_corpus
from flowtrain.tasks.facts import facts_tasks

NUM_QUESTIONS = 2000


def main(path: str) -> None:
    tasks = facts_tasks(load_corpus(""), "train", NUM_QUESTIONS, 0, kinds=["arithmetic"])
    rows = [{"question": task.question, "answer": list(task.answers)} for task in tasks]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


if __name__ == "__main__":
    main(*sys.argv[1:2])
