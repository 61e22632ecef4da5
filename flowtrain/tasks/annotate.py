"""Give questions sub-goals:  python -m flowtrain.tasks.annotate --config C --engine NAME
--in rows.jsonl --out annotated.jsonl

InfoFlow (arXiv 2510.26575) rewards what a rollout finds out on the way, and had a model name these
findings offline, with weights. Rows that hold them already need no engine.
`docs/reproduce-infoflow.md` shows the command in its place.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from flowtrain.config import Chat, Config
from flowtrain.config.command import INTERRUPTED, run_command
from flowtrain.engines.chat_engines import start_engine
from flowtrain.engines.endpoint import Endpoint
from flowtrain.engines.protocol import EngineError
from flowtrain.engines.token_chat import TokenChat
from flowtrain.tasks import sub_goals
from flowtrain.tasks.files import load_configured
from flowtrain.tasks.rows import parse_json
from flowtrain.tasks.sub_goal_prompt import ask_again, from_tree, prompt_for, read_reply
from flowtrain.types import SubGoal, Task, UserError
from flowtrain.utils.commands import end_on_signals
from flowtrain.utils.errors import user_error
from flowtrain.utils.files import writing
from flowtrain.utils.loops import run_to_end
from flowtrain.utils.seeds import derive_seed
from flowtrain.utils.terminal import protect_output
from flowtrain.utils.waiting import waiting

NUM_ATTEMPTS = 3
"""Replies per row: one that cannot be used is asked again, with the reason."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0; 1 when rows failed; 2 for a user's mistake; 130
    when interrupted.
    """
    protect_output()
    options, rest = _parser().parse_known_args(arguments)

    def body(config: Config) -> int:
        end_on_signals()  # what was answered is written down already
        try:
            return annotate(config, options.engine, options.rows, options.out)
        except KeyboardInterrupt:
            print("\nstopped; the same command goes on", file=sys.stderr)
            return INTERRUPTED

    words = [*(["--config", options.config] if options.config else []), *rest]
    return run_command("flowtrain.tasks.annotate", body, words)


def annotate(config: Config, engine: str, rows: str, out: Path) -> int:
    """Append the tasks of `rows` with sub-goals to `out`, and return the command's exit code.

    Rows that `out` has are not asked again; those that fail are asked the next time. Raises
    UserError for rows, files and engines that cannot be used.
    """
    tasks = load_configured(rows, config.tasks, keeps_columns=True).tasks
    done = _done(out, tasks)
    todo = [task for task in tasks if task.id not in done]
    needs = [task for task in todo if not task.sub_goals and from_tree(task) is None]
    if needs and not engine:
        raise UserError(
            f"{rows}: task {needs[0].id!r} has no sub-goals of its own, so a model must name "
            "them: --engine NAME"
        )
    chat = start_engine(config, engine, "--engine") if needs else None
    try:
        failed = _annotate(config, chat, todo, out, config.engines[engine] if needs else None)
    finally:
        if chat is not None:
            chat.close()
    print(f"{out}: {len(tasks) - len(failed):,} rows; {len(failed):,} failed")
    if chat is not None:
        meter = chat.meter.metrics()
        print(
            f"{engine}: {meter['requests']:.0f} requests, {meter['prompt_tokens']:,.0f} + "
            f"{meter['reply_tokens']:,.0f} tokens, cost {meter['cost']:.4g}"
        )
    for task_id, reason in failed.items():
        print(f"failed: {task_id}: {reason}", file=sys.stderr)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flowtrain.tasks.annotate",
        description="Give questions sub-goals with weights, for algorithm.name = 'infoflow'.",
        epilog="Options of a run go too: --tasks.preset, --tasks.scorer, --tasks.question_key, ... "
        "say how the rows are read, [engines.NAME] how the model is asked.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", metavar="FILE.toml", help="options of a run, [engines] among them")
    text = "a name in [engines]; not needed where all rows hold their steps"
    add("--engine", default="", metavar="NAME", help=text)
    text = "questions with answers, and passages if any: a file, a folder, or a data set of the Hub"
    add("--in", dest="rows", required=True, metavar="PATH", help=text)
    text = "rows with sub_goals, for tasks.path; one that is there is gone on with"
    add("--out", type=_jsonl, required=True, metavar="FILE.jsonl", help=text)
    return parser


def _jsonl(text: str) -> Path:
    if not text.endswith(".jsonl"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .jsonl")
    return Path(text)


def _done(out: Path, tasks: Sequence[Task]) -> set[str]:
    """Return the ids of the rows that `out` has, without one that a killed process has left
    unfinished. Raises UserError for a file that holds something else.
    """
    if not out.exists():
        return set()
    with user_error(f"--out {out}: cannot be read", OSError):
        data = out.read_bytes()
    questions = {task.id: task.question for task in tasks}
    whole = data[: data.rfind(b"\n") + 1]
    done = set()
    for place, line in enumerate(whole.splitlines(), start=1):
        where = f"--out {out}, line {place}"
        row = parse_json(line.decode(errors="replace"), where)
        if not isinstance(row, dict) or not {"id", "question", "sub_goals"} <= row.keys():
            raise UserError(f"{where}: was not written by this command; name another file")
        if questions.get(row["id"]) != row["question"]:
            raise UserError(
                f"{where}: {row['id']!r} is of another question than those of --in; name another "
                "file"
            )
        done.add(row["id"])
    if whole != data:
        with writing(out):
            os.truncate(out, len(whole))
    return done


def _annotate(
    config: Config,
    chat: Endpoint | TokenChat | None,
    tasks: Sequence[Task],
    out: Path,
    engine: Chat | None,
) -> dict[str, str]:
    """Annotate as many rows at a time as the engine takes, each of which is in the file as soon as
    it is done; return the reasons of those that failed, by their ids.
    """
    free = asyncio.Semaphore(engine.max_concurrency if engine else 1)
    failed: dict[str, str] = {}

    async def one(task: Task) -> None:
        async with free:
            try:
                goals = await _sub_goals(config, chat, task)
            except (UserError, EngineError) as error:
                failed[task.id] = str(error)
            else:
                line = json.dumps(_row_of(task, goals), ensure_ascii=False) + "\n"
                with writing(out), out.open("ab") as file:
                    file.write(line.encode())
        tick()

    async def every() -> None:
        async with asyncio.TaskGroup() as running:
            for task in tasks:
                running.create_task(one(task))

    with waiting("annotated rows", True, total=len(tasks)) as tick:
        run_to_end(every())
    return failed


async def _sub_goals(
    config: Config, chat: Endpoint | TokenChat | None, task: Task
) -> tuple[SubGoal, ...]:
    """Return the row's own sub-goals, or ask until a reply can be used; raises UserError or
    EngineError for a row that gets none.
    """
    if not task.answers:
        raise UserError("the row has no answer")
    goals = task.sub_goals or from_tree(task)
    if goals is not None:
        sub_goals.check(replace(task, sub_goals=goals))
        return goals
    assert chat is not None, "checked before the start"
    prompt = first = prompt_for(task)
    problem = ""
    for attempt in range(NUM_ATTEMPTS):
        seed = derive_seed(config.run.seed, "annotate", task.id, attempt)
        reply = await chat.ask(prompt, seed=seed, deadline_s=120.0)
        try:
            return read_reply(task, reply)
        except UserError as error:
            problem = str(error)
            prompt = ask_again(first, reply, problem)
    raise UserError(f"{problem} ({NUM_ATTEMPTS} replies)")


def _row_of(task: Task, goals: Sequence[SubGoal]) -> dict[str, Any]:
    """Return a row of our own layout."""
    row: dict[str, Any] = {"id": task.id, "question": task.question, "answer": list(task.answers)}
    others = {"kind": task.kind, "num_turns": task.num_turns, "choices": list(task.choices)}
    row |= {name: value for name, value in others.items() if value}
    return row | {"scorer": task.scorer, "sub_goals": [asdict(goal) for goal in goals]}


if __name__ == "__main__":
    sys.exit(main())
