"""Head to head with TRL's GRPOTrainer on a CPU:  python -m bench.trl [--config C] [--json F]

Both train the model of a config of flowtrain's on its questions of reasoning-gym, in the same order
and with the same prompts, token for token (the run ends if they differ). Equal are also questions
and rollouts per step, temperature, tokens per response, the checkers that give rewards, fp32,
AdamW (betas 0.9 and 0.95, no weight decay, gradient norm at most 1, one step per batch), learning
rate, clip, KL coefficient 0 and CPU threads. Advantages are (R - mean) / (std + eps) with the std
of N - 1, and the loss is the mean over all tokens of the batch, groups of one reward included:
TRL's `dapo`, its default, and flowtrain's `algorithm.mode = "released"`. What differs: eps is 1e-4
in TRL and 1e-6 here; TRL takes ratios against the trainer's own log-probs, flowtrain against the
sampler's (both are 1, up to rounding, in a batch of one step); each has its own random numbers.
Given the same rollouts, both end with the same weights (`tests/test_bench_trl.py`).

Sides take turns, a process each, round after round; a round has a seed of its own. Each side has
what makes it fastest on a CPU. TRL: transformers' `generate` with a growing cache (`--rivals` names
the other ways that TRL has without vLLM: a static cache was no faster in short runs, and continuous
batching several times slower on a CPU), the whole batch in one forward pass unless --micro-batch
says otherwise, no gradient checkpointing, the fused AdamW, no logs, progress bars or checkpoints.
"memory kept" is TRL in a process whose C library keeps freed memory, which flowtrain sees to by
itself and TRL does not. flowtrain: its real trainer with its logs and its weight versions on disk,
the torch engine, and vLLM where that is installed.

A fair reader should know: on a CPU TRL's fused head scores prompts and padding, too (`compact` in
its `add_fused_lm_head`); neither side compiles; TRL is not tried with vLLM, as it means a GPU; both
sides sample by themselves, so tokens per step differ, which is why the table has them; a default
run is too short for rewards to differ by more than chance.

All that is not named below is an option of flowtrain's, which both sides follow:
--rollout.max_new_tokens 48.

Seconds are medians over steps, of each run without its first, which warms up. "x flowtrain" is the
median of step / flowtrain's step of the same round and number. "peak GB" is the largest resident
set while training (with vLLM, its processes added). "held-out" is the mean reward of sampled
answers to held-out questions after --steps, measured for all by the same engine; "same time" is
flowtrain's after as many steps ("its steps") as fit into the time that the fastest TRL took.
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
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from tqdm import tqdm

from bench.measure import installed_version, median_ratio, print_table, write_json
from bench.trl_records import STAGES, Job, Result
from flowtrain.config.options import parse

OURS = "flowtrain"
RIVALS: dict[str, dict[str, Any]] = {
    OURS: {"side": "flowtrain"},
    "flowtrain, vLLM": {"side": "flowtrain"},
    "TRL": {"side": "trl", "generation": "dynamic"},
    "TRL, memory kept": {"side": "trl", "generation": "dynamic", "keeps_memory": True},
    "TRL, static cache": {"side": "trl", "generation": "static"},
    "TRL, continuous batching": {"side": "trl", "generation": "continuous"},
}
NEEDS = {"flowtrain, vLLM": "vllm", "TRL": "trl"}
"""Packages of rivals, by the beginning of the name."""
DEFAULT = ("TRL", "TRL, memory kept", OURS, "flowtrain, vLLM")
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
Rewards = Mapping[str, Mapping[Key, Sequence[float]]]
"""What `held_out` returns; {} where nothing was held out."""


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    rivals = [name for name in args.rivals if is_here(name)]
    with folder_of(args.dir) as folder:
        results = measure(args, rivals, folder)
        rewards = held_out(args, results, folder) if args.held_out else {}
    rows = table(results, rewards, args.threads)
    print_table(rows)
    if rewards:
        print(f"held-out reward before training: {mean_and_error(rewards['start']['', 0])}")
    if args.json:
        settings = {"settings": vars(args) | {"trl": installed_version("trl")}}
        write_json(args.json, [*rows, json.loads(json.dumps(settings, default=str))])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", default="configs/smollm2.toml", help="of flowtrain (default: %(default)s)")
    add("--steps", type=int, default=3, help="optimizer steps of a run (default: %(default)s)")
    add("--rounds", type=int, default=2, help="runs of each rival (default: %(default)s)")
    add("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    add("--micro-batch", type=int, default=0, help="TRL's sequences per pass (default: all)")
    add("--held-out", type=int, default=0, metavar="N", help="held-out questions (default: none)")
    add("--rivals", nargs="+", choices=list(RIVALS), default=DEFAULT, metavar="NAME",
        help=f"of {', '.join(map(repr, RIVALS))} (default: the first four)")  # fmt: skip
    add("--dir", type=Path, help="keep the runs in this folder")
    add("--json", metavar="F", help="write the rows to this file")
    args, words = parser.parse_known_args(argv)
    args.options = given_options(words)
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


def is_here(rival: str) -> bool:
    """Tell whether a rival's package is installed, and say so where it is not."""
    package = next((NEEDS[name] for name in NEEDS if rival.startswith(name)), "torch")
    if importlib.util.find_spec(package) is not None:
        return True
    print(f"left out: {rival}: {package} is not installed here")
    return False


