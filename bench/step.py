"""One optimizer step on trees, on packed samples and on padded ones:  python -m bench.step [--json F]

Batches: a group of 8 rollouts shaped as AgentFlow's (a long prompt that is constant for the question, a memory that grows with the turns, a
response a tenth as long as its prompt), of 3 and of 10 turns, and the turns of real rollouts of the main job. Paths: our trees; our rows
without sharing (what a packed trainer computes); a plain transformers loop over padded batches, as TRL runs it. All in turn in one
run on one model; gradients are compared before.
"""

from __future__ import annotations

import argparse
import copy
import random
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
from flowtrain.job import Job
from flowtrain.options import parse
from flowtrain.rewards import score
from flowtrain.rollout.collect import collect
from flowtrain.training import attention, head
from flowtrain.training.model import new_model, new_tokenizer
from flowtrain.training.trainer import OptimSpec, Totals, Trainer
from flowtrain.training.tree import Row, pack_rows
from flowtrain.training.world import World
from flowtrain.types import Sample
from flowtrain.weights.store import WeightStore

QUICKSTART = ["--config", "configs/quickstart.toml", "--run.threads", "1"]
VOCAB = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each path (default: 3)")
    parser.add_argument("--batch-size", type=int, default=8, help="samples of a padded batch (default: 8)")
    parser.add_argument(
        "--scale", type=float, default=0.1, help="lengths of the AgentFlow-shaped batches against the real ones (default: 0.1)"
    )
    parser.add_argument("--hidden", type=int, default=256, help="width of their model (default: 256)")
    parser.add_argument("--layers", type=int, default=4, help="layers of their model (default: 4)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    world = World.join("cpu")
    job = Job.prepare(_quickstart(), world)
    cases = {f"AgentFlow shape, {turns} turns": agentflow_samples(turns, args.scale) for turns in (3, 10)}
    rows = []
    for name, samples in cases.items():
        longest = max(len(s.prompt_ids) + len(s.response_ids) for s in samples)
        torch.manual_seed(0)
        model = new_model(new_tokenizer(["a"], 258), args.hidden, args.layers, args.hidden // 64, longest)
        model.resize_token_embeddings(VOCAB, mean_resizing=False)
        rows += compare(name, model, samples, world, args.repeats, args.batch_size)
    rows += compare("main job, 16 questions", job.model, main_job_samples(job), world, args.repeats, 32)
    job.close()
    world.leave()
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


def agentflow_samples(num_turns: int, scale: float, group_size: int = 8) -> list[Sample]:
    """A group of random tokens. Unscaled: 3,000 constant tokens (tools 2,300, template 300, question and analysis 400), 500 of memory per
    turn, 20 that close the prompt, and responses of 200 to 400."""
    rng = random.Random(0)

    def ids(number: float) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB) for _ in range(max(1, round(scale * number))))

    constant, closing, samples = ids(3000), ids(20), []
    for _ in range(group_size):
        memory: tuple[int, ...] = ()
        advantage = rng.uniform(-1, 1)
        for _ in range(num_turns):
            response = ids(rng.uniform(200, 400))
            logprobs = tuple(-7.6 + rng.gauss(0, 0.1) for _ in response)
            samples.append(Sample(constant + memory + closing, response, logprobs, advantage, (1 / len(response),) * len(response)))
            memory += ids(500)
    return samples


def main_job_samples(job: Job) -> list[Sample]:
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


def compare(
    name: str, model: PreTrainedModel, samples: Sequence[Sample], world: World, repeats: int, batch_size: int
) -> list[dict[str, Any]]:
    """The three paths on one batch."""
    plain = copy.deepcopy(model).train()
    plain.set_attn_implementation("sdpa")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    model.set_attn_implementation(attention.NAME)
    head.equip(model)
    trainer = Trainer(model, world, LossSpec(), OptimSpec(lr=1e-4))
    packed = {path: pack_rows(samples, 16384, share) for path, share in (("tree", True), ("packed", False))}
    differences = {path: _gradient_difference(trainer, rows, plain, samples, batch_size) for path, rows in packed.items()}
    paths: dict[str, Callable[[], Any]] = {
        "tree": lambda: trainer.step([pack_rows(samples, 16384)]),
        "packed": lambda: trainer.step([pack_rows(samples, 16384, share=False)]),
        "padded": lambda: _padded_step(plain, optimizer, samples, batch_size),
    }
    seconds = time_in_turn(paths, repeats)
    extra = {path: extra_bytes(run, world.device) / 1e6 for path, run in paths.items()}
    tokens = {path: sum(len(row.input_ids_N) for row in rows) for path, rows in packed.items()} | {
        "padded": _padded_tokens(samples, batch_size)
    }
    pairs = {path: sum(map(_pairs, rows)) for path, rows in packed.items()} | {"padded": _padded_pairs(samples, batch_size)}
    return [
        {
            "batch": name,
            "path": path,
            "threads": 1,
            "tokens": tokens[path],
            "tokens_of_tree": tokens[path] / tokens["tree"],
            "gflops": _flops(model, tokens[path], pairs[path], samples) / 1e9,
            "ms": 1e3 * sorted(times)[len(times) // 2],
            "time_of_tree": median_ratio(times, seconds["tree"]),
            "extra_mb": extra[path],
            "grad_difference": differences.get(path, 0.0),
        }
        for path, times in seconds.items()
    ]


def _quickstart() -> Any:
    config = parse(QUICKSTART)
    assert config is not None
    return config


def _pairs(row: Row) -> int:
    """Queries times the keys that they see."""
    return int((row.position_ids_N + 1).sum())


def _padded_pairs(samples: Sequence[Sample], batch_size: int) -> int:
    longest = [max(len(s.prompt_ids) + len(s.response_ids) for s in batch) for batch in _batches(samples, batch_size)]
    return sum(len(batch) * n * (n + 1) // 2 for batch, n in zip(_batches(samples, batch_size), longest, strict=True))


def _flops(model: PreTrainedModel, num_tokens: int, num_pairs: int, samples: Sequence[Sample]) -> float:
    """Forward and backward: 6 per parameter of a layer and token, 12 per channel of a layer and pair, 6 per head entry and target."""
    config = model.config
    head_size = config.vocab_size * config.hidden_size
    body = sum(p.numel() for p in model.get_decoder().layers.parameters())
    width = config.num_attention_heads * config.head_dim
    num_targets = sum(len(s.response_ids) for s in samples)
    return 6.0 * body * num_tokens + 12.0 * config.num_hidden_layers * width * num_pairs + 6.0 * head_size * num_targets


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


def _gradient_difference(
    trainer: Trainer, rows: Sequence[Row], plain: PreTrainedModel, samples: Sequence[Sample], batch_size: int
) -> float:
    """Largest difference of a gradient entry, relative to the largest entry; both start from the same weights."""
    trainer.forward_backward(rows, sum(float(row.weight_T.sum()) for row in rows), Totals())
    _padded_backward(plain, samples, batch_size)
    ours = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
    theirs = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
    for model in (trainer.model, plain):
        model.zero_grad()
    return float((ours - theirs).abs().max() / theirs.abs().max())


if __name__ == "__main__":
    main()
