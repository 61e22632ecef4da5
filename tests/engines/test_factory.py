"""The engine factory: engines of policies and of frozen chat models, with weights from stores or
from paths.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from flowtrain.config import Chat, Config, Vllm
from flowtrain.engines import factory
from flowtrain.engines.factory import ModelSpec, make_engine
from flowtrain.engines.vllm_process import VllmModel
from flowtrain.run.components import RunComponents
from flowtrain.training.model import named_weights
from flowtrain.training.world import World
from flowtrain.types import Sampling, UserError
from flowtrain.weights import HttpStore, Publisher, WeightStore

CPU = torch.device("cpu")
GREEDY = Sampling(6, temperature=0.0, ignore_end=True)


@pytest.fixture
def components(tiny_path: str, tmp_path: Path) -> Iterator[RunComponents]:
    """Components of a run whose two policies start from one warm model."""
    config = Config.model_validate(
        {
            "run": {"dir": str(tmp_path / "run"), "device": "cpu", "threads": 1},
            "roles": {"verifier": "own"},
            "model": {"path": tiny_path},
            "policies": {"verifier": {"path": tiny_path, "max_new_tokens": 8}},
            "tasks": {"num_train": 20},
            "rollout": {"max_new_tokens": 8},
            "eval": {"num_tasks": 4},
        }
    )
    world = World.join("cpu")
    components = RunComponents.prepare(config, world)
    yield components
    components.close()
    world.leave()


def publish(
    store: WeightStore, components: RunComponents, version: int, scale: float
) -> WeightStore:
    weights = {
        name: weight * scale if weight.dim() == 2 else weight
        for name, weight in named_weights(components.model).items()
    }
    Publisher(store).publish(weights, version)
    return store


def sampled(
    components: RunComponents, stores: dict[str, Any], versions: dict[str, int]
) -> dict[str, tuple[tuple[int, ...], tuple[float, ...], int]]:
    """Sample each policy on one prompt; returns ids, log-probs and the version."""
    engines = components.make_policy_engines(stores)
    for name, version in versions.items():
        engines[name].load(version)
    done = {
        name: asyncio.run(engine.generate((5, 6, 7), GREEDY)) for name, engine in engines.items()
    }
    for engine in engines.values():
        engine.close()
    return {name: (each.ids, each.logprobs, each.spans[0].version) for name, each in done.items()}


def test_each_policy_has_weights_and_versions_of_its_own(
    components: RunComponents, tmp_path: Path
) -> None:
    stores = {name: WeightStore(tmp_path / name) for name in ("planner", "verifier")}
    publish(stores["planner"], components, 3, 1.0), publish(stores["verifier"], components, 8, 1.2)
    both = sampled(components, stores, {"planner": 3, "verifier": 8})
    assert (both["planner"][2], both["verifier"][2]) == (3, 8)
    assert both["planner"][1] != pytest.approx(both["verifier"][1], rel=1e-2), "weights differ"
    swapped = sampled(
        components,
        {"planner": stores["verifier"], "verifier": stores["planner"]},
        {"planner": 8, "verifier": 3},
    )
    assert (swapped["planner"], swapped["verifier"]) == (both["verifier"], both["planner"])


def test_a_policy_without_a_store_has_the_weights_at_its_path(
    components: RunComponents, tmp_path: Path
) -> None:
    store = publish(WeightStore(tmp_path / "store"), components, 0, 1.0)
    found = sampled(components, {"planner": store}, {"planner": 0})
    assert found["verifier"] == found["planner"], "the same warm model"


def test_each_policy_has_its_own_temperature(components: RunComponents) -> None:
    values = components.config.model_dump()
    values["policies"]["verifier"]["temperature"] = 0.5
    flow = dataclasses.replace(components, config=Config.model_validate(values)).make_flow(
        components.make_no_engines(), 3
    )
    assert (flow.planner.policy.temperature, flow.verifier.policy.temperature) == (1.0, 0.5)  # type: ignore[attr-defined]
    greedy = components.make_flow(components.make_no_engines(), 3, temperature=0.0)
    assert (greedy.planner.policy.temperature, greedy.verifier.policy.temperature) == (0.0, 0.0)  # type: ignore[attr-defined]


def test_vllm_gets_the_location_of_the_store(
    tiny_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[Any] = []
    monkeypatch.setattr(
        factory, "VllmEngine", lambda model, tokenizer, options: models.append(model)
    )
    policy = ModelSpec.load("model.path", tiny_path)
    config = Config.model_validate({"rollout": {"engine": "vllm"}})
    for store in (
        None,
        WeightStore(tmp_path / "store"),
        HttpStore("http://127.0.0.1:9/w", tmp_path / "cache"),
    ):
        make_engine(config, policy, CPU, store)
    assert [model.store for model in models] == [
        "",
        str(tmp_path / "store"),
        "http://127.0.0.1:9/w",
    ]
    assert models[0].source == tiny_path and models[1].source.architectures == ["Qwen3ForCausalLM"]
    assert {model.max_tokens for model in models} == {64} and models[0].stop_ids == models[
        1
    ].stop_ids != frozenset()


@pytest.mark.parametrize("chat", [None, Chat(kind="vllm")], ids=["policy", "chat model"])
def test_vllm_takes_at_most_the_positions_of_the_model(
    tiny_path: str, monkeypatch: pytest.MonkeyPatch, chat: Chat | None
) -> None:
    made: list[VllmModel] = []
    monkeypatch.setattr(factory, "VllmEngine", lambda model, *rest: made.append(model))
    model = ModelSpec.load("the.key", tiny_path)
    for length in (0, 40, 64):
        config = Config.model_validate(
            {"rollout": {"engine": "vllm"}, "vllm": {"max_model_len": length}}
        )
        make_engine(config, model, CPU, chat=chat)
    assert [each.max_tokens for each in made] == [64, 40, 64]
    config = Config.model_validate({"rollout": {"engine": "vllm"}, "vllm": {"max_model_len": 65}})
    message = r"vllm\.max_model_len=65 must be at most the 64 positions of the\.key='.*'"
    with pytest.raises(UserError, match=message):
        make_engine(config, model, CPU, chat=chat)


def test_a_chat_model_has_its_own_engine_and_capacity(
    tiny_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Vllm] = []
    monkeypatch.setattr(factory, "VllmEngine", lambda model, tokenizer, opts: made.append(opts))
    model = ModelSpec.load("the.key", tiny_path)
    config = Config.model_validate({"rollout": {"engine": "torch", "max_batch_size": 3}})
    make_engine(config, model, CPU, chat=Chat(kind="vllm", max_concurrency=5))
    assert made[0].max_num_seqs == 5
    for chat, capacity in ((None, 3), (Chat(kind="torch", max_concurrency=7), 7)):
        engine = make_engine(config, model, CPU, chat=chat)
        assert engine._max_batch_size == capacity  # type: ignore[attr-defined]
        engine.close()


def test_a_policys_size_is_known_without_its_weights(tiny_path: str) -> None:
    assert (
        ModelSpec.load("k", tiny_path).num_parameters()
        == AutoModelForCausalLM.from_pretrained(tiny_path).num_parameters()
    )


def test_a_path_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="k must be the folder or hub name"):
        ModelSpec.load("k", "")
    with pytest.raises(UserError, match=r"k='.*' holds no tokenizer"):
        ModelSpec.load("k", str(tmp_path))
