"""Mathematical answers that are no plain numbers, by math-verify in a process with limits.

SymPy, under math-verify, may take for ever on hostile text, in code that no thread can stop. So it
runs in the sandbox of the tool Python_Coder, and is not asked about numbers and words.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import re
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from flowtrain.records import Task
from flowtrain.rewards.math_answer import pairs
from flowtrain.rewards.statements import Numbers, is_same
from flowtrain.tools.sandbox import make_checker_sandbox
from flowtrain.tools.sandbox.host import ProcessSandbox
from flowtrain.utils.shared_calls import Together

SCORER = "math"
"""The scorer whose 0 math-verify may overrule."""
MAX_LENGTH = 400
"""Characters of a text that math-verify reads."""
MAX_PAIRS = 8
"""Pairs of texts that are compared for one answer."""
TOGETHER = 8
"""Answers that one process compares: most take a tenth of a second, half of that to warm up."""
TIME_LIMIT_S = 4.0
"""CPU time of one process; an answer that takes longer alone keeps the rule's 0."""
MEMORY_MB = 1024
"""Address space for one answer."""

_Pairs = tuple[tuple[str, str], ...]

_MODULES = ("units", "statements", "symbolic_child")
_PROGRAM = """
import sys, types
for name, source in {sources!r}:
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    exec(source, module.__dict__)
print(module.same({cases!r}))
"""
_WORDS = re.compile(
    r"(?<![A-Za-z\\{])(?!(?:degrees?|and|min|max)(?![A-Za-z]))[A-Za-z]{4,}(?![A-Za-z])"
)


async def same(task: Task, answer: str) -> bool:
    """Return whether a final answer equals an accepted one; those that are asked about side by side
    share processes, and equal ones are compared once.
    """
    cases = tuple(pair for pair in pairs(task, answer) if _needs_parser(*pair))[:MAX_PAIRS]
    return await _same_together(cases) if cases else False


def _needs_parser(answer: str, gold: str) -> bool:
    """Return whether both are short, without sentences, and something in them is no number."""
    if any(not text or len(text) > MAX_LENGTH for text in (answer, gold)):
        return False
    if _WORDS.search(answer) or _WORDS.search(gold):
        return False
    numbers = Numbers()
    return not is_same(answer, gold, numbers) and numbers.has_others


async def _same(cases: Sequence[_Pairs]) -> list[bool]:
    """Compare in one process, and each in one of its own where that met a limit or died.

    Nobody knows that the two of a case are equal which does so alone.
    """
    if not _is_installed():
        return [False] * len(cases)
    texts = [list(map(list, case)) for case in cases]
    result = await _sandbox().run(_PROGRAM.format(sources=_sources(), cases=texts))
    if result.error is None:
        return [bool(equal) for equal in json.loads(result.output.rstrip().rpartition("\n")[2])]
    if len(cases) == 1:
        return [False]
    verdicts = await asyncio.gather(*(_same([case]) for case in cases))
    return list(itertools.chain(*verdicts))


_same_together = Together(_same, TOGETHER)


@functools.cache
def _sources() -> list[tuple[str, str]]:
    """Return the modules that run in the sandbox, and the packages in which they are."""
    packages = [("flowtrain", ""), ("flowtrain.rewards", "")]
    folder = Path(__file__).parent
    return packages + [
        (f"flowtrain.rewards.{name}", (folder / f"{name}.py").read_text("utf-8"))
        for name in _MODULES
    ]


@functools.cache
def _is_installed() -> bool:
    """Return whether math-verify is there, with one warning where it is not."""
    if find_spec("math_verify") is not None:
        return True
    warnings.warn(
        "math-verify is not installed, so math answers other than plain numbers are compared as "
        "text: pip install -e '.[math]'",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


@functools.cache
def _sandbox() -> ProcessSandbox:
    """Make the sandbox with the first answer; its processes end with this one."""
    with warnings.catch_warnings():
        # Of a weak sandbox; the answers are parsed here, by a grammar, and never run.
        warnings.simplefilter("ignore", RuntimeWarning)
        return make_checker_sandbox("math_verify", TIME_LIMIT_S, MEMORY_MB)
