"""Mixtures of experts in real vLLM, under load: routes and weights of each version against
transformers. One engine serves the file.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engines_under_way import loud_model, run, under_way
from torch import Tensor
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from flowtrain.config import Vllm
from flowtrain.inference.vllm.engine import VllmEngine
from flowtrain.inference.vllm.process import VllmModel, cpu_environment, engine_args
from flowtrain.inference.vllm.routes import routes_of
from flowtrain.records import Call, FinishReason, Routes, Sampling, UserError
from flowtrain.weights import Publisher, PublishOptions, WeightStore
from flowtrain.weights.format.manifest import AdapterSpec, digest_hex

SHARED = tuple(range(100, 170))
PROMPTS = [(5,), (9, 8, 7), SHARED, (*SHARED[:64], 1, 2, 3), (*SHARED, 4), tuple(range(20, 90))]
LAYERS, CHOSEN = 2, 3


@dataclass
class Setup:
    engine: VllmEngine
    model: PreTrainedModel
    publisher: Publisher
    store: WeightStore


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    """Layers 0 and 2 of three have experts; the KV cache has room for 16 of these requests."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 280, "hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"num_experts": 8, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(**sizes, mlp_only_layers=[1], initializer_range=0.2)
    model = Qwen3MoeForCausalLM(config)
    config.architectures = ["Qwen3MoeForCausalLM"]
    store = WeightStore(tmp_path_factory.mktemp("run") / "weights")
    publisher = Publisher(store, PublishOptions(torch.float32))
    publisher.publish(model.state_dict(), 0)
    tokenizer, _ = loud_model()
    options = {"records_routes": True, "store": str(store.root), "environment": cpu_environment(1)}
    spec = VllmModel(config, "float32", 256, frozenset(), **options)
    engine = VllmEngine(spec, tokenizer, Vllm(kv_cache_gb=0.125))
    engine.load(0)
    yield Setup(engine, model, publisher, store)
    engine.close()


async def sampled(
    engine: VllmEngine, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> list[Call]:
    return await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts))


async def in_engine(engine: VllmEngine, work: Coroutine[Any, Any, Any]) -> Any:
    """Await something of vLLM's on its own loop."""
    return await engine.supervisor.runner.result()._thread.call(work, time.monotonic() + 60)


