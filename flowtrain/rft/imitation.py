"""The imitation of samples: what can be trained, the steps, and the model that comes of it."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowkernels import LossSpec

from flowtrain.algorithms import filter_samples
from flowtrain.config.command import INTERRUPTED, Interrupt
from flowtrain.logging import MetricsLog, Progress, RunDir
from flowtrain.records import Call, FilterReason, Sample, TrainBatch
from flowtrain.trainer.balance import balance
from flowtrain.trainer.cost import ForwardCost
from flowtrain.trainer.lr_schedule import linear
from flowtrain.trainer.model.loading import export, full_weights
from flowtrain.trainer.packing import pack
from flowtrain.trainer.setup.components import LearnerComponents
from flowtrain.trainer.setup.learner import make_trainer
from flowtrain.trainer.trainer import OptimSpec
from flowtrain.utils.files import put_folder, remove, sync_tree
from flowtrain.utils.seeds import derive_seed
from flowtrain.weights.format.files import writing_tensors


def sample_of(call: Call, prompt_weight: float) -> Sample:
    """Make a sample of a call to imitate; an empty response stays empty.

    With a prompt weight, every token but the first is a target.
    """
    prompt, response, logprobs = call.prompt_ids, call.response_ids, call.logprobs
    weights = (1.0,) * len(response)
    if prompt_weight and response:
        num_before = len(prompt) - 1
        weights = (prompt_weight,) * num_before + weights
        logprobs = (0.0,) * num_before + logprobs
        response = prompt[1:] + response
        prompt = prompt[:1]
    return Sample(prompt, response, logprobs, (1.0,) * len(response), weights)


def trainable(components: LearnerComponents, samples: Sequence[Sample]) -> TrainBatch:
    """Leave out, and count, what cannot be trained or is longer than `rft.max_tokens`."""
    shape = components.model.config
    max_tokens = components.config.rft.max_tokens or math.inf
    short = tuple(s for s in samples if len(s.prompt_ids) + len(s.response_ids) <= max_tokens)
    num_long = len(samples) - len(short)
    return filter_samples(
        TrainBatch(short, num_filtered={FilterReason.TOO_LONG: num_long}),
        shape.max_position_embeddings,
        shape.vocab_size,
    )


def fit(
    components: LearnerComponents,
    batch: TrainBatch,
    counts: dict[str, Any],
    run_dir: RunDir,
    interrupt: Interrupt,
    started: float,
) -> int:
    """Imitate the samples of all ranks, export the model, and return the exit code."""
    rft = components.config.rft
    num_steps = rft.num_steps or math.ceil(rft.num_epochs * counts["num_turns"] / rft.batch_size)
    last_step = _imitate(components, batch.samples, num_steps, run_dir, interrupt)
    facts = {"seconds": time.monotonic() - started, **counts, "num_steps": last_step}
    _export(components, run_dir.path / "model", facts)
    return INTERRUPTED if interrupt.requested else 0


def _imitate(
    components: LearnerComponents,
    samples: Sequence[Sample],
    num_steps: int,
    run_dir: RunDir,
    interrupt: Interrupt,
) -> int:
    """Fine-tune with a warm-up and a linear decay; return the last step."""
    config, world, rft = components.config, components.world, components.config.rft
    trainer = make_trainer(
        components,
        loss=LossSpec("nll"),
        # A policy imitates with the experts that it will sample with.
        optim=OptimSpec(
            lr=rft.lr, betas=(0.9, 0.95), weight_decay=0.0, grad_clip=1.0, replays_routes=False
        ),
    )
    cost = ForwardCost.of(components.model).flops
    seed = derive_seed(config.run.seed, "batches", world.rank)
    batch_stream = batches(samples, rft.batch_size // world.size, seed)
    metrics = None
    if world.is_main:
        metrics = MetricsLog(run_dir.path, tensorboard=config.log.tensorboard)
    progress = Progress(num_steps, 0, world.is_main)
    step = 0
    for step in range(1, num_steps + 1):
        trainer.set_lr(linear(rft.lr, step, num_steps, rft.warmup_steps))
        rows = pack(next(batch_stream), 1, world.size)
        stats = trainer.step(balance(rows, cost, world, num_takers=world.size), step)
        if metrics is not None and step % 10 == 0:
            metrics.log({"step": step, **stats})
        progress.update({"step": step, "loss": stats["loss"]})
        # Collective, so that all ranks end after the same step.
        if step % 10 == 0 and world.max([interrupt.requested])[0]:
            break
    if metrics is not None:
        metrics.close()
    return step


def batches(samples: Sequence[Sample], batch_size: int, seed: int) -> Iterator[list[Sample]]:
    """Yield batches of shuffled epochs without end."""
    order = random.Random(seed)
    queue: list[Sample] = []
    while True:
        while len(queue) < batch_size:
            queue += order.sample(samples, len(samples))
        yield queue[:batch_size]
        queue = queue[batch_size:]


def _export(components: LearnerComponents, path: Path, facts: dict[str, Any]) -> None:
    """Write the model for `from_pretrained`, and what it was made from; collective."""
    # Collective, so before the other ranks return.
    weights = full_weights(components.model)
    if not components.world.is_main:
        return
    # Written beside and then moved: what stands there is a whole model.
    scratch = path.with_name(f"{path.name}.writing")
    with writing_tensors(path):
        remove(scratch)
        export(components.model, components.tokenizer, weights, scratch)
        (scratch / "rft.json").write_text(json.dumps(facts))
        sync_tree(scratch)
        put_folder(scratch, path)
    print(f"model: {path}")


def named(names: Sequence[str], counts: Sequence[float]) -> dict[str, int]:
    """Return the counts above 0 by name; what comes after the last name is left."""
    pairs = zip(names, counts, strict=False)
    return {str(name): round(number) for name, number in pairs if number}


def listed(form: str, counts: Mapping[str, int]) -> str:
    """Format counts by name, or nothing where there are none."""
    text = ", ".join(f"{number} {name}" for name, number in counts.items())
    return form.format(text) if counts else ""
