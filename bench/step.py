"""One optimizer step on trees, on packed samples and on padded ones:  python -m bench.step [--json F]

Batches: a group of 8 rollouts shaped as AgentFlow's (a long prompt that is constant for the question, a memory that grows with the turns, a
response a tenth as long as its prompt), of 3 and of 10 turns; the turns of the main job's scripted expert; and a batch recorded from the
main job itself: rollouts of its planner after a short warm-up, with their rewards. Paths: our trees; our rows without sharing (what a
packed trainer computes); a plain transformers loop and TRL's loss over padded batches (`bench/step_rivals.py`). All in turn in one run on
one model; gradients are compared before.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flowkernels import LossSpec
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from bench.measure import extra_bytes, median_ratio, print_table, time_in_turn, write_json
from bench.step_rivals import Transformers, Trl
from flowtrain.agents.expert import ScriptedPlanner
from flowtrain.agents.flow import Flow
from flowtrain.agents.planner import PolicyPlanner
from flowtrain.algorithms import flow_grpo, screen
from flowtrain.config import Config
from flowtrain.job import Job
from flowtrain.options import parse
from flowtrain.rewards import score
from flowtrain.rft import rft
from flowtrain.rollout.collect import collect
from flowtrain.training import attention
from flowtrain.training.cost import ForwardCost
from flowtrain.training.devices import peak_tflops
from flowtrain.training.model import ShardSpec, named_weights, shard
from flowtrain.training.trainer import OptimSpec, Totals, Trainer
from flowtrain.training.tree import Row, pack_rows
from flowtrain.training.world import World
from flowtrain.types import Group, Sample
from flowtrain.weights.store import WeightStore

QUICKSTART = ["--config", "configs/quickstart.toml", "--run.threads", "1"]
VOCAB = 2000
SHAPES = {
    "small": (256, 682, 4, 4, 4, VOCAB),
    "0.5b": (896, 4864, 24, 14, 2, 151936),
    "1.5b": (1536, 8960, 28, 12, 2, 151936),
}
"""Width, width of the MLP, layers, heads, key heads, words; random weights. The larger two are Qwen2.5's and want a GPU."""


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    warm = tempfile.TemporaryDirectory()
    if args.warm_steps:
        rft(_config(f"--run.dir={warm.name}/warm", "--rft.num_rollouts=2000", f"--rft.num_steps={args.warm_steps}"))
    world = World.join("auto")
    rows = []
    for turns in (3, 10):
        samples = agentflow_samples(turns, args.scale)
        longest = max(len(s.prompt_ids) + len(s.response_ids) for s in samples)
        rows += compare(f"AgentFlow shape, {turns} turns", random_model(args.shape, longest), samples, world, args, args.batch_size)
    job = Job.prepare(_config(), world)
    rows += compare("main job, scripted", job.model, scripted_samples(job), world, args, 32)
    job.close()
    if args.warm_steps:
        job = Job.prepare(_config(f"--model.path={warm.name}/warm/model"), world)
        rows += compare("main job, recorded", job.model, recorded_samples(job, Path(warm.name)), world, args, 32)
        job.close()
    world.leave()
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each path (default: 3)")
    parser.add_argument("--batch-size", type=int, default=8, help="samples of a padded batch (default: 8)")
    parser.add_argument("--scale", type=float, default=0.1, help="lengths of AgentFlow-shaped batches against the real ones (default: 0.1)")
    parser.add_argument("--shape", choices=SHAPES, default="small", help="their model (default: small)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of forward and backward pass")
    parser.add_argument("--token-budget", type=int, default=16384, help="tokens per row (default: 16384)")
    parser.add_argument("--warm-steps", type=int, default=300, help="of the planner that is recorded; 0: record none (default: 300)")
    parser.add_argument("--peak-tflops", type=float, default=0.0, help="of the device, for MFU; 0: as the table of GPUs has it")
    return parser.parse_args()


def random_model(shape: str, max_positions: int) -> PreTrainedModel:
    width, mlp, layers, heads, key_heads, vocab = SHAPES[shape]
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)


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
            samples.append(
                Sample(constant + memory + closing, response, logprobs, (advantage,) * len(response), (1 / len(response),) * len(response))
            )
            memory += ids(500)
    return samples


def scripted_samples(job: Job) -> list[Sample]:
    """The turns of 16 questions x 8 rollouts by the scripted expert, with made-up rewards so that no group is dropped."""
    flow = job.make_flow(job.make_no_engines(), job.config.agent.max_turns)
    assert isinstance(flow.planner, PolicyPlanner)
    order = random.Random(0)
    groups = _rollouts(job, replace(flow, planner=ScriptedPlanner(flow.planner, 0.2, job.tokenizer.eos_token_id)))
    return _samples([replace(g, trajectories=tuple(replace(t, reward=order.random()) for t in g.trajectories)) for g in groups], job)


