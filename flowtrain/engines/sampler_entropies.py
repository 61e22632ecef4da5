"""One number more per token out of vLLM: the entropy of the distribution that it was drawn from.

vLLM tells log-probs of chosen tokens, and a full distribution only as a number per id of the
vocabulary. Beside a token's log-prob it sends the token's rank, which nothing here reads: in its
place goes the entropy in fixed point, of the distribution at the request's temperature over the
whole vocabulary, before top-k and top-p. The sampler that is changed is that of one engine.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flowtrain.types import UserError

_UNIT = 2.0**-20
"""Nats per unit of a rank, which vLLM sends as int32: room for 2048 nats."""
_SMALLEST_TEMPERATURE = 1e-5
"""vLLM is greedy below it, and then takes the log-probs at temperature 1."""


def decode(rank: int) -> float:
    """Return the entropy in nats that was sent as a rank."""
    return rank * _UNIT


def record(sampler: Any) -> None:
    """Change a sampler of vLLM's (`vllm.v1.sample.sampler.Sampler`) so that it tells entropies.

    Raises UserError for another kind of sampler.
    """
    if not all(callable(getattr(sampler, name, None)) for name in ("sample", "gather_logprobs")):
        raise UserError(
            f"this vLLM samples by {type(sampler).__name__}, which is not known to tell entropies; "
            "take the runner that it had before (VLLM_USE_V2_MODEL_RUNNER=0), or rollout.engine = "
            "'torch'"
        )
    sample, gather = sampler.sample, sampler.gather_logprobs
    drawn: list[Tensor] = []
    """The entropies of the batch whose log-probs are gathered next."""

    def noting(logits: Tensor, metadata: Any, *args: Any, **options: Any) -> Any:
        drawn[:] = [_entropies(logits, metadata.temperature)]
        return sample(logits, metadata, *args, **options)

    def telling(*args: Any, **options: Any) -> Any:
        found = gather(*args, **options)
        if not drawn:  # log-probs of a prompt
            return found
        ranks = (drawn.pop() / _UNIT).round().to(found.selected_token_ranks.dtype)
        return found._replace(selected_token_ranks=ranks)

    sampler.sample, sampler.gather_logprobs = noting, telling


def _entropies(logits_BV: Tensor, temperature_B: Tensor | None) -> Tensor:
    """Return the entropy of each row in nats, [B]; None: all rows are greedy."""
    if temperature_B is not None:
        divisor_B = temperature_B.where(temperature_B >= _SMALLEST_TEMPERATURE, 1.0)
        logits_BV = logits_BV / divisor_B[:, None]
    lse_B = logits_BV.logsumexp(-1)
    mean_B = (logits_BV.softmax(-1) * logits_BV).nan_to_num(nan=0.0).sum(-1)  # of p = 0 at -inf
    return lse_B - mean_B
