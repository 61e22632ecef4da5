"""Command lines of several commands, with the arguments that they share, and how they end."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


def end_on_signals() -> None:
    """Have SIGINT and SIGTERM raise KeyboardInterrupt, whoever has started the command: a shell
    that puts it into the background of a script has SIGINT ignored.
    """
    if threading.current_thread() is threading.main_thread():  # where Python allows it
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)


def end_process(code: int) -> NoReturn:
    """Exit; several ranks without the interpreter's end, in which threads of gloo may abort."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Commands:
    """An argument parser; each command gets one of its own, with an example in its help."""

    def __init__(self, program: str, description: str | None) -> None:
        """`description`: the first line, and after an empty one what follows the commands."""
        summary, _, *epilog = (description or "").strip().splitlines()
        self.program = program
        self.parser = argparse.ArgumentParser(
            prog=program, description=summary, epilog=" ".join(epilog), allow_abbrev=False
        )
        self._commands = self.parser.add_subparsers(title="commands", required=True)

    def add(
        self, name: str, run: Callable[..., int], summary: str, example: str
    ) -> argparse.ArgumentParser:
        """Add a command. `run` becomes an option of the parsed arguments."""
        command: argparse.ArgumentParser = self._commands.add_parser(
            name,
            help=summary,
            description=f"{summary}.",
            epilog=f"example: {self.program} {name} {example}",
            allow_abbrev=False,
        )
        command.set_defaults(run=run)
        return command


def add_server(parser: argparse.ArgumentParser, port: int) -> None:
    """Add the options of a server: where it listens (`port` by default), and to whom."""
    text = "address to listen on (default: 127.0.0.1, this machine only); plain HTTP"
    parser.add_argument("--host", default="127.0.0.1", help=text)
    text = f"port to listen on; 0: any free port (default: {port})"
    parser.add_argument("--port", type=number(0, 65535), default=port, help=text)
    text = "serve /metrics without a token too"
    parser.add_argument("--open-metrics", action="store_true", help=text)
    add_tokens(parser, required=False)


def add_tokens(parser: argparse.ArgumentParser, required: bool) -> None:
    """Add the option for the file of tokens."""
    text = "JSON file with the tokens of nodes and trainers (default: only FLOWTRAIN_TOKEN)"
    parser.add_argument("--tokens", type=Path, required=required, metavar="FILE", help=text)


def number(low: int, high: int) -> Callable[[str], int]:
    """Return an argument type: a whole number between two bounds."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(
                f"{text!r} must be a whole number from {low} to {high}"
            )
        return int(text)

    return parse
