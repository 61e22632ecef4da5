"""Pairs of an accepted and a given answer: no unequal pair scores 1, few equal ones score 0.

`pytest -s` prints the counts by kind.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import make
import pytest

from flowtrain.records import Group, Task
from flowtrain.rewards import SCORERS, score, symbolic
from flowtrain.tools.sandbox.host import ProcessSandbox

PAIRS = [
    json.loads(line)
    for line in Path(__file__).with_name("answer_pairs.jsonl").read_text("utf-8").splitlines()
]
REFUSED = {
    ("choice", "place"): 10,
    ("choice", "sentence"): 2,
    ("math", "said"): 4,
    ("math", "unit"): 1,
    ("math", "word"): 7,
    ("qa", "assorted"): 2,
    ("qa", "date"): 15,
    ("qa", "name"): 9,
    ("qa", "number"): 7,
    ("qa", "told"): 33,
    ("qa", "unit"): 2,
}
"""Equal pairs that score 0 at most, by kind; of every other kind none does."""


@pytest.fixture(scope="module", autouse=True)
def sandbox() -> Iterator[ProcessSandbox]:
    """One worker, with time to spare: a process takes seconds to import SymPy."""
    symbolic._sandbox.cache_clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("os.cpu_count", lambda: 1)
        patched.setattr(symbolic, "TIME_LIMIT_S", 60.0)
        sandbox = symbolic._sandbox()
    yield sandbox
    sandbox.close()
    symbolic._sandbox.cache_clear()


def task(pair: dict[str, Any]) -> Task:
    return Task(
        "t",
        pair.get("question", "?"),
        tuple(pair["accepted"]),
        scorer=pair["scorer"],
        choices=tuple(pair.get("choices", ())),
    )


def rewards(pairs: list[dict[str, Any]]) -> list[float | None]:
    trajectories = [make.rollout(task=task(pair), answer=pair["answer"]) for pair in pairs]
    (group,) = score([Group(0, tuple(trajectories))])
    return [trajectory.reward for trajectory in group.trajectories]


def test_equal_answers_score_and_unequal_ones_never(monkeypatch: pytest.MonkeyPatch) -> None:
    # A process learns the grammar with its first texts; a sandbox prints this many answers.
    monkeypatch.setattr(symbolic._same_together, "_size", 400)
    assert len(PAIRS) >= 400
    count: Counter[tuple[str, str, str]] = Counter()
    refused: dict[tuple[str, str], list[str]] = {}
    accepted = []
    for pair, reward in zip(PAIRS, rewards(PAIRS), strict=True):
        kind = pair["scorer"], pair["kind"]
        text = f"{pair['answer']!r} for {pair['accepted'][0]!r}"
        count[(*kind, "equal" if pair["equal"] else "unequal")] += 1
        if pair["equal"] and reward != 1:
            refused.setdefault(kind, []).append(text)
            count[*kind, "refused"] += 1
        if not pair["equal"] and reward != 0:
            accepted.append(text)
            count[*kind, "accepted"] += 1
    columns = ("equal", "refused", "unequal", "accepted")
    print(f"\n| scorer | kind | {' | '.join(columns)} |\n{'|---' * 6}|")
    for kind in sorted({key[:2] for key in count}):
        cells = [str(count[*kind, column]) for column in columns]
        print(f"| {' | '.join((*kind, *cells))} |")
    assert not accepted
    assert {kind: few for kind, few in refused.items() if len(few) > REFUSED.get(kind, 0)} == {}


def test_an_accepted_answer_equals_itself() -> None:
    """But for letters that are the text of another option."""
    own = [
        pair | {"answer": pair["accepted"][0]}
        for pair in PAIRS
        if pair["scorer"] != "choice" or pair["choices"][0] == "Rome"
    ]
    rules = SCORERS
    wrong = [
        pair["answer"] for pair in own if rules[pair["scorer"]](task(pair), pair["answer"]) != 1
    ]
    assert wrong == []


@pytest.mark.parametrize("kind", ["number", "unit"])
def test_rules_are_symmetric(kind: str) -> None:
    """Apart from sentences, dates, places and years in parentheses: an answer may say more."""
    for pair in PAIRS:
        given, wanted = pair["answer"], pair["accepted"][0]
        if pair["kind"] == kind and pair["scorer"] != "choice" and "answer" not in given:
            turned = pair | {"answer": wanted, "accepted": [given]}
            rule = SCORERS[pair["scorer"]]
            assert rule(task(pair), given) == rule(task(turned), wanted), (given, wanted)


HOSTILE = [
    *("\\binom{10^{9}}{5^{9}}", "9!!!", "\\sum_{k=1}^{9^{9}} \\frac{1}{k!}", "\\log " * 70),
    *(
        "10^{10^{10}}",
        "9^{9^{9}}",
        "x+2004!!",
        "e^{-e^{99}}",
        "|" * 300,
        "\\sin(" * 60,
        "\\int_0^1 x^{x^{x^x}} dx",
        "__import__('os')!",
    ),
]


def same_all(cases: Sequence[tuple[Task, str]]) -> list[bool]:
    async def all_of_them() -> list[bool]:
        return await asyncio.gather(*(symbolic.same(*case) for case in cases))

    return asyncio.run(all_of_them())


@pytest.mark.clock
def test_hostile_text_is_stopped_and_spoils_no_other(
    sandbox: ProcessSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"timeout_s": 60.0, "memory_mb": symbolic.MEMORY_MB}
    assert sandbox._workers.limits.items() >= limits.items()
    monkeypatch.setitem(sandbox._workers.limits, "timeout_s", 0.5)
    monkeypatch.setattr(symbolic._same_together, "_size", 5)
    cases = [(Task("t", "?", ("120",), scorer="math"), text) for text in (*HOSTILE, "5!")]
    started = time.process_time()
    assert same_all(cases) == [False] * len(HOSTILE) + [True]
    assert time.process_time() - started < 2, "the processes are others"


def test_without_the_package_rules_decide_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = {"scorer": "math", "accepted": ["3"], "answer": "\\log_2 8"}
    monkeypatch.setattr(symbolic, "find_spec", lambda name: None)
    symbolic._is_installed.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match=r"pip install -e '\.\[math\]'") as caught:
            assert rewards([pair]) == rewards([pair]) == [0.0]
        assert len(caught) == 1
    finally:
        symbolic._is_installed.cache_clear()
