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
    """load everything, print how questions are read, prompt lengths, the memory plan and two scored
    rollouts, then exit without writing anything"""
    resume: Literal["never", "auto"] = "never"
    """auto: resume the run in run.dir from its newest checkpoint, if any, or start it"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """device on which the ranks compute; auto: CUDA if available"""
    collective_timeout_s: PositiveFloat = 600.0
    """seconds after which a hanging collective of the training pass aborts the run; waits for other
    ranks' rollouts, engines and evaluations are not limited"""
    threads: int = Field(0, ge=0)
    """CPU threads per rank; 0: OMP_NUM_THREADS, or else the cores that affinity and cgroups allow,
    divided by the ranks of this machine"""
    profile: int = Field(0, ge=0)
    """number of steps to profile after the first one, on the main rank; run.dir/profile gets a
    Chrome trace and a table of operators; 0: off"""


class Eval(Section):
    every: int = Field(10, ge=0)
    """steps between evaluations on held-out question texts and benchmarks; 0: only at the ends"""
    num_tasks: PositiveInt = 200
    """held-out questions per split"""
    at_ends: bool = True
    """evaluate before the first and after the last step; with dataflow.url the nodes answer, and
    the run waits for them at these two points only"""
    benchmarks: tuple[str, ...] = ()
    """benchmarks for every evaluation: names of files in tasks.benchmarks, NAME=FILE for a file
    elsewhere, NAME=FILE:SCORER for a custom benchmark (docs/evals.md)"""
    rows: int = Field(0, ge=0)
    """number of first rows to use of each benchmark; 0: as many as AgentFlow runs"""
    trials: PositiveInt = 1
    """number of answers to sample per question of eval.benchmarks"""
    temperature: float | None = Field(None, ge=0, lt=100)
    """temperature for eval.benchmarks; 0: greedy; unset: the training temperature"""


class Checkpoint(Section):
    every: int = Field(25, ge=0)
    """steps between checkpoints; 0: only at the end"""
    keep: PositiveInt = 2
    """number of newest checkpoints to keep on disk"""


class Weights(Section):
    keep: PositiveInt = 2
    """number of newest versions to keep in run.dir/weights, with the files that they need"""
    level: Literal[1, 2] = 1
    """2 makes deltas about a quarter smaller and several times slower to encode (CPU only), for
    slow links between sites"""
    verify_every: int = Field(10, ge=0)
    """number of loads between two comparisons of all of an engine's weights with the digests of
    their version; 0: compare only changed weights"""


class Log(Section):
    tensorboard: bool = True
    """write TensorBoard files into run.dir"""
    loggers: tuple[str, ...] = ()
    """further loggers for the metrics: wandb, trackio, names of entry points flowtrain.loggers, or
    FILE.py:NAME of a custom one (docs/metrics.md)"""
    replay: bool = False
    """keep the training data of every step and the digests of every version in run.dir/replay, so
    that `python -m flowtrain.replay` can replay the run (docs/replay.md)"""
