"""Does it pay to train the verifier beside the planner?  python -m bench.learning_policies
--planner runs/warm-planner/model --verifier runs/warm-verifier/model [--json F]

The flow of `configs/verifier.toml` on questions of two and three turns, whose planner guesses and
slips. Its verifier decides after every turn whether to go on; nobody tells it what is right. One
service of the dataflow and one node roll out; the planner's trainer, the verifier's, or both at the
same time learn from these rollouts, and a policy without a trainer stays as it was warmed up.

Compared, as in `bench.learning`, is the held-out reward at the same number of sampled response
tokens, those of both policies together and of dropped groups included. The pair of an evaluation
are the checkpoints of both policies at the same step. "sharp" is a verifier that stays as it was
and is sampled at a tenth of its temperature, which takes most of its slips away without training.
Further columns describe the last pair: "wrong stop" is the share of rollouts that the verifier
ended with a wrong answer, "out of turns" of those that it never ended.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from bench import learning
from bench.dataflow_learning import of_trained
from bench.dataflow_service import service
from bench.measure import print_table, write_json
from flowtrain.config import Config
from flowtrain.config.options import parse
from flowtrain.dataflow.client import Client
from flowtrain.run.components import RunComponents
from flowtrain.run.evaluation import evaluate
from flowtrain.tasks.sets import MAIN_SPLIT
from flowtrain.training import checkpoint
from flowtrain.training.world import World
from flowtrain.types import Trajectory, Verdict

SETTING = [
    *("--config", "configs/verifier.toml", "--tasks.kinds", '["chain", "sum"]'),
    *("--run.threads", "1", "--dataflow.max_staleness", "2"),
    *("--rollout.num_questions", "8", "--train.lr", "3e-4"),
]
SHARP = ["--policies.verifier.temperature", "0.1"]
ARMS: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "solver": (("planner",), []),
    "solver + verifier": (("planner", "verifier"), []),
    "solver, sharp verifier": (("planner",), SHARP),
    "verifier": (("verifier",), []),
}
"""The policies that each arm trains, and its options."""
EVERY, NUM_STEPS, NUM_TASKS = 8, 24, 200
"""Steps between evaluations, steps of a run, and held-out questions of an evaluation."""
LEVEL = 0.6

Point = dict[str, float]
"""An evaluation: "tokens" sampled until then, "reward", and what else is known of it."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("planner", "verifier"):
        parser.add_argument(
            f"--{name}",
            nargs="+",
            required=True,
            help="its warm models, of flowtrain.rft; seed i starts from number i mod their number",
        )
    parser.add_argument(
        "--arms", nargs="+", choices=list(ARMS), metavar="ARM", help=", ".join(ARMS)
    )
    parser.add_argument("--seeds", type=int, default=3, choices=list(learning.T_95), metavar="N")
    parser.add_argument("--dir", type=Path, default=Path("runs/policies"), help="of the runs")
    parser.add_argument("--plot", metavar="PNG", help="draw the curves into this file")
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    args, words = parser.parse_known_args()
    arms = args.arms or list(ARMS)
    found: dict[str, list[list[Point]]] = {arm: [] for arm in arms}
    for seed, arm in tqdm([(seed, arm) for seed in range(args.seeds) for arm in arms], desc="runs"):
        folder = args.dir / arm.replace(", ", "-").replace(" ", "_") / str(seed)
        models = {
            name: given[seed % len(given)]
            for name, given in (("planner", args.planner), ("verifier", args.verifier))
        }
        found[arm].append(run(folder, arm, seed, models, words))
    rows, curves = compare(found)
    print_table(rows)
    if args.json:
        write_json(args.json, rows)
    if args.plot:
        learning.plot(curves, rows[0]["tokens"], args.plot)


def compare(
    found: Mapping[str, Sequence[Sequence[Point]]],
) -> tuple[list[dict[str, Any]], dict[str, list[learning.Curve]]]:
    """The rows of `bench.learning`, each with what is known of its last pairs; and the curves."""
    curves = {arm: [_curve(points) for points in runs] for arm, runs in found.items()}
    every = [curve for runs in curves.values() for curve in runs]
    grid = learning.coarsest(every, min(tokens[-1] for tokens, _ in every))
    first = next(iter(curves.values()))
    base = [learning.reward_at(grid[-1], curve) for curve in first]
    rows = []
    for arm, runs in curves.items():
        ahead = [learning.reward_at(grid[-1], run) - b for run, b in zip(runs, base, strict=True)]
        last = [points[-1] for points in found[arm]]
        rows.append(
            learning.row(arm, runs, first, grid, LEVEL)
            | {"final gain": fmean(ahead), "final gain +-": learning.half_width(ahead)}
            | {name: fmean(point[name] for point in last) for name in last[0]}
        )
    return rows, curves


def _curve(points: Sequence[Point]) -> learning.Curve:
    return [point["sampled"] for point in points], [point["reward"] for point in points]


# ---- a run


