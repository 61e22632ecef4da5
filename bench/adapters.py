"""Adapters in a live vLLM:  python -m bench.adapters [--json F]

A LoRA adapter reaches vLLM in two ways: as it is, into a LoRA slot, or merged into the weights,
whose changed words travel as sparse deltas. Both take the same versions while requests are under
way; the model has the shape of SmolLM2-135M, random weights, and every linear layer of its decoder
an adapter. A version moves every word of A and B by a learning rate, up or down, as the first steps
of AdamW do. All of this is vLLM on a CPU, where LoRA is written in plain torch.

Columns: tokens/s, all paths in turn; pause and load of an update (medians) and the bytes that it
reads; vLLM's resident memory; and how far the log-probs of responses are on average from those of
transformers with peft, which computes with the adapter beside the weights as the trainer does.
5 minutes of one core.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from bench.measure import print_table, time_in_turn, write_json
from flowtrain.config import Lora, Vllm
from flowtrain.engines.factory import ModelSpec
from flowtrain.engines.protocol import Engine
from flowtrain.engines.vllm.engine import AdapterEngine, VllmEngine
from flowtrain.engines.vllm.process import VllmModel, cpu_environment
from flowtrain.types import Completion, Sampling
from flowtrain.weights import Publisher, WeightStore
from flowtrain.weights.adapters import AdapterSpec

_SHAPE = {"hidden_size": 576, "intermediate_size": 1536, "head_dim": 64, "vocab_size": 49152}
_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3}
_OPTIONS = Vllm(kv_cache_gb=0.25, max_num_seqs=32)
_PATHS = ("no adapter", "merged, sparse deltas", "LoRA slot", "LoRA slots of 3 policies")
_UPDATED = _PATHS[1:]
_POLICIES = ("planner", "verifier", "refiner")
_DTYPE = torch.bfloat16
_PROMPT = 16
"""Tokens of a prompt."""
_BETWEEN_S = 1.0
"""Seconds between two updates."""


@dataclass(frozen=True, slots=True)
class _Case:
    """One model, its adapter's versions, and the stores of both ways."""

    model: LlamaForCausalLM
    folder: Path
    spec: AdapterSpec
    versions: list[dict[str, Tensor]]
    """A and B in bf16."""
    adapters: WeightStore
    merged: WeightStore

    def vllm_model(self, **changes: Any) -> VllmModel:
        return VllmModel(
            dtype="bfloat16",
            max_tokens=512,
            stop_ids=frozenset(),
            environment=cpu_environment(torch.get_num_threads()),
            **changes,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    parser.add_argument("--layers", type=int, default=30, help="layers (default: 30)")
    parser.add_argument("--rank", type=int, default=16, help="of the adapter (default: 16)")
    parser.add_argument("--lr", type=float, default=2e-4, help="step of a word (default: 2e-4)")
    parser.add_argument("--versions", type=int, default=8, help="versions (default: 8)")
    parser.add_argument("--requests", type=int, default=16, help="at a time (default: 16)")
    parser.add_argument("--new-tokens", type=int, default=64, help="per response (default: 64)")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs (default: 3)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
        case = _make_case(folder, args)
        engines = {path: cleanup.enter_context(_engines(case, path)) for path in _PATHS}
        for path in _UPDATED:
            for engine in engines[path]:
                engine.load(0)
        runs = {path: partial(_sample, engines[path], args) for path in _PATHS}
        seconds = time_in_turn(runs, args.repeats, warmup=1)
        num_tokens = args.requests * args.new_tokens
        speeds = {
            path: {"path": path, "tokens_per_s": num_tokens / statistics.median(seconds[path])}
            for path in _PATHS
        }
        rows = [speeds[path] | _measure(case, engines[path], args) for path in _PATHS]
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


def _make_case(folder: Path, args: argparse.Namespace) -> _Case:
    torch.manual_seed(0)
    config = LlamaConfig(
        **_SHAPE, **_HEADS, num_hidden_layers=args.layers, max_position_embeddings=1024
    )
    config.architectures = ["LlamaForCausalLM"]
    config.tie_word_embeddings = True
    model = LlamaForCausalLM(config).to(_DTYPE).eval()
    model.save_pretrained(folder / "base")
    policy = ModelSpec.of("model.path", str(folder / "base"), None, model)
    spec = policy.adapters(Lora(rank=args.rank, alpha=2.0 * args.rank), _DTYPE)
    stores = [WeightStore(folder / name) for name in ("adapters", "merged")]
    publishers = [Publisher(store) for store in stores]
    held = {name: torch.zeros(s.shape) for name, s in spec.layout.items()}
    for name, tensor in held.items():
        if ".lora_A." in name:  # as peft initialises it
            torch.nn.init.kaiming_uniform_(tensor, a=5**0.5)
    versions = []
    for version in range(args.versions):
        for tensor in held.values():
            tensor.add_(torch.randn_like(tensor).sign(), alpha=args.lr)
        versions.append({name: tensor.to(_DTYPE) for name, tensor in held.items()})
        publishers[0].publish(versions[-1], version)
        publishers[1].publish(_merge(model, spec, versions[-1]), version)
    return _Case(model, folder / "base", spec, versions, *stores)


def _merge(model: torch.nn.Module, spec: AdapterSpec, adapter: Mapping[str, Tensor]) -> Any:
    """Add A and B to the weights, in fp32, and round once."""
    weights: dict[str, Tensor] = dict(model.named_parameters())
    for module in spec.modules:
        a, b = (adapter[f"base_model.model.{module}.lora_{half}.weight"].float() for half in "AB")
        frozen = weights[f"{module}.weight"].detach().float()
        weights[f"{module}.weight"] = (frozen + spec.alpha / spec.rank * (b @ a)).to(_DTYPE)
    return weights


@contextmanager
def _engines(case: _Case, path: str) -> Iterator[list[Engine]]:
    """Start the engines of a path: one for each policy."""
    engines: list[Engine]
    if path == "no adapter":
        engines = [VllmEngine(case.vllm_model(source=str(case.folder)), None, _OPTIONS)]  # type: ignore[arg-type]
    elif path.startswith("merged"):
        model = case.vllm_model(source=case.model.config, store=str(case.merged.root))
        engines = [VllmEngine(model, None, _OPTIONS)]  # type: ignore[arg-type]
    else:
        policies = _POLICIES if path.endswith("policies") else _POLICIES[:1]
        stores = {policy: str(case.adapters.root) for policy in policies}
        model = case.vllm_model(source=str(case.folder), adapters=case.spec, adapter_stores=stores)
        engines = [*AdapterEngine.start(model, None, _OPTIONS).values()]  # type: ignore[arg-type]
    yield engines
    for engine in engines:
        engine.close()


def _measure(case: _Case, engines: list[Engine], args: argparse.Namespace) -> dict[str, Any]:
    """Load all versions, one after another, while requests are under way."""
    memory = {"vllm_mb": _resident_bytes(engines[0]) / 1e6}
    if "weights_pause_s" not in engines[0].metrics():
        return memory
    updates: list[dict[str, float]] = []

    def load_all() -> None:
        for version in range(1, len(case.versions)):
            time.sleep(_BETWEEN_S)
            began = time.monotonic()
            engines[0].load(version)
            updates.append({**engines[0].metrics(), "load_s": time.monotonic() - began})

    with ThreadPoolExecutor(1) as pool:
        loads = pool.submit(load_all)
        while not loads.done():
            _sample(engines, args)
        loads.result()
    return {
        "pause_ms": 1e3 * statistics.median(update["weights_pause_s"] for update in updates),
        "load_ms": 1e3 * statistics.median(update["load_s"] for update in updates),
        "load_mb": statistics.median(update["weights_loaded_bytes"] for update in updates) / 1e6,
        **memory,
        "logprob_gap": _gap(case, _sample(engines[:1], args)),
    }


def _sample(engines: list[Engine], args: argparse.Namespace) -> list[Completion]:
    """Sample responses of one length by all engines together."""
    order = torch.Generator().manual_seed(0)
    prompts = torch.randint(5, _SHAPE["vocab_size"], (args.requests, _PROMPT), generator=order)

    async def together() -> list[Completion]:
        requests = (
            engines[i % len(engines)].generate(
                prompt.tolist(),
                Sampling(args.new_tokens, ignore_end=True, seed=i, deadline_s=600.0),
            )
            for i, prompt in enumerate(prompts)
        )
        return await asyncio.gather(*requests)

    return asyncio.run(together())


@torch.no_grad()
def _gap(case: _Case, found: list[Completion]) -> float:
    """Mean distance of the log-probs of the newest version from those of transformers with peft."""
    order = torch.Generator().manual_seed(0)
    prompts = torch.randint(5, _SHAPE["vocab_size"], (len(found), _PROMPT), generator=order)
    lora = LoraConfig(
        r=case.spec.rank, lora_alpha=int(case.spec.alpha), target_modules=case.spec.targets
    )
    model: Any = get_peft_model(copy.deepcopy(case.model), lora, autocast_adapter_dtype=False)
    set_peft_model_state_dict(model, case.versions[-1])
    gaps = []
    for prompt, done in zip(prompts, found, strict=True):
        ids = torch.cat([prompt, torch.tensor(done.ids)])
        logprob_TV = model(ids[None]).logits[0, _PROMPT - 1 : -1].float().log_softmax(-1)
        logprob_T = logprob_TV.gather(1, torch.tensor(done.ids)[:, None])[:, 0]
        gaps.append((logprob_T - torch.tensor(done.logprobs)).abs().mean())
    return float(torch.stack(gaps).mean())


def _resident_bytes(engine: Engine) -> int:
    shared = engine.shared if isinstance(engine, AdapterEngine) else engine
    assert isinstance(shared, VllmEngine)
    (process,) = shared.supervisor.runner.result()._processes
    status = Path(f"/proc/{process.pid}/status").read_text()
    return 1024 * int(status.partition("VmRSS:")[2].split()[0])


if __name__ == "__main__":
    main()
