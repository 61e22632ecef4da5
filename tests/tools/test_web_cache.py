"""Equal queries of a run get equal hits, and are paid for once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from web_servers import json_answer, serving

from flowtrain.config import Config
from flowtrain.tools import Tool, ToolError, run_tool
from flowtrain.tools.registry import make_tools
from flowtrain.tools.web.cache import Cache


def hits(title: str) -> dict[str, Any]:
    return {"organic": [{"title": title, "link": "https://a.example/", "snippet": title}]}


def test_rollouts_that_ask_the_same_share_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERPER_API_KEY", "key")
    agent = {"tools": ["Web_Search"], "tool_timeout_s": 5.0}
    with serving(json_answer(hits("first")), json_answer(hits("later"))) as server:
        web = {"provider": "serper", "base_url": server.url}
        tool: Tool = make_tools(Config.model_validate({"agent": agent, "web_search": web}))[
            "Web_Search"
        ]

        async def group(query: str) -> list[str]:
            asked = (run_tool(tool, {"query": query}, 5.0, 400) for _ in range(4))
            return [result.output for result in await asyncio.gather(*asked)]

        first, again = asyncio.run(group("capital of Mali")), asyncio.run(group("capital of Mali"))
        assert len(server.seen) == 1 and set(first + again) == {first[0]}
        asyncio.run(group("capital of Chad"))
        assert len(server.seen) == 2


def asking(*answers: str | Exception) -> tuple[list[str], Callable[[], Any]]:
    """Answers one after the other, and the list of what has been asked for."""
    asked: list[str] = []

    async def ask() -> str:
        answer = answers[len(asked) % len(answers)]
        asked.append(str(answer))
        await asyncio.sleep(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return asked, ask


def test_errors_are_shared_and_not_kept() -> None:
    asked, ask = asking(ToolError("it is down"), "found")
    cache: Cache[str] = Cache(1)

    async def main() -> list[object]:
        both = (cache.get("q", ask) for _ in range(2))
        return [*await asyncio.gather(*both, return_exceptions=True), await cache.get("q", ask)]

    first, second, third = asyncio.run(main())
    assert str(first) == str(second) == "it is down" and third == "found" and len(asked) == 2


def test_one_caller_s_cancellation_is_no_other_s_but_the_last_ends_the_request() -> None:
    cache: Cache[str] = Cache(1)

    async def main() -> list[str]:
        released, ended = asyncio.Event(), []

        async def ask() -> str:
            try:
                await released.wait()
            finally:
                ended.append("ended")
            return "found"

        first, second = (asyncio.ensure_future(cache.get("q", ask)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait({first})
        assert not ended
        released.set()
        assert await second == "found" and await cache.get("q", ask) == "found"
        released.clear()
        alone = asyncio.ensure_future(cache.get("other", ask))
        for _ in range(3):
            await asyncio.sleep(0)
        alone.cancel()
        await asyncio.wait({alone})
        await asyncio.sleep(0)
        return ended

    assert asyncio.run(main()) == ["ended", "ended"]
    assert not cache._pending and not cache._waiting


def test_who_asks_as_the_last_one_leaves_gets_an_answer_of_his_own() -> None:
    cache: Cache[str] = Cache(1)

    async def main() -> str:
        async def ask() -> str:
            await asyncio.sleep(0)
            return "found"

        leaving = asyncio.ensure_future(cache.get("q", ask))
        await asyncio.sleep(0)
        leaving.cancel()
        coming = asyncio.ensure_future(cache.get("q", ask))  # in the same tick
        return await coming

    assert asyncio.run(main()) == "found"
    assert not cache._pending and not cache._waiting


def test_the_least_recently_used_go_first() -> None:
    cache: Cache[str] = Cache(1)
    asked, ask = asking("x" * 400_000)

    async def main() -> None:
        for key in ("a", "b", "a", "c", "a", "b"):
            await cache.get(key, ask)

    asyncio.run(main())
    assert len(asked) == 4 and list(cache._entries) == ["a", "b"]
    asked, ask = asking("x" * (2 << 20))
    asyncio.run(cache.get("huge", ask))
    assert not cache._entries and cache._room == 1 << 20
