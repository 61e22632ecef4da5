"""Adapters of several policies on one real vLLM: log-probs, loads under way, damaged versions."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence

import pytest
import torch
from engines_under_way import loud_model, run, under_way
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import Tensor

from flowtrain.config import Lora, Vllm
from flowtrain.inference.factory import ModelSpec
from flowtrain.inference.requests import stop_ids
from flowtrain.inference.vllm.engine import AdapterEngine
from flowtrain.inference.vllm.process import VllmModel, cpu_environment
from flowtrain.records import Call, FinishReason, Sample, Sampling, VersionSpan
from flowtrain.weights import Publisher, StoreError, WeightStore

pytestmark = pytest.mark.vllm

RANK, ALPHA = 6, 9
"""Not a rank that vLLM has slots of, and a scaling that is not 1."""
PROMPTS = [(5,), (9, 8, 7), tuple(range(100, 130)), (9, 8, 7, 6), tuple(range(20, 90))]
LONG = (tuple(range(100, 130)), Sampling(190, 1.0, seed=3, ignore_end=True))
BOUND = 1e-5
"""Of differences of log-probs in fp32, as for full training."""


@dataclasses.dataclass
class Setup:
    engines: dict[str, AdapterEngine]
    """"refiner" is frozen at the model without an adapter."""
    model: PeftModel
    stores: dict[str, WeightStore]
    versions: dict[tuple[str, int], dict[str, Tensor]]

    def set_weights(self, policy: str, version: int) -> None:
        """Into the model of peft; a version that was never published is the bare model."""
        weights = self.versions.get((policy, version), {})
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                parameter.data.zero_()
                if weights:
                    parameter.data.copy_(weights[name.replace(".default", "")])

    @torch.no_grad()
    def truth(self, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1) -> Tensor:
        """Log-probs of a response by transformers."""
        logits_TV = self.model(torch.tensor([[*prompt, *ids]])).logits[0]
        logprob_TV = (logits_TV[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        return logprob_TV.gather(1, torch.tensor([ids]).T)[:, 0]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    """One fp32 vLLM; planner and verifier have stores with versions 0 to 2 of an adapter each."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer, model = loud_model(scale=0.5)
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    lora = Lora(rank=RANK, alpha=ALPHA, sync="adapter")
    policy_spec = ModelSpec.of("model.path", str(folder / "base"), tokenizer, model)
    spec = policy_spec.adapters(lora, torch.float32)
    adapted = get_peft_model(
        model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=spec.targets)
    ).eval()
    setup = Setup({}, adapted, {}, {})
    for policy in ("planner", "verifier"):
        setup.stores[policy] = WeightStore(folder / policy)
        publisher = Publisher(setup.stores[policy])
        for version in range(3):
            weights = {
                name: torch.randn_like(tensor) * 0.15
                for name, tensor in get_peft_model_state_dict(adapted).items()
            }
            setup.versions[policy, version] = weights
            publisher.publish(weights, version)
    vllm_model = VllmModel(
        source=str(folder / "base"),
        dtype="float32",
        max_tokens=256,
        stop_ids=stop_ids(model.generation_config, tokenizer),
        adapters=spec,
        adapter_stores={**{name: str(s.root) for name, s in setup.stores.items()}, "refiner": ""},
        environment=cpu_environment(1),
    )
    options = Vllm(kv_cache_gb=0.125, max_num_seqs=64)
    setup.engines = AdapterEngine.start(vllm_model, tokenizer, options)
    yield setup
    for engine in setup.engines.values():
        engine.close()


Request = tuple[str, Sequence[int], Sampling]
"""Policy, prompt and sampling."""


def generate(setup: Setup, requests: Sequence[Request]) -> list[Call]:
    async def together() -> list[Call]:
        return await asyncio.gather(
            *(setup.engines[policy].generate(prompt, s) for policy, prompt, s in requests)
        )

    return run(together())


def test_policies_without_a_version_are_the_bare_model(setup: Setup) -> None:
    """This test is the first: no policy has loaded anything yet."""
    requests = [
        (policy, PROMPTS[1], Sampling(20, 0.0, ignore_end=True)) for policy in setup.engines
    ]
    setup.set_weights("", 0)
    found = generate(setup, requests)
    expected = setup.truth(PROMPTS[1], found[0].response_ids)
    assert len({done.response_ids for done in found}) == 1
    for done in found:
        assert done.spans == (VersionSpan(0, 20, 0),)
        assert (torch.tensor(done.logprobs) - expected).abs().max() <= BOUND


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_each_policy_samples_as_a_model_of_its_own(setup: Setup, temperature: float) -> None:
    """All in the same batches, one of them frozen without an adapter, after loads in any order."""
    for version, other in ((1, 0), (2, 1), (0, 2)):
        setup.engines["planner"].load(version)
        setup.engines["verifier"].load(other)
        versions = {"planner": version, "verifier": other, "refiner": 0}
        requests = [
            (policy, prompt, Sampling(40, temperature, seed=seed, ignore_end=True))
            for seed, prompt in enumerate(PROMPTS)
            for policy in setup.engines
        ]
        found = generate(setup, requests)
        for (policy, prompt, _), done in zip(requests, found, strict=True):
            assert done.spans == (VersionSpan(0, 40, versions[policy]),)
            setup.set_weights(policy, versions[policy])
            expected = setup.truth(prompt, done.response_ids, temperature)
            difference = (torch.tensor(done.logprobs) - expected).abs().max()
            assert difference <= BOUND / temperature, (policy, versions[policy])
        assert len({done.response_ids for done in found}) == len(requests), (
            "or they would be too alike"
        )


