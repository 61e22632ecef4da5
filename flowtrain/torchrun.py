"""torchrun, ended by the line that a run ends with, not by a page about its processes:

    python -m flowtrain.torchrun --nproc_per_node 8 -m flowtrain.train --config quickstart

The command takes torchrun's options. A signal goes to the ranks alone, which save first, however
long that takes; torchrun kills them after 30 s.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args, run

_MISTAKES, _INTERRUPTED = (2, os.EX_TEMPFAIL), 130
"""Exit codes of `run_command`, whose rank 0 says why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a program on several devices; return the exit code of the rank that ended first."""
    words = sys.argv[1:] if argv is None else argv
    # Not those that `_pass_on` takes.
    arguments = parse_args(["--signals-to-handle", "SIGQUIT", *words])
    for talker, level in (("elastic", logging.CRITICAL), ("run", logging.ERROR)):
        logging.getLogger(f"torch.distributed.{talker}").setLevel(level)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _pass_on)
    try:
        run(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        speaker = error.failures.get(0)  # a moment later, with the same mistake
        is_said = failure.exitcode == _INTERRUPTED or (
            speaker is not None and speaker.exitcode in _MISTAKES
        )
        if not is_said:
            print(f"flowtrain.torchrun: {_why(rank, failure)}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


def _why(rank: int, failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        hint = (
            ", as the kernel does when memory runs out"
            if failure.exitcode == -signal.SIGKILL
            else ""
        )
        return f"rank {rank} was ended by {failure.signal_name()}{hint}"
    if failure.exitcode in _MISTAKES and Path(failure.error_file).is_file():
        return f"rank {rank}: {failure.message}"
    return f"rank {rank} ended with exit code {failure.exitcode}; see its output above"


def _pass_on(number: int, _frame: FrameType | None) -> None:
    """Send a signal to the ranks; Ctrl-C reaches them by itself, and they take two for one."""
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            os.kill(int(child), number)


if __name__ == "__main__":
    sys.exit(main())
