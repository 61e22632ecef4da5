"""Write conversations in which a harness's shell solves sums, for a warm-up of a tiny policy. The
harness is run once, for what it asks first; that begins them all.

python -m examples.tool_calls runs/shown.jsonl 12000
python -m flowtrain.rft --config configs/tools.toml --run.dir runs/warm --tiny.max_positions 512 \
    --rft.num_steps 3000
python -m examples.gateway.questions runs/arithmetic.jsonl
python -m examples.gateway.shell_demonstrations runs/shell.jsonl examples/gateway/claude_code.sh \
    --bare --tools Bash --system-prompt "You work in a shell."
python -m flowtrain.rft --config configs/tools.toml --run.dir runs/shell \
    --model.path runs/warm/model --rft.conversations runs/shell.jsonl --rft.num_steps 400
python -m flowtrain.train --config configs/gateway.toml --model.path runs/shell/model \
    --gateway.function "" --gateway.command '["examples/gateway/claude_code.sh", "--bare",
    "--tools", "Bash", "--system-prompt", "You work in a shell."]' --gateway.max_programs 4 \
    --agent.rollout_timeout_s 200 --rollout.num_questions 4 --rollout.group_size 8 \
    --rollout.max_new_tokens 96 --eval.at_ends false

and likewise, in groups of 4 and for 6 steps, with the words

examples/gateway/mini_swe_agent.sh -c "agent.system_template=You work in a shell." \
    -c "agent.instance_template={{task}}" -c "model.observation_template={{output.output}}" \
    -c "model.format_error_template={{error}}"

Most of them guess. What is right, to calculate, is left to be found out by the reward.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from flowtrain.agents.gateway.plain import ChatRequest, Message, Refusal
from flowtrain.agents.gateway.programs import Command, ProgramFailed
from flowtrain.agents.gateway.server import Gateway, new_key
from flowtrain.config.gateway import Gateway as Options
from flowtrain.records import Task
from flowtrain.tasks.corpus import load_corpus
from flowtrain.tasks.facts import facts_tasks

NUM_CONVERSATIONS, SHARE_OF_GUESSES = 16_000, 0.65
QUESTION = "What is it?"
"""Of the task that the harness is run with."""


def main(path: str, *command: str) -> None:
    asked = first_request(command)
    is_mini = "mini" in command[0]
    rng = random.Random(0)
    tasks = facts_tasks(load_corpus(""), "train", NUM_CONVERSATIONS, 0, kinds=["arithmetic"])
    rows = []
    for task in tasks:
        guesses = rng.random() < SHARE_OF_GUESSES
        found = str(rng.randrange(32768)) if guesses else task.answers[0]
        look = "$RANDOM" if guesses else f"$(({task.plan[0].sub_goal}))"
        answer = f"<answer>{found}</answer>"
        submit = f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo '{answer}'"
        messages = [
            *(_with(task.question, message) for message in asked.messages),
            _call(asked, "1", f"echo {look}"),
            {"role": "tool", "tool_call_id": "1", "content": found + "\n" * is_mini},
            _call(asked, "2", submit) if is_mini else {"role": "assistant", "content": answer},
        ]
        rows.append({"messages": messages, "tools": asked.tools})
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


class _Listener:
    """In place of a rollout: keeps what is asked first, and refuses it."""

    task = Task("0", QUESTION, ("",))
    num_requests, max_requests = 0, 100

    def __init__(self) -> None:
        self.key = new_key()
        self.asked: ChatRequest | None = None

    def ask(self, asked: ChatRequest, body: bytes, *, retry_of: bytes | None) -> Any:
        self.asked = self.asked or asked
        raise Refusal("that is all")


def first_request(command: Sequence[str]) -> ChatRequest:
    """Run a harness until it has asked for something."""
    listener: Any = _Listener()
    with closing(Gateway()) as gateway, gateway.serving(listener):
        try:
            asyncio.run(Command(Options(command=command)).solve(listener, gateway.base_url))
        except ProgramFailed as error:
            if listener.asked is None:
                raise SystemExit(f"it asks for nothing: {error}") from None
    return listener.asked


def _with(question: str, message: Message) -> Message:
    return {**message, "content": message["content"].replace(QUESTION, question)}


def _call(asked: ChatRequest, name: str, command: str) -> Message:
    """Call the shell, which is the harness's only tool."""
    (tool,) = (each["function"] for each in asked.tools)
    used = {"name": tool["name"], "arguments": json.dumps({"command": command})}
    calls = [{"id": name, "type": "function", "function": used}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) > 2 else print(__doc__)
