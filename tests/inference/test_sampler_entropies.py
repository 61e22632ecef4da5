"""The entropy of every sampled token, in the place of its rank, from both samplers of vLLM."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flowtrain.inference.vllm.sampler_entropies import decode, record
from flowtrain.records import UserError

LOGITS_BV = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 3
TEMPERATURE_B = torch.tensor([1.0, 0.7, 0.0, 2.0])
"""The third row is greedy, and counts as one of temperature 1."""


class Tensors(NamedTuple):
    selected_token_ranks: Tensor


class OldSampler:
    """As `vllm.v1.sample.sampler.Sampler`."""

    def forward(self) -> Tensors:
        self.sample(LOGITS_BV, SimpleNamespace(temperature=TEMPERATURE_B))
        return self.gather_logprobs()

    def sample(self, logits: Tensor, metadata: Any) -> None:
        pass

    def gather_logprobs(self) -> Tensors:
        return Tensors(torch.ones(4, dtype=torch.int32))


class NewSampler:
    """As `vllm.v1.worker.gpu.sample.sampler.Sampler`: temperature first, then what is kept."""

    def __call__(self, logits: Tensor, input_batch: Any) -> Any:
        logits = self.apply_sampling_params(logits, skip_top_k_top_p=True)
        logits[:, 10:] = -torch.inf
        tensors = Tensors(torch.ones(4, dtype=torch.int64)) if input_batch.has_logprobs else None
        return SimpleNamespace(logprobs_tensors=tensors)

    def apply_sampling_params(self, logits: Tensor, skip_top_k_top_p: bool = False) -> Tensor:
        assert skip_top_k_top_p
        return logits / TEMPERATURE_B.where(TEMPERATURE_B > 0, 1.0)[:, None]


def truth() -> Tensor:
    scaled = LOGITS_BV.double() / TEMPERATURE_B.where(TEMPERATURE_B > 0, 1.0)[:, None]
    return torch.distributions.Categorical(logits=scaled).entropy()


def told(tensors: Tensors) -> list[float]:
    return [decode(rank) for rank in tensors.selected_token_ranks.tolist()]


def test_the_older_sampler_tells_entropies() -> None:
    record(sampler := OldSampler())
    assert told(sampler.forward()) == pytest.approx(truth().tolist(), abs=1e-5)


def test_the_newer_sampler_tells_entropies_of_all_tokens() -> None:
    record(sampler := NewSampler())
    for has_logprobs in (True, False, True):
        output = sampler(LOGITS_BV, SimpleNamespace(has_logprobs=has_logprobs))
        if has_logprobs:
            assert told(output.logprobs_tensors) == pytest.approx(truth().tolist(), abs=1e-5)
        else:
            assert output.logprobs_tensors is None
    assert type(NewSampler()(LOGITS_BV, SimpleNamespace(has_logprobs=True))) is SimpleNamespace
    assert NewSampler()(LOGITS_BV, SimpleNamespace(has_logprobs=True)).logprobs_tensors[0][0] == 1


def test_another_kind_of_sampler_is_refused() -> None:
    with pytest.raises(UserError, match="samples by object, which is not known to tell entropies"):
        record(object())


@pytest.mark.vllm
def test_vllms_newer_sampler_has_the_methods_that_are_changed() -> None:
    """It runs on a GPU only."""
    from vllm.v1.worker.gpu.sample.output import SamplerOutput
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    assert list(inspect.signature(Sampler.__call__).parameters)[1:] == ["logits", "input_batch"]
    assert "skip_top_k_top_p=True" in inspect.getsource(Sampler.sample)
    assert "skip_top_k_top_p" in inspect.signature(Sampler.apply_sampling_params).parameters
    assert "logprobs_tensors" in SamplerOutput.__dataclass_fields__
