"""Mathematical answers that are beyond our own arithmetic, by math-verify in a process with limits.

SymPy, under math-verify, may take for ever on hostile text, in code that no thread can stop. So it
runs in the sandbox of the tool Python_Coder, and is asked only about notation that `math_answer`
does not compute: functions, binomials, factorials, matrices, absolute values, sets, inequalities.
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

from flowtrain.rewards.latex import tidy
from flowtrain.rewards.math_answer import readings, right_side
from flowtrain.tools.sandbox import make_checker_sandbox
from flowtrain.tools.sandbox.host import ProcessSandbox
from flowtrain.types import Task
from flowtrain.utils.per_loop import Together

SCORER = "math"
"""The scorer whose 0 math-verify may overrule."""
MAX_LENGTH = 300
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

_SOURCE = Path(__file__).with_name("symbolic_child.py")
_BEYOND = re.compile(
    r"\\(?:log|ln|lg|exp|(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|d?binom|begin|[lr]?vert|lfloor"
    r"|lceil|cup|cap|setminus|emptyset|varnothing|mathbb|sum|prod|lim|int|leq?|geq?|lt|gt)"
    r"(?![A-Za-z])|[!|<>\u2264\u2265]|(?<![A-Za-z\\])i(?![A-Za-z])"
)
_NOT_FOR_IT = re.compile(
    r"(?<![A-Za-z\\])(?!(?:degrees?|[pbv]?matrix|Bmatrix|Vmatrix|"
    r"cases|mathbb)(?![A-Za-z]))[A-Za-z]{3,}"
    r"|[%$=:]|_\{?[0-9]+\}?$"
)
"""Words, of which the parser makes products of letters; per cents, money, equations, bases."""
_SUBSCRIPT = re.compile(r"_\{[A-Za-z]=[^{}]*\}")
_COMMAND = re.compile(r"\\(?!begin|end)[A-Za-z]+")


async def same(task: Task, answer: str) -> bool:
    """Return whether a final answer equals an accepted one; those that are asked about side by side
    share processes, and equal ones are compared once.
    """
    pairs = _pairs(task, answer)
    return await _same_together(pairs) if pairs else False


def _pairs(task: Task, answer: str) -> _Pairs:
    """Return the texts that math-verify may compare."""
    pairs = [
        (right_side(given) if "=" in _SUBSCRIPT.sub("", given) else given, wanted)
        for wanted in map(tidy, task.answers)
        for given in readings(answer)
    ]
    return tuple(pair for pair in pairs if _is_for_it(*pair))[:MAX_PAIRS]


def _is_for_it(given: str, wanted: str) -> bool:
    return bool(given and wanted and (_BEYOND.search(given) or _BEYOND.search(wanted))) and all(
        len(text) <= MAX_LENGTH
        and not _NOT_FOR_IT.search(_COMMAND.sub(" ", _SUBSCRIPT.sub("", text)))
        for text in (given, wanted)
    )


async def _same(cases: Sequence[_Pairs]) -> list[bool]:
    """Compare in one process, and each in one of its own where that met a limit or died.

    Nobody knows that the two of a case are equal which does so alone.
    """
    if not _is_installed():
        return [False] * len(cases)
    texts = [list(map(list, pairs)) for pairs in cases]
    ran = await _sandbox().run(f"{_SOURCE.read_text('utf-8')}\nprint(same({texts!r}))\n")
    if ran.error is None:
        return [bool(equal) for equal in json.loads(ran.output.rstrip().rpartition("\n")[2])]
    if len(cases) == 1:
        return [False]
    alone = await asyncio.gather(*(_same([pairs]) for pairs in cases))
    return list(itertools.chain(*alone))


_same_together = Together(_same, TOGETHER)


@functools.cache
def _is_installed() -> bool:
    """Return whether math-verify is there, with one warning where it is not."""
    if find_spec("math_verify") is not None:
        return True
    warnings.warn(
        "math answers with functions, matrices or inequalities are compared as text: "
        "pip install 'flowtrain[math]'",
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
