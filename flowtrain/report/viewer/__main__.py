"""A run as one HTML file: its curves, and its rollouts turn by turn.

python -m flowtrain.report.viewer runs/texts
python -m flowtrain.report.viewer runs/texts --rollouts 2000 --out texts.html
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flowtrain.report.run_dir import atomic_write_text
from flowtrain.report.viewer.page import build_page
from flowtrain.types import UserError
from flowtrain.utils.terminal import protect_output


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    protect_output()
    parser = argparse.ArgumentParser(
        prog="python -m flowtrain.report.viewer",
        description="Write a run as one HTML file that needs nothing else.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder: what --run.dir named")
    parser.add_argument("--out", type=Path, help="the page (default: RUN/view.html)")
    parser.add_argument(
        "--rollouts",
        type=int,
        default=500,
        metavar="N",
        help="rollouts to show, in whole groups (default: 500)",
    )
    arguments = parser.parse_args(argv)
    out = arguments.out or arguments.run / "view.html"
    try:
        if arguments.rollouts < 0:
            raise UserError(f"--rollouts {arguments.rollouts} must be 0 or more")
        atomic_write_text(out, build_page(arguments.run, arguments.rollouts))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
