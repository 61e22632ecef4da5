"""Evaluate planners on public benchmarks:  python -m flowtrain.evals --config C --benchmarks
gameof24,bamboogle --trials 3 --turns 3,5,7,10

`docs/evals.md` says what the numbers mean.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from flowtrain.config import Config
from flowtrain.config.command import INTERRUPTED, run_command
from flowtrain.engines.chat_engines import POLICY
from flowtrain.evals.run import Request, evaluate_benchmarks
from flowtrain.tasks.benchmarks import BENCHMARKS, parse_benchmarks
from flowtrain.types import UserError
from flowtrain.utils.commands import end_on_signals
from flowtrain.utils.terminal import protect_output

FOLDER_ENV = "FLOWTRAIN_BENCHMARKS"


def main() -> int:
    """Run the command and return its exit code: 0, 2 for a user's mistake, 130 when interrupted."""
    protect_output()
    parser = _parser()
    arguments, rest = parser.parse_known_args()

    def body(config: Config) -> int:
        request = _request(arguments, config)
        end_on_signals()  # what has ended is written down already
        try:
            return evaluate_benchmarks(config, request)
        except KeyboardInterrupt:
            words = [word for word in sys.argv[1:] if word != "--resume"]
            print(
                f"\nstopped; go on with: python -m flowtrain.evals {shlex.join(words)} --resume",
                file=sys.stderr,
            )
            return INTERRUPTED

    return run_command(
        "flowtrain.evals",
        body,
        [*(["--config", arguments.config] if arguments.config else []), *rest],
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flowtrain.evals",
        description="Ask planners the questions of public benchmarks.",
        epilog="Every --section.key of a training run goes too (python -m flowtrain.train --help "
        "all): --model.path runs/x/model, ...",
        allow_abbrev=False,
    )
    add = parser.add_argument
    text = "options; config.toml of an evaluation's folder repeats it"
    add("--config", metavar="FILE.toml", help=text)
    text = (
        f"of {', '.join(BENCHMARKS)}; NAME=FILE for a file elsewhere, or one of your own, "
        "NAME=FILE:SCORER with the rule for rows that name none"
    )
    add("--benchmarks", required=True, metavar="A,B", help=text)
    text = "times to ask every question (AgentFlow's paper: 3; default 1)"
    add("--trials", type=int, default=1, metavar="N", help=text)
    text = "first rows of each (default: as many as AgentFlow runs, 100 of the larger ones)"
    add("--rows", default="", metavar="N|all", help=text)
    text = f"folder of the benchmark files (default: {FOLDER_ENV} of the environment, or "
    add("--data", type=Path, metavar="DIR", help=f"{text}tasks.benchmarks)")
    text = "folder for records, manifest and summary (default: run.dir/evals)"
    add("--out", type=Path, metavar="DIR", help=text)
    text = "go on with the evaluation in --out; what has ended is not asked again"
    add("--resume", action="store_true", help=text)
    text = "of the planner; 0 is greedy (default: rollout.temperature)"
    add("--temperature", type=float, metavar="T", help=text)
    text = "policy, or names in [engines]: frozen planners; each is asked (default: policy)"
    add("--planner", default="policy", metavar="A,B", help=text)
    text = "budgets of turns, each for each planner (default: agent.eval_max_turns)"
    add("--turns", default="", metavar="N,M", help=text)
    text = "another evaluation, of one planner and budget, to show beside this one"
    add("--beside", type=Path, metavar="DIR", help=text)
    text = "show the numbers of AgentFlow's paper beside this evaluation's"
    add("--paper", action="store_true", help=text)
    return parser


def _request(arguments: argparse.Namespace, config: Config) -> Request:
    """Read the arguments. Raises UserError for what does not make sense."""
    names = _listed(arguments.benchmarks)
    if not names:
        raise UserError(f"--benchmarks names none; there are {', '.join(BENCHMARKS)}")
    benchmarks = parse_benchmarks(names)
    folder = arguments.data or os.environ.get(FOLDER_ENV) or config.tasks.benchmarks
    if not folder and not all(benchmark.path for benchmark in benchmarks):
        raise UserError(
            "where are the benchmarks? name their folder: --data DIR, or tasks.benchmarks, or "
            f"{FOLDER_ENV} in the environment"
        )
    rows = arguments.rows
    if rows not in ("", "all") and (not rows.isdecimal() or int(rows) < 1):
        raise UserError(f"--rows {rows!r} must be a number from 1, or all")
    if arguments.trials < 1:
        raise UserError(f"--trials {arguments.trials} must be at least 1")
    temperature = (
        config.rollout.temperature if arguments.temperature is None else arguments.temperature
    )
    if not 0 <= temperature < 100:
        raise UserError(f"--temperature {temperature} must be a number from 0")
    turns = _listed(arguments.turns)
    if not all(word.isdecimal() and int(word) for word in turns):
        raise UserError(f"--turns {arguments.turns!r} must be numbers from 1, with commas")
    return Request(
        benchmarks=benchmarks,
        data=Path(folder or "."),
        rows=rows,
        trials=arguments.trials,
        temperature=temperature,
        planners=tuple(_listed(arguments.planner)) or (POLICY,),
        max_turns=tuple(dict.fromkeys(map(int, turns))) or (config.agent.eval_max_turns,),
        out=arguments.out or Path(config.run.dir) / "evals",
        resume=arguments.resume,
        beside=arguments.beside,
        paper=arguments.paper,
    )


def _listed(text: str) -> list[str]:
    """Split at commas, without what is empty or there already."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


if __name__ == "__main__":
    sys.exit(main())
