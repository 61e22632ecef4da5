"""What a training run writes, without what it computes: `python durable_run.py FOLDER`.

Marks in the log of file operations (file_ops.py) say what has been promised by then.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from flowtrain.logging import RunDir
from flowtrain.logging.jsonl import append_lines, cut_lines
from flowtrain.trainer import checkpoint, toy
from flowtrain.trainer.distributed import World
from flowtrain.trainer.optimizers import ShardOptimizer
from flowtrain.utils.files import writing
from flowtrain.weights import Publisher, WeightStore
from flowtrain.weights.format.files import writing_tensors

CONFIG = "a = 1\n"
MANIFEST = {"seed": 0}
LINES_PER_STEP = 15
"""Enough to make several blocks of a disk."""


def weights(version: int) -> dict[str, Tensor]:
    """2,400 words, of which each version changes some eight."""
    words = torch.arange(2400, dtype=torch.int16)
    for each in range(1, version + 1):
        rng = torch.Generator().manual_seed(each)
        words[torch.randint(0, 2400, (8,), generator=rng)] += 1
    return {"a": words[:2000].view(torch.bfloat16).view(50, 40), "b": words[2000:].view(torch.half)}


def tiny() -> tuple[PreTrainedModel, PreTrainedTokenizerFast, ShardOptimizer]:
    """A model of a few kilobytes, and an optimizer that has taken a step."""
    torch.manual_seed(0)
    tokenizer = toy.new_tokenizer(["a b"], vocab_size=260)
    model = toy.new_model(tokenizer, 8, 1, 1, max_positions=8)
    world = World(0, 1, torch.device("cpu"))
    optimizer = ShardOptimizer(model, world, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, tokenizer, optimizer


class DurableRun:
    """A run of which every step publishes and logs, and every other one saves a checkpoint."""

    def __init__(self, folder: Path, parts: tuple[object, ...]) -> None:
        """Begin, or resume as `run.py` does."""
        self._parts = parts
        self.lock = RunDir.lock(folder, "--run.dir")
        if not (folder / "manifest.json").exists():
            RunDir.create(folder, CONFIG, MANIFEST)
            mark("begun")
        self.dir = RunDir.open(folder)
        self.store = WeightStore(self.dir.weights)
        self.publisher = Publisher(self.store)
        with writing(self.dir.checkpoints):
            found = checkpoint.settle(self.dir.checkpoints)
        self.step = checkpoint.load_state(found)["step"] if found else 0
        mark(f"rolled back {self.step}")
        self.roll_back(self.step)
        if not self.publisher.resume(weights(self.step), self.step):
            self.roll_back(self.step - 1)
            self.publish()
        cut_lines(self.log, self.step or -1)

    @property
    def log(self) -> Path:
        return self.dir.path / "metrics.jsonl"

    def roll_back(self, step: int) -> None:
        with writing_tensors(self.store.root):
            self.store.rollback(step)

    def publish(self) -> None:
        with writing_tensors(self.store.root):
            self.publisher.publish(weights(self.step), self.step)
        mark(f"published {self.step}")
        self.store.collect_garbage(keep=1)

    def advance(self) -> None:
        self.step += 1
        self.publish()
        lines = [{"step": self.step, "text": "x" * 900} for _ in range(LINES_PER_STEP)]
        append_lines(self.log, lines)
        mark(f"logged {self.step}")

    def save(self) -> None:
        model, tokenizer, optimizer = self._parts
        checkpoints = checkpoint.Checkpoints(
            self.dir.checkpoints, World(0, 1, torch.device("cpu")), keep=1
        )
        state, step = {"cursor": self.step}, self.step
        checkpoints.save(step, model, tokenizer, optimizer, state, dtype=torch.bfloat16)
        checkpoints.close()
        mark(f"saved {self.step}")

    def close(self) -> None:
        self.publisher.close()
        self.lock.release()


def mark(text: str) -> None:
    """Put a mark into the log of file operations (file_ops.py), where there is one."""
    if marks := os.environ.get("FILE_OPS_MARKS"):
        with Path(marks).open("a") as file:
            file.write(text)


def play(folder: Path, parts: tuple[object, ...], ends: Iterable[int]) -> None:
    """Go on to each of these steps; between two of them the run ends, one step after it saved."""
    for end in ends:
        run = DurableRun(folder, parts)
        while run.step < end:
            run.advance()
            if run.step % 2 == 0:
                run.save()
        if run.step % 2 == 0:
            run.save()  # the same step again
        run.close()


if __name__ == "__main__":
    folder, parts = Path(sys.argv[1]), tiny()
    play(folder, parts, ends=(3, 4, 5))
    run = DurableRun(folder, parts)
    mark("rolled back 0")
    run.roll_back(-1)
    run.close()
