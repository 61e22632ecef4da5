"""Sampling:  python -m bench.rollout [--json F] [--model FOLDER]

The torch engine runs against transformers' own `generate`, and, where vLLM is installed, our engine
on vLLM against its `AsyncLLM` alone. All rivals get the same prompts: distinct ones, and groups of
8 that share one, as in the first turn of a GRPO batch. End-of-sequence is switched off, so that all
sample the same number of tokens.

Two runs of the flow with simulated tools (`bench/simulated_tools.py`) follow: with 256 rollouts in
flight and with 16 workers.

--model takes the model of a folder, in fp32, and questions of reasoning-gym through its chat
template, 16 at a time with 16 new tokens each, and leaves the simulated tools out: 3 minutes of one
core for SmolLM2-135M with --repeats 3.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import importlib.util
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from bench import model_folder, simulated_tools
from bench.measure import median_ratio, print_table, time_in_turn, write_json
from bench.model_folder import ModelFolder, questions
from flowtrain.config import Vllm
from flowtrain.engines.protocol import Engine
from flowtrain.engines.torch_engine import TorchEngine
from flowtrain.engines.vllm.engine import VllmEngine
from flowtrain.engines.vllm.process import VllmModel, cpu_environment
from flowtrain.toy import new_model, new_tokenizer
from flowtrain.training.model import export, full_weights
from flowtrain.types import Sampling
from flowtrain.weights.stores.folder import WeightStore

Prompts = Sequence[tuple[int, ...]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    parser.add_argument(
        "--repeats", type=int, default=5, help="timed runs of each rival (default: 5)"
    )
    model_folder.add_option(parser)
    parser.add_argument(
        "--batch", type=int, help="requests at a time (default: 128; of --model 16)"
    )
    parser.add_argument(
        "--new-tokens", type=int, default=16, help="tokens per response (default: 16)"
    )
    parser.add_argument(
        "--rollouts",
        type=int,
        default=1024,
        help="rollouts of the simulation of tools (default: 1024)",
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = _of_folder(args) if args.model else _of_random_model(args)
    if args.json:
        write_json(args.json, rows)


def _of_random_model(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A model of the quickstart's shape, random prompts, and the simulated tools."""
    model, engine, vocab_size = _engine()
    order = random.Random(0)
    distinct = [
        tuple(order.randrange(5, vocab_size) for _ in range(order.randrange(30, 90)))
        for _ in range(args.batch or 128)
    ]
    rows = _torch_rows(model, engine, distinct, args)
    with tempfile.TemporaryDirectory() as folder:
        tiny, tokenizer = _model(3)  # vLLM on a CPU wants heads at least 32 wide
        tiny.config.architectures = [type(tiny).__name__]
        export(tiny, tokenizer, full_weights(tiny), Path(folder))
        rows += _vllm_rows(folder, tokenizer, distinct, args)
    print_table(rows)
    simulated = simulated_tools.measure(engine, args.rollouts)
    print_table(simulated)
    return [*rows, *simulated]


def _of_folder(args: argparse.Namespace) -> list[dict[str, Any]]:
    folder = ModelFolder.load(args.model)
    number = args.batch or 16
    distinct = list(dict.fromkeys(folder.prompts(questions(4 * number))))[:number]
    folder.model.generation_config.eos_token_id = None  # `generate` must not end either
    engine = folder.engine()
    folder.model.set_attn_implementation("sdpa")
    rows = _torch_rows(folder.model, engine, distinct, args)
    rows += _vllm_rows(args.model, folder.tokenizer, distinct, args)
    print_table(rows)
    return [{"model": folder.name, **row} for row in rows]


def _torch_rows(
    model: PreTrainedModel, engine: TorchEngine, distinct: Prompts, args: argparse.Namespace
) -> list[dict[str, Any]]:
    rows = []
    for name, prompts in _kinds(distinct).items():
        rivals = {
            "torch engine": partial(_engine_run, engine, prompts, args.new_tokens),
            "transformers generate": partial(_generate, model, prompts, args.new_tokens),
        }
        rows += _rows(name, rivals, prompts, args)
    return rows


