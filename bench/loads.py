"""A load through the GPU's path without vLLM:  python -m bench.loads [--shape 1.5b]
[--density 0.01] [--repeats 3] [--folder F] [--json F]

The trainer's weights, random ones of a Qwen2.5 shape, are published from the device. A model that
fuses its parameters as vLLM does takes each version on the same device, through `ShardedTarget`:
staged, then loaded within what would be a pause. Beside it, plain tensors on the CPU take it
through `HostTensors`. After each load, the digests of all words are compared with the manifest.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bench.measure import report
from bench.weights import change, config_of, new_weights, parser_of
from flowtrain.inference.vllm.plan import make_plan, prove
from flowtrain.inference.vllm.sharded_target import ShardedTarget
from flowtrain.weights import Publisher, PublishOptions, SnapshotPolicy, WeightReader, WeightStore
from flowtrain.weights.format.manifest import Layout
from flowtrain.weights.ranks import SingleRank

_T = TypeVar("_T")


class FusedModel(nn.Module):
    """The parameters of vLLM's Qwen2, unset, and a `load_weights` that copies as vLLM's does."""

    def __init__(self, stored: Mapping[str, Tensor]) -> None:
        """Make parameters for stored tensors, on their device."""
        super().__init__()
        parts: dict[str, list[Tensor]] = defaultdict(list)
        self.slices: dict[str, tuple[str, int]] = {}
        """The parameter and the first row there, by stored tensor."""
        for name, tensor in stored.items():
            fused = re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", name)
            fused = re.sub(r"\.(gate|up)_proj\.", ".gate_up_proj.", fused).replace(".", "_")
            self.slices[name] = fused, sum(map(len, parts[fused]))
            parts[fused].append(tensor)
        for fused, tensors in parts.items():
            shape = sum(map(len, tensors)), *tensors[0].shape[1:]
            self.register_parameter(fused, nn.Parameter(tensors[0].new_empty(shape)))

    def load_weights(self, found: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in found:
            fused, first = self.slices[name]
            self.get_parameter(fused).data.narrow(0, first, len(tensor)).copy_(tensor)


def measure(
    shape: str, density: float, repeats: int, device: str, folder: Path | None = None
) -> list[dict[str, Any]]:
    """Return a row for each path: medians over `repeats` versions, each of which changes a share
    `density` of the words, after one that warms up. The store is made in `folder`.

    `connect_s` is the plan with its proof, `prove_s` the proof alone; `ns_per_change` is the pause
    by changed word. `extra_bytes` is the peak of a GPU's memory beside the weights, from the begin
    of staging to the end of the pause.

    Raises:
        RuntimeError: a version was not loaded as a delta, or not word for word.
    """
    threads = torch.get_num_threads()
    weights = new_weights(config_of(shape), device)
    common = {"shape": shape, "words": sum(map(Tensor.numel, weights.values()))}
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    with TemporaryDirectory(prefix="flowtrain-bench-", dir=folder) as root:
        store = WeightStore(Path(root))
        options, policy = PublishOptions(num_threads=threads), SnapshotPolicy(max_deltas=1000)
        publisher = Publisher(store, options, policy=policy)
        publisher.publish(weights, 0)
        views, once = _connect(weights, store.manifest(0).layout, threads)
        plain = {name: torch.empty_like(tensor, device="cpu") for name, tensor in weights.items()}
        readers = {
            f"views on {device}": WeightReader(store, views, threads),
            "tensors on cpu": WeightReader(store, plain, threads),  # through `HostTensors`
        }
        for reader in readers.values():
            _take(reader, 0)
        for version in range(1, repeats + 2):
            num_changed = change(weights, density, version)
            published, publish_s = _timed(partial(publisher.publish, weights, version))
            assert published.num_changed == num_changed, published
            facts = {"changed": num_changed, "delta_bytes": published.delta_bytes}
            for name, reader in readers.items():
                found[name].append({**facts, "publish_s": publish_s, **_take(reader, version)})
                print(f"version {version}, {name}: {found[name][-1]}", flush=True)
    rows = []
    for name, (_, *versions) in found.items():
        row = {key: statistics.median(each[key] for each in versions) for key in versions[0]}
        row["ns_per_change"] = 1e9 * row["pause_s"] / row["changed"]
        rows.append({"path": name, **common, **row})
    rows[0] |= once
    return rows


def _connect(
    weights: Mapping[str, Tensor], layout: Layout, num_threads: int
) -> tuple[ShardedTarget, dict[str, float]]:
    """Plan and prove the loads of a fused model, as vLLM's worker does."""
    model = FusedModel(weights)
    load, tensors = model.load_weights, list(model.parameters())
    plan, plan_s = _timed(lambda: make_plan(layout, load, tensors, SingleRank()))
    _, prove_s = _timed(lambda: prove(plan, load, tensors, SingleRank()))
    assert not plan.dense, plan.dense
    target = ShardedTarget(plan, SingleRank(), lambda whole: load(whole.items()), num_threads)
    return target, {"connect_s": plan_s + prove_s, "prove_s": prove_s}


def _take(reader: WeightReader, version: int) -> dict[str, float]:
    """Stage and load a version, and check all words."""
    before = 0
    if has_gpu := torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    _, staged_s = _timed(lambda: reader.stage(version).result())
    loaded, pause_s = _timed(lambda: reader.load(version))
    extra = {"extra_bytes": torch.cuda.max_memory_allocated() - before} if has_gpu else {}
    if version and loaded.mode != "delta":
        raise RuntimeError(f"version {version} was loaded by {loaded.mode}: {loaded.reason}")
    if wrong := reader.damaged():
        raise RuntimeError(f"{wrong[0]!r} is not that of version {version}")
    return {"staged_s": staged_s, "pause_s": pause_s, **extra}


def _timed(run: Callable[[], _T]) -> tuple[_T, float]:
    """Return what a call returns, and its seconds; a GPU has nothing else to do meanwhile."""
    _synchronize()
    started = time.perf_counter()
    result = run()
    _synchronize()
    return result, time.perf_counter() - started


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = parser_of(__doc__, shape="1.5b", repeats=3)
    parser.add_argument("--folder", type=Path, help="where the store is made, such as a tmpfs")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report(args.json, measure(args.shape, args.density, args.repeats, device, args.folder))


if __name__ == "__main__":
    main()
