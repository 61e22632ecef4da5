"""Evaluate planners on public benchmarks:  python -m flowtrain.evaluation --config C --benchmarks
gameof24,bamboogle --trials 3 --turns 3,5,7,10

`docs/evals.md` says what the numbers mean.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from flowtrain.config import Config
from flowtrain.config.command import INTERRUPTED, run_command
from flowtrain.evaluation.benchmarks import Request, evaluate_benchmarks
from flowtrain.inference.chat_engines import POLICY
from flowtrain.records import UserError
from flowtrain.tasks.benchmarks import BENCHMARKS
from flowtrain.utils.commands import end_on_signals
from flowtrain.utils.terminal import protect_output

_SHORT = {
    "benchmarks": (
        "eval.benchmarks",
        f"of {', '.join(BENCHMARKS)}; NAME=FILE, NAME=FILE:SCORER",
    ),
    "data": ("tasks.benchmarks", "folder of the benchmark files"),
    "rows": (
        "eval.rows",
        "first rows of each, or all (default: as many as AgentFlow runs)",
    ),
    "trials": ("eval.trials", "answers to sample per question (AgentFlow's paper: 3)"),
    "temperature": ("eval.temperature", "temperature of the policies; 0 is greedy"),
}
"""Short forms of options."""
_ALL_ROWS = str(10**9)


def main() -> int:
    """Run the command and return its exit code: 0, 2 for a user's mistake, 130 when interrupted."""
    protect_output()
    parser = _parser()
    arguments, config_words = parser.parse_known_args()

    def body(config: Config) -> int:
        end_on_signals()  # what has ended is written down already
        try:
            return evaluate_benchmarks(config, _request(arguments, config))
        except KeyboardInterrupt:
            words = shlex.join([*(word for word in sys.argv[1:] if word != "--resume"), "--resume"])
            print(
                f"\nstopped; continue with: python -m flowtrain.evaluation {words}", file=sys.stderr
            )
            return INTERRUPTED

    file_words = ["--config", arguments.config] if arguments.config else []
    return run_command(
        "flowtrain.evaluation",
        body,
        [*file_words, *_words(arguments), *config_words],
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flowtrain.evaluation",
        description="Evaluate planners on public benchmarks.",
        epilog="Every --section.key of a training run is accepted too (python -m flowtrain.train "
        "--help all): --model.path runs/x/model, ...",
        allow_abbrev=False,
    )
    add = parser.add_argument
    text = "options; config.toml of an evaluation's folder repeats it"
    add("--config", metavar="FILE.toml", help=text)
    for name, (key, text) in _SHORT.items():
        add(f"--{name}", metavar="X", help=f"{key}: {text}")
    text = "folder for records, manifest and summary (default: run.dir/evals)"
    add("--out", type=Path, metavar="DIR", help=text)
    text = "continue the evaluation in --out, without repeating finished rollouts"
    add("--resume", action="store_true", help=text)
    text = "planners: policy, or names in [engines] of frozen ones (default: policy)"
    add("--planner", default="policy", metavar="A,B", help=text)
    text = "turn limits; every planner is evaluated with each (default: agent.eval_max_turns)"
    add("--turns", default="", metavar="N,M", help=text)
    text = "show the numbers of AgentFlow's paper beside this evaluation's"
    add("--paper", action="store_true", help=text)
    return parser


def _words(arguments: argparse.Namespace) -> list[str]:
    """Write the short forms out, so that they hold whenever training would ask."""
    words = ["--eval.at_ends", "true"]
    for name, (key, _) in _SHORT.items():
        if (value := getattr(arguments, name)) is not None:
            value = json.dumps(_listed(value)) if name == "benchmarks" else value
            words += [f"--{key}", _ALL_ROWS if (name, value) == ("rows", "all") else value]
    return words


def _request(arguments: argparse.Namespace, config: Config) -> Request:
    """Read the arguments. Raises UserError for what does not make sense."""
    if not config.eval.benchmarks:
        raise UserError(f"--benchmarks names no benchmark; available: {', '.join(BENCHMARKS)}")
    turns = _listed(arguments.turns)
    if not all(word.isdecimal() and int(word) for word in turns):
        raise UserError(f"--turns {arguments.turns!r} must be numbers from 1, separated by commas")
    return Request(
        planners=tuple(_listed(arguments.planner)) or (POLICY,),
        max_turns=tuple(dict.fromkeys(map(int, turns))) or (config.agent.eval_max_turns,),
        out=arguments.out or Path(config.run.dir) / "evals",
        resume=arguments.resume,
        paper=arguments.paper,
    )


def _listed(text: str) -> list[str]:
    """Split at commas, without what is empty or there already."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


if __name__ == "__main__":
    sys.exit(main())