def _kinds(distinct: Prompts) -> dict[str, Prompts]:
    return {"distinct": distinct, "groups of 8": [distinct[i // 8] for i in range(len(distinct))]}


def _model(num_heads: int) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Make a random model of the quickstart's shape."""
    tokenizer = new_tokenizer(["Question: What is the area of Norway?"], 300)
    torch.manual_seed(0)
    model = new_model(tokenizer, 96, 3, num_heads, 256).eval()
    model.set_attn_implementation("sdpa")
    return model, tokenizer


def _engine() -> tuple[PreTrainedModel, TorchEngine, int]:
    """Make an engine whose model never ends a response."""
    model, tokenizer = _model(6)
    model.generation_config.eos_token_id = None
    engine = TorchEngine(copy.deepcopy(model), tokenizer, WeightStore(Path("unused")))
    return model, engine, len(tokenizer)


def _rows(
    name: str,
    rivals: Mapping[str, Callable[[], object]],
    prompts: Prompts,
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Time the rivals; the first one is ours."""
    seconds = time_in_turn(rivals, args.repeats, warmup=1 if args.model else 2)
    num_tokens = len(prompts) * args.new_tokens
    ours = next(iter(seconds.values()))
    return [
        {
            "prompts": name,
            "path": rival,
            "threads": torch.get_num_threads(),
            "requests": len(prompts),
            "tokens": num_tokens,
            "tokens_per_s": num_tokens / sorted(times)[len(times) // 2],
            "times_ours": median_ratio(times, ours),
        }
        for rival, times in seconds.items()
    ]


def _vllm_rows(
    path: str, tokenizer: PreTrainedTokenizerFast, distinct: Prompts, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Time our engine and vLLM itself on one vLLM, where it is installed."""
    if importlib.util.find_spec("vllm") is None:
        print("left out: vLLM: it is not installed")
        return []
    spec = VllmModel(
        source=path,
        dtype="float32",
        max_tokens=max(map(len, distinct)) + args.new_tokens,
        stop_ids=frozenset(),
        environment=cpu_environment(torch.get_num_threads()),
    )
    engine = VllmEngine(spec, tokenizer, Vllm(kv_cache_gb=0.5))
    rows = []
    for name, prompts in _kinds(distinct).items():
        rivals = {
            "vllm engine": partial(_engine_run, engine, prompts, args.new_tokens),
            "vllm itself": partial(_vllm_run, engine, prompts, args.new_tokens),
        }
        rows += _rows(name, rivals, prompts, args)
    engine.close()
    return rows


def _engine_run(engine: Engine, prompts: Prompts, new_tokens: int) -> object:
    async def together() -> object:
        return await asyncio.gather(
            *map(engine.generate, prompts, _samplings(len(prompts), new_tokens))
        )

    return asyncio.run(together())


def _vllm_run(engine: VllmEngine, prompts: Prompts, new_tokens: int) -> object:
    """Sample as a user of vLLM would: tokens in, the last output of each request, no more."""
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    runner = engine.supervisor.runner.result()

    async def one(number: int) -> object:
        prompt = TokensPrompt(prompt_token_ids=list(prompts[number]))
        params = SamplingParams(
            max_tokens=new_tokens,
            seed=number,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        return [output async for output in runner._llm.generate(prompt, params, f"direct {number}")]

    async def together() -> object:
        return await asyncio.gather(*map(one, range(len(prompts))))

    return runner._thread.run(together(), time.monotonic() + 600)


def _samplings(number: int, new_tokens: int) -> list[Sampling]:
    return [
        Sampling(new_tokens, ignore_end=True, seed=seed, deadline_s=600.0) for seed in range(number)
    ]


@torch.inference_mode()
def _generate(model: PreTrainedModel, prompts: Prompts, new_tokens: int) -> object:
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        attention[row, longest - len(prompt) :] = 1
    options = {
        "max_new_tokens": new_tokens,
        "do_sample": True,
        "top_k": 0,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    out = model.generate(input_ids=ids, attention_mask=attention, pad_token_id=0, **options)
    # A trainer needs the sampler's log-probs.
    return [logits.log_softmax(-1) for logits in out.logits]


if __name__ == "__main__":
    main()
