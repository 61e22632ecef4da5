"""Options of the run itself and of what it evaluates, keeps and writes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from flowtrain.config.section import Section


class Run(Section):
    dir: str = "runs/default"
    """folder of the run: config, manifest, metrics, checkpoints, weights, curves"""
    seed: int = 0
    """seed of task order, sampling and new weights"""
    dry_run: bool = False
    """load everything, show how the questions are read, the lengths of prompts, the memory plan and
    two rollouts with their rewards, and end; nothing is written"""
    resume: Literal["never", "auto"] = "never"
    """auto: continue the run in run.dir from its newest checkpoint, or start it if there is none"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """device on which the ranks compute; auto: CUDA where there is one"""
    collective_timeout_s: PositiveFloat = 600.0
    """seconds after which a collective of the training pass that hangs ends the run; ranks wait for
    each other's rollouts, engines and evaluations however long these take"""
    threads: int = Field(0, ge=0)
    """CPU threads per rank; 0: OMP_NUM_THREADS, or else the cores that affinity and cgroups allow,
    divided by the ranks of this machine"""
    profile: int = Field(0, ge=0)
    """profile so many steps after the first one, on the main rank: run.dir/profile gets a
    Chrome trace and a table of operators; 0: none"""


class Eval(Section):
    every: int = Field(10, ge=0)
    """steps between evaluations on held-out question texts and benchmarks; 0: only at the ends"""
    num_tasks: PositiveInt = 200
    """held-out questions per split"""
    at_ends: bool = True
    """evaluate before the first and after the last step; with dataflow.url nodes answer, and the
    run waits for them at both ends and nowhere else"""
    benchmarks: tuple[str, ...] = ()
    """benchmarks that every evaluation asks, too: names whose files are in tasks.benchmarks,
    NAME=FILE for one elsewhere, NAME=FILE:SCORER for your own (docs/evals.md)"""
    rows: int = Field(0, ge=0)
    """first rows of each of eval.benchmarks; 0: as many as AgentFlow runs"""
    trials: PositiveInt = 1
    """times that each question of eval.benchmarks is asked"""
    temperature: float | None = Field(None, ge=0, lt=100)
    """of the policies for eval.benchmarks; 0: greedy; unset: that of training"""


class Checkpoint(Section):
    every: int = Field(25, ge=0)
    """steps between checkpoints; 0: only at the end"""
    keep: PositiveInt = 2
    """newest checkpoints that stay on disk"""


class Weights(Section):
    keep: PositiveInt = 2
    """newest versions that stay in run.dir/weights, with the files that they need"""
    level: Literal[1, 2] = 1
    """2 makes deltas about a quarter smaller and several times slower to code (CPU only): for links
    between sites"""
    verify_every: int = Field(10, ge=0)
    """loads between two comparisons of all of an engine's weights with the digests of their
    version; 0: compare only weights that change"""


class Log(Section):
    tensorboard: bool = True
    """write TensorBoard files into run.dir"""
    loggers: tuple[str, ...] = ()
    """further places for the numbers: wandb, trackio, names of entry points flowtrain.loggers, or
    FILE.py:NAME of your own (docs/metrics.md)"""
    replay: bool = False
    """keep in run.dir/replay what every step was trained from and the digests of every version, so
    that `python -m flowtrain.replay` can make the run again (docs/replay.md)"""
