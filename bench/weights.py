"""The pause of a live vLLM:  python -m bench.weights [--shape 0.5b] [--density 0.01] [--json F]

One engine serves random weights of a Qwen2.5 shape. In turn it takes a sparse update, staged while
it serves and applied within a pause, and a full reload of the same version from a checkpoint by
vLLM's own `reload_weights`, within the same kind of pause, from the page cache. Last, an engine
without the plugin reloads the checkpoint, which on a CPU packs its weights again. `--no-reload`
leaves the reloads out; `--sleep` adds the seconds of going to sleep and of waking up. After each
update, reload and sleep, the digests of all words are compared with the manifest. On a GPU, the
trainer's weights are on the same device as vLLM. The bench needs vLLM and an installed flowtrain.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from bench.measure import median_ratio, new_parser, report
from flowtrain.weights import Publisher, SnapshotPolicy, WeightStore
from flowtrain.weights.format.manifest import digest_hex

_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads",
)  # fmt: skip
SHAPES = {
    "tiny": dict(zip(_SIZES, (256, 1024, 4, 4, 2), strict=True)),
    "0.5b": dict(zip(_SIZES, (896, 4864, 24, 14, 2), strict=True)),
    "1.5b": dict(zip(_SIZES, (1536, 8960, 28, 12, 2), strict=True)),
    "7b": dict(zip(_SIZES, (3584, 18944, 28, 28, 4), strict=True)),
}


def parser_of(doc: str | None, shape: str, repeats: int) -> argparse.ArgumentParser:
    """Make a parser of what benches of updates have in common, with these defaults."""
    parser = new_parser(doc)
    parser.add_argument("--shape", choices=SHAPES, default=shape, help="of Qwen2.5")
    parser.add_argument("--density", type=float, default=0.01, help="share of changed words")
    parser.add_argument("--repeats", type=int, default=repeats, help="versions timed")
    return parser


def main() -> None:
    parser = parser_of(__doc__, shape="0.5b", repeats=5)
    parser.add_argument("--no-reload", action="store_true", help="no checkpoint, and no reloads")
    parser.add_argument("--sleep", action="store_true", help="time sleep and waking too, on a GPU")
    args = parser.parse_args()
    if args.sleep and not torch.cuda.is_available():
        parser.error("--sleep needs a GPU: on a CPU vLLM does not sleep")
    with TemporaryDirectory(prefix="flowtrain-bench-") as folder:
        rows = asyncio.run(_measure(Path(folder), args))
    report(args.json, rows)


async def _measure(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    config = config_of(args.shape)
    config.save_pretrained(folder)
    weights = new_weights(config, "cuda" if torch.cuda.is_available() else "cpu")
    if not args.no_reload:
        _save(folder, weights)
    times, facts = await _in_turn(folder, weights, args)
    if not args.no_reload:
        times["full reload, packed weights"] = await _reload_packed(folder, args.repeats)
    num_words = sum(tensor.numel() for tensor in weights.values())
    common = {"shape": args.shape, "words": num_words, "density": facts.pop("changed") / num_words}
    rows = []
    for path, seconds in times.items():
        row = {"path": path, **common, "bytes": 2 * num_words}
        row["pause_s"] = statistics.median(seconds)
        row["times_ours"] = median_ratio(seconds, times["sparse update"])
        rows.append({**row, **facts} if path == "sparse update" else row)
    return rows


async def _in_turn(
    folder: Path, weights: dict[str, Tensor], args: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the seconds of each pause, and medians of other facts about the updates."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    store = WeightStore(folder / "weights")
    publisher = Publisher(store, policy=SnapshotPolicy(max_deltas=1000))
    publisher.publish(weights, 0)
    times: dict[str, list[float]] = defaultdict(list)
    found: dict[str, list[float]] = defaultdict(list)
    llm = _start(folder, args)
    try:
        started = time.perf_counter()
        await llm.init_weight_transfer_engine(
            WeightTransferInitRequest({"location": str(store.root)})
        )
        connect_s = time.perf_counter() - started
        await _update(llm, 0)
        for version in range(1, args.repeats + 2):
            change(weights, args.density, version)
            published = publisher.publish(weights, version)
            staged_s, pause_s = await _update(llm, version)
            await _check(llm, store, version)
            (held,) = await llm.collective_rpc("held_weights")
            pauses = {"sparse update": pause_s}
            if not args.no_reload:
                _save(folder, weights)
                reload = partial(llm.collective_rpc, "reload_weights")
                pauses["full reload"] = await _paused(llm, reload)
                await _check(llm, store, version)
            facts = {
                "bytes": published.delta_bytes,
                "staged_s": staged_s,
                "applying_s": held["seconds"],
                "changed": published.num_changed,
            }
            print(f"version {version}: {pauses}", flush=True)
            for kept, values in ((times, pauses), (found, facts)):
                for key, value in values.items() if version > 1 else ():  # the first warms up
                    kept[key].append(value)
        if args.sleep:
            times |= await _sleep(llm, store, args.repeats)
    finally:
        llm.shutdown()
    medians = {key: statistics.median(values) for key, values in found.items()}
    return times, medians | {"connect_s": connect_s}


async def _sleep(llm: Any, store: WeightStore, repeats: int) -> dict[str, list[float]]:
    """Seconds of going to sleep, with the weights in host memory, and of waking up."""
    version = store.head() or 0
    times: dict[str, list[float]] = {"sleep": [], "wake up": []}
    for _ in range(repeats + 1):
        started = time.perf_counter()
        await llm.sleep(level=1)
        asleep = time.perf_counter()
        await llm.wake_up()
        times["wake up"].append(time.perf_counter() - asleep)
        times["sleep"].append(asleep - started)
        await _check(llm, store, version)
    return {name: seconds[1:] for name, seconds in times.items()}  # the first gets host memory


async def _reload_packed(folder: Path, repeats: int) -> list[float]:
    """Time reloads in an engine without the plugin, which on a CPU packs its weights again."""
    llm = _start(folder, None)
    try:
        return [
            await _paused(llm, lambda: llm.collective_rpc("reload_weights"))
            for _ in range(repeats + 1)
        ][1:]
    finally:
        llm.shutdown()


def _start(folder: Path, plugged: argparse.Namespace | None) -> Any:
    """Start vLLM; None: without the plugin."""
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 8,
    }
    if torch.cuda.is_available():
        options["gpu_memory_utilization"] = 0.5  # the trainer's weights have the rest
        # A forked process cannot use the device that this one uses.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    else:
        options["kv_cache_memory_bytes"] = 1 << 30  # or vLLM wants all memory of the machine
    if plugged is not None:
        options["weight_transfer_config"] = WeightTransferConfig(backend="sparse_delta")
        options["worker_extension_cls"] = "flowtrain.inference.vllm.plugin.WeightReports"
        options |= {"load_format": "dummy"} if plugged.no_reload else {}
        options |= {"enable_sleep_mode": True} if plugged.sleep else {}
    options["trust_remote_code"] = False
    return AsyncLLM.from_engine_args(AsyncEngineArgs(str(folder), dtype="bfloat16", **options))


def config_of(shape: str) -> Qwen2Config:
    """Return the config of a shape of `SHAPES`; up to 1.5B, Qwen2.5 ties its head."""
    sizes = {"vocab_size": 151936, "max_position_embeddings": 256, **SHAPES[shape]}
    config = Qwen2Config(tie_word_embeddings=shape != "7b", **sizes)
    config.architectures = ["Qwen2ForCausalLM"]
    return config


def new_weights(config: Qwen2Config, device: str) -> dict[str, Tensor]:
    """Make random bf16 weights on a device, by the names of a checkpoint."""
    with torch.device("meta"):
        named = dict(Qwen2ForCausalLM(config).named_parameters())
    rng = torch.Generator(device).manual_seed(0)
    return {
        name: torch.empty(meta.shape, dtype=torch.bfloat16, device=device).normal_(
            std=0.02, generator=rng
        )
        for name, meta in named.items()
    }


def _save(folder: Path, weights: dict[str, Tensor]) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change(weights: Mapping[str, Tensor], density: float, seed: int) -> int:
    """Change words by one unit in the last place, up or down, as a trainer's small step does.
    Returns how many.
    """
    device = next(iter(weights.values())).device
    draw = partial(torch.randint, generator=torch.Generator(device).manual_seed(seed))
    num_changed = 0
    for tensor in weights.values():
        words = tensor.view(-1).view(torch.int16)
        at = draw(0, len(words), (int(len(words) * density),), device=device)
        at = at.unique()  # so that a word that is drawn twice changes once, on any device
        words[at] += draw(0, 2, at.shape, device=device, dtype=torch.int16) * 2 - 1
        num_changed += len(at)
    return num_changed


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
