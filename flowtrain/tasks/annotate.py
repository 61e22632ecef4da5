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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from flowtrain.config import Config
from flowtrain.config.command import INTERRUPTED, run_command
from flowtrain.engines.chat_engines import start_engine
from flowtrain.engines.endpoint import Endpoint
from flowtrain.engines.protocol import EngineError
from flowtrain.engines.token_chat import TokenChat
from flowtrain.tasks import sub_goals
from flowtrain.tasks.files import load_source
from flowtrain.tasks.rows import parse_json
from flowtrain.tasks.sub_goal_prompt import ask_again, from_tree, prompt_for, read_reply
from flowtrain.types import SubGoal, Task, UserError
from flowtrain.utils.commands import end_on_signals, number
from flowtrain.utils.errors import user_error
from flowtrain.utils.files import writing
from flowtrain.utils.seeds import derive_seed
from flowtrain.utils.terminal import protect_output
from flowtrain.utils.waiting import waiting


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0; 1 when rows failed; 2 for a user's mistake; 130
    when interrupted.
    """
    protect_output()
    options, rest = _parser().parse_known_args(arguments)

    def body(config: Config) -> int:
        end_on_signals()  # what was answered is written down already
        try:
            return annotate(
                config, options.engine, options.rows, options.out, num_attempts=options.attempts
            )
        except KeyboardInterrupt:
            print("\nstopped; the same command goes on", file=sys.stderr)
            return INTERRUPTED

    words = [*(["--config", options.config] if options.config else []), *rest]
    return run_command("flowtrain.tasks.annotate", body, words)


def annotate(config: Config, engine: str, rows: str, out: Path, num_attempts: int = 3) -> int:
    """Append the tasks of `rows` with sub-goals to `out`, and return the command's exit code.

    Rows that `out` has are not asked again; those that fail are asked the next time. Raises
    UserError for rows, files and engines that cannot be used.
    """
    tasks = _tasks(config, rows)
    done = _done(out, tasks)
    todo = [task for task in tasks if task.id not in done]
    needs = [task for task in todo if not task.sub_goals and from_tree(task) is None]
    if needs and not engine:
        raise UserError(
            f"{rows}: task {needs[0].id!r} has no sub-goals of its own, so a model must name "
            "them: --engine NAME"
        )
    chat = start_engine(config, engine, "--engine") if needs else None
    annotation = _Annotation(config, chat, out, num_attempts)
    try:
        annotation.run(todo, config.engines[engine].max_concurrency if needs else 1)
    finally:
        if chat is not None:
            chat.close()
    num_rows = len(tasks) - len(annotation.failed)
    print(f"{out}: {num_rows:,} rows; {len(annotation.failed):,} failed")
    if chat is not None:
        print(f"{engine}: {annotation.num_asked:,} rows answered, {_cost_of(chat)}")
    for task_id, reason in annotation.failed.items():
        print(f"failed: {task_id}: {reason}", file=sys.stderr)
    return 1 if annotation.failed else 0


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
    text = "replies per row: one that cannot be used is asked again with the reason (default: 3)"
    add("--attempts", type=number(1, 100), default=3, metavar="N", help=text)
    return parser


def _jsonl(text: str) -> Path:
    if not text.endswith(".jsonl"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .jsonl")
    return Path(text)


def _tasks(config: Config, rows: str) -> list[Task]:
    tasks = config.tasks
    source = load_source(
        rows,
        tasks.preset,
        split=tasks.split,
        question_key=tasks.question_key,
        answer_key=tasks.answer_key,
        scorer=tasks.scorer,
        keeps_columns=True,
    )
    return list(source.tasks)


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


@dataclass
class _Annotation:
    """Rows under way, and what became of them."""

    config: Config
    chat: Endpoint | TokenChat | None
    out: Path
    num_attempts: int
    failed: dict[str, str] = field(default_factory=dict)
    """Reasons by the ids of rows."""
    num_asked: int = 0
    """Rows that the engine has answered."""

    def run(self, tasks: Sequence[Task], width: int) -> None:
        """Annotate `width` rows at a time; an interrupt leaves in the file what is done."""
        free = asyncio.Semaphore(width)

        async def one(task: Task) -> None:
            async with free:
                await self._row(task)
            tick()

        async def every() -> None:
            async with asyncio.TaskGroup() as running:
                for task in tasks:
                    running.create_task(one(task))

        with waiting("annotated rows", True, total=len(tasks)) as tick:
            try:
                asyncio.run(every())
            except* UserError as mistakes:
                raise mistakes.exceptions[0] from None

    async def _row(self, task: Task) -> None:
        try:
            goals = await self._sub_goals(task)
        except (UserError, EngineError) as error:
            self.failed[task.id] = str(error)
            return
        line = json.dumps(_row_of(task, goals), ensure_ascii=False) + "\n"
        with writing(self.out), self.out.open("ab") as file:
            file.write(line.encode())

    async def _sub_goals(self, task: Task) -> tuple[SubGoal, ...]:
        """Raises UserError, or EngineError, for a row that gets none."""
        if not task.answers:
            raise UserError("the row has no answer")
        goals = task.sub_goals or from_tree(task)
        if goals is None:
            return await self._asked(task)
        sub_goals.check(replace(task, sub_goals=goals))
        return goals

    async def _asked(self, task: Task) -> tuple[SubGoal, ...]:
        """Ask until a reply can be used."""
        assert self.chat is not None, "checked before the start"
        prompt = first = prompt_for(task)
        problem = ""
        for attempt in range(self.num_attempts):
            reply = await self.chat.ask(
                prompt,
                seed=derive_seed(self.config.run.seed, "annotate", task.id, attempt),
                deadline_s=self.config.agent.module_timeout_s,
            )
            try:
                goals = read_reply(task, reply)
            except UserError as error:
                problem = str(error)
                prompt = ask_again(first, reply, problem)
            else:
                self.num_asked += 1
                return goals
        raise UserError(f"{problem} ({self.num_attempts} replies)")


def _row_of(task: Task, goals: Sequence[SubGoal]) -> dict[str, Any]:
    """Return a row of our own layout."""
    row: dict[str, Any] = {"id": task.id, "question": task.question, "answer": list(task.answers)}
    others = {"kind": task.kind, "num_turns": task.num_turns, "choices": list(task.choices)}
    row |= {name: value for name, value in others.items() if value}
    return row | {"scorer": task.scorer, "sub_goals": [asdict(goal) for goal in goals]}


def _cost_of(chat: Endpoint | TokenChat) -> str:
    meter = chat.meter.metrics()
    return (
        f"{meter['requests']:.0f} requests, {meter['prompt_tokens']:,.0f} + "
        f"{meter['reply_tokens']:,.0f} tokens, cost {meter['cost']:.4g}"
    )


if __name__ == "__main__":
    sys.exit(main())
