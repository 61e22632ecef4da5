"""The log of a run: banner, metrics.jsonl, rollouts, progress line and final report."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flowtrain import __version__
from flowtrain.config import Config
from flowtrain.evaluation.evaluator import Measured
from flowtrain.logging import (
    MetricsLog,
    Progress,
    RunDir,
    TrajectoryLog,
    comparison_table,
    write_summary,
)
from flowtrain.logging.fingerprints import changes
from flowtrain.logging.loggers import open_loggers
from flowtrain.logging.series import Series, read_series, total_seconds, total_tokens
from flowtrain.logging.tally import Tally
from flowtrain.records import Group, Rollouts, TokenAccount, TrainBatch, Trajectory
from flowtrain.trainer import checkpoint
from flowtrain.trainer.devices import MemoryPeak, peak_tflops
from flowtrain.trainer.model.fused_layers import fused_text
from flowtrain.trainer.setup.components import RunComponents
from flowtrain.trainer.setup.memory_plan import MemoryPlan
from flowtrain.trainer.setup.placement import Placement
from flowtrain.utils.text import printable

_log = logging.getLogger(__name__)


class Counted(NamedTuple):
    """The statistics of a step, equal on every rank."""

    total: Tally
    tokens: TokenAccount
    mismatch: Mapping[str, float]
    """Metrics of trainer and sampler."""
    metrics: Mapping[str, float]
    """All metrics for the log."""


class RunLogger:
    """Logs a run: metrics on the main rank, rollouts on each sampling rank."""

    def __init__(
        self,
        config: Config,
        placement: Placement,
        run_dir: RunDir,
        memory: MemoryPeak,
        *,
        start_step: int,
        is_shown: bool = True,
    ) -> None:
        """Open the logs; a resumed run continues after the lines of `start_step`.

        `memory` covers this process from before the model was loaded; `is_shown`: the main rank
        shows progress.
        """
        self._config, self._placement = config, placement
        self.run_dir, self._memory = run_dir, memory
        tflops = _known_tflops(config, placement.world.device)
        self._peak_flops = 1e12 * tflops * placement.trainers.size
        self.progress = Progress(
            config.train.num_steps, start_step, is_shown and placement.world.is_main
        )
        self._cleanup = ExitStack()
        self._writing: Future[None] | None = None
        with ExitStack() as cleanup:  # closes what is open when a later part cannot be opened
            self._open(start_step, cleanup)
            self._cleanup = cleanup.pop_all()

    def _open(self, start_step: int, cleanup: ExitStack) -> None:
        config, path, samplers = self._config, self.run_dir.path, self._placement.samplers
        last_step = start_step or -1  # from the start also means: without the line of step 0
        is_main = self._placement.world.is_main
        self._metrics = None
        if is_main:
            loggers = open_loggers(config, path, last_step)
            self._metrics = MetricsLog(path, last_step, config.log.tensorboard, loggers)
            cleanup.callback(self._metrics.close)
        last_evaluated = -1 if self._metrics is None else self._metrics.last_step("eval_reward")
        self.evaluated = int(self._placement.world.max([last_evaluated])[0])
        """Newest step up to which all evaluations are in the log."""
        self._trajectories, self._held_out = (
            TrajectoryLog(path, samplers.rank, step, name, samplers.size)
            for name, step in (("trajectories", last_step), ("held_out", self.evaluated))
        )
        self._thread = ThreadPoolExecutor(1, "rollouts")
        cleanup.callback(self._thread.shutdown)

    def close(self) -> None:
        self._cleanup.close()

    def flush(self) -> None:
        """Wait until the rollouts of all steps are on disk."""
        if self._writing is not None:
            self._writing.result()

    def peak_bytes(self) -> int:
        """Return this rank's peak memory in bytes."""
        return self._memory.num_bytes()

    def log(
        self,
        step: int,
        rollouts: Rollouts,
        batch: TrainBatch,
        *,
        trained: Mapping[str, float],
        counted: Counted,
        evaluation: Measured | None,
        metrics: Mapping[str, Any],
    ) -> None:
        """Log a step, its rollouts in the background until `flush`.

        Args:
            rollouts, batch: this rank's.
            trained: statistics of the optimizer steps; empty on a rank that does not train.
            metrics: metrics of the weights and the replay log, and the seconds by stage.
        """

        def write_rollouts() -> None:
            if evaluation is not None:
                self.log_held_out(step, evaluation.held_out)
            policy = self._config.train.policy
            self._trajectories.log(step, step - 1, rollouts.groups, batch.samples, policy)

        self.flush()
        self._writing = self._thread.submit(write_rollouts)
        eval_metrics = {}
        if evaluation is not None:
            eval_metrics = evaluation.metrics
            self.evaluated = step
        self.write(
            {
                "step": step,
                "version": step,
                **counted.metrics,
                **eval_metrics,
                **rollouts.metrics,
                **trained,
                **self._speed(trained, metrics["train_s"]),
                **metrics,
            }
        )

    def log_evaluation(self, step: int, evaluation: Measured) -> None:
        """Log the nodes' evaluation of the weights after `step`, perhaps behind later steps."""
        self.log_held_out(step, evaluation.held_out)
        metrics = {"step": step, "version": step, **evaluation.metrics}
        self._log(metrics)
        self.evaluated = step
        self.progress.remember(metrics)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Log a line of metrics and show it."""
        self._log(metrics)
        self.progress.update(metrics)

    def _log(self, metrics: Mapping[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.log(metrics)

    def log_held_out(self, version: int, trajectories: Sequence[Trajectory]) -> None:
        """Write this rank's rollouts of the main held-out split."""
        self._held_out.log(version, version, self._groups_of_one(trajectories))

    def log_trained(self, trajectories: Sequence[Trajectory]) -> None:
        """Write this rank's rollouts of the main held-out split that the trained policy is compared
        by; those of the same step in the other log are of another draw.
        """
        samplers, step = self._placement.samplers, self._config.train.num_steps
        log = TrajectoryLog(self.run_dir.path, samplers.rank, -1, "trained", samplers.size)
        log.log(step, step, self._groups_of_one(trajectories))

    def _groups_of_one(self, trajectories: Sequence[Trajectory]) -> list[Group]:
        rank, size = self._placement.samplers.rank, self._placement.samplers.size
        return [Group(rank + i * size, (trajectory,)) for i, trajectory in enumerate(trajectories)]

    def _speed(self, stats: Mapping[str, float], train_s: float) -> dict[str, float]:
        """Return the speed of a step; {} on ranks that do not train.

        MFU counts the FLOPs that the trees need, and requires a device with a known peak.
        """
        if not stats:
            return {}
        train_s = max(train_s, 1e-9)
        num_tokens = stats["num_packed_tokens"]
        budget = max(stats["num_rows"], 1) * self._config.train.row_budget
        speed = {"tokens_per_s": num_tokens / train_s, "packing_efficiency": num_tokens / budget}
        if self._peak_flops:
            speed["mfu"] = 1e12 * stats["train_tflop"] / train_s / self._peak_flops
        return speed

    def report(
        self,
        plan: MemoryPlan,
        warm: Mapping[str, Any],
        trained: Mapping[str, Any],
        *,
        signal: Mapping[str, Any],
        tokens: TokenAccount | None,
    ) -> None:
        """Write summary.json and curves.png, and print the comparison; collective.

        Args:
            warm, trained: comparisons before and after training; empty if not measured.
            signal: steps without a learning signal; empty if every step had one.
            tokens: the fates of all tokens by the dataflow; None: by the log.
        """
        # Collective, so before the other ranks return.
        (peak_bytes,) = self._placement.world.max([self.peak_bytes()])
        if not self._placement.world.is_main:
            return
        path = self.run_dir.path
        series = read_series(path)
        tokens = tokens or total_tokens(series)
        summary = {
            "warm": warm,
            "trained": trained,
            **signal,
            "tokens": {**tokens.metrics(), "text": tokens.text()},
            "seconds": self._seconds(series),
            "planned_memory_gb": plan.num_bytes / 1e9,
            "peak_memory_gb": peak_bytes / 1e9,
        }
        write_summary(path / "summary.json", summary)
        curves = "curves.png, " if _draw(path) else ""
        if trained:
            print(comparison_table(warm, trained))
        if idle_steps := signal.get("idle_steps"):
            cause = printable(signal["last_cause"])
            print(f"{len(idle_steps)} steps had nothing to learn from; the last: {cause}")
        for key, (_, values) in series.items():
            if key.startswith("reward/") and not any(values):
                print(f"{key.removeprefix('reward/')!r}, a part of the reward, was 0 in every step")
        print(f"tokens: {tokens.text()}")
        checkpoint_path = checkpoint.place(self.run_dir.checkpoints, self._config.train.num_steps)
        files = f"{curves}summary.json, metrics.jsonl, trajectories.jsonl"
        print(f"{path}/{files}; model: {checkpoint_path}")
        print(f"to look at it: python -m flowtrain.logging.page {path}")

    def _seconds(self, series: Mapping[str, Series]) -> dict[str, float]:
        """Sum the seconds by stage over the whole run, resumed parts included; "warm_up" where the
        model's folder says how long it took.
        """
        seconds = total_seconds(series)
        rft_path = Path(self._config.model.path) / "rft.json"
        if rft_path.exists():
            seconds["warm_up"] = round(json.loads(rft_path.read_text())["seconds"], 3)
        return seconds


