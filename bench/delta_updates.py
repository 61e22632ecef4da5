"""Real updates of a model in a folder: our trainer with fp32 masters and AdamW steps on the model's
own rollouts, and every step is published as bf16 and loaded by a reader.

A step takes the 8 rollouts of one question of reasoning-gym, packed as one tree of about 200
tokens (responses of at most 24); rollouts are sampled once, from the start, and reused in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from flowkernels import LossSpec
from torch import Tensor
from transformers import PreTrainedModel

from bench.delta_weights import U16, Step
from bench.model_folder import ModelFolder
from flowtrain.metrics import ProgressLine
from flowtrain.training.model import named_weights
from flowtrain.training.sharding import ShardSpec, shard
from flowtrain.training.trainer import OptimSpec, Trainer
from flowtrain.training.tree import pack_rows
from flowtrain.training.world import World
from flowtrain.types import Sample
from flowtrain.weights import Publisher, PublishOptions, WeightReader, WeightStore

_TOKEN_BUDGET = 4096


def measure_updates(
    path: str,
    lrs: Sequence[float],
    num_steps: int,
    num_questions: int,
    use: Callable[[Step], None],
) -> list[dict[str, Any]]:
    """Train from the folder's weights at each learning rate and return a row for each.

    `use` gets the published words before and after the first, the middle and the last step.
    """
    folder = ModelFolder.load(path)
    groups = folder.rollouts(num_questions)
    world = World.join("cpu")
    line = ProgressLine(len(lrs) * num_steps, 0, True)
    rows = []
    for number, lr in enumerate(lrs):
        # Loaded anew, because the trainer changes it in place.
        model = folder.model if number == 0 else ModelFolder.load(path).model
        with TemporaryDirectory(prefix="flowtrain-bench-") as store:
            run = _Run(model, world, lr, WeightStore(Path(store)))
            show = partial(_show, line, number * num_steps, lr)
            rows.append(run.measure(groups, num_steps, use, show))
    world.leave()
    return rows


def _show(line: ProgressLine, done: int, lr: float, step: int, density: float) -> None:
    line.show(done + step, f"lr {lr:g}, {100 * density:.3g} % changed")


class _Run:
    """A trainer, its publisher, and a reader of what it publishes."""

    def __init__(self, model: PreTrainedModel, world: World, lr: float, store: WeightStore) -> None:
        self._lr, self._store = lr, store
        self._model = shard(model, world, ShardSpec(torch.float32))
        self._trainer = Trainer(self._model, world, LossSpec(), OptimSpec(lr=lr))
        self._publisher = Publisher(store, PublishOptions(torch.bfloat16))
        weights = named_weights(self._model)
        self._publisher.publish(weights, 0)
        self._served = {
            name: torch.empty(weight.shape, dtype=torch.bfloat16)
            for name, weight in weights.items()
        }
        self._reader = WeightReader(store, self._served)
        self._reader.load(0)

    def measure(
        self,
        groups: Sequence[Sequence[Sample]],
        num_steps: int,
        use: Callable[[Step], None],
        show: Callable[[int, float], None],
    ) -> dict[str, Any]:
        """Take the steps. Times are medians over the versions that are deltas alone."""
        looked_at = {1, (num_steps + 1) // 2, num_steps}
        steps = []
        for step in range(1, num_steps + 1):
            old = _words(self._served) if step in looked_at else []
            steps.append(self._step(step, groups[(step - 1) % len(groups)]))
            if step in looked_at:
                use(Step(f"lr {self._lr:g}, step {step}", old, _words(self._served)))
            show(step, steps[-1]["density"])
        densities = [each["density"] for each in steps]
        deltas = [each for each in steps if not each["is_snapshot"]] or steps
        return {
            "lr": self._lr,
            "steps": num_steps,
            "tokens a step": statistics.mean(each["tokens"] for each in steps),
            "density % first": 100 * densities[0],
            "min": 100 * min(densities),
            "mean": 100 * statistics.mean(densities),
            "max": 100 * max(densities),
            "last": 100 * densities[-1],
            "bytes/changed": sum(each["bytes"] for each in steps)
            / sum(each["changed"] for each in steps),
            "delta mb": statistics.mean(each["bytes"] for each in steps) / 1e6,
            "snapshots": len([each for each in steps if each["is_snapshot"]]),
            **{
                f"{key} s": statistics.median(each[key] for each in deltas)
                for key in ("train", "publish", "load")
            },
            "densities": densities,
        }

    def _step(self, step: int, samples: Sequence[Sample]) -> dict[str, Any]:
        rows = pack_rows(samples, _TOKEN_BUDGET)
        train_s, _ = _timed(lambda: self._trainer.step([rows], step))
        weights = named_weights(self._model)
        publish_s, published = _timed(lambda: self._publisher.publish(weights, step))
        load_s, _ = _timed(lambda: self._reader.load(step))
        self._store.collect_garbage(1)
        return {
            "tokens": sum(len(row.input_ids_N) for row in rows),
            "density": published.num_changed / published.num_words,
            "changed": published.num_changed,
            "bytes": published.delta_bytes,
            "is_snapshot": bool(published.snapshot_bytes),
            "train": train_s,
            "publish": publish_s,
            "load": load_s,
        }


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = run()
    return time.perf_counter() - started, result


def _words(tensors: dict[str, Tensor]) -> list[U16]:
    return [
        tensor.view(torch.int16).flatten().numpy().view(np.uint16).copy()
        for tensor in tensors.values()
    ]
