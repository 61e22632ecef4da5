"""The main text of a page, taken by processes that may be killed: hostile HTML keeps a parser busy
for as long as it likes.

The extractor is trafilatura, which among readability-lxml, jusText and resiliparse keeps most of a
page's text and least of its menus (selectolax is a parser alone). Like all of them it needs minutes
for some pages of a megabyte.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

from flowtrain.tools.base import ToolError
from flowtrain.tools.web.fetch import Page

CHILD = Path(__file__).with_name("extract_child.py")
MEMORY_MB = 1024


class Extractor:
    """Blocking, for the threads of a pool: each call takes an idle process or starts one. Safe to
    share between threads.
    """

    def __init__(self, timeout_s: float = 5.0) -> None:
        """`timeout_s` seconds per page; then its process is gone, and the next page gets another."""
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._is_closed = False

    def text(self, page: Page) -> str:
        """The text without what is around it; raises ToolError when there is none, or none in time."""
        with self._lock:
            process = self._idle.pop() if self._idle else None
        process = process or _Process(self._timeout_s)
        try:
            text = process.exchange(
                f"{page.content_type} {page.charset}\n".encode("ascii", "replace") + page.body
            )
        except (EOFError, BrokenPipeError):
            process.kill()
            raise ToolError(
                f"the page cannot be taken apart in {self._timeout_s:g} s and {MEMORY_MB} MiB"
            ) from None
        self._give_back(process)
        if not text.strip():
            raise ToolError(
                "the page has no text that can be read; it may need JavaScript or a login"
            )
        return text

    def close(self) -> None:
        """End the processes; a page under way may still be finished."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            process.kill()

    def _give_back(self, process: _Process) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(process)
                return
        process.kill()


class _Process:
    """One of them; it ends by itself when a page takes it too long, and when this process has gone."""

    def __init__(self, timeout_s: float) -> None:
        self._process = subprocess.Popen(
            # Nothing of the host's environment gets in but where the packages are: it holds keys.
            [sys.executable, "-P", str(CHILD), str(timeout_s), str(MEMORY_MB)],
            env={"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._receive()
        except EOFError:
            self.kill()
            raise RuntimeError(f"{CHILD} does not start") from None

    def exchange(self, message: bytes) -> str:
        """Raises EOFError or BrokenPipeError when the process ends before it has answered."""
        assert self._process.stdin is not None
        self._process.stdin.write(len(message).to_bytes(4, "big") + message)
        self._process.stdin.flush()
        return self._receive().decode()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # of what was not sent yet
                pipe.close()

    def _receive(self) -> bytes:
        assert self._process.stdout is not None
        header = self._process.stdout.read(4)
        message = self._process.stdout.read(int.from_bytes(header, "big"))
        if len(header) < 4 or len(message) < int.from_bytes(header, "big"):
            raise EOFError
        return message