def recorded_samples(job: Job, place: Path) -> list[Sample]:
    """Of 16 questions x 8 rollouts by the planner, with the sampler's log-probs and the rewards that they got."""
    store = WeightStore(place / "weights")
    engines = job.make_policy_engines({"planner": store})
    job.make_publisher(store, job.world).publish(named_weights(job.model), 0)
    engines["planner"].load(0)
    return _samples(_rollouts(job, job.make_flow(engines, job.config.agent.max_turns)), job)


def _rollouts(job: Job, flow: Flow) -> list[Group]:
    return score(collect(flow, job.tasks.train[:16], group_size=8, seed=0))


def _samples(groups: Sequence[Group], job: Job) -> list[Sample]:
    """In random order, as a loop over padded batches takes them; every sample counts alike, which TRL's loss is made for."""
    batch = screen(flow_grpo(groups, "released"), job.model.config.max_position_embeddings)
    samples = [replace(s, weights=(1 / len(s.response_ids),) * len(s.response_ids)) for s in batch.samples]
    random.Random(0).shuffle(samples)
    return samples


def compare(
    name: str, model: PreTrainedModel, samples: Sequence[Sample], world: World, args: argparse.Namespace, batch_size: int
) -> list[dict[str, Any]]:
    """All paths on one batch."""
    model, dtype, budget = model.to(world.device), getattr(torch, args.dtype), args.token_budget
    rivals = {"padded": Transformers(model, batch_size, dtype)}
    if importlib.util.find_spec("trl"):
        rivals["trl"] = Trl(model, batch_size, dtype)
    cost = ForwardCost.of(model)
    trainer = Trainer(shard(model, world, ShardSpec(dtype)), world, LossSpec(), OptimSpec(lr=1e-4))
    packed = {path: pack_rows(samples, budget, share) for path, share in (("tree", True), ("packed", False))}
    truth = _gradient(rivals["padded"].model, partial(rivals["padded"].backward, samples))
    grads = {path: _gradient(trainer.model, partial(_backward, trainer, rows)) for path, rows in packed.items()}
    grads |= {path: _gradient(rival.model, partial(rival.backward, samples)) for path, rival in rivals.items()}
    paths: dict[str, Callable[[], Any]] = {
        "tree": lambda: trainer.step([pack_rows(samples, budget)]),
        "packed": lambda: trainer.step([pack_rows(samples, budget, share=False)]),
        **{path: partial(rival.step, samples) for path, rival in rivals.items()},
    }
    seconds = time_in_turn(paths, args.repeats)
    extra = {path: extra_bytes(run, world.device) / 1e6 for path, run in paths.items()}
    num_targets = sum(len(s.response_ids) for s in samples)
    tokens = {path: sum(len(row.input_ids_N) for row in rows) for path, rows in packed.items()}
    tokens |= {path: rival.num_tokens(samples) for path, rival in rivals.items()}
    flops = {path: 3 * sum(map(cost.flops, rows)) for path, rows in packed.items()}
    for path, rival in rivals.items():
        forward = cost.per_token * tokens[path] + cost.per_pair * rival.num_pairs(samples) + cost.per_target * num_targets
        flops[path] = 3 * forward
    peak = args.peak_tflops or (peak_tflops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None)
    return [
        {
            "batch": name,
            "path": path,
            "device": world.device.type,
            "samples": len(samples),
            "tokens": tokens[path],
            "tokens_of_tree": tokens[path] / tokens["tree"],
            "gflops": flops[path] / 1e9,
            "ms": 1e3 * sorted(times)[len(times) // 2],
            "time_of_tree": median_ratio(times, seconds["tree"]),
            **({"mfu": flops["tree"] / 1e12 / sorted(times)[len(times) // 2] / peak} if peak else {}),
            "extra_mb": extra[path],
            "grad_difference": float((grads[path] - truth).abs().max() / truth.abs().max()),
        }
        for path, times in seconds.items()
    ]


def _backward(trainer: Trainer, rows: Sequence[Row]) -> None:
    placed = [row.to(torch.device(trainer.model.device)) for row in rows]
    trainer.forward_backward(placed, sum(float(row.weight_T.sum()) for row in rows), Totals())


def _gradient(model: nn.Module, backward: Callable[[], None]) -> Tensor:
    """All of it in fp32 on the CPU; the model has none afterwards."""
    backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    whole = torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).float().cpu().flatten() for g in grads])
    model.zero_grad()
    return whole


def _config(*options: str) -> Config:
    config = parse([*QUICKSTART, *(part for option in options for part in option.split("=", 1))])
    assert config is not None
    return config


if __name__ == "__main__":
    main()
