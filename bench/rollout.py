"""Sampling:  python -m bench.rollout [--json F]

The torch engine against transformers' own `generate` on the same prompts in one run: all prompts distinct, and groups of 8 that share one,
as the first turn of a GRPO batch does. End-of-sequence is switched off, so that both sample the same number of tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from bench.measure import median_ratio, print_table, time_in_turn, write_json
from flowtrain.rollout.torch_engine import TorchEngine
from flowtrain.training.model import new_model, new_tokenizer
from flowtrain.types import Completion, Sampling
from flowtrain.weights.store import WeightStore

Prompts = Sequence[tuple[int, ...]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each rival (default: 5)")
    parser.add_argument("--batch", type=int, default=128, help="requests at a time (default: 128)")
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens per response (default: 16)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, engine, vocab_size = _engine()
    order = random.Random(0)
    distinct = [tuple(order.randrange(5, vocab_size) for _ in range(order.randrange(30, 90))) for _ in range(args.batch)]
    rows = []
    for name, prompts in {"distinct": distinct, "groups of 8": [distinct[i // 8] for i in range(args.batch)]}.items():
        rows += _rows(name, model, engine, prompts, args.new_tokens, args.repeats)
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


def _engine() -> tuple[PreTrainedModel, TorchEngine, int]:
    """A random model of the quickstart's shape whose `generate` never ends a response."""
    tokenizer = new_tokenizer(["Question: What is the area of Norway?"], 300)
    torch.manual_seed(0)
    model = new_model(tokenizer, 96, 3, 6, 256).eval()
    model.set_attn_implementation("sdpa")
    model.generation_config.eos_token_id = None
    engine = TorchEngine(model, tokenizer, WeightStore(Path("unused")))
    return model, engine, len(tokenizer)


def _rows(name: str, model: PreTrainedModel, engine: TorchEngine, prompts: Prompts, new_tokens: int, repeats: int) -> list[dict[str, Any]]:
    rivals = {
        "torch engine": lambda: asyncio.run(_sample(engine, prompts, new_tokens)),
        "transformers generate": lambda: _generate(model, prompts, new_tokens),
    }
    seconds = time_in_turn(rivals, repeats)
    num_tokens = len(prompts) * new_tokens
    return [
        {
            "prompts": name,
            "path": rival,
            "threads": torch.get_num_threads(),
            "requests": len(prompts),
            "tokens": num_tokens,
            "tokens_per_s": num_tokens / sorted(times)[len(times) // 2],
            "times_ours": median_ratio(times, seconds["torch engine"]),
        }
        for rival, times in seconds.items()
    ]


async def _sample(engine: TorchEngine, prompts: Prompts, new_tokens: int) -> list[Completion]:
    samplings = [Sampling(new_tokens, ignore_end=True, seed=seed) for seed in range(len(prompts))]
    return await asyncio.gather(*map(engine.generate, prompts, samplings))


@torch.inference_mode()
def _generate(model: PreTrainedModel, prompts: Prompts, new_tokens: int) -> object:
    longest = max(map(len, prompts))
    ids, attention = torch.zeros(len(prompts), longest, dtype=torch.int64), torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        attention[row, longest - len(prompt) :] = 1
    options = {"max_new_tokens": new_tokens, "do_sample": True, "top_k": 0, "output_logits": True, "return_dict_in_generate": True}
    out = model.generate(input_ids=ids, attention_mask=attention, pad_token_id=0, **options)
    return [logits.log_softmax(-1) for logits in out.logits]  # a trainer needs the sampler's log-probs


if __name__ == "__main__":
    main()
