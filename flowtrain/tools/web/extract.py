"""The main text of a page, extracted in the sandbox, because HTML may be hostile.

The extractor is trafilatura: compared with readability-lxml, jusText and resiliparse it keeps most
of a page's text and least of its menus (selectolax is only a parser). Like all of them it needs
minutes for some pages of a megabyte.
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path

from flowtrain.tools.base import ToolError
from flowtrain.tools.sandbox import make_checker_sandbox
from flowtrain.tools.web.fetch import Page

MAX_CHARS = 1_000_000
"""Characters of a text, as many as AgentFlow reads."""
MEMORY_MB = 1024
_SOURCE = Path(__file__).with_name("extract_child.py")


class Extractor:
    """Safe to share between tasks, event loops and threads."""

    def __init__(self, timeout_s: float = 5.0) -> None:
        """Give each page `timeout_s` seconds of computing. ModuleNotFoundError where the extractor
        is not installed.
        """
        if find_spec("trafilatura") is None:
            raise ModuleNotFoundError("no trafilatura", name="trafilatura")
        self._timeout_s = timeout_s
        self._source = _SOURCE.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            # Of a weak sandbox; pages are parsed here, and never run.
            warnings.simplefilter("ignore", RuntimeWarning)
            self._sandbox = make_checker_sandbox("trafilatura", timeout_s, MEMORY_MB, MAX_CHARS)

    async def text(self, page: Page) -> str:
        """Return the main text; raises ToolError when there is none, or none in time."""
        arguments = (page.body, page.content_type, page.charset)
        result = await self._sandbox.run(f"{self._source}\nwrite(*{arguments!r}, {MAX_CHARS})\n")
        if result.error is not None:
            raise ToolError(
                f"the page cannot be taken apart in {self._timeout_s:g} s and {MEMORY_MB} MiB"
            )
        if not result.output.strip():
            raise ToolError(
                "the page has no text that can be read; it may need JavaScript or a login"
            )
        return result.output

    def close(self) -> None:
        """End the processes; a page under way has an error."""
        self._sandbox.close()
