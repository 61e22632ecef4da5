"""Tensor-parallel vLLM with real workers on the CPU, under live sparse updates."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engines_under_way import under_way
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from flowtrain.config import Vllm
from flowtrain.inference.vllm.engine import VllmEngine
from flowtrain.inference.vllm.process import VllmModel, cpu_environment
from flowtrain.records import Call, Sampling, VersionSpan
from flowtrain.trainer.model import loading as models
from flowtrain.weights import Publisher, StoreError, WeightStore
from flowtrain.weights.format.manifest import digest_hex

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

SIZE = 2
PROMPTS = [(5,), (9, 8, 7), tuple(range(100, 130)), tuple(range(20, 90))]
LONG = (PROMPTS[2], Sampling(190, 1.0, seed=3, ignore_end=True))
BOUND = 1e-5
"""Of differences of log-probs in fp32, as for one worker."""


class Setup:
    """A model in versions, and a vLLM whose workers hold the halves of one of them."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        shape = {"vocab_size": 280, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
        config = LlamaConfig(**shape, **heads, max_position_embeddings=256, initializer_range=0.1)
        self.model: Any = LlamaForCausalLM(config).eval()
        self.model.config.architectures = [type(self.model).__name__]
        self.store = WeightStore(folder / "weights")
        publisher = Publisher(self.store)
        self.versions: dict[int, dict[str, Tensor]] = {}
        for version in range(4):
            weights = models.named_weights(self.model)
            self.versions[version] = {name: tensor.clone() for name, tensor in weights.items()}
            publisher.publish(weights, version)
            with torch.no_grad():
                for parameter in self.model.parameters():
                    change = 0.1 * torch.randn_like(parameter)
                    parameter.add_(change * (torch.rand_like(parameter) < 0.05))
        vllm_model = VllmModel(
            source=self.model.config,
            dtype="float32",
            max_tokens=256,
            stop_ids=frozenset({2}),
            store=str(self.store.root),
            environment=cpu_environment(1),
        )
        options = Vllm(tensor_parallel_size=SIZE, kv_cache_gb=0.125, max_num_seqs=16)
        self.engine = VllmEngine(vllm_model, tokenizer=None, options=options)

    @torch.no_grad()
    def truth(self, version: int, prompt: Sequence[int], ids: Sequence[int]) -> Tensor:
        """Log-probs of a response by transformers."""
        self.model.load_state_dict(self.versions[version])
        logits_TV = self.model(torch.tensor([[*prompt, *ids]])).logits[0]
        logprob_TV = logits_TV[len(prompt) - 1 : -1].log_softmax(-1)
        return logprob_TV.gather(1, torch.tensor([ids]).T)[:, 0]

    def held_words(self) -> dict[str, str]:
        """Digests of all words of all workers, as they add up."""
        runner = self.engine.supervisor.runner.result()
        call = runner._llm.collective_rpc("digest_weights")
        found = asyncio.run_coroutine_threadsafe(call, runner._thread._loop).result(60)
        assert len(found) == SIZE and all(each == found[0] for each in found)
        return dict(found[0])


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    setup = Setup(tmp_path_factory.mktemp("run"))
    yield setup
    setup.engine.close()


def generate(engine: VllmEngine, sampling: Sampling) -> list[Call]:
    async def together() -> list[Call]:
        return await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in PROMPTS))

    return asyncio.run(together())


def test_updates_leave_words_and_logprobs_of_each_version(setup: Setup) -> None:
    """The workers' parts together, and what they sample together."""
    for version in (0, 1, 2, 1, 3):
        setup.engine.load(version)
        manifest = setup.store.manifest(version)
        wanted = {name: digest_hex(digest) for name, digest in manifest.digests.items()}
        assert setup.held_words() == wanted
        for prompt, done in zip(
            PROMPTS,
            generate(setup.engine, Sampling(20, 1.0, seed=version, ignore_end=True)),
            strict=True,
        ):
            assert done.spans == (VersionSpan(0, 20, version),)
            truth = setup.truth(version, prompt, done.response_ids)
            difference = torch.tensor(done.logprobs) - truth
            assert difference.abs().max() <= BOUND
    assert setup.engine.metrics()["weights_loaded_by_delta"] == 1


def test_a_request_goes_on_across_an_update(setup: Setup) -> None:
    setup.engine.load(0)

    async def scenario() -> Call:
        request = asyncio.create_task(setup.engine.generate(*LONG))
        await under_way(setup.engine, number=1)
        await asyncio.to_thread(setup.engine.load, 1)
        return await request

    done = asyncio.run(scenario())
    before, after = done.spans
    assert (before.version, after.version) == (0, 1) and 0 < before.end == after.start < 190
    for span in done.spans:
        truth = setup.truth(span.version, LONG[0], done.response_ids)
        difference = torch.tensor(done.logprobs) - truth
        assert difference[span.start : span.end].abs().max() <= BOUND
        assert difference.abs().max() > 1e-3, "or the versions would be too alike to tell"


def test_a_damaged_version_leaves_the_one_before_on_all_workers(setup: Setup) -> None:
    setup.engine.load(2)
    (file,) = setup.store.manifest(3).delta_files[2]
    path = setup.store.folder(3) / file.name
    good = path.read_bytes()
    path.write_bytes(good[:200] + bytes([good[200] ^ 1]) + good[201:])
    with pytest.raises(StoreError, match="stays at version 2"):
        setup.engine.load(3)
    path.write_bytes(good)
    wanted = setup.store.manifest(2).digests
    assert setup.held_words() == {name: digest_hex(digest) for name, digest in wanted.items()}
    assert setup.engine.metrics()["engine_restarts"] == 0
    setup.engine.load(3)


def test_all_processes_end_with_the_scheduler(setup: Setup) -> None:
    """This test is the last: nobody samples after it."""
    (scheduler,) = setup.engine.supervisor.runner.result()._processes
    children = Path(f"/proc/{scheduler.pid}/task/{scheduler.pid}/children").read_text().split()
    workers = [pid for pid in children if "Worker" in Path(f"/proc/{pid}/comm").read_text()]
    assert len(workers) == SIZE
    os.kill(scheduler.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(is_alive(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid: str) -> bool:
    """A process that nobody has waited for is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
