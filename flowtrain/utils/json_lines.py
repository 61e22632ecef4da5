"""Output as JSON objects, one a line, for collectors of logs: whatever a process prints, logs or
dies of.

Each has "time" (UTC), "level", "process" (the command), with torchrun "rank", and "message"; lines
of the logging module also "logger" and, where there is one, "exception"; `say` may add "fields".
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO, cast

from flowtrain.utils.terminal import Wrapped, bare


class JsonLines(Wrapped):
    """Writes each line of text to a stream as an object. Threads may share it."""

    def __init__(self, stream: TextIO, process: str) -> None:
        super().__init__(stream)
        self._head = {"process": process}
        if rank := os.environ.get("RANK", ""):
            self._head["rank"] = rank
        self._lock = threading.RLock()
        self._begun = ""

    def write(self, text: str) -> int:
        with self._lock:
            *whole, self._begun = (self._begun + text).split("\n")
            for line in whole:
                if line.strip():
                    self.emit("info", line.strip())
        return len(text)

    def emit(self, level: str, message: str, more: Mapping[str, Any] | None = None) -> None:
        """Write one object, with the keys of `more` behind those that all have."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        record = {"time": now, "level": level, **self._head, "message": message, **(more or {})}
        with self._lock:
            self.stream.write(f"{json.dumps(record, default=str)}\n")
            self.stream.flush()

    def isatty(self) -> bool:
        """Return False: bars draw themselves on terminals."""
        return False


class _Handler(logging.Handler):
    """Passes what is logged to the lines of stderr, as `emit` is there."""

    def emit(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.stderr, JsonLines):
            return
        more: dict[str, Any] = {"logger": record.name}
        if record.exc_info:
            more["exception"] = logging.Formatter().formatException(record.exc_info)
        sys.stderr.emit(record.levelname.lower(), record.getMessage(), more)


def print_json(process: str) -> None:
    """Have this process print, log and fail in JSON from now on; `process` names it."""
    if isinstance(sys.stderr, JsonLines):
        return
    sys.stdout = cast(TextIO, JsonLines(bare(sys.stdout), process))
    sys.stderr = cast(TextIO, JsonLines(bare(sys.stderr), process))
    logging.getLogger().addHandler(_Handler())
    logging.captureWarnings(True)
    sys.excepthook = _on_exception


def say(text: str, level: str = "info", fields: Mapping[str, Any] | None = None) -> None:
    """Print a line on stderr; in JSON it has that level, and the fields beside the message."""
    if isinstance(sys.stderr, JsonLines):
        sys.stderr.emit(level, text, {"fields": dict(fields)} if fields else None)
    else:
        print(text, file=sys.stderr, flush=True)


def _on_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if isinstance(sys.stderr, JsonLines):
        text = "".join(traceback.format_exception(kind, error, trace))
        sys.stderr.emit("critical", f"{kind.__name__}: {error}", {"exception": text})
