"""A run whose frozen roles are on a server: what it logs, and how it ends when that fails."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from chat_servers import chat_server
from cli_runs import Run
from starlette.responses import JSONResponse, Response

pytest_plugins = ("cli_runs",)


def chance(prompt: str) -> float:
    """The same for the same prompt."""
    return hashlib.sha256(prompt.encode()).digest()[0] / 256


def script(body: dict[str, Any]) -> Response | str:
    prompt = body["messages"][0]["content"]
    if prompt.startswith("You prepare"):
        return "1. Summary: a sum."
    if prompt.startswith("You check"):
        return "Good.\nConclusion: STOP" if chance(prompt) < 0.3 else "Conclusion: CONTINUE"
    if prompt.startswith("You decide whether"):
        return f"It may.\nVerdict: {chance(prompt) < 0.5}"
    if chance(prompt) < 0.2:
        return JSONResponse({"error": "not today"}, 400)
    return f"<answer>{10 + int(chance(prompt) * 8)}</answer>"


def options(place: Path, base_url: str) -> tuple[str, ...]:
    roles = ("analyst", "verifier", "generator", "judge")
    return (
        *(word for role in roles for word in (f"--roles.{role}", "local")),
        *("--engines.local.base_url", base_url, "--engines.local.model", "m"),
        *("--engines.local.api_key_env", "", "--engines.local.price_out", "1000000"),
        *("--judge.cache", str(place / "judge.sqlite"), "--eval.num_tasks", "4"),
    )


def test_a_run_whose_frozen_roles_are_elsewhere(run: Run, tmp_path: Path) -> None:
    with chat_server(script) as chat:
        ran = run("run", *options(tmp_path, chat.base_url), "--train.num_steps", 2)
    assert not ran.lines
    records, steps = ran.rollouts, ran.steps
    failed = [record for record in records if record["error"]]
    assert 0 < len(failed) < len(records) == 64
    for record in records:
        assert record["analysis"] == "1. Summary: a sum."
        assert (record["reward"] is None) == bool(record["error"]) == (record["output"] == "")
        assert all("Conclusion: " in turn["verdict_text"] for turn in record["turns"])
    assert all(
        record["error"].startswith("generator: engines.local: HTTP 400: ") for record in failed
    )
    text = (ran.path / "config.toml").read_text()
    assert "[engines.local]" in text and json.dumps("local") in text
    found = [step["failed_rollouts"] for step in steps]
    assert found == [sum(r["step"] == n for r in failed) for n in (1, 2)]
    for number, step in enumerate(steps, 1):
        rewards = [
            record["reward"]
            for record in records
            if record["step"] == number and not record["error"]
        ]
        assert step["reward_mean"] == pytest.approx(sum(rewards) / len(rewards))
    assert {record["scored_by"] for record in records} == {"exact", "judge", ""}
    assert {record["reward"] for record in records if record["scored_by"] == "judge"} == {0.0, 1.0}
    last = steps[-1]
    assert (
        0 < last["judge/asked"] <= sum(prompt.startswith("You decide") for prompt in chat.prompts)
    ), "the last evaluation asks, too"
    assert steps[0]["engines/local/requests"] < last["engines/local/requests"] <= len(chat.asked)
    assert last["engines/local/cost"] == last["engines/local/reply_tokens"] > 0
    assert last["engines/local/failures"] >= len(failed)
    assert any(step["num_tokens"] > 0 for step in steps), "something was trained"


def test_a_run_does_not_go_on_when_every_rollout_fails(run: Run, tmp_path: Path) -> None:
    with chat_server(lambda body: JSONResponse({"error": "not today"}, 400)) as chat:
        argv = options(tmp_path, chat.base_url)
        lines = run("failing", *argv, "--train.num_steps", 5, code=2).lines
    assert sum("nothing to learn from" in line for line in lines) == 3
    assert "(3 steps in a row): all 32 rollouts failed" in lines[-1]
    assert "analyst: engines.local: HTTP 400" in lines[-1]
