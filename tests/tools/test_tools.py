"""The tools but the sandbox; whatever a tool does, `run_tool` gives a result in time."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import make
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.records import ToolResult, UserError
from flowtrain.tools import Parameter, Tool, ToolCard, ToolError, run_tool, schema_of
from flowtrain.tools.base import shorten
from flowtrain.tools.search import Search
from tests import virtual_time


def stub(act: Callable[[str], Any]) -> make.Tool:
    """A tool that does what the test says, in a coroutine or at once."""
    return make.Tool(ToolCard("Stub", "Does what the test says."), act)


def returning(value: object) -> make.Tool:
    return stub(lambda query: value)


def raising(error: BaseException) -> make.Tool:
    async def act(query: str) -> object:
        raise error

    return stub(act)


def run(
    tool: Tool,
    arguments: Mapping[str, object] | None = None,
    timeout_s: float = 5.0,
    max_chars: int = 100,
) -> ToolResult:
    given = {"query": "q"} if arguments is None else arguments
    return virtual_time.run(run_tool(tool, given, timeout_s, max_chars))


def test_an_output_is_passed_on_with_its_time() -> None:
    async def act(query: str) -> str:
        await asyncio.sleep(2.0)
        return f"<{query}>"

    result = run(stub(act), {"query": "what?"})
    assert (result.output, result.error, result.text) == ("<what?>", None, "<what?>")
    assert result.seconds == 2.0


class Plain:
    """A tool whose method is no coroutine function."""

    card = ToolCard("Stub", "")

    def execute(self, query: str) -> None: ...


@pytest.mark.parametrize(
    ("tool", "error"),
    [
        (raising(ToolError("no such page")), "no such page"),
        (raising(ToolError()), "the tool failed and did not say why"),
        (raising(KeyError("x")), "KeyError: 'x'"),
        (raising(TimeoutError("inner")), "TimeoutError: inner"),
        (raising(SystemExit("no key")), "SystemExit: no key"),
        (raising(asyncio.CancelledError()), "Stub was cancelled"),
        (returning(""), "no output"),
        (returning(" \n"), "no output"),
        (returning(None), "Stub returned NoneType, not a string"),
        (returning(b"x"), "Stub returned bytes, not a string"),
        (Plain(), "TypeError: object NoneType can't be used in 'await' expression"),
    ],
)
def test_a_failure_is_an_error_and_never_raised(tool: Tool, error: str) -> None:
    result = run(tool)
    assert (result.output, result.error) == ("", error)


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ({}, "()"),
        ({"question": "q"}, "(question: str)"),
        ({"query": 3}, "(query: int)"),
        ({"query": "q", "k": None}, "(query: str, k: NoneType)"),
    ],
)
def test_wrong_arguments_are_an_error(arguments: Mapping[str, object], given: str) -> None:
    assert run(returning("x"), arguments).error == f"Stub takes (query: str); got {given}"


@pytest.mark.parametrize(
    ("arguments", "is_right"),
    [
        ({"url": "u"}, True),
        ({"url": "u", "top": 3}, True),
        ({"top": 3}, False),
        ({"url": "u", "top": True}, False),
        ({"url": "u", "top": "3"}, False),
        ({"url": "u", "query": "q"}, False),
    ],
)
def test_arguments_are_those_of_the_card(arguments: Mapping[str, object], is_right: bool) -> None:
    top = Parameter("top", "how many", int, is_required=False)
    card = ToolCard("Page", "Reads.", schema_of(Parameter("url", "where"), top))
    result = run(make.Tool(card, lambda url, top=1: f"{url} {top}"), arguments)
    told = "Page takes (url: str, top: int (optional)); got ("
    assert result.error is None if is_right else result.error.startswith(told)


def test_a_slow_tool_is_cancelled() -> None:
    events: list[str] = []

    async def act(query: str) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            events.append("cancelled")
            raise

    result = run(stub(act), timeout_s=0.25)
    assert (result.output, result.error, events) == ("", "timed out after 0.25 s", ["cancelled"])
    assert result.seconds == 0.25


def test_tool_that_ignores_cancellation_is_left_behind() -> None:
    async def main() -> ToolResult:
        release = asyncio.Event()

        async def act(query: str) -> str:
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue
            return "late"

        result = await run_tool(stub(act), {"query": "q"}, 0.1, 100)
        release.set()
        return result

    assert asyncio.run(asyncio.wait_for(main(), 5.0)).error == "timed out after 0.1 s"


def test_cancelling_the_caller_passes_through_and_cancels_the_tool() -> None:
    async def main() -> None:
        started, cancelled = asyncio.Event(), asyncio.Event()

        async def act(query: str) -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        task = asyncio.create_task(run_tool(stub(act), {"query": "q"}, 5.0, 100))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(cancelled.wait(), 1.0)

    asyncio.run(main())


def test_long_texts_lose_their_middle() -> None:
    text = "".join(map(str, range(100)))
    result = run(returning(text), max_chars=11)
    assert result.output == f"{text[:6]}\n... {len(text) - 11} characters left out ...\n{text[-5:]}"
    error = run(raising(ToolError(text)), max_chars=11).error
    assert error == result.output
    assert run(returning("x" * 11), max_chars=11).output == "x" * 11


@given(st.text(), st.integers(1, 20))
@settings(max_examples=50)
def test_shorten_keeps_both_ends_and_counts_the_rest(text: str, max_chars: int) -> None:
    short = shorten(text, max_chars)
    if len(text) <= max_chars:
        assert short == text
        return
    note = f"\n... {len(text) - max_chars} characters left out ...\n"
    head = (max_chars + 1) // 2
    assert (short[:head], short[head : head + len(note)]) == (text[:head], note)
    assert text.endswith(short[head + len(note) :]) and len(short) == max_chars + len(note)


PASSAGES = [
    "The capital of Chad is N'Djamena.",
    "The capital of Mali is Bamako.",
    "Bamako lies on the river Niger.",
    "Room 7 holds 12 chairs.",
    "Room 8 holds 12 chairs.",
]


@pytest.mark.parametrize(
    ("query", "index"),
    [
        ("What is the capital of Chad?", 0),
        ("CAPITAL MALI", 1),
        ("river", 2),
        ("room 8", 4),
        ("12 chairs", 3),  # a tie: the first
        ("n'djamena \0\ud800 \U0001f600 (*[", 0),
        ("capital capital capital Niger", 2),
    ],
)
def test_search_finds_the_passage(query: str, index: int) -> None:
    assert run(Search(PASSAGES), {"query": query}).text == PASSAGES[index]


def test_search_returns_the_best_first_and_ties_in_order() -> None:
    def found(passages: list[str], top_k: int, query: str) -> list[str]:
        tool = Search(passages, top_k=top_k)
        return run(tool, {"query": query}, max_chars=10_000).output.split("\n")

    assert found(PASSAGES, 3, "room 8") == [PASSAGES[4], PASSAGES[3]]
    assert found(["same words"] * 9, 3, "words") == ["same words"] * 3
    twins = [f"{'word ' * 3}{i}" for i in range(40)]
    assert found(twins, 40, "word") == twins


def test_search_agrees_with_the_formula() -> None:
    """BM25 as Lucene has it, k1 = 1.5, b = 0.75, written out."""
    documents = [
        passage.casefold().replace("'", " ").replace(".", "").split() for passage in PASSAGES
    ]
    mean = sum(map(len, documents)) / len(documents)

    def score(document: list[str], query: list[str]) -> float:
        total = 0.0
        for word in query:
            count, holders = document.count(word), sum(word in other for other in documents)
            idf = math.log(1 + (len(documents) - holders + 0.5) / (holders + 0.5))
            total += idf * count / (count + 1.5 * (0.25 + 0.75 * len(document) / mean))
        return total

    for query in ("capital bamako", "the river of chad", "12 bamako", "holds the room"):
        ranked = sorted(range(len(documents)), key=lambda i: -score(documents[i], query.split()))
        expected = [PASSAGES[i] for i in ranked if score(documents[i], query.split()) > 0]
        result = run(Search(PASSAGES, top_k=5), {"query": query}, max_chars=10_000)
        assert result.output.split("\n") == expected


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("", "empty query"),
        (" \n", "empty query"),
        ("zebra", "no passage matches 'zebra'"),
        ("?!", "no passage matches '?!'"),
        ("z" * 99, f"no passage matches '{'z' * 80}'"),
    ],
)
def test_search_says_when_nothing_matches(query: str, error: str) -> None:
    assert run(Search(PASSAGES), {"query": query}, max_chars=200).error == error


def test_search_is_silent(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG):
        run(Search(PASSAGES), {"query": "river"})
    assert not [record for record in caplog.records if record.name.startswith("bm25s")]
    assert capfd.readouterr() == ("", "")


def test_search_may_be_shared_by_threads() -> None:
    passages = [f"The value of node n{i} in ring {i % 37} is {i * i}." for i in range(1500)]
    tool = Search(passages)

    def ask(i: int) -> bool:
        return asyncio.run(tool.execute(f"What is the value of node n{i}?")) == passages[i]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(0, 1500, 50)))


@pytest.mark.clock
def test_search_is_fast() -> None:
    """0.05 ms on an idle core; the bound leaves room for a busy machine."""
    tool = Search([f"The value of node n{i} in ring {i % 37} is {i * i}." for i in range(1500)])

    async def median_s() -> float:
        times = []
        for i in range(100):
            start = time.perf_counter()
            await tool.execute(f"What is the value of node n{i}?")
            times.append(time.perf_counter() - start)
        return sorted(times)[50]

    assert asyncio.run(median_s()) < 2e-3


def test_search_refuses_what_it_cannot_index() -> None:
    for passages in ([], ["", "?!"]):
        with pytest.raises(UserError, match="needs a passage with at least one word"):
            Search(passages)
