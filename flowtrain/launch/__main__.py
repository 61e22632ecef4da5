"""Bring up a run on several hosts from a plan: service, weights, trainers and nodes.

    python -m flowtrain.launch plan.toml

Processes start in their order, on this machine or over SSH; their lines are printed with their
names, and each has a log. It restarts nothing. When the trainer is done the rest ends; Ctrl-C and
SIGTERM end everything well (a second time: at once). The exit code is the trainer's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flowtrain.launch.plan import read_plan
from flowtrain.launch.printed import PRINTERS
from flowtrain.launch.run import Launch, check
from flowtrain.types import UserError
from flowtrain.utils.terminal import protect_output

_COMMAND = "python -m flowtrain.launch"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code of the trainer, 1 where something failed before it, 2 for a user's
    mistake.
    """
    protect_output()
    options = _parser().parse_args(arguments)
    try:
        plan = read_plan(options.plan)
        if options.print:
            print(PRINTERS[options.print](plan), end="")
            return 0
        if options.check:
            return check(plan)
        with Launch(plan) as launch:
            return launch.run()
    except UserError as error:
        print(f"{_COMMAND}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_COMMAND,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a TOML file")
    which = parser.add_mutually_exclusive_group()
    text = "print what would run, as a script or as manifests, and start nothing"
    which.add_argument("--print", choices=tuple(PRINTERS), help=text)
    text = "try the plan, and every host of it, and start nothing"
    which.add_argument("--check", action="store_true", help=text)
    return parser


if __name__ == "__main__":
    sys.exit(main())
