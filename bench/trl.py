"""Head to head with TRL's GRPOTrainer on a CPU:  python -m bench.trl [--full] [--config C]

Both train the model of a config of flowtrain's on its questions, in the same order and with the
same prompts, token for token (the run ends if they differ). Equal are also questions and rollouts
per step, temperature, tokens per response, the reward function, fp32, AdamW (betas 0.9 and 0.95, no
weight decay, gradient norm at most 1, one step per batch), learning rate, clip, KL coefficient 0
and CPU threads. Advantages are (R - mean) / (std + eps) with the std of N - 1, and the loss is the
mean over all tokens of the batch, groups of one reward included: TRL's `dapo`, its default, and
flowtrain's `algorithm.mode = "released"`. What differs: eps is 1e-4 in TRL and 1e-6 here; TRL takes
ratios against the trainer's own log-probs, flowtrain against the sampler's (both are 1, up to
rounding, in a batch of one step); each has its own random numbers. Given the same rollouts, both
end with the same weights (`tests/test_bench_trl.py`).

Sides take turns, a process each, round after round; a round has a seed of its own. Each side has
what makes it fastest on a CPU. TRL: transformers' `generate` with a growing cache (a static cache
was no faster in short runs, and continuous batching several times slower), the whole batch in one
forward pass unless --micro-batch says otherwise, no gradient checkpointing, the fused AdamW, no
logs, progress bars or checkpoints. "memory kept" is TRL in a process whose C library keeps freed
memory, which flowtrain sees to by itself and TRL does not. flowtrain: its real trainer with its
logs and its weight versions on disk, and the torch engine.

On a CPU TRL's fused head scores prompts and padding, too (`compact` in its `add_fused_lm_head`);
neither side compiles, and neither is tried with vLLM; both sample by themselves, so tokens per step
differ, which is why the table has them; a default run is too short for rewards to differ.

Other options are flowtrain's, which both sides follow: --rollout.max_new_tokens 48. Seconds are
medians over steps, of each run without its first, which warms up. "x flowtrain" is the median of
step / flowtrain's of the same round and number. "peak GB" is the largest resident set. "held-out"
is the mean reward of answers to held-out questions after --steps, by the same engine for all.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from bench.measure import installed_version, median_ratio, new_parser, report
from bench.trl_sides import STAGES, Job, Result
from flowtrain.config.options import parse

OURS = "flowtrain"
RIVALS = ("TRL", "TRL, memory kept", OURS)
FIXED = {
    "agent.name": "single",
    "agent.rollout_timeout_s": "36000",
    "model.dtype": "float32",
    "algorithm.mode": "released",
    "algorithm.kl_coef": "0",
    "algorithm.clip_low": "0.2",
    "algorithm.clip_high": "0.2",
    "algorithm.dual_clip": "1e9",
    "train.weight_decay": "0",
    "train.num_minibatches": "1",
    "rollout.request_timeout_s": "36000",
    "eval.every": "0",
    "eval.at_ends": "false",
    "checkpoint.every": "0",
    "log.tensorboard": "false",
    "run.device": "cpu",
}
"""Options of flowtrain that both sides follow, and that keep its run from doing more than train."""

Key = tuple[str, int]
"""A rival and a round."""


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    with ExitStack() as cleanup:
        folder = args.dir or Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
        report(args.json, rows(args, folder.resolve()))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    full = {"steps": 12, "threads": 1, "held_out": 100}
    parser = new_parser(__doc__, **full)
    parser.allow_abbrev = False
    add = parser.add_argument
    add("--config", default="configs/smollm2.toml", help="of flowtrain")
    add("--steps", type=int, default=2, help="optimizer steps of a run")
    add("--rounds", type=int, default=1, help="runs of each rival")
    add("--threads", type=int, default=2, help="CPU threads")
    add("--micro-batch", type=int, default=0, help="TRL's sequences per pass; 0: all")
    add("--held-out", type=int, default=0, metavar="N", help="held-out questions; 0: none")
    add("--rivals", nargs="+", choices=RIVALS, default=[RIVALS[1], OURS], help="the sides")
    add("--dir", type=Path, help="keep the runs in this folder")
    args, words = parser.parse_known_args(argv)
    args.options = given_options(words)
    if importlib.util.find_spec("trl") is None:
        print("left out: TRL: it is not installed here")
        args.rivals = [name for name in args.rivals if name == OURS]
    return args


def given_options(words: Sequence[str]) -> dict[str, str]:
    """Read flowtrain's options of the command line. Ends the command where the comparison does not
    leave one open.
    """
    given = dict(zip(words[::2], words[1::2], strict=False))
    keys = {word.removeprefix("--"): value for word, value in given.items()}
    if len(words) % 2 or not all(word.startswith("--") and "." in word for word in given):
        raise SystemExit(f"options of flowtrain are --section.key value, not {' '.join(words)}")
    if taken := FIXED.keys() & keys:
        key = min(taken)
        raise SystemExit(f"--{key} {keys[key]}: the comparison fixes it at {FIXED[key]}")
    return keys


def options(args: argparse.Namespace, seed: int, **more: object) -> tuple[str, ...]:
    """Return flowtrain's options for a run; `more` has sections and keys divided by two bars."""
    chosen = {
        "train.num_steps": args.steps,
        "eval.num_tasks": max(1, args.held_out),
        "run.threads": args.threads,
        "run.seed": seed,
    }
    own = {key.replace("__", "."): value for key, value in more.items()}
    words = {"config": args.config, **args.options, **FIXED, **chosen, **own}.items()
    return tuple(word for key, value in words for word in (f"--{key}", str(value)))