def _known_tflops(config: Config, device: torch.device) -> float:
    """Return the device's dense bf16 peak; 0 if unknown."""
    if device.type != "cuda" or config.model.dtype != "bfloat16":
        return 0.0
    return peak_tflops(torch.cuda.get_device_name()) or 0.0


def _draw(path: Path) -> bool:
    """Draw the curves of a run; returns False with a warning without matplotlib."""
    try:
        from flowtrain.logging.page import curves  # which is slow to load
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        _log.warning(
            "matplotlib is not installed, so curves.png is not drawn; install it with: "
            "pip install -e '.[plots]'"
        )
        return False
    curves.plot_curves(path)
    return True


def train_banner(components: RunComponents, start_step: int) -> str:
    """Return the banner of a run; `start_step`: the step after which a run continues."""
    config, placement = components.config, components.placement
    rollout, train, trainers = config.rollout, config.train, placement.trainers
    step_text = f"each {rollout.num_questions} questions x {rollout.group_size} rollouts"
    samplers_text = f"{rollout.engine} on {placement.samplers.size} ranks"
    if config.dataflow.url:
        samplers_text = f"nodes of {config.dataflow.url}"
    device_text = trainers.device.type
    device_text += f", {torch.get_num_threads()} threads each" * (device_text == "cpu")
    rows = {
        "ranks": f"sampled by {samplers_text}, trained by {trainers.size} ({device_text})",
        "steps": f"{train.num_steps}, {step_text}"
        + f", after step {start_step}" * (start_step > 0),
        "fused": fused_text(components.model) or "no layers",
    }
    policies = (config.word_for(name) for name in (train.policy, *config.trained_beside))
    title = f"{components.algorithm} trains the {' and the '.join(policies)}"
    return _banner(components, title, rows)


