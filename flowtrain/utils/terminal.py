"""Output for people: everything that is printed passes here, because models, tools, web pages,
servers and nodes have a say in it, and a terminal obeys what it is sent.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast

from tqdm import tqdm

from flowtrain.utils.text import printable


class Printable:
    """Writes to a stream what is safe to show: see `printable`. The stream is asked whatever is not
    about text.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def __eq__(self, other: object) -> bool:
        # tqdm asks whether a bar is on the terminal that a line of text goes to.
        return other is self or other is self.stream

    def __hash__(self) -> int:
        return hash(self.stream)


def protect_output() -> None:
    """Escape all that this process prints from now on: text, logs, warnings, tracebacks and the
    errors of argparse. Every command line begins with it; a second call does nothing.
    """
    if not isinstance(sys.stdout, Printable):
        sys.stdout = cast(TextIO, Printable(sys.stdout))
    if not isinstance(sys.stderr, Printable):
        sys.stderr = cast(TextIO, Printable(sys.stderr))


def say(text: str) -> None:
    """Print a line on stderr, at once."""
    print(text, file=sys.stderr, flush=True)


def bare(stream: TextIO) -> TextIO:
    """Return the stream behind a protected one, for control sequences of our own."""
    return stream.stream if isinstance(stream, Printable) else stream


def bar(*args: Any, **options: Any) -> Any:
    """Make a tqdm bar on stderr, which draws itself with control characters; texts that it shows
    must be `printable`.
    """
    return tqdm(*args, file=bare(sys.stderr), **options)
