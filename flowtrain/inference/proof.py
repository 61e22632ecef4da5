"""Prove that an endpoint samples with the policy that was trained.

Log-probs of fixed tokens from a server that tells those of a prompt, as vLLM's does, are compared
with those of a checkpoint, or of an adapter on its base, computed here. How far apart rounding puts
them is measured on the same tokens. Other models that it may hold instead, such as an earlier
checkpoint or another adapter, are named if it holds them; the base of an adapter is always tried.
FLOWTRAIN_TOKEN is the key for the endpoint.
Exit codes: 0 it samples with the policy, 1 it does not, 2 the question was not understood.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from flowtrain.config import Chat
from flowtrain.inference.endpoint import Endpoint
from flowtrain.inference.endpoint_scorer import EndpointScorer
from flowtrain.inference.protocol import EngineError, Scorer
from flowtrain.records import Sample, UserError
from flowtrain.trainer.model import lora
from flowtrain.trainer.model.loading import load_model, load_tokenizer
from flowtrain.utils.commands import number
from flowtrain.utils.event_loop import run_to_end
from flowtrain.utils.terminal import protect_output, say

_COMMAND = "python -m flowtrain.inference.proof"
NUM_TOKENS, _LENGTH = 64, 32
"""Tokens that are compared, and those of a sequence."""
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


def main(arguments: list[str] | None = None) -> int:
    """Ask an endpoint, and return the exit code."""
    protect_output()
    options = _parser().parse_args(arguments)
    key = "FLOWTRAIN_TOKEN" if os.environ.get("FLOWTRAIN_TOKEN") else ""
    chat = Chat(model=options.model, base_url=options.url, api_key_env=key)
    try:
        endpoint = Endpoint("proof", chat)
        try:
            scorer = EndpointScorer(endpoint, options.model, options.timeout)
            dtype = getattr(torch, options.dtype)
            others = dict(options.other)
            proof = run_to_end(prove(scorer, options.policy, others, dtype, options.tokens))
        finally:
            endpoint.close()
    except (UserError, EngineError) as error:
        say(f"{_COMMAND}: {error}")
        return 2
    print(proof.text())
    return 0 if proof.is_proven else 1


def _parser() -> argparse.ArgumentParser:
    summary, _, *rest = (__doc__ or "").splitlines()
    example = f"example: {_COMMAND} http://localhost:8000/v1 --model policy --policy run/model"
    parser = argparse.ArgumentParser(
        prog=_COMMAND, description=summary, epilog=" ".join([*rest, example]), allow_abbrev=False
    )
    add = parser.add_argument
    add("url", metavar="URL", help="the endpoint's address, such as http://localhost:8000/v1")
    add("--model", required=True, help="the name of the policy, or of its adapter, at the endpoint")
    add("--policy", required=True, metavar="FOLDER", help="the checkpoint or adapter it should be")
    text = "another model that it may hold; may be given several times"
    add("--other", metavar="NAME=FOLDER", type=_named, action="append", default=[], help=text)
    dtypes = ("bfloat16", "float16", "float32")
    add("--dtype", choices=dtypes, default="bfloat16", help="in which it computes")
    text = f"tokens to compare (default: {NUM_TOKENS})"
    add("--tokens", type=number(1, 4096), default=NUM_TOKENS, help=text)
    add("--timeout", type=number(1, 3600), default=120, help="seconds for an answer (default: 120)")
    return parser


def _named(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=FOLDER")
    return name, folder


if __name__ == "__main__":
    sys.exit(main())
