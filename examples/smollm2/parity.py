"""Check a converted folder: its answers, and the log-probs of all who compute with it.

T: response tokens of all prompts together.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from flowtrain.config import Config
from flowtrain.inference.factory import ModelSpec, make_engine
from flowtrain.inference.protocol import Engine
from flowtrain.records import Call, Sample, Sampling, UserError
from flowtrain.trainer.attention import registration as attention
from flowtrain.trainer.loss import equip, score_row
from flowtrain.trainer.model.loading import load_model, load_tokenizer
from flowtrain.trainer.packing import pack_row

PROMPTS = {
    "What is the capital of France? Answer in one sentence.": "Paris",
    "What is 2+2?": "4",
    "What is the opposite of hot?": "cold",
}
"""Questions, and what a sane answer to each has in it."""
MAX_NEW_TOKENS = 48
PLAIN = "tokens  12, 345"
PLAIN_PIECES = ["tokens", "  ", "1", "2", ",", " ", "3", "4", "5"]
"""How SmolLM2's own tokenizer cuts a text; GPT-2's rule would part the two spaces."""
CHAT_END = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@dataclass(frozen=True, slots=True)
class Bound:
    """Largest distances of log-probs, in nats."""

    mean: float
    most: float


BOUNDS = {"float32": Bound(2e-5, 5e-4), "bfloat16": Bound(0.05, 0.5)}
"""Bounds by dtype: fp32 differs by the order of sums, bf16 by a rounding of 2^-8 in every layer."""


@dataclass(frozen=True, slots=True)
class Distance:
    """How far one who computes is from transformers in the same dtype."""

    name: str
    dtype: str
    num_tokens: int
    mean: float
    """Mean of |difference| over tokens, in nats."""
    most: float
    """Largest |difference|."""
    skipped: str = ""
    """Why there is no measurement; "" where there is one."""

    @property
    def is_fine(self) -> bool:
        bound = BOUNDS[self.dtype]
        # Not <=, because a NaN must not pass.
        return bool(self.skipped) or (self.mean <= bound.mean and self.most <= bound.most)

    def line(self) -> str:
        """Return a row of the table."""
        if self.skipped:
            return f"| {self.name} | {self.dtype} | skipped: {self.skipped} |"
        bound = BOUNDS[self.dtype]
        return (
            f"| {self.name} | {self.dtype} | {self.num_tokens} | {self.mean:.1e} (at most "
            f"{bound.mean:g}) | {self.most:.1e} (at most {bound.most:g}) |"
        )


def check_folder(folder: Path, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Check tokenizer, answers and log-probs of a folder.

    Returns what was measured. Raises UserError, which names the check and what it found.
    """
    tokenizer = load_tokenizer(str(folder))
    check_tokenizer(tokenizer)
    distances: list[Distance] = []
    replies: list[str] = []
    for dtype in BOUNDS:
        say(f"comparing log-probs in {dtype} (10 s)")
        prompts = [prompt_ids(tokenizer, question) for question in PROMPTS]
        sampled = sample(folder, dtype, "torch", prompts)
        if dtype == "float32":
            replies = [
                tokenizer.decode(each.response_ids, skip_special_tokens=True) for each in sampled
            ]
            check_replies(replies)
            for question, reply in zip(PROMPTS, replies, strict=True):
                say(f"  {question}\n    {reply!r}")
        reference = transformers_logprobs(folder, dtype, prompts, sampled)
        engine = [torch.tensor(each.logprobs) for each in sampled]
        distances.append(_distance("torch engine", dtype, engine, reference))
        tree = tree_logprobs(folder, dtype, sampled)
        distances.append(_distance("trainer's token tree", dtype, tree, reference))
        distances.append(_vllm_distance(folder, dtype, prompts))
    for each in distances:
        say(each.line())
    if wrong := [each for each in distances if not each.is_fine]:
        raise UserError(f"log-probs differ too much from transformers': {wrong[0].line()}")
    return {
        "replies": dict(zip(PROMPTS, replies, strict=True)),
        "distances": [asdict(each) for each in distances],
    }