def change(model: PreTrainedModel, seed: int) -> None:
    """Another value for one parameter in twenty."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            is_changed = torch.rand(parameter.shape, generator=rng) < 0.05
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=rng) * is_changed)


def array(routes: Routes | None) -> Tensor:
    """Chosen experts in ascending order, [tokens, layers, chosen]."""
    assert routes is not None and (routes.num_layers, routes.num_chosen) == (LAYERS, CHOSEN)
    flat = torch.frombuffer(bytearray(routes.experts), dtype=torch.uint8)
    return flat.view(-1, LAYERS, CHOSEN).long().sort(-1).values


@torch.no_grad()
def truth(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """The experts that the routers of transformers choose."""
    chosen: list[Tensor] = []
    routers = [layer.mlp.gate for layer in (model.model.layers[0], model.model.layers[2])]
    hooks = [each.register_forward_hook(lambda *a: chosen.append(a[2][2])) for each in routers]
    model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1).sort(-1).values


def check(setup: Setup, prompts: Sequence[Sequence[int]], found: Sequence[Call]) -> None:
    for prompt, completion in zip(prompts, found, strict=True):
        expected = truth(setup.model, [*prompt, *completion.response_ids[:-1]])
        assert torch.equal(array(completion.routes), expected)


class TestVllm:
    pytestmark = pytest.mark.vllm

    def test_routes_are_those_that_transformers_chooses(self, setup: Setup) -> None:
        """In one batch, and with prompts that are in the prefix cache, whole or in part."""
        for seed in range(3):
            sampling = Sampling(20, 1.0, seed=seed, ignore_end=True)
            check(setup, PROMPTS, run(sampled(setup.engine, PROMPTS, sampling)))

    def test_a_response_that_is_cut_has_the_routes_of_its_tokens(self, setup: Setup) -> None:
        engine, prompts = setup.engine, PROMPTS[:3]
        at_string = Sampling(40, 1.0, seed=1, stop_strings=("a", "e", "i", "t", "s"))
        found = run(sampled(engine, prompts, at_string))
        assert {each.finish_reason for each in found} == {FinishReason.STOP}
        check(setup, prompts, found)

        async def aborted() -> list[Call]:
            long = Sampling(180, 1.0, seed=1, ignore_end=True)
            task = asyncio.create_task(sampled(engine, prompts, long))
            await under_way(engine, len(prompts))
            llm = engine.supervisor.runner.result()._llm
            for state in list(llm.output_processor.request_states.values()):
                await in_engine(engine, llm.abort(state.external_req_id))
            return await task

        found = run(aborted())
        assert {each.finish_reason for each in found} == {FinishReason.DEADLINE}
        check(setup, prompts, found)

    def test_ten_versions_arrive_whole_while_it_samples(self, setup: Setup) -> None:
        """Words, greedy tokens and routes of each version; requests across several have routes."""
        engine, model = setup.engine, setup.model
        across: list[Call] = []

        async def load() -> None:
            while setup.store.head() != 10 or engine.version != 10:
                long = Sampling(180, 1.0, seed=len(across), ignore_end=True)
                across.append(await engine.generate(SHARED, long))

        async def serve() -> None:
            tasks = [asyncio.create_task(load()) for _ in range(3)]
            for version in range(1, 11):
                await under_way(engine, 3)
                change(model, version)
                setup.publisher.publish(model.state_dict(), version)
                await asyncio.to_thread(engine.load, version)
                llm = engine.supervisor.runner.result()._llm
                (held,) = await in_engine(engine, llm.collective_rpc("digest_weights"))
                digests = setup.store.manifest(version).digests
                assert held == {name: digest_hex(digest) for name, digest in digests.items()}
                found = await sampled(engine, PROMPTS, Sampling(8, 0.0, ignore_end=True))
                check(setup, PROMPTS, found)
                for prompt, completion in zip(PROMPTS, found, strict=True):
                    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
                    whole = model.generate(torch.tensor([prompt]), **options)[0].tolist()
                    assert [*prompt, *completion.response_ids] == whole, version
            await asyncio.gather(*tasks)

        run(serve())
        assert {span.version for each in across for span in each.spans} == set(range(11))
        assert max(len(each.spans) for each in across) > 1
        for each in across:
            assert len(array(each.routes)) == len(SHARED) + 179


def test_routes_that_vllm_returns_itself_are_cut_to_layers_and_tokens() -> None:
    """As its newer runner has them on a GPU: of all layers, zeros for those without a router."""
    of_all = np.zeros((9, 4, 2), dtype=np.uint8)
    of_all[:, 1], of_all[:, 3] = np.arange(18).reshape(9, 2), 200
    last = SimpleNamespace(routed_experts=of_all)
    found = run(routes_of(None, "7", last, 5, ([1, 3], 2, False)))
    assert found == Routes(bytes(x for i in range(5) for x in (2 * i, 2 * i + 1, 200, 200)), 2, 2)
    wide = run(routes_of(None, "7", last, 1, ([1, 3], 2, True)))
    assert wide is not None and wide.experts == bytes([0, 0, 1, 0, 200, 0, 200, 0])
    assert run(routes_of(None, "7", last, 10, ([1, 3], 2, False))) is None


@pytest.mark.parametrize("store", ["weights", ""])
def test_on_a_gpu_vllm_is_asked_for_routes_and_for_plain_experts(store: str) -> None:
    model = VllmModel("x", "bfloat16", 64, frozenset(), store, records_routes=True, is_cpu=False)
    args = engine_args(model, Vllm())
    assert args["enable_return_routed_experts"] is True
    assert args.get("moe_backend") == ("triton" if store else None)


def test_adapters_of_a_mixture_are_refused_on_a_cpu() -> None:
    adapters = AdapterSpec(8, 16.0, {})
    model = VllmModel("x", "bfloat16", 64, frozenset(), adapters=adapters, records_routes=True)
    with pytest.raises(UserError, match=r"no adapters of a mixture .* lora.sync = 'merged'"):
        engine_args(model, Vllm())
