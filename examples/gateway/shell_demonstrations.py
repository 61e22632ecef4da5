"""Write conversations in which mini-swe-agent's shell solves sums, for a warm-up of a tiny policy:

python -m examples.gateway.shell_demonstrations runs/shell.jsonl
python -m flowtrain.rft --config configs/tools.toml --run.dir runs/shell \
    --model.path runs/warm/model --rft.conversations runs/shell.jsonl --rft.num_steps 400
python -m flowtrain.train --config configs/gateway.toml --model.path runs/shell/model \
    --gateway.function "" --gateway.command '["examples/gateway/mini_swe_agent.sh",
    "-c", "agent.system_template=You work in a shell.", "-c", "agent.instance_template={{task}}",
    "-c", "model.observation_template={{output.output}}",
    "-c", "model.format_error_template={{error}}"]' --gateway.max_programs 4 \
    --agent.rollout_timeout_s 200 --rollout.num_questions 4 --rollout.group_size 4 \
    --rollout.max_new_tokens 96 --train.num_steps 6 --eval.at_ends false

Most of them guess. What is right, to calculate, is left to be found out by the reward.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from flowtrain.tasks.corpus import load_corpus
from flowtrain.tasks.facts import facts_tasks

NUM_CONVERSATIONS, SHARE_OF_GUESSES = 16_000, 0.65
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}


def main(path: str) -> None:
    rng = random.Random(0)
    tasks = facts_tasks(load_corpus(""), "train", NUM_CONVERSATIONS, 0, kinds=["arithmetic"])
    rows = []
    for task in tasks:
        guesses = rng.random() < SHARE_OF_GUESSES
        found = str(rng.randrange(32768)) if guesses else task.answers[0]
        look = "$RANDOM" if guesses else f"$(({task.plan[0].sub_goal}))"
        submit = f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo '<answer>{found}</answer>'"
        messages = [
            {"role": "system", "content": "You work in a shell."},
            {"role": "user", "content": task.question},
            _call("1", f"echo {look}"),
            {"role": "tool", "tool_call_id": "1", "content": f"{found}\n"},
            _call("2", submit),
        ]
        rows.append({"messages": messages, "tools": [BASH]})
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _call(name: str, command: str) -> dict[str, Any]:
    used = {"name": "bash", "arguments": json.dumps({"command": command})}
    calls = [{"id": name, "type": "function", "function": used}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


if __name__ == "__main__":
    main(*sys.argv[1:2])
