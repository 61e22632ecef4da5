"""Output for people: everything that is printed passes here, because models, tools, web pages,
servers and nodes have a say in it, and a terminal obeys what it is sent.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast

from tqdm import tqdm

from flowtrain.records import UserError
from flowtrain.utils.text import printable


class Lasting:
    """Writes to a stream that may go away, as a terminal, a pipe and a full disk do: from then on
    what is written is lost, also that of others in this process, and the program goes on. The
    stream is asked whatever is not about text.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.failure: OSError | None = None
        """The error that ended the stream."""

    def write(self, text: str) -> int:
        try:
            self.stream.write(text)
        except OSError as error:
            self._detach(error)
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            self._detach(error)

    def _detach(self, error: OSError) -> None:
        # What the stream still holds goes there too, so that nothing fails at the exit.
        self.failure = error
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.stream.fileno())
        os.close(null)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def __eq__(self, other: object) -> bool:
        # tqdm asks whether a bar is on the terminal that a line of text goes to.
        return getattr(other, "stream", other) is self.stream

    def __hash__(self) -> int:
        return hash(self.stream)


class Printable(Lasting):
    """Writes what is safe to show: see `printable`."""

    def write(self, text: str) -> int:
        super().write(printable(text))
        return len(text)


def protect_output() -> None:
    """Escape all that this process prints from now on: text, logs, warnings, tracebacks and the
    errors of argparse; and outlive a stream that goes away, or was closed from the beginning. Every
    command line begins with it; a second call does nothing.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            stream = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
        if not isinstance(stream, Printable):
            setattr(sys, name, Printable(stream))


def say(text: str) -> None:
    """Print a line on stderr, at once."""
    print(text, file=sys.stderr, flush=True)


def hand_out(text: str) -> None:
    """Print on stdout what a command was asked for. Raises UserError where it cannot be written; a
    reader that has seen enough is no failure.
    """
    print(text, flush=True)
    failure = getattr(sys.stdout, "failure", None)
    if failure is not None and not isinstance(failure, BrokenPipeError):
        raise UserError(f"stdout cannot be written: {failure.strerror}")


def bare(stream: TextIO) -> TextIO:
    """Return a protected stream without its escapes, for control sequences of our own."""
    return cast(TextIO, Lasting(stream.stream)) if isinstance(stream, Printable) else stream


def bar(*args: Any, **options: Any) -> Any:
    """Make a tqdm bar on stderr, which draws itself with control characters; texts that it shows
    must be `printable`.
    """
    return tqdm(*args, file=bare(sys.stderr), **options)
