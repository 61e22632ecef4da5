"""Keys, retries, clients that leave, limits, and the ends of rollouts behind the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from chat_templates import tokenizer_of
from gateway_runs import TASK, LoggingEngine, calls_of, logging_engine, make_agent, roll_out

from flowtrain.agents.deadlines import Cutoff
from flowtrain.agents.gateway import agent as agent_module
from flowtrain.agents.gateway import server
from flowtrain.agents.gateway.agent import GatewayAgent
from flowtrain.agents.gateway.plain import Refusal
from flowtrain.agents.gateway.rollout import Outcome, Rollout
from flowtrain.agents.gateway.wires import chat
from flowtrain.inference.protocol import EngineError
from flowtrain.records import Trajectory, UserError

HI = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}]}


class InProcess:
    """A program of the test itself, in place of a file's."""

    is_bounded = False

    def __init__(self, solve: Callable[[httpx2.AsyncClient], Any]) -> None:
        self.solve_with = solve
        self.key = self.base_url = ""

    async def solve(self, rollout: Any, base_url: str) -> Outcome:
        self.key, self.base_url = rollout.key, base_url
        async with client_of(base_url, rollout.key) as client:
            return Outcome.of(await self.solve_with(client))

    def close(self) -> None: ...


def client_of(base_url: str, key: str) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(
        base_url=base_url, headers={"Authorization": f"Bearer {key}"}, timeout=60
    )


def solving(
    monkeypatch: pytest.MonkeyPatch, engine: Any, solve: Any, **options: Any
) -> tuple[GatewayAgent, InProcess]:
    """An agent whose program is a coroutine function of an HTTP client."""
    program = InProcess(solve)
    monkeypatch.setattr(agent_module, "_program", lambda options: program)
    return make_agent(engine, **options), program


def solved(monkeypatch: pytest.MonkeyPatch, engine: Any, solve: Any, **options: Any) -> Trajectory:
    agent, _ = solving(monkeypatch, engine, solve, **options)
    with contextlib.closing(agent):
        return roll_out(agent)


async def post(client: httpx2.AsyncClient, body: dict[str, Any], **headers: str) -> httpx2.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await client.post("/chat/completions", json=body, headers=named)


def said(response: httpx2.Response) -> str:
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


async def ask_once(client: httpx2.AsyncClient) -> str:
    return said(await post(client, HI))


async def until(is_so: Callable[[], Any]) -> None:
    while not is_so():
        await asyncio.sleep(0)


# ---- retries


@pytest.mark.parametrize("name", ["x_stainless_retry_count", "idempotency_key"])
def test_a_retry_gets_the_recorded_answer(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    first = {} if name == "x_stainless_retry_count" else {name: "1"}
    clock = SimpleNamespace(time=itertools.count(1000).__next__)
    monkeypatch.setattr("flowtrain.agents.gateway.plain.time", clock)

    async def solve(client: httpx2.AsyncClient) -> str:
        before = await post(client, HI, **first)
        again = await post(client, HI, **{name: "1"})
        assert before.content == again.content
        return said(again)

    trajectory = solved(monkeypatch, logging_engine("one", "two"), solve)
    assert trajectory.error == "" and trajectory.answer == "one" and len(trajectory.turns) == 1


def test_a_retry_joins_the_request_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    both_wait = asyncio.Event()
    engine = logging_engine("one", "two", wait=both_wait.wait)

    async def solve(client: httpx2.AsyncClient) -> str:
        first = asyncio.create_task(post(client, HI))
        await until(lambda: engine.asked)
        again = asyncio.create_task(post(client, HI, x_stainless_retry_count="1"))
        rollout = next(iter(agent.gateway._rollouts.values()))
        await until(lambda: rollout.num_requests == 2)
        first.cancel()
        await until(lambda: rollout.num_requests == 1)
        both_wait.set()
        return said(await again)

    agent, _ = solving(monkeypatch, engine, solve)
    with contextlib.closing(agent):
        trajectory = roll_out(agent)
    assert trajectory.error == "" and trajectory.answer == "one" and len(trajectory.turns) == 1
    assert engine.num_cancelled == 0


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (HI, {}),
        (HI, {"x_stainless_retry_count": "0"}),
        (HI, {"idempotency_key": "other"}),
        ({**HI, "max_tokens": 9}, {"x_stainless_retry_count": "1"}),
        ({**HI, "max_tokens": 9}, {"idempotency_key": "1"}),
    ],
)
def test_what_is_no_retry_is_sampled_anew(
    monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], headers: dict[str, str]
) -> None:
    async def solve(client: httpx2.AsyncClient) -> str:
        await post(client, HI, idempotency_key="1")
        return said(await post(client, body, **headers))

    trajectory = solved(monkeypatch, logging_engine("one", "two"), solve)
    assert trajectory.answer == "two" and len(trajectory.turns) == 2


