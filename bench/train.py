"""The training step of the main job:  python -m bench.train [--json F]

Two tables. First, one optimizer step on the turns of real rollouts: our packed rows, with the loss within the model's head and from whole
logits, against a plain transformers loop over padded batches of the same samples, in turn in one run, with the largest difference of
their gradients and the peak memory beyond what was there before the step. Second, where the wall time of a step of
`flowtrain.train` goes.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flowkernels import LossSpec
from torch import Tensor
from transformers import PreTrainedModel

from bench.measure import extra_bytes, median_ratio, print_table, time_in_turn, write_json
from flowtrain.agents.build import make_flow
from flowtrain.agents.expert import ScriptedPlanner
from flowtrain.algorithms import flow_grpo
from flowtrain.config import Config, parse
from flowtrain.job import Job
from flowtrain.rewards import score
from flowtrain.rft import rft
from flowtrain.rollout.collect import collect
from flowtrain.session import STAGES
from flowtrain.train import train
from flowtrain.training import head
from flowtrain.training.trainer import OptimSpec, Totals, Trainer
from flowtrain.training.tree import pack
from flowtrain.training.world import World
from flowtrain.types import Sample
from flowtrain.weights.store import WeightStore

QUICKSTART = ["--config", "configs/quickstart.toml"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    parser.add_argument("--repeats", type=int, default=10, help="timed steps of each rival (default: 10)")
    parser.add_argument("--batch-size", type=int, default=32, help="samples of a padded batch of the plain loop (default: 32)")
    parser.add_argument("--steps", type=int, default=20, help="steps of flowtrain.train to take apart (default: 20)")
    args = parser.parse_args()
    rows = step_rows(args.repeats, args.batch_size)
    shares = stage_rows(args.steps)
    print()
    print_table(rows)
    print()
    print_table(shares)
    if args.json:
        write_json(args.json, [*rows, *shares])


def step_rows(repeats: int, batch_size: int) -> list[dict[str, Any]]:
    """One optimizer step, packed and padded."""
    config = _config([*QUICKSTART, "--run.threads", "1"])
    world = World.join("cpu")
    job = Job.prepare(config, world)
    samples = _samples(job)
    job.close()
    padded_model = copy.deepcopy(job.model).train()
    padded_model.set_attn_implementation("sdpa")
    spec = LossSpec()
    plain = Trainer(copy.deepcopy(job.model), world, spec, OptimSpec(lr=1e-4))
    head.equip(job.model)
    trainer = Trainer(job.model, world, spec, OptimSpec(lr=1e-4))
    optimizer = torch.optim.AdamW(padded_model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    rows = pack(samples, 1, config.train.token_budget)
    difference = _gradient_difference(trainer, padded_model, samples, batch_size)
    rivals: dict[str, Callable[[], Any]] = {
        "flowtrain, packed": lambda: trainer.step(pack(samples, 1, config.train.token_budget)),
        "flowtrain, packed, whole logits": lambda: plain.step(pack(samples, 1, config.train.token_budget)),
        "transformers, padded": lambda: _padded_step(padded_model, optimizer, samples, batch_size),
    }
    seconds = time_in_turn(rivals, repeats)
    extra = {name: extra_bytes(run, world.device) / 1e6 for name, run in rivals.items()}
    world.leave()
    num_targets = sum(len(s.response_ids) for s in samples)
    packed_tokens = sum(len(row.input_ids_N) for row in rows[0])
    computed = dict.fromkeys(rivals, packed_tokens) | {"transformers, padded": _padded_tokens(samples, batch_size)}
    best = seconds["flowtrain, packed"]
    return [
        {
            "path": name,
            "threads": 1,
            "samples": len(samples),
            "trained_tokens": num_targets,
            "computed_tokens": computed[name],
            "ms": 1e3 * sorted(times)[len(times) // 2],
            "trained_tokens_per_s": num_targets / sorted(times)[len(times) // 2],
            "extra_mb": extra[name],
            "times_ours": median_ratio(times, best),
            "grad_difference": difference,
        }
        for name, times in seconds.items()
    ]


def stage_rows(num_steps: int) -> list[dict[str, Any]]:
    """Shares of a step's wall time, from the log of a short run on a planner that was warmed up briefly, so that its turns are real."""
    with tempfile.TemporaryDirectory() as folder:
        rft(_config([*QUICKSTART, "--run.dir", f"{folder}/warm", "--rft.num_rollouts", "4000", "--rft.num_steps", "500"]))
        off = ["--eval.every", "0", "--eval.num_tasks", "20", "--checkpoint.every", "0", "--log.num_rollouts", "0"]
        short = ["--train.num_steps", str(num_steps), "--algorithm.mode", "released"]  # the mode that drops no group
        train(_config([*QUICKSTART, "--run.dir", f"{folder}/run", "--model.path", f"{folder}/warm/model", *short, *off]))
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > 1]  # the first step warms up
    total = sum(line["step_s"] for line in steps)
    stages = [stage for stage in STAGES if stage != "eval"]
    return [
        {"stage": stage, "threads": torch.get_num_threads(), "ms_per_step": 1e3 * seconds / len(steps), "share": seconds / total}
        for stage, seconds in [(stage, sum(line[f"{stage}_s"] for line in steps)) for stage in (*stages, "other")]
    ]