def rows(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each run as it ends, then one for each side."""
    results: dict[Key, Result] = {}
    for number in range(args.rounds):
        for rival in args.rivals:
            result = run(job_of(args, rival, number, folder), args.threads)
            results[rival, number] = result
            seconds = sum(step["step"] for step in result.steps)
            yield {"run of": rival, "round": number, "steps": len(result.steps), "s": seconds}
        check_prompts({rival: results[rival, number] for rival in args.rivals})
    rewards = held_out(args, results, folder) if args.held_out else {}
    if rewards:
        yield {"held-out before training": mean_and_error(rewards["", 0])}
    yield from table(results, rewards, args.threads)
    settings = {key: str(value) for key, value in vars(args).items() if key != "json"}
    yield {"trl": installed_version("trl"), **settings}


def job_of(args: argparse.Namespace, rival: str, number: int, folder: Path) -> Job:
    out = folder / f"{RIVALS.index(rival)}-{number}"
    return Job(
        side="flowtrain" if rival == OURS else "trl",
        out=str(out),
        options=options(args, number, run__dir=out / "run", rollout__engine="torch"),
        micro_batch=args.micro_batch,
        keeps_memory=rival == RIVALS[1],
    )


def run(job: Job, threads: int) -> Result:
    """Run one side in a process of its own; raises SystemExit with the end of its errors."""
    out = Path(job.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "job.json").write_text(json.dumps(asdict(job)))
    own = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"}
    command = [sys.executable, "-m", "bench.trl_sides", str(out / "job.json")]
    with (out / "log").open("w") as log:
        done = subprocess.run(
            command, env={**os.environ, **own}, stdout=log, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        raise SystemExit(f"{job.side} failed:\n{(out / 'log').read_text()[-3000:]}")
    return Result(**json.loads((out / "result.json").read_text()))


def check_prompts(results: Mapping[str, Result]) -> None:
    """Make sure that all rivals of a round have trained on the same prompts."""
    if len({tuple(result.prompts) for result in results.values()}) > 1:
        every = {rival: result.prompts for rival, result in results.items()}
        raise SystemExit(f"the rivals' prompts differ: {every}")


def held_out(
    args: argparse.Namespace, results: Mapping[Key, Result], folder: Path
) -> dict[Key, list[float]]:
    """The rewards of held-out questions by what each run came to, and of ("", 0) before them."""
    start = parse(options(args, 0))
    assert start is not None
    models = {("", 0): start.model.path} | {key: each.model for key, each in results.items()}
    found = {}
    for key, model in models.items():
        own = options(args, 0, model__path=model, run__dir=folder / "held-out")
        job = Job(side="held-out", out=str(folder / "held-out"), options=own)
        found[key] = run(job, args.threads).rewards
    return found


def table(
    results: Mapping[Key, Result], rewards: Mapping[Key, Sequence[float]], threads: int
) -> list[dict[str, Any]]:
    rivals = list(dict.fromkeys(rival for rival, _ in results))
    found = []
    for rival in rivals:
        row: dict[str, Any] = {"side": rival, "threads": threads, **stages(results, rival)}
        if OURS in rivals:
            row["x flowtrain"] = ratio(results, rival)
        row["peak GB"] = median(r.peak_bytes / 1e9 for r in runs_of(results, rival))
        if own := [x for (name, _), each in rewards.items() if name == rival for x in each]:
            row["held-out"] = mean_and_error(own)
        found.append(row)
    return found


def stages(results: Mapping[Key, Result], rival: str) -> dict[str, float]:
    """Medians over the steps of all rounds: seconds, tokens, and rewards of training."""
    steps = steps_of(results, rival)
    seconds = {f"{name} s": median(step[name] for step in steps) for name in ("step", *STAGES)}
    return {
        **seconds,
        "tokens": fmean(step["tokens"] for step in steps),
        "tokens/s": median(step["tokens"] / step["step"] for step in steps),
        "reward": fmean(step["reward_mean"] for step in steps),
    }


def ratio(results: Mapping[Key, Result], rival: str) -> float:
    """Compare step by step with flowtrain's of the same round."""
    theirs, ours = ([s["step"] for s in steps_of(results, name)] for name in (rival, OURS))
    return median_ratio(theirs, ours)


def runs_of(results: Mapping[Key, Result], rival: str) -> list[Result]:
    return [results[key] for key in sorted(results) if key[0] == rival]


def steps_of(results: Mapping[Key, Result], rival: str) -> list[dict[str, float]]:
    """Of all rounds, without each run's first, unless it is the only one."""
    runs = runs_of(results, rival)
    return [step for result in runs for step in result.steps[1:] or result.steps]


def mean_and_error(rewards: Sequence[float]) -> str:
    """Write the mean and its standard error over questions and rounds."""
    error = stdev(rewards) / len(rewards) ** 0.5 if len(rewards) > 1 else 0.0
    return f"{fmean(rewards):.3f} +- {error:.3f}"


if __name__ == "__main__":
    main()
