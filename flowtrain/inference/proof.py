"""Log-probs of fixed tokens, as a server tells them and as a policy has them: whether they are the
same but for rounding, and whose they are if not.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from flowtrain.inference.protocol import Scorer
from flowtrain.records import Sample
from flowtrain.trainer.model import lora
from flowtrain.trainer.model.loading import load_model, load_tokenizer

_LENGTH = 32
"""Tokens of a sequence."""
_TRUSTED = 4.0
"""Times the rounding that log-probs may be apart."""
_LEAST = 1e-5
"""Nats of rounding that are always allowed for: sums in another order."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The answer about an endpoint."""

    distance: float
    """Root mean square of the differences to the policy's log-probs, in nats."""
    rounding: float
    """That of what rounding does to the policy's, in nats."""
    holds: str = ""
    """The name of another model whose log-probs these are; "": of none that was named."""
    alike: tuple[str, ...] = ()
    """Models that these tokens cannot tell from the policy."""

    @property
    def is_proven(self) -> bool:
        return not self.holds and self.distance <= _TRUSTED * self.rounding

    def text(self) -> str:
        """Say it in a line or two."""
        apart = f"{self.distance:.2g} nats apart, where rounding makes {self.rounding:.2g}"
        if self.holds:
            verdict = f"not the policy: it samples with {self.holds} ({apart})"
        elif self.is_proven:
            verdict = f"proven: it samples with the policy ({apart})"
        else:
            verdict = (
                f"not the policy, nor any other model that was named ({apart}): weights of another "
                "version, in another layout, or damaged"
            )
        unsure = f"\nthese tokens cannot tell it from {', '.join(self.alike)}" if self.alike else ""
        return verdict + unsure


def compare(
    served_T: Tensor, policy_T: Tensor, rounded_T: Tensor, others: Mapping[str, Tensor]
) -> Proof:
    """Judge log-probs of the same tokens, fp64 [T] each: what was served, the policy's, the
    policy's as rounding leaves them, and those of other models by name.

    Along the line from the policy to another model the served ones lie at 0 for the policy and at 1
    for the other. Rounding moves them by its size over their distance, so that even models whose
    tokens differ by less than they are rounded by can be told apart by enough tokens.
    """
    rounding = max(_rms(rounded_T - policy_T), _LEAST)
    holds, nearest, alike = "", 0.5, []
    for name, other_T in others.items():
        line_T = other_T - policy_T
        length = float(line_T.norm())
        if length <= 2 * _TRUSTED * rounding:
            alike.append(name)
            continue
        place = float((served_T - policy_T) @ line_T) / length**2
        is_there = _rms(served_T - other_T) <= _TRUSTED * rounding
        if is_there and place > nearest:
            holds, nearest = name, place
    return Proof(_rms(served_T - policy_T), rounding, holds, tuple(alike))


def _rms(x_T: Tensor) -> float:
    return float(x_T.square().mean().sqrt())


async def prove(
    scorer: Scorer, path: str, others: Mapping[str, str], dtype: torch.dtype, num_tokens: int
) -> Proof:
    """Compare what a server or an engine tells with the model in a folder.

    Args:
        path: a model, or an adapter beside the name of its base.
        others: folders of other models by name.
        dtype: in which the server computes.

    Raises:
        UserError: a folder that is no model.
        EngineError: the server does not tell log-probs of prompts.
    """
    names = dict(others)
    if lora.is_adapter(path):
        names.setdefault("the base without the adapter", lora.base_of(path, "--policy"))
    samples = fixed_samples(load_tokenizer(path, "--policy"), num_tokens)
    _, found = await scorer.score(samples, 1.0)
    served_T = torch.tensor([x for each in found for x in each], dtype=torch.float64)
    rounded_T = log_probs(path, samples, dtype)
    exact = torch.float64 if dtype == torch.float32 else torch.float32
    policy_T = log_probs(path, samples, exact)
    models = {name: log_probs(other, samples, exact) for name, other in names.items()}
    return compare(served_T, policy_T, rounded_T, models)


def fixed_samples(tokenizer: PreTrainedTokenizerFast, num_tokens: int) -> list[Sample]:
    """Draw sequences of ordinary tokens, always the same of a vocabulary."""
    special = set(tokenizer.all_special_ids)
    ids = [x for x in sorted(tokenizer.get_vocab().values()) if x not in special]
    rng, samples = random.Random(0), []
    for start in range(0, num_tokens, _LENGTH):
        length = min(_LENGTH, num_tokens - start)
        drawn = tuple(rng.choice(ids) for _ in range(1 + length))
        nothing = (0.0,) * length
        samples.append(Sample(drawn[:1], drawn[1:], nothing, nothing, nothing))
    return samples


@torch.inference_mode()
def log_probs(path: str, samples: Sequence[Sample], dtype: torch.dtype) -> Tensor:
    """Return the log-probs of all responses by a model in a folder, fp64 [T], on the CPU."""
    model, found = load_model(path, dtype, attn="sdpa", key="--policy"), []
    for sample in samples:
        ids = torch.tensor([*sample.prompt_ids, *sample.response_ids])
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0].double()
        found.append(logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0])
    return torch.cat(found)