def _config(argv: Sequence[str]) -> Config:
    config = parse(argv)
    assert config is not None
    return config


def _samples(job: Job) -> list[Sample]:
    """The turns of 16 questions x 8 rollouts by the scripted expert, with made-up rewards so that no group is dropped."""
    config = job.config
    engine = job.make_engine(WeightStore(Path("unused")))
    planner = ScriptedPlanner(job.make_planner(engine, 1.0), 0.2, job.tokenizer.eos_token_id)
    flow = make_flow(config, planner, job.tools, config.agent.max_turns)
    groups = score(collect(flow, job.tasks.train[:16], group_size=8, seed=0))
    order = random.Random(0)
    groups = [replace(g, trajectories=tuple(replace(t, reward=order.random()) for t in g.trajectories)) for g in groups]
    samples = list(flow_grpo(groups).samples)
    order.shuffle(samples)
    return samples


def _batches(samples: Sequence[Sample], batch_size: int) -> list[Sequence[Sample]]:
    return [samples[start : start + batch_size] for start in range(0, len(samples), batch_size)]


def _padded_tokens(samples: Sequence[Sample], batch_size: int) -> int:
    return sum(len(batch) * max(len(s.prompt_ids) + len(s.response_ids) for s in batch) for batch in _batches(samples, batch_size))


def _padded_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, samples: Sequence[Sample], batch_size: int) -> None:
    _padded_backward(model, samples, batch_size)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _padded_backward(model: PreTrainedModel, samples: Sequence[Sample], batch_size: int) -> None:
    """What a plain transformers loop does: pad, full logits, log_softmax, gather, clipped ratio."""
    normaliser = sum(sum(s.weights) for s in samples)
    for batch in _batches(samples, batch_size):
        ids, attention, old, advantage, weight = _padded_batch(batch)
        logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1]
        logprob = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        ratio = (logprob - old).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        ((loss * weight).sum() / normaliser).backward()


def _padded_batch(batch: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """ids and attention [B, L]; old log-probs, advantages and weights [B, L - 1], zero outside responses."""
    longest = max(len(s.prompt_ids) + len(s.response_ids) for s in batch)
    ids, attention = torch.zeros(len(batch), longest, dtype=torch.int64), torch.zeros(len(batch), longest, dtype=torch.int64)
    old, advantage, weight = (torch.zeros(len(batch), longest - 1) for _ in range(3))
    for row, sample in enumerate(batch):
        start, end = len(sample.prompt_ids), len(sample.prompt_ids) + len(sample.response_ids)
        ids[row, :end] = torch.tensor(sample.prompt_ids + sample.response_ids)
        attention[row, :end] = 1
        old[row, start - 1 : end - 1] = torch.tensor(sample.logprobs)
        advantage[row, start - 1 : end - 1] = sample.advantage
        weight[row, start - 1 : end - 1] = torch.tensor(sample.weights)
    return ids, attention, old, advantage, weight


def _gradient_difference(trainer: Trainer, padded_model: PreTrainedModel, samples: Sequence[Sample], batch_size: int) -> float:
    """Largest difference of a gradient entry, relative to the largest entry; both start from the same weights."""
    rows = pack(samples, 1, 8192)[0]
    trainer.forward_backward(rows, sum(float(row.weight_T.sum()) for row in rows), Totals())
    _padded_backward(padded_model, samples, batch_size)
    ours = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
    theirs = torch.cat([p.grad.flatten() for p in padded_model.parameters() if p.grad is not None])
    for model in (trainer.model, padded_model):
        model.zero_grad()
    return float((ours - theirs).abs().max() / theirs.abs().max())


if __name__ == "__main__":
    main()