def rft_banner(components: RunComponents) -> str:
    """Return the banner of a fine-tuning: expert, model and place of the result."""
    config, rft = components.config, components.config.rft
    policy = config.word_for(config.train.policy)
    steps = f"{rft.num_steps} steps" if rft.num_steps else f"{rft.num_epochs:g} epochs"
    steps += f" (train.token_budget = {config.train.row_budget})"
    after_rollouts = "no more" if rft.collect_only else f"then imitated for {steps}"
    rows = {"next": f"{rft.num_rollouts:,} rollouts are made, {after_rollouts}"}
    return _banner(components, f"the {policy} imitates demonstrations ({rft.expert})", rows)


def _banner(components: RunComponents, title: str, rows: dict[str, str]) -> str:
    config, tasks, agent = components.config, components.tasks, components.config.agent
    num_weights = sum(parameter.numel() for parameter in components.model.parameters())
    adapter = f", LoRA of rank {config.lora.rank}" if config.lora.rank else ""
    num_train = sum(len(source) for _, source in tasks.mixture.values()) or len(tasks.train)
    num_held_out = sum(map(len, tasks.held_out.values()))
    tools = ", ".join(agent.tools) or "no tools"
    fields = {
        "model": f"{config.model.path}, {num_weights:,} parameters, {config.model.dtype}{adapter}",
        "tasks": f"{config.tasks.name}, {num_train:,} to train on, {num_held_out:,} held out",
        "agent": f"{agent.name}, at most {agent.max_turns} turns, {tools}",
        **rows,
        "folder": config.run.dir,
    }
    if change := changes(Path(config.run.dir), config):
        fields["change"] = change
    lines = [f"  {name:6}  {value}" for name, value in fields.items()]
    return "\n".join([f"flowtrain {__version__}: {title}", *lines])
