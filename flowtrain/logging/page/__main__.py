"""A run as a page: its curves, and its rollouts turn by turn.

python -m flowtrain.logging.page runs/texts
python -m flowtrain.logging.page runs/texts --serve
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flowtrain.logging.page.page import build_page
from flowtrain.logging.page.serve import Server
from flowtrain.logging.run_dir import atomic_write_text
from flowtrain.records import UserError
from flowtrain.utils.commands import end_on_signals, number
from flowtrain.utils.terminal import protect_output

_PORT = 8450


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    protect_output()
    arguments = _parser().parse_args(argv)
    try:
        if arguments.rollouts < 0:
            raise UserError(f"--rollouts {arguments.rollouts} must be 0 or more")
        if arguments.serve:
            return _serve(arguments)
        out = arguments.out or arguments.run / "view.html"
        atomic_write_text(out, build_page(arguments.run, arguments.rollouts))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(out)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flowtrain.logging.page",
        description="Write a run as one self-contained HTML file, or serve it to a browser while "
        "the run continues.",
    )
    text = "run folder, the value of --run.dir"
    parser.add_argument("run", type=Path, metavar="RUN", help=text)
    parser.add_argument("--out", type=Path, help="the page (default: RUN/view.html)")
    text = "number of rollouts to show, in whole groups (default: 500)"
    parser.add_argument("--rollouts", type=int, default=500, metavar="N", help=text)
    text = "serve the page on this machine, rebuilt at every load; the run may start later"
    parser.add_argument("--serve", action="store_true", help=text)
    text = f"port to listen on; 0: any free port (default: {_PORT})"
    parser.add_argument("--port", type=number(0, 65535), default=_PORT, help=text)
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    if arguments.out is not None:
        raise UserError("--out writes the page to a file: use either --serve or --out")
    end_on_signals()
    try:
        with Server(arguments.run, arguments.rollouts, arguments.port) as server:
            print(f"open {server.url}  (Ctrl-C stops the server)", flush=True)
            server.serve_forever()
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