@contextmanager
def folder_of(path: Path | None) -> Iterator[Path]:
    """Give the folder of the runs, or one that goes with them."""
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
        yield path.resolve()
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(scratch)


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


def measure(args: argparse.Namespace, rivals: Sequence[str], folder: Path) -> dict[Key, Result]:
    """Run all rivals in turn, round after round; the keys are rival and round."""
    results: dict[Key, Result] = {}
    with tqdm(total=args.rounds * len(rivals), desc="runs", disable=None) as bar:
        for number in range(args.rounds):
            for rival in rivals:
                bar.set_postfix_str(f"round {number + 1}, {rival}")
                results[rival, number] = run(job_of(args, rival, number, folder), args.threads)
                bar.update()
            check_prompts({rival: results[rival, number] for rival in rivals})
    return results


def job_of(args: argparse.Namespace, rival: str, number: int, folder: Path) -> Job:
    out = folder / f"{list(RIVALS).index(rival)}-{number}"
    engine = "vllm" if "vLLM" in rival else "torch"
    own = options(args, number, run__dir=out / "run", rollout__engine=engine)
    return Job(out=str(out), options=own, micro_batch=args.micro_batch, **RIVALS[rival])


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


def held_out(args: argparse.Namespace, results: Mapping[Key, Result], folder: Path) -> Rewards:
    """Return the rewards of held-out questions: before training ("start"), after the steps of all
    ("steps") and, of flowtrain's rivals, after the time that TRL took ("time"); "num_steps" has
    how many steps that were.
    """
    longer = {
        (rival, number): train_on(args, rival, number, results, folder)
        for rival, number in results
        if rival.startswith(OURS) and any(name.startswith("TRL") for name, _ in results)
    }
    start = parse(options(args, 0))
    assert start is not None
    models = [("start", ("", 0), start.model.path)]
    models += [("steps", key, result.model) for key, result in results.items()]
    models += [("time", key, model) for key, (model, _) in longer.items()]
    found: dict[str, dict[Key, list[float]]] = {"start": {}, "steps": {}, "time": {}}
    for when, key, model in tqdm(models, desc="held-out", disable=None):
        out = folder / "held-out"
        own = options(args, 0, model__path=model, run__dir=out)
        job = Job(side="held-out", out=str(out), options=own)
        found[when][key] = run(job, args.threads).rewards
    return {**found, "num_steps": {key: [num_steps] for key, (_, num_steps) in longer.items()}}


