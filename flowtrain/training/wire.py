"""Samples as bytes, for the way from the ranks that sample to those that train, and what these made
of them, for the way back.

Safetensors files of flat arrays, no pickle.

S: samples, P: prompt tokens, T: response tokens, K: kept ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from flowtrain.types import Sample, SampleId, SamplingMask


def to_bytes(samples: Sequence[Sample]) -> bytes:
    """Numbers as rows have them: int32 is enough for ids and counts, and fp32 is what log-probs and
    weights become.
    """
    assert not any(sample.old_logprobs or sample.ref_logprobs for sample in samples), (
        "who scores samples trains them too"
    )
    kept = [sample.sampling_mask for sample in samples if sample.sampling_mask is not None]
    return save(
        {
            "num_prompt_S": _ints(len(s.prompt_ids) for s in samples),
            "num_response_S": _ints(len(s.response_ids) for s in samples),
            "num_kept_S": _ints(
                -1 if s.sampling_mask is None else len(s.sampling_mask.ids) for s in samples
            ),
            "minibatch_S": _ints(s.minibatch for s in samples),
            "origin_S3": _ints(chain.from_iterable(s.sample_id or () for s in samples)),
            "prompt_ids_P": _ints(chain.from_iterable(s.prompt_ids for s in samples)),
            "response_ids_T": _ints(chain.from_iterable(s.response_ids for s in samples)),
            "logprobs_T": _floats(chain.from_iterable(s.logprobs for s in samples)),
            "advantages_T": _floats(chain.from_iterable(s.advantages for s in samples)),
            "weights_T": _floats(chain.from_iterable(s.loss_weights for s in samples)),
            "kept_ids_K": _ints(chain.from_iterable(each.ids for each in kept)),
            "kept_counts_T": _ints(chain.from_iterable(each.counts for each in kept)),
        }
    )


def from_bytes(data: bytes) -> list[Sample]:
    """What `to_bytes` was given, its numbers rounded to fp32."""
    left = {name: iter(tensor.tolist()) for name, tensor in load(data).items()}

    def take(name: str, number: int) -> tuple[Any, ...]:
        return tuple(islice(left[name], number))

    def kept(num_ids: int, num_tokens: int) -> SamplingMask | None:
        if num_ids < 0:
            return None
        return SamplingMask(
            array("i", take("kept_ids_K", num_ids)), array("i", take("kept_counts_T", num_tokens))
        )

    of_samples = (
        left[name] for name in ("num_prompt_S", "num_response_S", "num_kept_S", "minibatch_S")
    )
    return [
        Sample(
            take("prompt_ids_P", num_prompt),
            take("response_ids_T", num_response),
            take("logprobs_T", num_response),
            take("advantages_T", num_response),
            take("weights_T", num_response),
            minibatch,
            SampleId(*ids) if (ids := take("origin_S3", 3)) else None,
            kept(num_kept, num_response),
        )
        for num_prompt, num_response, num_kept, minibatch in zip(*of_samples, strict=True)
    ]


def scores_to_bytes(scores: Mapping[SampleId, Sequence[float]]) -> bytes:
    """Log-probs by the turn that they belong to, rounded to fp32."""
    return save(
        {
            "origin_S3": _ints(chain.from_iterable(scores)),
            "num_tokens_S": _ints(map(len, scores.values())),
            "logprobs_T": _floats(chain.from_iterable(scores.values())),
        }
    )


def scores_from_bytes(data: bytes) -> dict[SampleId, tuple[float, ...]]:
    """What `scores_to_bytes` was given."""
    parts = load(data)
    left = iter(parts["logprobs_T"].tolist())
    return {
        SampleId(*each): tuple(islice(left, number))
        for each, number in zip(
            parts["origin_S3"].view(-1, 3).tolist(), parts["num_tokens_S"].tolist(), strict=True
        )
    }


def _ints(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def _floats(values: Iterable[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float32)