# ---- clients that leave


def test_a_client_that_leaves_cancels_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = asyncio.Event()
    engine = logging_engine("one", wait=go_on.wait)

    async def solve(client: httpx2.AsyncClient) -> str:
        request = asyncio.create_task(post(client, HI))
        await until(lambda: engine.asked)
        request.cancel()
        await until(lambda: engine.num_cancelled)
        go_on.set()
        return said(await post(client, HI, x_stainless_retry_count="1"))

    trajectory = solved(monkeypatch, engine, solve)
    assert trajectory.error == "" and trajectory.answer == "one"
    assert calls_of(trajectory) == engine.log and len(engine.log) == 1


# ---- keys and limits


def test_a_wrong_key_is_401_and_one_of_the_past_410(monkeypatch: pytest.MonkeyPatch) -> None:
    async def solve(client: httpx2.AsyncClient) -> str:
        for key in ("wrong", "\xe9"):
            bad = {"Authorization": f"Bearer {key}".encode("latin-1")}
            response = await client.post("/chat/completions", json=HI, headers=bad)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        return await ask_once(client)

    async def late() -> httpx2.Response:
        async with client_of(program.base_url, program.key) as client:
            return await post(client, HI)

    agent, program = solving(monkeypatch, logging_engine("one"), solve)
    with contextlib.closing(agent):
        trajectory, response = roll_out(agent), asyncio.run(late())
    assert (trajectory.answer, trajectory.error) == ("one", "")
    assert response.status_code == 410 and response.headers["x-should-retry"] == "false"


def test_a_request_that_is_read_while_the_rollout_ends_is_410(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rollouts: list[Rollout] = []

    async def solve(client: httpx2.AsyncClient) -> str:
        rollouts.extend(agent.gateway._rollouts.values())
        return await ask_once(client)

    agent, _ = solving(monkeypatch, logging_engine("one"), solve)
    with contextlib.closing(agent):
        assert roll_out(agent).answer == "one"
    body = json.dumps(HI).encode()
    with pytest.raises(Refusal) as refused:
        rollouts[0].ask(chat.read(body), body, retry_of=None)
    assert refused.value.status == 410


def test_the_keys_of_two_rollouts_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []

    async def solve(client: httpx2.AsyncClient) -> str:
        keys.append(client.headers["authorization"])
        return await ask_once(client)

    async def both() -> list[Trajectory]:
        return await asyncio.gather(agent.run(TASK, 0), agent.run(TASK, 1))

    agent, _ = solving(monkeypatch, logging_engine("one", "two"), solve)
    with contextlib.closing(agent):
        found = asyncio.run(both())
    assert len(set(keys)) == 2 and [len(each.turns) for each in found] == [1, 1]


def test_too_many_requests_at_a_time_are_429(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = asyncio.Event()
    engine = logging_engine("one", wait=go_on.wait)

    async def solve(client: httpx2.AsyncClient) -> str:
        first = asyncio.create_task(post(client, HI))
        await until(lambda: engine.asked)
        second = await post(client, HI)
        assert second.status_code == 429 and second.headers["retry-after"] == "1"
        go_on.set()
        return said(await first)

    monkeypatch.setattr(server, "MAX_REQUESTS", 1)
    assert solved(monkeypatch, engine, solve).answer == "one"


def test_beyond_the_turns_the_program_may_still_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def solve(client: httpx2.AsyncClient) -> str:
        await post(client, HI)
        response = await post(client, HI)
        assert response.status_code == 410
        return str(response.json()["error"]["message"])

    trajectory = solved(monkeypatch, logging_engine("one"), solve, agent={"max_turns": 1})
    assert trajectory.truncated == "turns" and "agent.max_turns" in trajectory.answer
    assert trajectory.error == "" and len(trajectory.turns) == 1


def test_a_program_that_fails_at_the_limit_is_cut_and_not_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def solve(client: httpx2.AsyncClient) -> str:
        return await ask_once(client) + await ask_once(client)

    one_turn = {"max_turns": 1}
    trajectory = solved(monkeypatch, logging_engine("one"), solve, agent=one_turn)
    assert (trajectory.truncated, trajectory.answer, trajectory.error) == ("turns", "", "")
    agent, _ = solving(monkeypatch, logging_engine("one"), solve, agent=one_turn)
    with contextlib.closing(agent):
        of_verifiers = roll_out(agent, task=replace(TASK, columns='{"verifiers": {}}'))
    assert of_verifiers.error == "agent: cut off (turns) before it had a reward", "it has no rule"


def test_a_prompt_that_is_too_long_is_400_and_the_rollout_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def solve(client: httpx2.AsyncClient) -> str:
        long = {"model": "policy", "messages": [{"role": "user", "content": "x" * 5000}]}
        response = await post(client, long)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        return await ask_once(client)

    trajectory = solved(monkeypatch, logging_engine("short"), solve)
    assert (trajectory.answer, trajectory.truncated, len(trajectory.turns)) == ("short", "", 1)


def test_time_ends_the_rollout_and_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = logging_engine(wait=asyncio.Event().wait)
    trajectory = solved(monkeypatch, engine, ask_once, agent={"rollout_timeout_s": 0.5})
    assert (trajectory.truncated, trajectory.turns) == ("time", ())
    assert engine.num_cancelled == len(engine.asked), "where the request came in time"


def test_a_cutoff_ends_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = logging_engine(wait=asyncio.Event().wait)
    agent, _ = solving(monkeypatch, engine, ask_once)

    async def run() -> Trajectory:
        cutoff = Cutoff()
        running = asyncio.create_task(agent.run(TASK, 0, cutoff))
        await until(lambda: engine.asked)
        cutoff.set(asyncio.get_running_loop().time())
        return await running

    with contextlib.closing(agent):
        assert asyncio.run(run()).truncated == "straggler"
    assert engine.num_cancelled == 1


def test_an_engine_that_fails_for_good_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail() -> None:
        raise EngineError("no GPU")

    async def solve(client: httpx2.AsyncClient) -> str:
        response = await post(client, HI)
        assert response.status_code == 500 and response.headers["x-should-retry"] == "false"
        return "never mind"

    with pytest.raises(EngineError, match="no GPU"):
        solved(monkeypatch, logging_engine(wait=fail), solve)


# ---- requests that are none


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/nothing", b"{}", 404),
        ("GET", "/chat/completions", b"", 405),
        ("GET", "/models", b"", 404),
        ("POST", "/chat/completions", b"\xff", 400),
        ("POST", "/chat/completions", b"[]", 400),
        ("POST", "/chat/completions", b"[" * 100_000, 400),
        ("POST", "/chat/completions", b" " * ((16 << 20) + 1), 413),
        ("POST", "/completions", b'{"model": "x", "prompt": "x"}', 404),
    ],
)
def test_requests_that_are_none_are_refused_in_openais_form(
    monkeypatch: pytest.MonkeyPatch, method: str, path: str, body: bytes, status: int
) -> None:
    async def solve(client: httpx2.AsyncClient) -> str:
        response = await client.request(method, path, content=body)
        assert response.status_code == status, response.text
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        return await ask_once(client)

    assert solved(monkeypatch, logging_engine("still here"), solve).answer == "still here"