def train_on(
    args: argparse.Namespace,
    rival: str,
    number: int,
    results: Mapping[Key, Result],
    folder: Path,
) -> tuple[str, int]:
    """Train as long as the fastest TRL of the round took; return the model and its steps."""
    theirs = [r for (name, n), r in results.items() if n == number and name.startswith("TRL")]
    seconds = min(sum(step["step"] for step in result.steps) for result in theirs)
    own = results[rival, number]
    num_steps = steps_within(seconds, [step["step"] for step in own.steps])
    if num_steps == args.steps:
        return own.model, num_steps
    job = job_of(args, rival, number, folder)
    changes = ["--train.num_steps", str(num_steps)]
    changes += (
        ["--run.resume", "auto"] if num_steps > args.steps else ["--run.dir", f"{job.out}/shorter"]
    )
    return run(replace(job, options=(*job.options, *changes)), args.threads).model, num_steps


def steps_within(seconds: float, steps: Sequence[float]) -> int:
    """Count the steps that fit into a time, later ones taking as long as the median of `steps`;
    at least 1.
    """
    num_steps, left = 0, seconds
    while (step := steps[num_steps] if num_steps < len(steps) else median(steps)) <= left:
        left -= step
        num_steps += 1
    return max(1, num_steps)


def table(
    results: Mapping[Key, Result],
    rewards: Rewards,
    threads: int,
) -> list[dict[str, Any]]:
    rivals = list(dict.fromkeys(rival for rival, _ in results))
    return [
        {
            "side": rival,
            "threads": threads,
            **stages(results, rival),
            **({"x flowtrain": ratio(results, rival)} if OURS in rivals else {}),
            "peak GB": median(r.peak_bytes / 1e9 for _, r in runs_of(results, rival)),
            **reward_cells(rewards, rival),
        }
        for rival in rivals
    ]


def stages(results: Mapping[Key, Result], rival: str) -> dict[str, float]:
    """Medians over the steps of all rounds: seconds, tokens, and rewards of training."""
    steps = [step for _, result in runs_of(results, rival) for step in timed(result)]
    seconds = {f"{name} s": median(step[name] for step in steps) for name in ("step", *STAGES)}
    return {
        **seconds,
        "tokens": fmean(step["tokens"] for step in steps),
        "tokens/s": median(step["tokens"] / step["step"] for step in steps),
        "reward": fmean(step["reward_mean"] for step in steps),
    }


def ratio(results: Mapping[Key, Result], rival: str) -> float:
    """Compare step by step with flowtrain's of the same round."""
    theirs, ours = (
        [step["step"] for _, result in runs_of(results, name) for step in timed(result)]
        for name in (rival, OURS)
    )
    return median_ratio(theirs, ours)


def runs_of(results: Mapping[Key, Result], rival: str) -> list[tuple[int, Result]]:
    return sorted((n, result) for (name, n), result in results.items() if name == rival)


def timed(result: Result) -> list[dict[str, float]]:
    """Leave out the first step, unless it is the only one."""
    return result.steps[1:] or result.steps


def reward_cells(rewards: Rewards, rival: str) -> dict[str, str | float]:
    def all_of(when: str) -> list[float]:
        return [
            each for (name, _), found in rewards[when].items() if name == rival for each in found
        ]

    if not rewards:
        return {}
    cells: dict[str, str | float] = {"held-out": mean_and_error(all_of("steps"))}
    if all_of("time"):
        cells["same time"] = mean_and_error(all_of("time"))
        cells["its steps"] = fmean(all_of("num_steps"))
    return cells


def mean_and_error(rewards: Sequence[float]) -> str:
    """Write the mean and its standard error over questions and rounds."""
    error = stdev(rewards) / len(rewards) ** 0.5 if len(rewards) > 1 else 0.0
    return f"{fmean(rewards):.3f} +- {error:.3f}"


if __name__ == "__main__":
    main()