def run(
    folder: Path, arm: str, seed: int, models: Mapping[str, str], words: Sequence[str]
) -> list[Point]:
    """Train and evaluate, unless that is done already; what was broken off begins anew."""
    path = folder / "points.json"
    if not path.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        policies, options = ARMS[arm]
        options = [*SETTING, *options, "--run.seed", str(seed), *words]
        status = train(folder, policies, models, options)
        points = measure(folder, policies, models, options)
        factor = of_trained(status, policies[0])
        sampled = [0.0, *(factor * n for n in accumulate(tokens_of_steps(folder / policies[0])))]
        for point in points:
            point["sampled"] = sampled[int(point["step"])]
        path.write_text(json.dumps(points))
    return list(json.loads(path.read_text()))


def train(
    folder: Path, policies: Sequence[str], models: Mapping[str, str], options: Sequence[str]
) -> dict[str, Any]:
    """Train the policies at the same time; the ledger's last report."""
    own = {name: [*options, *models_of(name, models)] for name in models}
    ends = [
        *("--train.num_steps", str(NUM_STEPS), "--checkpoint.every", str(EVERY)),
        *("--checkpoint.keep", str(NUM_STEPS), "--eval.every", "0", "--eval.at_ends", "false"),
        *("--log.tensorboard", "false"),
    ]
    with service(str(folder / "ledger.db"), own[policies[0]]) as (url, token), ExitStack() as ended:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "FLOWTRAIN_TOKEN": token}

        def start(name: str, *command: str) -> subprocess.Popen[bytes]:
            log = ended.enter_context((folder / f"{name}.log").open("w"))
            process = subprocess.Popen(
                [sys.executable, "-m", *command], env=environment, stdout=log, stderr=log
            )
            ended.callback(process.wait)
            ended.callback(process.terminate)
            return process

        start("node", "flowtrain.node", "--dataflow", url, "--name", "node")
        trainers = {}
        for name in policies:
            place = ["--run.dir", str(folder / name), "--dataflow.url", url]
            trainers[name] = start(name, "flowtrain.train", *own[name], *ends, *place)
        for name, trainer in trainers.items():
            if trainer.wait():
                raise SystemExit(f"the trainer of the {name} failed: see {folder}/{name}.log")
        with Client(url, token, wait_s=60.0) as client:
            return dict(client.status())


def models_of(trained: str, models: Mapping[str, str]) -> Iterator[str]:
    """Options that name the models of a run which trains that policy."""
    yield from ("--train.policy", trained)
    for name, path in models.items():
        yield from ("--model.path" if name == trained else f"--policies.{name}.path", path)


def tokens_of_steps(run_dir: Path) -> list[float]:
    """Tokens that both policies sampled in the rollouts of each step."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["num_sampled_tokens"] + line["verifier/num_sampled_tokens"] for line in lines]


# ---- evaluation


def measure(
    folder: Path, policies: Sequence[str], models: Mapping[str, str], options: Sequence[str]
) -> list[Point]:
    """Of the pairs at the start and after every `EVERY` steps; of the last one greedily, too."""
    points: list[Point] = []
    for step in range(0, NUM_STEPS + 1, EVERY):
        pair = dict(models)
        if step:
            pair |= {p: str(checkpoint.place(folder / p / "checkpoints", step)) for p in policies}
        config = parse([*options, *models_of("planner", pair), "--eval.num_tasks", str(NUM_TASKS)])
        assert config is not None
        points.append({"step": step, **describe(roll_out(config, step))})
        if step == NUM_STEPS:
            points[-1]["greedy"] = describe(roll_out(config, step, temperature=0.0))["reward"]
    return points


def roll_out(config: Config, step: int, temperature: float | None = None) -> list[Trajectory]:
    """The held-out questions; after a given step always with the same random numbers."""
    with ExitStack() as cleanup:
        world = World.join("cpu")
        cleanup.callback(world.leave)
        components = RunComponents.prepare(config, world)
        cleanup.callback(components.close)
        engines = components.make_policy_engines({})
        for engine in engines.values():
            cleanup.callback(engine.close)
        agent = components.make_agent(engines, config.agent.eval_max_turns, temperature)
        cleanup.callback(agent.close)
        found = evaluate(
            agent,
            components.tasks.held_out[MAIN_SPLIT],
            step,
            tool_names=config.agent.tools,
            world=world,
            max_in_flight=config.rollout.max_in_flight,
        )
    return list(found.trajectories)


def describe(rollouts: Sequence[Trajectory]) -> Point:
    """Rewards, and why they are not 1: stopped too early, or not at all."""
    num = len(rollouts)
    stopped = [each.turns[-1].verdict is Verdict.STOP for each in rollouts if each.turns]
    wrong = [not each.reward for each in rollouts if each.turns]
    return {
        "reward": fmean(each.reward or 0.0 for each in rollouts),
        "turns": fmean(len(each.turns) for each in rollouts),
        "wrong stop": sum(a and b for a, b in zip(stopped, wrong, strict=True)) / num,
        "out of turns": sum(each.truncated == "turns" for each in rollouts) / num,
    }


if __name__ == "__main__":
    main()
