"""vLLM in the process of a test, on a small model in a folder, with the sparse-delta plugin."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from flowtrain.inference.requests import kept_sets
from flowtrain.inference.vllm.process import sampling_args
from flowtrain.records import Sample, Sampling, SamplingMask
from flowtrain.weights import WeightStore
from flowtrain.weights.format.manifest import digest_hex

PROMPTS = ([1, 2, 3, 4, 5], [200, 17, 60], [9] * 20)
NUM_TOKENS = 8
SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SMALL |= {
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
}


@contextmanager
def in_process() -> Iterator[None]:
    """Run vLLM in this process, with a small cache; register the plugin as its entry point does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_PLUGINS", "")
        from flowtrain.inference.vllm.plugin import register

        register()
        register()
        yield


@contextmanager
def engines() -> Iterator[Any]:
    """Open engines one after the other; the last one is closed at the end."""
    opened: list[Engine] = []

    def make(path: Path, dtype: torch.dtype, **options: Any) -> Engine:
        while opened:
            opened.pop().close()
        opened.append(Engine(path, dtype, **options))
        return opened[-1]

    yield make
    while opened:
        opened.pop().close()


def change(model: PreTrainedModel, seed: int) -> None:
    """Another value for one parameter in a hundred."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            at = torch.randint(0, len(flat), (1 + len(flat) // 100,), generator=rng)
            flat[at] = flat[at.flip(0)] + (torch.randn(len(at), generator=rng) * 0.1).to(flat.dtype)


class Engine:
    """vLLM on a model in a folder, in this process."""

    def __init__(self, path: Path, dtype: torch.dtype, **options: Any) -> None:
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        self.llm: Any = LLM(
            str(path),
            dtype=str(dtype).removeprefix("torch."),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=8,
            logprobs_mode="processed_logprobs",
            max_logprobs=-1,
            weight_transfer_config=WeightTransferConfig(backend="sparse_delta"),
            worker_extension_cls="flowtrain.inference.vllm.plugin.WeightReports",
            **options,
        )

    def connect(self, store: WeightStore, **options: Any) -> None:
        self.rpc("init_weight_transfer_engine", init_info={"location": str(store.root), **options})

    def rpc(self, method: str, **arguments: Any) -> Any:
        (answer,) = self.llm.collective_rpc(method, kwargs=arguments)
        return answer

    def update(self, version: int, stage: bool = False) -> None:
        self.rpc("start_weight_update")
        if stage:
            self.rpc("update_weights", update_info={"version": version, "stage": True})
        self.rpc("update_weights", update_info={"version": version})
        self.rpc("finish_weight_update")

    def holds(self, store: WeightStore, version: int) -> bool:
        """Its words are those of the manifest, all of them."""
        wanted = {
            name: digest_hex(digest) for name, digest in store.manifest(version).digests.items()
        }
        return bool(
            self.rpc("digest_weights") == wanted and self.rpc("held_weights")["version"] == version
        )

    def greedy(self, version: int) -> list[list[int]]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": ids, "cache_salt": str(version)} for ids in PROMPTS]
        return [
            list(out.outputs[0].token_ids)
            for out in self.llm.generate(prompts, sampling, use_tqdm=False)
        ]

    def sample(self, sampling: Sampling, number: int, version: int) -> list[Sample]:
        """Responses as the trainer takes them."""
        from vllm import SamplingParams

        prompts = [
            {"prompt_token_ids": PROMPTS[i % 3], "cache_salt": str(version)} for i in range(number)
        ]
        params = [
            SamplingParams(**sampling_args(sampling, frozenset(), SMALL["vocab_size"]), seed=i)
            for i in range(number)
        ]
        outputs = [out.outputs[0] for out in self.llm.generate(prompts, params, use_tqdm=False)]
        samples = []
        for prompt, out in zip(prompts, outputs, strict=True):
            flat = out.logprobs
            kept = SamplingMask.of(kept_sets(flat)) if sampling.is_truncated else None
            logprobs = tuple(flat.logprobs[at] for at in flat.start_indices)
            weights = (1.0,) * len(out.token_ids)
            samples.append(
                Sample(
                    tuple(prompt["prompt_token_ids"]),
                    tuple(out.token_ids),
                    logprobs,
                    weights,
                    weights,
                    sampling_mask=kept,
                )
            )
        return samples

    @property
    def transfer(self) -> Any:
        executor = self.llm.llm_engine.engine_core.engine_core.model_executor
        return executor.driver_worker.worker.weight_transfer_engine

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return dict(model.named_parameters())
