"""One number more per token out of vLLM: the entropy of the distribution that it was drawn from.

vLLM tells log-probs of chosen tokens, and a full distribution only as a number per id of the
vocabulary. Beside a token's log-prob it sends the token's rank, which nothing here reads: in its
place goes the entropy in fixed point, of the distribution at the request's temperature over the
whole vocabulary, before top-k and top-p. Only the sampler of one engine changes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flowtrain.records import UserError

_UNIT = 2.0**-20
"""Nats per unit of a rank, which vLLM sends as int32: room for 2048 nats."""
_SMALLEST_TEMPERATURE = 1e-5
"""vLLM is greedy below it, and then takes the log-probs at temperature 1."""


def decode(rank: int) -> float:
    """Return the entropy in nats that was sent as a rank."""
    return rank * _UNIT


def record(sampler: Any) -> None:
    """Change a sampler of vLLM's so that it tells entropies: that of its older runner, `v1.sample`,
    or that of the newer one, `v1.worker.gpu.sample`.

    Raises UserError for another kind of sampler.
    """
    if _has_methods(sampler, "sample", "gather_logprobs"):
        _record_older(sampler)
    elif _has_methods(sampler, "__call__", "apply_sampling_params"):
        sampler.__class__ = _recording_type(type(sampler))
    else:
        raise UserError(
            f"this vLLM samples by {type(sampler).__name__}, which is not known to tell entropies; "
            "take rollout.engine = 'torch'"
        )


def _has_methods(sampler: Any, *names: str) -> bool:
    return all(callable(getattr(sampler, name, None)) for name in names)


def _record_older(sampler: Any) -> None:
    sample, gather = sampler.sample, sampler.gather_logprobs
    pending: list[Tensor] = []
    """The entropies of the batch whose log-probs are gathered next."""

    def sample_noting(logits: Tensor, metadata: Any, *args: Any, **options: Any) -> Any:
        pending[:] = [_entropies(logits, metadata.temperature)]
        return sample(logits, metadata, *args, **options)

    def gather_telling(*args: Any, **options: Any) -> Any:
        logprobs = gather(*args, **options)
        # Log-probs of a prompt come without a sample before them.
        return _with_entropies(logprobs, pending.pop()) if pending else logprobs

    sampler.sample, sampler.gather_logprobs = sample_noting, gather_telling


def _recording_type(kind: type[Any]) -> type[Any]:
    """Return the newer kind of sampler with entropies. It applies temperatures in a method of its
    own, before top-k and top-p, and never gathers log-probs of a prompt.
    """

    class Telling(kind):
        def __call__(self, logits: Tensor, input_batch: Any) -> Any:
            output = super().__call__(logits, input_batch)
            if (logprobs := output.logprobs_tensors) is not None:
                output.logprobs_tensors = _with_entropies(logprobs, self.entropy_B)
            return output

        def apply_sampling_params(self, *args: Any, **options: Any) -> Any:
            logits: Tensor = super().apply_sampling_params(*args, **options)
            self.entropy_B = _entropies(logits.float(), None)
            return logits

    return Telling


def _with_entropies(logprobs: Any, entropy_B: Tensor) -> Any:
    ranks = (entropy_B / _UNIT).round().to(logprobs.selected_token_ranks.dtype)
    return logprobs._replace(selected_token_ranks=ranks)


def _entropies(logits_BV: Tensor, temperature_B: Tensor | None) -> Tensor:
    """Return the entropy of each row in nats, [B]; None: the logits are at their temperatures."""
    if temperature_B is not None:
        divisor_B = temperature_B.where(temperature_B >= _SMALLEST_TEMPERATURE, 1.0)
        logits_BV = logits_BV / divisor_B[:, None]
    lse_B = logits_BV.logsumexp(-1)
    mean_B = (logits_BV.softmax(-1) * logits_BV).nan_to_num(nan=0.0).sum(-1)  # of p = 0 at -inf
    return lse_B - mean_B
