"""The engine factory: engines of policies and of frozen models, from stores or from paths."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file
from toy_options import toy
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from bench.families import SHAPE
from flowtrain.config import Chat, Config, Lora, Vllm
from flowtrain.inference import factory
from flowtrain.inference.factory import ModelSpec, make_engine
from flowtrain.inference.protocol import NoEngine
from flowtrain.inference.vllm.process import VllmModel, engine_args, gpu_environment
from flowtrain.records import Sampling, UserError
from flowtrain.trainer.distributed import World
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.model.loading import named_weights
from flowtrain.trainer.model.lora import WEIGHTS, adapter_weights, add_adapter
from flowtrain.trainer.setup.components import RunComponents
from flowtrain.trainer.setup.placement import Placement
from flowtrain.weights import Publisher, WeightStore, open_source
from flowtrain.weights.format.manifest import TensorSpec

CPU = torch.device("cpu")
GREEDY = Sampling(6, temperature=0.0, ignore_end=True)


@pytest.fixture
def components(tiny_path: str, tmp_path: Path) -> Iterator[RunComponents]:
    """Components of a run whose two policies start from one warm model."""
    config = toy(
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
    components = RunComponents.prepare(config, Placement.colocated(world))
    yield components
    components.close()
    world.leave()


def under(components: RunComponents, config: Config) -> RunComponents:
    return dataclasses.replace(components, algorithm=components.algorithm.with_config(config))


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
    return {n: (c.response_ids, c.logprobs, c.spans[0].version) for n, c in done.items()}


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
    engines = components.make_policy_engines({}, ())
    flow = under(components, toy(values)).make_agent(engines, 3)
    assert (flow.planner.voice.temperature, flow.verifier.voice.temperature) == (1.0, 0.5)
    greedy = components.make_agent(engines, 3, temperature=0.0)
    assert (greedy.planner.voice.temperature, greedy.verifier.voice.temperature) == (0.0, 0.0)


def test_vllm_gets_the_location_of_the_store(
    tiny_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(factory, "VllmEngine", lambda model, *rest: made.append(model))
    policy = ModelSpec.load("model.path", tiny_path)
    config = toy({"rollout": {"engine": "vllm"}})
    for store in (
        None,
        WeightStore(tmp_path / "store"),
        open_source("http://127.0.0.1:9/w", tmp_path / "cache"),
    ):
        make_engine(config, policy, CPU, store)
    assert [model.store for model in made] == ["", str(tmp_path / "store"), "http://127.0.0.1:9/w"]
    assert made[0].source == tiny_path and made[1].source.architectures == ["Qwen3ForCausalLM"]
    assert {model.max_tokens for model in made} == {64}
    assert made[0].stop_ids == made[1].stop_ids != frozenset()


def test_policies_of_one_model_share_a_vllm(
    components: RunComponents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With versions of adapters alone; a policy of another model has a vLLM of its own."""
    shared: list[VllmModel] = []
    alone: list[Any] = []

    def start(model: VllmModel, *_: Any) -> dict[str, Any]:
        shared.append(model)
        return {name: NoEngine(64) for name in model.adapter_stores}

    def make(model: VllmModel, *_: Any) -> NoEngine:
        alone.append(model)
        return NoEngine(64)

    monkeypatch.setattr(factory.AdapterEngine, "start", start)
    monkeypatch.setattr(factory, "VllmEngine", make)
    values = components.config.model_dump()
    values["rollout"]["engine"] = "vllm"
    stores = {"planner": WeightStore(tmp_path / "store")}
    for lora in ({}, {"rank": 4}, {"rank": 4, "alpha": 8, "sync": "adapter"}):
        config = toy({**values, "lora": lora})
        under(components, config).make_policy_engines(stores)
    (model,) = shared
    assert len(alone) == 4 and not any(each.adapters for each in alone)
    assert model.adapter_stores == {"planner": str(tmp_path / "store"), "verifier": ""}
    assert model.source == components.config.model.path and not model.store
    assert model.adapters is not None and (model.adapters.rank, model.adapters.alpha) == (4, 8)
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
    width = components.policies["planner"].shape.intermediate_size
    assert model.adapters.layout[name] == TensorSpec("float32", (4, width))
    args = engine_args(model, Vllm())
    assert (args["max_loras"], args["max_lora_rank"]) == (2, 8), "one more slot, which stays empty"
    assert set(args["lora_target_modules"]) >= {"q_proj", "down_proj"}
    other = dict(components.policies)
    other["verifier"] = dataclasses.replace(other["verifier"], path="elsewhere")
    alike = dataclasses.replace(under(components, config), policies=other)
    alike.make_policy_engines(stores)
    assert list(shared[1].adapter_stores) == ["planner"] and alone[-1].source == "elsewhere"


