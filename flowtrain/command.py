"""What the commands share: parse, run, and turn a person's mistake into one line and exit code 2."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from flowtrain.config import Config, help_text, parse
from flowtrain.types import UserError

INTERRUPTED = 130


def run_command(module: str, body: Callable[[Config], int]) -> int:
    """The exit code of `body`: 0, 2 after a UserError, 130 when it was interrupted. Under torchrun only rank 0 speaks."""
    is_main = os.environ.get("RANK", "0") == "0"
    try:
        config = parse(sys.argv[1:])
        if config is None:
            print(help_text(module))
            return 0
        return body(config)
    except UserError as error:
        if is_main:
            print(f"{module}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


class Interrupt:
    """Ctrl-C and SIGTERM ask a loop to end after its step; a second one ends the process at once."""

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if os.environ.get("RANK", "0") == "0":
            print("\nfinishing this step, then saving (once more to stop at once)", file=sys.stderr, flush=True)
