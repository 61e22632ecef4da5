"""The pause of a live vLLM:  python -m bench.weights [--shape 0.5b] [--density 0.01] [--json F]

One engine serves random weights of a Qwen2.5 shape. In turn it takes a sparse update, staged while
it serves and applied within a pause, and a full reload of the same version from a checkpoint by
vLLM's own `reload_weights`, within the same kind of pause, from the page cache. Last, an engine
without the plugin reloads the checkpoint, which on a CPU packs its weights again. After each update
and reload, the digests of all words are compared with the manifest. The bench needs vLLM and an
installed flowtrain.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from bench.measure import median_ratio, report
from flowtrain.weights import Publisher, SnapshotPolicy, WeightStore
from flowtrain.weights.format.layout import digest_hex

SHAPES = {
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    parser.add_argument(
        "--shape", choices=SHAPES, default="0.5b", help="of Qwen2.5 (default: 0.5b)"
    )
    parser.add_argument(
        "--density",
        type=float,
        default=0.01,
        help="share of the words that a version changes (default: 0.01)",
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="versions that are timed (default: 5)"
    )
    args = parser.parse_args()
    with TemporaryDirectory(prefix="flowtrain-bench-") as folder:
        rows = asyncio.run(_measure(Path(folder), args.shape, args.density, repeats=args.repeats))
    report(args.json, rows)


async def _measure(folder: Path, shape: str, density: float, repeats: int) -> list[dict[str, Any]]:
    weights = _new_weights(folder, shape)
    times, facts = await _in_turn(folder, weights, density, repeats=repeats)
    times["full reload, packed weights"] = await _reload_packed(folder, repeats)
    num_words = sum(tensor.numel() for tensor in weights.values())
    common = {"shape": shape, "words": num_words, "density": facts.pop("changed") / num_words}
    rows = []
    for path, seconds in times.items():
        row = {
            "path": path,
            **common,
            "bytes": 2 * num_words,
            "pause_s": statistics.median(seconds),
        }
        row["times_ours"] = median_ratio(seconds, times["sparse update"])
        rows.append({**row, **facts} if path == "sparse update" else row)
    return rows


async def _in_turn(
    folder: Path, weights: dict[str, Tensor], density: float, repeats: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the seconds of each pause, and medians of other facts about the updates."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    store = WeightStore(folder / "weights")
    publisher = Publisher(store, policy=SnapshotPolicy(max_deltas=1000))
    publisher.publish(weights, 0)
    times: dict[str, list[float]] = {"sparse update": [], "full reload": []}
    found: dict[str, list[float]] = {"bytes": [], "staged_s": [], "applying_s": [], "changed": []}
    llm = _start(folder, is_plugged=True)
    try:
        started = time.perf_counter()
        await llm.init_weight_transfer_engine(
            WeightTransferInitRequest({"location": str(store.root)})
        )
        connect_s = time.perf_counter() - started
        await _update(llm, 0)
        for version in range(1, repeats + 2):
            _change(weights, density, version)
            published = publisher.publish(weights, version)
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
            staged_s, pause_s = await _update(llm, version)
            await _check(llm, store, version)
            reload_s = await _paused(llm, lambda: llm.collective_rpc("reload_weights"))
            await _check(llm, store, version)
            if version > 1:  # the first warms up
                times["sparse update"].append(pause_s)
                times["full reload"].append(reload_s)
                (held,) = await llm.collective_rpc("held_weights")
                for key, value in zip(
                    found,
                    (published.delta_bytes, staged_s, held["seconds"], published.num_changed),
                    strict=True,
                ):
                    found[key].append(value)
    finally:
        llm.shutdown()
    return times, {key: statistics.median(values) for key, values in found.items()} | {
        "connect_s": connect_s
    }


async def _reload_packed(folder: Path, repeats: int) -> list[float]:
    """Time reloads in an engine without the plugin, which on a CPU packs its weights again."""
    llm = _start(folder, is_plugged=False)
    try:
        return [
            await _paused(llm, lambda: llm.collective_rpc("reload_weights"))
            for _ in range(repeats + 1)
        ][1:]
    finally:
        llm.shutdown()


def _start(folder: Path, is_plugged: bool) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 8,
    }
    if is_plugged:
        options["weight_transfer_config"] = WeightTransferConfig(backend="sparse_delta")
        options["worker_extension_cls"] = "flowtrain.engines.vllm.plugin.WeightReports"
    return AsyncLLM.from_engine_args(AsyncEngineArgs(str(folder), dtype="bfloat16", **options))


def _new_weights(folder: Path, shape: str) -> dict[str, Tensor]:
    """Make random weights and save them as a checkpoint too."""
    config = Qwen2Config(
        vocab_size=151936,
        tie_word_embeddings=shape != "7b",
        max_position_embeddings=256,
        **SHAPES[shape],
    )
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        named = dict(Qwen2ForCausalLM(config).named_parameters())
    rng = torch.Generator().manual_seed(0)
    weights = {
        name: torch.empty(meta.shape, dtype=torch.bfloat16).normal_(std=0.02, generator=rng)
        for name, meta in named.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


def _change(weights: dict[str, Tensor], density: float, seed: int) -> None:
    """Change words by one unit in the last place, up or down, as a trainer's small step does."""
    rng = torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        words = tensor.view(-1).view(torch.int16)
        at = torch.randint(0, len(words), (int(len(words) * density),), generator=rng)
        words[at] += torch.randint(0, 2, (len(at),), generator=rng, dtype=torch.int16) * 2 - 1


async def _paused(llm: Any, action: Callable[[], Awaitable[object]]) -> float:
    """Return the seconds from the pause request to the end of `resume_generation`."""
    started = time.perf_counter()
    await llm.pause_generation(mode="keep", clear_cache=False)
    await action()
    await llm.resume_generation()
    return time.perf_counter() - started


async def _update(llm: Any, version: int) -> tuple[float, float]:
    """Seconds to stage, and of the pause."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    async def action() -> None:
        await llm.update_weights(WeightTransferUpdateRequest({"version": version}))
        await llm.finish_weight_update(weight_version=str(version))

    await llm.start_weight_update()
    started = time.perf_counter()
    await llm.update_weights(WeightTransferUpdateRequest({"version": version, "stage": True}))
    while not (await llm.collective_rpc("staged_weights"))[0]:
        await asyncio.sleep(0.01)
    staged_s = time.perf_counter() - started
    return staged_s, await _paused(llm, action)


async def _check(llm: Any, store: WeightStore, version: int) -> None:
    (digests,) = await llm.collective_rpc("digest_weights")
    wanted = {name: digest_hex(d) for name, d in store.manifest(version).digests.items()}
    if digests != wanted:
        raise SystemExit(f"the engine does not hold version {version}")


if __name__ == "__main__":
    main()