def test_vllm_gets_a_saved_adapter_as_a_whole_model(
    tiny_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[VllmModel] = []
    monkeypatch.setattr(factory, "VllmEngine", lambda model, *rest: made.append(model))
    network = models.load_model(tiny_path, torch.float32)
    add_adapter(network, Lora(rank=2), tiny_path)
    weights = {name: torch.ones_like(tensor) for name, tensor in adapter_weights(network).items()}
    tokenizer = models.load_tokenizer(tiny_path)
    models.export_shape(network, tokenizer, tmp_path / "saved", torch.float32)
    save_file(weights, tmp_path / "saved" / WEIGHTS)
    config = toy({"rollout": {"engine": "vllm"}})
    make_engine(config, ModelSpec.load("model.path", str(tmp_path / "saved")), CPU)
    name = "model.layers.0.mlp.up_proj.weight"
    merged = made[0].source.get_parameter(name)
    bare = models.load_model(tiny_path, torch.float32).get_parameter(name)
    assert torch.allclose(merged - bare, torch.full_like(bare, 32.0), atol=1e-4), "32 / 2 * 2"


@pytest.mark.skipif(
    "granite_swa" not in CONFIG_MAPPING, reason="this transformers has no such model"
)
def test_a_model_that_sdpa_does_not_run_is_sampled(tiny_path: str, tmp_path: Path) -> None:
    """It has sinks."""
    tokenizer = models.load_tokenizer(tiny_path)
    shape = SHAPE | {"vocab_size": len(tokenizer), "head_dim": 8, "sliding_window": 4}
    network = AutoModelForCausalLM.from_config(CONFIG_MAPPING["granite_swa"](**shape))
    models.export(network, tokenizer, models.full_weights(network), tmp_path)
    spec = ModelSpec.load("model.path", str(tmp_path))
    frozen, trained = (
        make_engine(toy({}), spec, CPU, store) for store in (None, WeightStore(tmp_path / "store"))
    )
    done = [asyncio.run(e.generate((5, 6, 7), GREEDY)) for e in (frozen, trained)]
    assert [len(each.response_ids) for each in done] == [6, 6]


@pytest.mark.parametrize(
    ("size", "device", "message"),
    [
        (3, "cpu", "must divide num_attention_heads of model.path='.*', which is "),
        (2, "cuda:1", "takes GPUs 1 to 2, but this machine has 2"),
    ],
)
def test_what_cannot_be_cut_for_several_devices_is_refused(
    tiny_path: str, monkeypatch: pytest.MonkeyPatch, size: int, device: str, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(factory, "VllmEngine", lambda *rest: None)
    options = {"rollout": {"engine": "vllm"}, "vllm": {"tensor_parallel_size": size}}
    config, policy = toy(options), ModelSpec.load("model.path", tiny_path)
    policy.shape.intermediate_size = 96
    with pytest.raises(UserError, match=rf"vllm\.tensor_parallel_size={size} {message}"):
        make_engine(config, policy, torch.device(device))


def test_vllm_sees_its_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_environment(1) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert gpu_environment(1, 2) == {"CUDA_VISIBLE_DEVICES": "1,2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    assert gpu_environment(1, 2) == {"CUDA_VISIBLE_DEVICES": "5,7"}


@pytest.mark.parametrize("chat", [None, Chat(kind="vllm")], ids=["policy", "chat model"])
def test_vllm_takes_at_most_the_positions_of_the_model(
    tiny_path: str, monkeypatch: pytest.MonkeyPatch, chat: Chat | None
) -> None:
    made: list[VllmModel] = []
    monkeypatch.setattr(factory, "VllmEngine", lambda model, *rest: made.append(model))
    model = ModelSpec.load("the.key", tiny_path)
    for length in (0, 40, 64):
        config = toy({"rollout": {"engine": "vllm"}, "vllm": {"max_model_len": length}})
        make_engine(config, model, CPU, chat=chat)
    assert [each.max_tokens for each in made] == [64, 40, 64]
    config = toy({"rollout": {"engine": "vllm"}, "vllm": {"max_model_len": 65}})
    message = r"vllm\.max_model_len=65 must be at most the 64 positions of the\.key='.*'"
    with pytest.raises(UserError, match=message):
        make_engine(config, model, CPU, chat=chat)


def test_a_chat_model_has_its_own_engine_and_capacity(
    tiny_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Vllm] = []
    monkeypatch.setattr(factory, "VllmEngine", lambda model, tokenizer, opts: made.append(opts))
    model = ModelSpec.load("the.key", tiny_path)
    config = toy({"rollout": {"engine": "torch", "max_batch_size": 3}})
    make_engine(config, model, CPU, chat=Chat(kind="vllm", max_concurrency=5))
    assert made[0].max_num_seqs == 5
    for chat, capacity in ((None, 3), (Chat(kind="torch", max_concurrency=7), 7)):
        engine = make_engine(config, model, CPU, chat=chat)
        assert engine._max_batch_size == capacity
        engine.close()


def test_a_policys_size_is_known_without_its_weights(tiny_path: str) -> None:
    found = ModelSpec.load("k", tiny_path).num_parameters()
    assert found == AutoModelForCausalLM.from_pretrained(tiny_path).num_parameters()


def test_a_path_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="k must be the folder or hub name"):
        ModelSpec.load("k", "")
    with pytest.raises(UserError, match=r"k='.*' is not a causal language model"):
        ModelSpec.load("k", str(tmp_path))
    with pytest.raises(UserError, match=r"k='\./mistyped': there is no such folder$"):
        ModelSpec.load("k", "./mistyped")


def test_what_cannot_be_a_name_in_the_hub_is_refused_in_one_line() -> None:
    with pytest.raises(
        UserError, match=r"^k='no name!': there is no such folder; looking it up in"
    ):
        ModelSpec.load("k", "no name!")


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (ConnectionError("no route"), "; looking it up in the hub failed: no route"),
        (ValueError("no name"), "; looking it up in the hub failed: no name"),
    ],
)
def test_the_hub_is_asked_once(
    answer: Exception, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask(name: str, timeout: float) -> None:
        asked.append(name)
        raise answer

    monkeypatch.setattr(huggingface_hub, "model_info", ask)
    with pytest.raises(UserError) as raised:
        ModelSpec.load("k", "no/such")
    assert str(raised.value) == f"k='no/such': there is no such folder{line}"
    assert asked == ["no/such"]