# ---- agents


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "gateway.command or gateway.function"),
        ({"command": ["no-such-program"]}, "gateway.command"),
        ({"function": "nowhere.py:solve"}, "nowhere.py"),
        ({"function": "os.path:join"}, "base_url"),
        ({"function": "solve"}, "FILE.py:NAME"),
        ({"function": "json:dumps", "agent": {"tools": ["Search"]}}, "agent.tools"),
        ({"command": ["ls"], "environment": ["NOT_SET_AT_ALL"]}, "NOT_SET_AT_ALL"),
    ],
)
def test_a_program_that_is_not_there_is_a_mistake_of_the_config(
    options: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=named.replace(".", r"\.")):
        make_agent(logging_engine(), **options)


def test_the_outcome_may_be_told_as_a_mapping() -> None:
    assert Outcome.of({"answer": "x", "reward": 1}) == Outcome("x", {"reward": 1.0})
    assert Outcome.of(json.loads('{"answer": "x"}')) == Outcome("x")
    bad_reward = ({}, True, "y", {"a\n": 1}, float("nan"))
    bad_rewards = [{"answer": "x", "reward": each} for each in bad_reward]
    for bad in (3, {"answer": None}, {"answer": "x", "score": 1}, *bad_rewards):
        with pytest.raises(ValueError):
            Outcome.of(bad)


def test_a_model_without_a_chat_template_is_refused_whatever_the_prompt() -> None:
    engine = LoggingEngine(tokenizer_of("", "<|im_end|>"))
    for prompt in ("compact", "full"):
        with pytest.raises(UserError) as refused:
            make_agent(engine, function="json:dumps", agent={"prompt": prompt})
        text = str(refused.value)
        assert "no chat template" in text and "agent.name='gateway'" in text
        assert "use agent.prompt" not in text and "\n" not in text