def test_scores_are_those_of_the_policys_adapter(setup: Setup) -> None:
    prompt, response = PROMPTS[2], tuple(range(50, 80))
    weights = (1.0,) * len(response)
    sample = Sample(prompt, response, weights, weights, weights)
    for policy in setup.engines:
        if policy in setup.stores:
            setup.engines[policy].load(2)
        version, (found,) = run(setup.engines[policy].score([sample], 1.0))
        setup.set_weights(policy, version)
        assert version == (2 if policy in setup.stores else 0)
        assert (torch.tensor(found) - setup.truth(prompt, response)).abs().max() <= BOUND


def test_a_request_goes_on_across_a_load_of_its_policy(setup: Setup) -> None:
    """Later tokens are the new adapter's alone; requests of other policies are as they would have
    been.
    """
    setup.engines["planner"].load(0)
    setup.engines["verifier"].load(0)
    (alone,) = generate(setup, [("verifier", *LONG)])

    async def scenario() -> list[Call]:
        requests = [
            asyncio.create_task(setup.engines[policy].generate(*LONG))
            for policy in ("planner", "verifier", "planner", "refiner")
        ]
        await under_way(setup.engines["planner"].shared, number=4)
        await asyncio.to_thread(setup.engines["planner"].load, 1)
        return await asyncio.gather(*requests)

    first, other, second, frozen = run(scenario())
    assert (other.response_ids, other.spans) == (alone.response_ids, alone.spans)
    assert frozen.spans == (VersionSpan(0, 190, 0),)
    for done in (first, second):
        before, after = done.spans
        assert (before.version, after.version) == (0, 1)
        assert done.finish_reason is FinishReason.LENGTH
        assert 0 == before.start < before.end == after.start < after.end == 190
        for span in done.spans:
            setup.set_weights("planner", span.version)
            difference = torch.tensor(done.logprobs) - setup.truth(LONG[0], done.response_ids)
            assert difference[span.start : span.end].abs().max() <= BOUND
            outside = torch.cat([difference[: span.start], difference[span.end :]])
            assert outside.abs().max() > 1e-3, "or the versions would be too alike to tell"
    assert 0 < setup.engines["planner"].metrics()["weights_pause_s"] < 5


def test_policies_may_load_at_the_same_time(setup: Setup) -> None:
    """However often slots change, each token is its own version's."""

    async def scenario() -> list[Call]:
        requests = [
            asyncio.create_task(setup.engines[policy].generate(*LONG))
            for policy in setup.stores
            for _ in range(3)
        ]
        await under_way(setup.engines["planner"].shared, number=6)
        for version in (2, 1, 0, 2):
            await asyncio.gather(
                *(asyncio.to_thread(setup.engines[policy].load, version) for policy in setup.stores)
            )
        return await asyncio.gather(*requests)

    found = run(scenario())
    assert max(len(done.spans) for done in found) > 2
    for number, done in enumerate(found):
        assert len(done.response_ids) == 190
        for span in done.spans:
            setup.set_weights([*setup.stores][number // 3], span.version)
            difference = torch.tensor(done.logprobs) - setup.truth(LONG[0], done.response_ids)
            assert difference[span.start : span.end].abs().max() <= BOUND


def test_a_damaged_adapter_leaves_the_version_before(setup: Setup) -> None:
    planner, store = setup.engines["planner"], setup.stores["planner"]
    planner.load(1)
    request = ("planner", PROMPTS[2], Sampling(20, 0.0, ignore_end=True))
    before = generate(setup, [request])
    (file,) = store.manifest(2).snapshot_files
    path = store.folder(2) / file.name
    good = path.read_bytes()
    path.write_bytes(good[:-50] + bytes([good[-50] ^ 1]) + good[-49:])
    with pytest.raises(StoreError, match=r"stays at version 1: .*checksum of its manifest"):
        planner.load(2)
    path.write_bytes(good)
    assert planner.version == 1 and generate(setup, [request]) == before
    with pytest.raises(StoreError, match=r"stays at version 1: .*version 77 is not in"):
        planner.load(77)
    assert planner.metrics()["engine_restarts"] == 0 and generate(setup, [request]) == before
    planner.load(2)
    assert generate(setup, [request])[0].spans == (VersionSpan(0, 20, 2),)


def test_a_sparse_change_is_loaded_as_a_delta(setup: Setup) -> None:
    """So nothing else has written to the words that the reader changes."""
    store = WeightStore(setup.stores["planner"].root)
    publisher, weights = Publisher(store), setup.versions["planner", 2]
    setup.versions["planner", 10] = weights
    publisher.publish(weights, 10)
    setup.versions["planner", 11] = {name: tensor.clone() for name, tensor in weights.items()}
    for name, tensor in setup.versions["planner", 11].items():
        tensor[0, 0] += 1.0 if ".lora_A." in name else 0.5
    publisher.publish(setup.versions["planner", 11], 11)
    for version in (10, 11):
        setup.engines["planner"].load(version)
        setup.set_weights("planner", version)
        (done,) = generate(setup, [("planner", PROMPTS[2], Sampling(20, 1.0, ignore_end=True))])
        difference = torch.tensor(done.logprobs) - setup.truth(PROMPTS[2], done.response_ids)
        assert difference.abs().max() <= BOUND
    assert setup.engines["planner"].metrics()["weights_loaded_by_delta"] == 1


def test_an_adapter_of_another_model_is_refused(setup: Setup) -> None:
    """A store that holds another rank."""
    store = setup.stores["verifier"]
    setup.engines["verifier"].load(1)
    other = {name: tensor[:, :3].clone() for name, tensor in setup.versions["verifier", 2].items()}
    publisher = Publisher(store)
    publisher.publish(other, 3)
    with pytest.raises(StoreError, match="version 3 holds another model than the one here"):
        setup.engines["verifier"].load(3)
    assert setup.engines["verifier"].version == 1
