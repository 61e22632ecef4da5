"""Sampling:  python -m bench.rollout [--json F] [--model FOLDER]

The torch engine runs against transformers' own `generate`, and, where vLLM is installed, our engine
on vLLM against its `AsyncLLM` alone. All rivals get the same prompts: distinct ones, and groups of
8 that share one, as in the first turn of a GRPO batch. End-of-sequence is switched off, so that all
sample the same number of tokens.

--model takes the model of a folder, in fp32, and sums through its chat
template, 16 at a time with 16 new tokens each: 3 minutes of one core for SmolLM2-135M with
--repeats 3.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import importlib.util
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from bench import model_folder
from bench.measure import Row, median_ratio, new_parser, report, time_in_turn
from bench.model_folder import ModelFolder, questions
from flowtrain.config import Vllm
from flowtrain.inference.protocol import Engine
from flowtrain.inference.torch_engine import TorchEngine
from flowtrain.inference.vllm.engine import VllmEngine
from flowtrain.inference.vllm.process import VllmModel, cpu_environment
from flowtrain.records import Sampling
from flowtrain.trainer.model.loading import export, full_weights
from flowtrain.trainer.toy import new_model, new_tokenizer

Prompts = Sequence[tuple[int, ...]]


def main() -> None:
    parser = new_parser(__doc__)
    model_folder.add_option(parser)
    add = parser.add_argument
    add("--repeats", type=int, default=5, help="timed runs of each rival")
    add("--batch", type=int, default=0, help="requests at a time; 0: 128, of --model 16")
    add("--new-tokens", type=int, default=16, help="tokens per response")
    add("--threads", type=int, default=1, help="CPU threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    report(args.json, _of_folder(args) if args.model else _of_random_model(args))


def _of_random_model(args: argparse.Namespace) -> Iterator[Row]:
    """A model of the quickstart's shape, and random prompts."""
    model, tokenizer = _model(6)
    model.generation_config.eos_token_id = None  # it never ends a response
    engine = TorchEngine(copy.deepcopy(model), tokenizer, None)
    order = random.Random(0)
    distinct = [
        tuple(order.randrange(5, len(tokenizer)) for _ in range(order.randrange(30, 90)))
        for _ in range(args.batch or 128)
    ]
    yield from _torch_rows(model, engine, distinct, args)
    with tempfile.TemporaryDirectory() as folder:
        tiny, tokenizer = _model(3)  # vLLM on a CPU wants heads at least 32 wide
        tiny.config.architectures = [type(tiny).__name__]
        export(tiny, tokenizer, full_weights(tiny), Path(folder))
        yield from _vllm_rows(folder, tokenizer, distinct, args)


def _of_folder(args: argparse.Namespace) -> Iterator[Row]:
    folder = ModelFolder.load(args.model)
    number = args.batch or 16
    distinct = list(dict.fromkeys(folder.prompts(questions(4 * number))))[:number]
    folder.model.generation_config.eos_token_id = None  # `generate` must not end either
    engine = folder.engine()
    folder.model.set_attn_implementation("sdpa")
    rows = _torch_rows(folder.model, engine, distinct, args)
    of_vllm = _vllm_rows(args.model, folder.tokenizer, distinct, args)
    for row in chain(rows, of_vllm):
        yield {"model": folder.name, **row}


def _torch_rows(
    model: PreTrainedModel, engine: TorchEngine, distinct: Prompts, args: argparse.Namespace
) -> Iterator[Row]:
    for name, prompts in _kinds(distinct).items():
        rivals = {
            "torch engine": partial(_engine_run, engine, prompts, args.new_tokens),
            "transformers generate": partial(_generate, model, prompts, args.new_tokens),
        }
        yield from _rows(name, rivals, prompts, args)


def _kinds(distinct: Prompts) -> dict[str, Prompts]:
    return {"distinct": distinct, "groups of 8": [distinct[i // 8] for i in range(len(distinct))]}


def _model(num_heads: int) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Make a random model of the quickstart's shape."""
    tokenizer = new_tokenizer(["Question: What is the area of Norway?"], 300)
    torch.manual_seed(0)
    model = new_model(tokenizer, 96, 3, num_heads, 256).eval()
    model.set_attn_implementation("sdpa")
    return model, tokenizer


def _rows(
    name: str,
    rivals: Mapping[str, Callable[[], object]],
    prompts: Prompts,
    args: argparse.Namespace,
) -> list[Row]:
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
) -> Iterator[Row]:
    """Time our engine and vLLM itself on one vLLM, where it is installed."""
    if importlib.util.find_spec("vllm") is None:
        print("left out: vLLM: it is not installed")
        return
    spec = VllmModel(
        source=path,
        dtype="float32",
        max_tokens=max(map(len, distinct)) + args.new_tokens,
        stop_ids=frozenset(),
        environment=cpu_environment(torch.get_num_threads()),
    )
    engine = VllmEngine(spec, tokenizer, Vllm(kv_cache_gb=0.5))
    for name, prompts in _kinds(distinct).items():
        rivals = {
            "vllm engine": partial(_engine_run, engine, prompts, args.new_tokens),
            "vllm itself": partial(_vllm_run, engine, prompts, args.new_tokens),
        }
        yield from _rows(name, rivals, prompts, args)
    engine.close()


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
