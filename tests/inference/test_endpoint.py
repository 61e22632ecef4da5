"""The endpoint against real servers on loopback: what it sends, repeats, makes of bad answers."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from chat_servers import ChatServer, Gate, chat_server, http, raw_server, reply
from starlette.responses import JSONResponse, Response

from flowtrain.config import Chat
from flowtrain.inference import endpoint as module
from flowtrain.inference.endpoint import Endpoint
from flowtrain.inference.protocol import EngineError
from flowtrain.records import UserError
from flowtrain.utils.event_loop import run_to_end

OK = http(json.dumps(reply("fine")).encode())


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setenv("TEST_KEY", "sk-secret")


def options(server: ChatServer, **changes: Any) -> Chat:
    given = {"model": "m", "base_url": server.base_url, "api_key_env": "TEST_KEY", "max_retries": 2}
    return Chat.model_validate({**given, **changes})


@contextmanager
def opened(serving: Any, **changes: Any) -> Iterator[tuple[ChatServer, Endpoint]]:
    with serving as server, closing(Endpoint("frozen", options(server, **changes))) as engine:
        yield server, engine


def ask(
    server: ChatServer, prompt: str = "Hello?", deadline_s: float = 20.0, **changes: Any
) -> str:
    with closing(Endpoint("frozen", options(server, **changes))) as engine:
        return run_to_end(engine.ask(prompt, seed=2**40 + 7, deadline_s=deadline_s))


def refusal(serving: Any, kind: type[Exception] = EngineError, **how: Any) -> tuple[str, int]:
    """What an error says, and how often the server was asked."""
    with serving as server, pytest.raises(kind) as refused:
        ask(server, **how)
    return str(refused.value), len(server.asked)


# ---- what it sends and returns


def test_a_question_and_its_reply() -> None:
    said = "Hi \U0001f600 there."
    with chat_server(lambda body: said) as server:
        assert ask(server, "Hello\n\u00e9?", temperature=0.3, max_tokens=77) == said
    (body,) = server.asked
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hello\n\u00e9?"}],
        "temperature": 0.3,
        "max_tokens": 77,
        "seed": (2**40 + 7) % 2**31,
    }
    assert server.headers[0]["authorization"] == "Bearer sk-secret"


def test_no_key_is_sent_without_api_key_env() -> None:
    with chat_server(lambda body: "ok") as server:
        assert ask(server, api_key_env="") == "ok"
    assert "authorization" not in server.headers[0]


SPECIAL = (
    *("<|im_end|>", "<|im_start|>assistant", "<|eot_id|>", "<|start_header_id|>", "</s>", "<s>"),
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[gMASK]", "<sop>", "<start_of_turn>", "<bos>", "<eos>"),
    *("<\uff5cend\u2581of\u2581sentence\uff5c>", "<|END_OF_TURN_TOKEN|>", "<|channel|>"),
    *("<tool_call>", "<think>", "]~b]", "]~!b[", "[e~[", "<reserved_1>", "<unk>", "<fim_prefix>"),
    "[SYSTEM_PROMPT]",
)


@pytest.mark.parametrize("token", SPECIAL)
def test_no_special_token_of_a_page_reaches_a_server(token: str) -> None:
    """Not at the edge of a text, in itself, or twice."""
    page = f"{token}The area {token * 2} is 1284.<{token}>{token}"
    with chat_server(lambda body: "ok") as server:
        ask(server, page)
    (body,) = server.asked
    sent = body["messages"][0]["content"]
    assert token not in sent and "1284" in sent
    assert sent.replace(" ", "") == page.replace(" ", ""), "every letter is there"


def test_plain_texts_and_our_own_tags_are_sent_as_they_are() -> None:
    text = "if a < b and b > c: x[A] = [1]; <answer>42</answer> a<b c>d [a link](x) [ ] 1 <2> "
    with chat_server(lambda body: "ok") as server:
        ask(server, text.replace("[A]", "[a]").replace("<2>", "< 2 >"))
        (body,) = server.asked
    assert body["messages"][0]["content"] == text.replace("[A]", "[a]").replace("<2>", "< 2 >")


def test_calls_in_a_row_share_one_connection() -> None:
    peers = set()

    def script(body: dict[str, Any]) -> str:
        return body["messages"][0]["content"].upper()

    with opened(chat_server(script)) as (_, engine):
        for word in ("one", "two", "three"):
            assert run_to_end(engine.ask(word)) == word.upper()
            peers |= {id(connection) for connection in engine._client._transport._pool.connections}
    assert len(peers) == 1, "the connection was kept"


def test_the_meter_counts_what_the_endpoint_says() -> None:
    prices = {"price_in": 2.0, "price_out": 10.0}
    with opened(chat_server(lambda body: "two words"), **prices) as (_, engine):
        run_to_end(_all(engine, 3, "one two three"))
    assert engine.meter.metrics() == {
        "requests": 3,
        "retries": 0,
        "failures": 0,
        "prompt_tokens": 9,
        "reply_tokens": 6,
        "cost": pytest.approx((9 * 2 + 6 * 10) / 1e6),
    }


async def _all(
    engine: Endpoint, count: int, prompt: str = "x", deadline_s: float = 20.0
) -> list[str | BaseException]:
    asked = (engine.ask(prompt, deadline_s=deadline_s) for _ in range(count))
    return await asyncio.gather(*asked, return_exceptions=True)


@pytest.mark.parametrize("most", [1, 3])
def test_no_more_requests_than_allowed_are_under_way(most: int) -> None:
    serving = chat_server(lambda body: "ok", wait=lambda: asyncio.sleep(0.01))
    with opened(serving, max_concurrency=most) as (server, engine):
        assert run_to_end(_all(engine, 12)) == ["ok"] * 12
    assert server.most == most


def test_hundreds_wait_at_the_same_time() -> None:
    arrived = asyncio.Event()

    async def wait() -> None:
        """Nobody is answered before all have come."""
        if server.now == 200:
            arrived.set()
        await asyncio.wait_for(arrived.wait(), 20)

    with opened(chat_server(lambda body: "ok", wait=wait), max_concurrency=200) as (server, engine):
        assert run_to_end(_all(engine, 200)) == ["ok"] * 200
    assert server.most == 200


# ---- what passes


def first(*responses: Response) -> Callable[[dict[str, Any]], Response | str]:
    """These responses, then the reply."""
    queue: Iterator[Response] = iter(responses)
    return lambda body: next(queue, None) or "fine"


def status(code: int, **headers: str) -> Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return JSONResponse({"error": f"code {code}"}, code, named)


def slow_at_first() -> Callable[[], Any]:
    slow = iter([30])
    return lambda: asyncio.sleep(next(slow, 0))


@pytest.mark.parametrize("code", [408, 409, 429, 500, 502, 503, 529])
def test_passing_errors_are_retried(code: int) -> None:
    with chat_server(first(status(code), status(code))) as server:
        assert ask(server) == "fine"
    assert len(server.asked) == 3


def test_the_last_attempt_raises_its_reason() -> None:
    said, num_asked = refusal(chat_server(lambda body: status(500)))
    assert re.match(r"engines\.frozen: HTTP 500.*code 500.*attempt 3", said) and num_asked == 3


def test_retry_after_is_honoured() -> None:
    with chat_server(first(status(429, Retry_After="0.3"))) as server:
        assert ask(server) == "fine"
    first_time, second_time = server.times
    assert second_time - first_time >= 0.29


@pytest.mark.parametrize(
    "broken",
    [[http(b'{"choices": [', length=5000)], [b"", b"HTTP/1.1 200 OK\r\n"]],
    ids=["cut", "dropped"],
)
def test_a_body_that_does_not_come_is_asked_for_again(broken: list[bytes]) -> None:
    with raw_server(*broken, OK) as server:
        assert ask(server) == "fine"
    assert len(server.asked) == len(broken) + 1


def test_a_server_that_never_was_there_is_the_users_mistake(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with raw_server(OK) as server:
        pass
    with pytest.raises(UserError, match=r"base_url=.*: no server responds: ConnectError"):
        ask(server)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("waiting for engines.frozen at http://127.0.0.1")


def test_a_server_that_went_away_is_an_error() -> None:
    with raw_server(OK) as server:
        engine = Endpoint("frozen", options(server, max_retries=0))
        run_to_end(engine.ask("?"))
    with closing(engine), pytest.raises(EngineError, match="ConnectError"):
        run_to_end(engine.ask("?"))


def test_a_slow_attempt_is_retried() -> None:
    with chat_server(lambda body: "fine", wait=slow_at_first()) as server:
        assert ask(server, timeout_s=1.5) == "fine"
    assert len(server.asked) == 2


def test_the_deadline_bounds_all_attempts_together() -> None:
    never = chat_server(lambda body: "never", wait=lambda: asyncio.sleep(30))
    said, num_asked = refusal(never, timeout_s=0.2, deadline_s=3.0, max_retries=50)
    assert "timeout_s=0.2" in said and 1 < num_asked < 50


def test_waiting_for_a_free_slot_counts_towards_the_deadline() -> None:
    gate = Gate()
    gate.open_for = 0

    async def scenario(engine: Endpoint) -> str:
        first = asyncio.create_task(engine.ask("x", deadline_s=60.0))
        while not gate.num_held:
            await asyncio.sleep(0.005)
        others = await _all(engine, 3, deadline_s=0.2)
        assert all(isinstance(error, EngineError) for error in others)
        assert "other requests used up the time" in str(others[-1])
        gate.open_for = 1
        return await first

    with opened(chat_server(lambda body: "late", wait=gate), max_concurrency=1) as (server, engine):
        assert run_to_end(scenario(engine)) == "late"
    assert (engine.meter.failures, len(server.asked)) == (3, 1)


def test_a_cancelled_request_frees_its_slot() -> None:
    async def impatient(engine: Endpoint) -> str:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.ask("x"), 0.2)
        return await engine.ask("y")

    serving = chat_server(lambda body: "fine", wait=slow_at_first())
    with opened(serving, max_concurrency=1) as (_, engine):
        assert run_to_end(impatient(engine)) == "fine"


# ---- what does not pass


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<html>Bad gateway</html>", "not JSON: '<html>Bad gateway"),
        (b"", "an empty body"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1, 2]", r"without choices.*\[1, 2\]"),
        (b'{"choices": []}', "without choices"),
        (b'{"choices": [null]}', "without choices"),
        (b'{"choices": [{"message": {"content": null}}]}', "content.*null"),
        (b'{"choices": [{"message": {"content": [{"text": "x"}]}}]}', "without choices"),
        (b'{"error": {"message": "overloaded"}}', "overloaded"),
    ],
)
def test_malformed_replies_are_errors(body: bytes, said: str) -> None:
    found, num_asked = refusal(raw_server(http(body)))
    assert re.search(said, found) and num_asked == 1, "nobody asks for more of it"


def test_a_huge_body_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_BYTES", 100_000)
    said, num_asked = refusal(raw_server(http(b"x" * 10_000_000)))
    assert "more than 100000 bytes: 'xxx" in said and num_asked == 1
    bomb = http(gzip.compress(b"x" * 50_000_000), "200 OK", "Content-Encoding: gzip")
    assert len(bomb) < 100_000
    assert "more than 100000 bytes" in refusal(raw_server(bomb))[0]


def test_half_a_surrogate_pair_is_replaced() -> None:
    with raw_server(http(b'{"choices": [{"message": {"content": "a\\ud800b"}}]}')) as server:
        assert ask(server) == "a?b"


def test_a_reply_without_usage_is_a_reply() -> None:
    with raw_server(http(b'{"choices": [{"message": {"content": ""}}], "usage": null}')) as server:
        assert ask(server) == ""


@pytest.mark.parametrize("code", [400, 413, 422])
def test_a_request_that_is_refused_is_not_repeated(code: int) -> None:
    said, num_asked = refusal(chat_server(lambda body: status(code)))
    assert f"HTTP {code}" in said and num_asked == 1


@pytest.mark.parametrize("code", [401, 403, 404])
def test_a_wrong_key_or_model_is_a_user_error_until_the_first_reply(code: int) -> None:
    said, _ = refusal(chat_server(lambda body: status(code)), UserError)
    assert re.match(rf"engines\.frozen: .*/v1.* HTTP {code} for model 'm'", said)
    answers = iter(["fine"])
    with opened(chat_server(lambda body: next(answers, None) or status(code))) as (_, engine):
        assert run_to_end(engine.ask("x")) == "fine"
        with pytest.raises(EngineError, match=f"HTTP {code}"):
            run_to_end(engine.ask("x"))


@pytest.mark.parametrize("key", [None, "", "  ", "sch\u00f6n", "a\nb"])
def test_a_missing_key_is_a_user_error(key: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEST_KEY")
    if key is not None:
        monkeypatch.setenv("TEST_KEY", key)
    with pytest.raises(UserError, match=r"engines\.frozen\.api_key_env='TEST_KEY'") as caught:
        Endpoint(
            "frozen", Chat(model="m", base_url="http://127.0.0.1:1/v1", api_key_env="TEST_KEY")
        )
    said = str(caught.value)
    assert "\n" not in said and "sch" not in said, "a key is no one's business"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("base_url", "127.0.0.1:8000/v1"),
        ("base_url", "ftp://x/v1"),
        ("base_url", ""),
        ("model", ""),
    ],
)
def test_a_malformed_address_or_model_is_a_user_error(name: str, value: str) -> None:
    with pytest.raises(UserError, match=rf"engines\.frozen\.{name}"):
        Endpoint("frozen", Chat.model_validate({"model": "m", "api_key_env": "", name: value}))


def test_openai_gets_max_completion_tokens() -> None:
    with closing(Endpoint("frozen", Chat(model="m", api_key_env="TEST_KEY"))) as engine:
        body = engine._body("x", 0)
    assert "max_completion_tokens" in body and "max_tokens" not in body


def test_a_closed_engine_raises_at_once() -> None:
    with chat_server(lambda body: "ok") as server:
        engine = Endpoint("frozen", options(server))
        engine.close()
        with pytest.raises(EngineError, match="it is closed"):
            run_to_end(engine.ask("x"))
