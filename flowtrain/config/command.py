"""Run a command: parse its options, and turn a user's mistake into one line and exit code 2."""

from __future__ import annotations

import errno
import json
import os
import pkgutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from flowtrain.config import Config
from flowtrain.config.options import help_text, help_topic, parse, shows_config, to_toml
from flowtrain.records import Outage, Unmet, UserError
from flowtrain.utils.commands import end_process
from flowtrain.utils.terminal import hand_out, protect_output, say
from flowtrain.utils.waiting import waiting

INTERRUPTED = 130
OUTAGE = os.EX_TEMPFAIL
_GOES_ON = "run the same command with --resume auto to continue"
_ECHO_S = 2.0


def main(module: str, command: str) -> NoReturn:
    """Run `command`, "module:function", with the options of the command line, as `python -m module`
    does. Its module is imported for seconds, so help and mistakes are answered before.
    """

    def body(config: Config) -> int:
        with waiting("loading torch and the model libraries", _is_main()):
            run: Callable[[Config], int] = pkgutil.resolve_name(command)
        return run(config)

    end_process(run_command(module, body, goes_on=_GOES_ON))


class NothingToDo(Exception):
    """All that was asked for is done. The command line prints its one line and exits with 0."""


def run_command(
    module: str,
    body: Callable[[Config], int],
    argv: Sequence[str] | None = None,
    *,
    goes_on: str = "",
) -> int:
    """Parse the options, run `body` and return its exit code: 2 after a UserError, 75 after an
    Outage, 130 after an interrupt. Under torchrun only rank 0 prints. Who asks for help or the
    config gets no run.

    `argv`: the options, where a command has arguments besides. `goes_on` says, after an interrupt,
    how what was interrupted goes on.
    """
    protect_output()
    # Read now: torchrun's variables are out of sight while a vLLM starts.
    is_main, error_file = _is_main(), os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    try:
        words = sys.argv[1:] if argv is None else argv
        config = parse(words)
        if config is None or shows_config(words):
            text = help_text(module, help_topic(words) or "") if config is None else to_toml(config)
            if is_main:
                hand_out(text.removesuffix("\n"))
            return 0
        code = body(config)
        if code == INTERRUPTED and is_main:
            say(_interrupted(module, goes_on))
        return code
    except NothingToDo as done:
        if is_main:
            say(f"{module}: {done}")
        return 0
    except UserError as error:
        if is_main or isinstance(error, Unmet):
            say(f"{module}: {error}")
        if error_file:
            _tell_torchrun(error_file, f"{module}: {error}")
        return OUTAGE if isinstance(error, Outage) else 2
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        say(f"{module}: {str(error.filename)!r} is too long for a file name")
        return 2
    except KeyboardInterrupt:
        if is_main:
            say(_interrupted(module, goes_on))
        return INTERRUPTED


def _interrupted(module: str, goes_on: str) -> str:
    return f"{module}: interrupted{'; ' * bool(goes_on)}{goes_on}"


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _tell_torchrun(path: str, line: str) -> None:
    """Give torchrun, which started this rank, the reason for which it ends."""
    reason = {"message": line, "timestamp": int(time.time())}
    Path(path).write_text(json.dumps(reason), encoding="utf-8")


class Interrupt:
    """Turns Ctrl-C, SIGTERM and the end of the terminal (SIGHUP) inside `with` into
    KeyboardInterrupt, as long as a command starts; after `defer` into a request to end after the
    current step, and then a second one ends at once.

    torchrun repeats the signal that the terminal has sent, so one that follows within `_ECHO_S`
    seconds is the same request.
    """

    def __init__(self) -> None:
        self.requested = False
        self._is_main = _is_main()
        self._is_deferred = False
        self._requested_at = 0.0
        self._old_handlers: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
            numbers.append(signal.SIGHUP)
        self._old_handlers = {number: signal.signal(number, self._on_signal) for number in numbers}
        return self

    def defer(self) -> None:
        """Turn signals into requests from now on: there is something to finish and to save."""
        self._is_deferred = True

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if not self._is_deferred:
            self._is_deferred = True  # what is cleaned up now is not broken off by an echo
            self.requested, self._requested_at = True, time.monotonic()
            raise KeyboardInterrupt
        if self.requested:
            if time.monotonic() - self._requested_at > _ECHO_S:
                raise KeyboardInterrupt
            return
        self.requested = True
        self._requested_at = time.monotonic()
        if self._is_main:
            say("\nfinishing this step, then saving (interrupt again to stop at once)")
