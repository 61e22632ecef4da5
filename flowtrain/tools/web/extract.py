"""The main text of a page, extracted by processes that can be killed, because HTML may be hostile.

The extractor is trafilatura: compared with readability-lxml, jusText and resiliparse it keeps most
of a page's text and least of its menus (selectolax is only a parser). Like all of them it needs
minutes for some pages of a megabyte.
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
    """Blocks, on the threads of a pool: each call takes an idle process or starts one.

    Safe to share between threads.
    """

    def __init__(self, timeout_s: float = 5.0) -> None:
        """Kill a process that spends more than `timeout_s` seconds on a page."""
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._is_closed = False

    def text(self, page: Page) -> str:
        """Return the main text; raises ToolError when there is none, or none in time."""
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
        """End the idle processes; a page under way may still be finished."""
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
    """One extractor; it ends by itself after its time limit, and when this process ends."""

    def __init__(self, timeout_s: float) -> None:
        self._process = subprocess.Popen(
            # Only the path of the packages gets in, because the host's environment holds keys.
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
        """Return the text of a page; raises EOFError or BrokenPipeError if the process ends."""
        assert self._process.stdin is not None
        self._process.stdin.write(len(message).to_bytes(4, "big") + message)
        self._process.stdin.flush()
        return self._receive().decode()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # by bytes that were not sent yet
                pipe.close()

    def _receive(self) -> bytes:
        assert self._process.stdout is not None
        header = self._process.stdout.read(4)
        message = self._process.stdout.read(int.from_bytes(header, "big"))
        if len(header) < 4 or len(message) < int.from_bytes(header, "big"):
            raise EOFError
        return message
