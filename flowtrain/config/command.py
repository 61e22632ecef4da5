"""Run a command: parse its options, and turn a user's mistake into one line and exit code 2."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from flowtrain.config import Config
from flowtrain.config.options import help_text, help_topic, parse
from flowtrain.types import UserError

INTERRUPTED = 130
_ECHO_S = 2.0


def run_command(
    module: str, body: Callable[[Config], int], argv: Sequence[str] | None = None
) -> int:
    """The exit code of `body`: 0, 2 after a UserError, 130 when it was interrupted. Under torchrun
    only rank 0 speaks.

    `argv`: the words that make up the config, where a command takes others besides.
    """
    is_main = os.environ.get("RANK", "0") == "0"
    try:
        words = sys.argv[1:] if argv is None else argv
        config = parse(words)
        if config is None:
            print(help_text(module, help_topic(words) or ""))
            return 0
        return body(config)
    except UserError as error:
        if is_main:
            print(f"{module}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


class Interrupt:
    """Within `with`, Ctrl-C and SIGTERM ask a loop to end after its step; asked again later, the
    process ends at once.

    torchrun passes the signal on that the terminal has sent already, so what follows within
    `_ECHO_S` is the same request.
    """

    def __init__(self) -> None:
        self.requested = False
        self._requested_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        self._before = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.requested:
            if time.monotonic() - self._requested_at > _ECHO_S:
                raise KeyboardInterrupt
            return
        self.requested, self._requested_at = True, time.monotonic()
        if os.environ.get("RANK", "0") == "0":
            print(
                "\nfinishing this step, then saving (once more to stop at once)",
                file=sys.stderr,
                flush=True,
            )