def check_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise UserError unless special tokens, cuts and the chat template are SmolLM2's."""
    whole = tokenizer(PLAIN).input_ids
    user = [{"role": "user", "content": "Hi"}]
    chat = tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True)
    found = {
        "the pieces of a text": [tokenizer.decode([each]) for each in whole],
        "the ids of the special tokens": tokenizer.convert_tokens_to_ids(list(MARKS)),
        "a special token in a text": tokenizer(MARKS[1]).input_ids,
        "the token that ends a response": tokenizer.eos_token,
        "the end of a chat": chat[-len(CHAT_END) :],
    }
    wanted = {
        "the pieces of a text": PLAIN_PIECES,
        "the ids of the special tokens": [0, 1, 2],
        "a special token in a text": [1],
        "the token that ends a response": "<|im_end|>",
        "the end of a chat": CHAT_END,
    }
    for what, right in wanted.items():
        if found[what] != right:
            raise UserError(f"the tokenizer is wrong: {what} is {found[what]!r}, not {right!r}")


def check_replies(replies: Sequence[str]) -> None:
    """Raise UserError for a reply without what a sane one has in it."""
    for (question, part), reply in zip(PROMPTS.items(), replies, strict=True):
        if part not in reply:
            raise UserError(f"the reply to {question!r} has no {part!r} in it: {reply!r}")


def prompt_ids(tokenizer: PreTrainedTokenizerFast, question: str) -> tuple[int, ...]:
    """Return the ids of a chat with one question, up to where the reply begins."""
    chat = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)


def sample(folder: Path, dtype: str, kind: str, prompts: Sequence[tuple[int, ...]]) -> list[Call]:
    """Sample greedily with one of our engines: "torch" or "vllm"."""
    options = {"model": {"dtype": dtype}, "rollout": {"engine": kind}}
    config = Config.model_validate(
        {**options, "vllm": {"max_model_len": 512, "kv_cache_gb": 1.0, "enforce_eager": True}}
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    engine = make_engine(config, ModelSpec.load("--dir", str(folder)), device)
    try:
        return asyncio.run(_ask(engine, prompts))
    finally:
        engine.close()


async def _ask(engine: Engine, prompts: Sequence[tuple[int, ...]]) -> list[Call]:
    sampling = Sampling(MAX_NEW_TOKENS, temperature=0.0, deadline_s=600.0)
    return await asyncio.gather(*(engine.generate(ids, sampling) for ids in prompts))


@torch.no_grad()
def transformers_logprobs(
    folder: Path,
    dtype: str,
    prompts: Sequence[tuple[int, ...]],
    sampled: Sequence[Call],
) -> list[Tensor]:
    """Score each response by transformers alone, one at a time; fp32, one per token."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), trust_remote_code=False
    ).eval()
    scores = []
    for prompt, response in zip(prompts, sampled, strict=True):
        ids = torch.tensor([*prompt, *response.response_ids])
        logits = model(ids[None, :-1]).logits[0, len(prompt) - 1 :].float()
        scores.append(logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0])
    return scores


@torch.no_grad()
def tree_logprobs(folder: Path, dtype: str, sampled: Sequence[Call]) -> list[Tensor]:
    """Score all responses as the trainer does: packed as one token tree, the head on targets only.

    Returns fp32, one per token.
    """
    model = load_model(str(folder), getattr(torch, dtype), attention.NAME).eval()
    equip(model)
    samples = [Sample.of(call) for call in sampled]
    logprob_T = score_row(model, pack_row(samples), 1.0).logprob_T
    return list(logprob_T.split([len(sample.response_ids) for sample in samples]))


def _vllm_distance(folder: Path, dtype: str, prompts: Sequence[tuple[int, ...]]) -> Distance:
    """Compare vLLM with transformers on the tokens that vLLM sampled."""
    if importlib.util.find_spec("vllm") is None:
        return Distance("vLLM", dtype, 0, 0.0, 0.0, "vLLM is not installed here")
    sampled = sample(folder, dtype, "vllm", prompts)
    reference = transformers_logprobs(folder, dtype, prompts, sampled)
    own = [torch.tensor(each.logprobs) for each in sampled]
    return _distance("vLLM", dtype, own, reference)


def _distance(name: str, dtype: str, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Distance:
    difference_T = (torch.cat(list(ours)).float() - torch.cat(list(theirs)).float()).abs()
    return Distance(
        name, dtype, len(difference_T), float(difference_T.mean()), float(difference_T.max())
    )
