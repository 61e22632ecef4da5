"""What Prometheus gets from a trainer, from the numbers of its steps to the address."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from prometheus_text import samples

from flowtrain.config import Config
from flowtrain.net.monitoring import Monitor
from flowtrain.run.trainer_metrics import TrainerMetrics, TrainerMonitor
from flowtrain.training.world import World
from flowtrain.types import UserError

_NAME = "flowtrain_trainer"


def made(step: int = 0) -> tuple[TrainerMetrics, Monitor]:
    monitor = Monitor(_NAME, None)
    return TrainerMetrics(10, step, monitor), monitor


def numbers(**more: Any) -> dict[str, float]:
    stages = {"collect_s": 2.0, "train_s": 1.0, "other_s": 0.5, "step_s": 3.5}
    tokens = {"tokens/sampled": 100, "tokens/to/trained": 60, "tokens/to/no_signal": 40}
    return {"reward_mean": 0.25, "loss": -0.5, **stages, **tokens, **more}


def test_a_step_in_numbers() -> None:
    metrics, monitor = made()
    metrics.log(1, numbers(peak_memory_gb=1.5, mismatch_kl=0.01, **{"dataflow/staleness_max": 3}))
    found = samples(monitor.text())
    assert (found[f"{_NAME}_step"], found[f"{_NAME}_steps"]) == (1, 10)
    assert (found[f"{_NAME}_reward"], found[f"{_NAME}_loss"]) == (0.25, -0.5)
    assert found[f"{_NAME}_mismatch_kl_nats"] == 0.01
    assert found[f"{_NAME}_staleness_max_versions"] == 3
    assert found[f"{_NAME}_peak_memory_bytes"] == 1.5e9
    assert found[f"{_NAME}_stage_seconds_total{{stage=collect}}"] == 2.0
    assert found[f"{_NAME}_stage_seconds_total{{stage=other}}"] == 0.5
    assert f"{_NAME}_kl_nats" not in found, "what was not measured is not 0"


def test_counters_add_up_and_the_step_does_not_fall() -> None:
    metrics, monitor = made(step=4)
    assert samples(monitor.text())[f"{_NAME}_step"] == 4
    metrics.log(5, numbers())
    metrics.log(6, numbers(reward_mean=0.5))
    metrics.log(5, {"eval_reward": 0.75})  # what nodes have answered late
    found = samples(monitor.text())
    assert found[f"{_NAME}_step"] == found[f"{_NAME}_weights_version"] == 6
    assert (found[f"{_NAME}_reward"], found[f"{_NAME}_eval_reward"]) == (0.5, 0.75)
    assert found[f"{_NAME}_tokens_total{{fate=trained}}"] == 120
    assert found[f"{_NAME}_sampled_tokens_total"] == 200
    assert found[f"{_NAME}_stage_seconds_total{{stage=train}}"] == 2.0


def test_names_of_users_are_no_metrics() -> None:
    metrics, monitor = made()
    metrics.log(1, numbers(**{"reward/my part": 1.0, "tool_share/Mine": 1.0}))
    assert "mine" not in monitor.text().lower() and "my part" not in monitor.text()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def config(**log: Any) -> Config:
    return Config.model_validate({"log": log})


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World.join("cpu")
    yield world
    world.leave()


def test_off_by_default(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLOWTRAIN_TOKEN", raising=False)
    monitor = TrainerMonitor(config(), world)
    assert monitor.logger(10, 0) == []
    monitor.close()


def test_a_trainer_answers_with_the_token(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("FLOWTRAIN_TOKEN", "t")
    port = free_port()
    monitor = TrainerMonitor(config(metrics_port=port), world)
    try:
        (metrics,) = monitor.logger(10, 0)
        metrics.log(1, numbers())
        url = f"http://127.0.0.1:{port}"
        assert httpx2.get(f"{url}/health").json() == {"status": "ok"}
        assert httpx2.get(f"{url}/metrics").status_code == 401
        found = samples(httpx2.get(f"{url}/metrics", headers={"Authorization": "Bearer t"}).text)
        assert found[f"{_NAME}_step"] == 1
        with pytest.raises(UserError, match=f"cannot listen at 127.0.0.1 port {port}"):
            TrainerMonitor(config(metrics_port=port), world)
    finally:
        monitor.close()


def test_without_a_token_it_is_refused_unless_it_needs_none(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("FLOWTRAIN_TOKEN", raising=False)
    port = free_port()
    with pytest.raises(
        UserError, match=r"log\.metrics_port=\d+ needs the variable FLOWTRAIN_TOKEN"
    ):
        TrainerMonitor(config(metrics_port=port), world)
    monitor = TrainerMonitor(config(metrics_port=port, open_metrics=True), world)
    try:
        assert httpx2.get(f"http://127.0.0.1:{port}/metrics").status_code == 200
    finally:
        monitor.close()
