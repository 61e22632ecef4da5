"""A training run while it runs: what `train.py` needs beside its eight verbs.

Opening and resuming, evaluation, logging, checkpoints, and the report at the end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from flowtrain import report
from flowtrain.agents.flow import Flow
from flowtrain.algorithms import Advantages
from flowtrain.config import Config
from flowtrain.evals import Evaluation, RolloutStats, evaluate
from flowtrain.job import Job, check_divides, loss_spec, optim_spec, resume_point, saving
from flowtrain.report.curves import plot_curves
from flowtrain.report.jsonl import read_lines
from flowtrain.rewards import Judge
from flowtrain.rollout.engine import Engine, EngineError
from flowtrain.seeds import derive_seed
from flowtrain.tasks.cursor import TaskCursor
from flowtrain.tasks.mixture import MixedCursor
from flowtrain.tasks.sets import MAIN_SPLIT
from flowtrain.training import checkpoint
from flowtrain.training.devices import MemoryPeak, peak_tflops
from flowtrain.training.model import named_weights
from flowtrain.training.scores import annotate
from flowtrain.training.trainer import Trainer
from flowtrain.training.world import World
from flowtrain.types import Group, Trajectory
from flowtrain.weights import WeightStore

STAGES = ("collect", "train", "publish", "load", "eval")


class Clock:
    """Seconds of a step by stage; what no stage claims is "other"."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._seconds = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self._seconds[stage] += time.monotonic() - started

    def metrics(self) -> dict[str, float]:
        step_s = time.monotonic() - self._started
        stages = {f"{stage}_s": seconds for stage, seconds in self._seconds.items()}
        return {**stages, "other_s": step_s - sum(self._seconds.values()), "step_s": step_s}


class Session:
    """Use with `with`; attributes are what the main loop touches."""

    world: World
    cursor: TaskCursor | MixedCursor
    flow: Flow
    judge: Judge | None
    engine: Engine
    trainer: Trainer
    start_step: int

    def __init__(self, config: Config) -> None:
        self._config = config
        self._cleanup = ExitStack()
        self._checkpoint_s = 0.0
        self._weights_metrics: dict[str, float | str] = {}

    def __enter__(self) -> Session:
        with ExitStack() as cleanup:  # closes what is open when a later part fails to
            self._cleanup = cleanup
            self._open()
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def _open(self) -> None:
        config = self._config
        self.world = World.join(config.run.device)
        self._cleanup.callback(self.world.leave)
        self._memory = MemoryPeak(self.world.device)
        self._peak_flops = 1e12 * (config.train.peak_tflops or self._known_tflops()) * self.world.size
        check_divides("rollout.num_questions", config.rollout.num_questions, self.world)
        self._job = Job.prepare(config, self.world)
        self._cleanup.callback(self._job.close)
        self._store = WeightStore(Path(config.run.dir) / "weights")
        self.engine = self._job.make_engine(self._store)
        self._cleanup.callback(self.engine.close)
        self._publisher = self._job.make_publisher(self._store)
        self.flow = self._make_flow(config.rollout.temperature, config.agent.max_turns)
        self.judge = self._job.make_judge()
        self._memory_plan = self._job.memory_plan()
        self._run_dir = self._job.open_run_dir({"memory_plan": self._memory_plan.parts})
        if self.world.is_main:  # the ids in the logs are words as long as this lies beside them
            report.atomic_write_text(self._run_dir.tokenizer, self._job.tokenizer.backend_tokenizer.to_str())
        self.trainer = self._job.make_trainer(loss_spec(config), optim_spec(config))
        self._resume()
        if self.world.is_main:
            print(self._memory_plan.text())
        self._open_logs()
        self._warm = self._evaluate_warm()

    def _resume(self) -> None:
        """Take up the newest checkpoint, or begin; either way version `start_step` is published and loaded."""
        place = resume_point(self._config, self._run_dir)
        state = {"step": 0, "cursor": 0}
        if place is not None:
            state = checkpoint.load_state(place)
            checkpoint.restore(place, self._job.model, self.trainer.optimizer)
        self.start_step = state["step"]
        self.cursor = self._job.tasks.cursor(self._config.run.seed, state["cursor"])
        self._republish(self.start_step)
        self.load(self.start_step)

    def _open_logs(self) -> None:
        config, path, world = self._config, self._run_dir.path, self.world
        last_step = self.start_step or -1  # from the start also means: without the line of step 0
        self._trajectories, self._held_out = (
            report.TrajectoryLog(path, world.rank, last_step, name, world.size) for name in ("trajectories", "held_out")
        )
        self._progress = report.Progress(config.train.num_steps, self.start_step, world.is_main)
        self._cleanup.callback(self._progress.close)
        self._metrics = None
        if world.is_main:
            log = config.log
            self._metrics = report.MetricsLog(path, last_step, log.tensorboard, log.wandb_project or None, config.model_dump())
            self._cleanup.callback(self._metrics.close)

    def collect_options(self, step: int) -> dict[str, Any]:
        """Keyword arguments of `collect` for a training step."""
        rollout = self._config.rollout
        seed = derive_seed(self._config.run.seed, "train", step)
        waits = {"straggler_share": rollout.straggler_share, "straggler_s": rollout.straggler_s}
        return {"group_size": rollout.group_size, "seed": seed, "max_in_flight": rollout.max_in_flight, **waits, **self._ranks()}

    def publish(self, version: int) -> None:
        """Put the policy's weights into the store; collective, and done on every rank when it returns."""
        with saving(self._store.root):
            published = self._publisher.publish(named_weights(self._job.model), version)
            if self.world.is_main:
                self._store.collect_garbage(self._config.weights.keep)
        self._weights_metrics = published.metrics()

    def _republish(self, version: int) -> None:
        """Have the store at `version`, where the run starts or goes on: what was published later will be trained anew."""
        if self.world.is_main:
            self._store.rollback(version)
        self.world.barrier()
        if not self._publisher.resume(named_weights(self._job.model), version):
            if self.world.is_main:
                self._store.rollback(version - 1)
            self.world.barrier()
            self.publish(version)

    def load(self, version: int) -> None:
        """Have the engine sample with `version` from now on."""
        self.engine.load(version)
        self._weights_metrics.update(self.engine.metrics())

    def log(self, step: int, groups: Sequence[Group], batch: Advantages, stats: Mapping[str, float], clock: Clock) -> None:
        """Evaluate if that is due, write the step down, save if that is due: a kill in between leaves too many lines, not too few."""
        config = self._config
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        rollouts = RolloutStats.of(trajectories, config.agent.tools, self.world)
        if rollouts.failed_rollouts == rollouts.num_rollouts:
            reason = next((trajectory.error for trajectory in trajectories), "")
            raise EngineError(f"all {rollouts.num_rollouts} rollouts of step {step} failed, so there is nothing to go on with: {reason}")
        counts = [batch.num_dropped, *batch.num_excluded.values()]
        (num_dropped, *num_excluded), (peak_bytes,) = self.world.reduce(counts, [self._memory.num_bytes()])
        left_out = {f"num_excluded/{reason}": number for reason, number in zip(batch.num_excluded, num_excluded, strict=True)}
        chats = {**self._job.chats.metrics(), **(self.judge.metrics() if self.judge is not None else {})}
        chats = dict(zip(chats, self.world.sum(list(chats.values())), strict=True))
        evaluation = {}
        if config.eval.every and step % config.eval.every == 0:
            with clock("eval"):
                held_out = self._evaluate(MAIN_SPLIT, config.rollout.temperature, step)
            evaluation = {"eval_reward": held_out.stats.reward_mean}
            self._log_held_out(step, held_out.trajectories)
        self._trajectories.log(step, step - 1, annotate(groups, batch.samples, self.trainer.own_scores()))
        head = {"step": step, "version": step, **rollouts.metrics(), **evaluation, "num_groups_dropped": num_dropped, **left_out}
        seconds = {**clock.metrics(), "checkpoint_s": self._checkpoint_s}
        speed = self._speed(stats, seconds["train_s"], peak_bytes)
        self._write({**head, **stats, **speed, **self._weights_metrics, **chats, **seconds})
        self._checkpoint_s = 0.0
        if config.checkpoint.every and step % config.checkpoint.every == 0 and step < config.train.num_steps:
            self.save(step)

    def save(self, step: int) -> None:
        """Write a checkpoint of `step`; collective. Its seconds are in the next line of the log."""
        started = time.monotonic()
        job, state = self._job, {"cursor": self.cursor.position, "version": step}
        keep, place = self._config.checkpoint.keep, self._run_dir.checkpoints
        with saving(place):
            checkpoint.save(place, step, job.model, job.tokenizer, self.trainer.optimizer, state, self.world, keep)
        self._checkpoint_s += time.monotonic() - started

    def finish(self) -> None:
        """Save, evaluate the trained policy as the frozen one was, and write summary.json, curves.png and the table."""
        self.save(self._config.train.num_steps)
        trained, shown = self._evaluate_all()
        self._progress.close()
        (peak_bytes,) = self.world.max([self._memory.num_bytes()])
        if not self.world.is_main:
            return
        path = self._run_dir.path
        memory = {"planned_memory_gb": self._memory_plan.num_bytes / 1e9, "peak_memory_gb": peak_bytes / 1e9}
        report.write_summary(path / "summary.json", {"warm": self._warm, "trained": trained, "seconds": self._seconds(), **memory})
        plot_curves(path)
        for trajectory in shown[: self._config.log.num_rollouts]:
            print(report.rollout_text(trajectory))
        print(report.comparison_table(self._warm, trained))
        model = checkpoint.place(self._run_dir.checkpoints, self._config.train.num_steps)
        print(f"{path}/curves.png, summary.json, metrics.jsonl, trajectories.jsonl; model: {model}")
        print(f"to look at it: python -m flowtrain.view {path}")

    def _make_flow(self, temperature: float, max_turns: int) -> Flow:
        return self._job.make_flow(self._job.make_planner(self.engine, temperature), max_turns)

    def _ranks(self) -> dict[str, int]:
        return {"rank": self.world.rank, "num_ranks": self.world.size}

    def _evaluate(self, split: str, temperature: float, step: int) -> Evaluation:
        """One rollout of each held-out task; at a given step always with the same random numbers."""
        config = self._config
        flow = self._make_flow(temperature, config.agent.eval_max_turns)
        seed = derive_seed(config.run.seed, "eval", step)
        return evaluate(
            flow, self._job.tasks.held_out[split], seed, config.agent.tools, self.world, config.rollout.max_in_flight, self.judge
        )

    def _evaluate_warm(self) -> dict[str, Any]:
        """The policy that training starts from, measured once per run."""
        path = self._run_dir.path / "warm.json"
        if self.start_step and path.exists():
            return dict(json.loads(path.read_text()))
        started = time.monotonic()
        warm, trajectories = self._evaluate_all()
        if not self.start_step:
            self._log_held_out(0, trajectories)
        if self.world.is_main:
            report.atomic_write_text(path, json.dumps(warm))
            if not self.start_step:
                self._write({"step": 0, "version": 0, "eval_reward": warm["eval_reward"], "eval_s": time.monotonic() - started})
        return warm

    def _evaluate_all(self) -> tuple[dict[str, Any], tuple[Trajectory, ...]]:
        """Every held-out split, sampled and greedy; and the sampled rollouts of the main one."""
        config, splits = self._config, self._job.tasks.held_out
        sampled = {split: self._evaluate(split, config.rollout.temperature, -1) for split in splits}
        greedy = {split: self._evaluate(split, 0.0, -1) for split in splits}
        main = sampled[MAIN_SPLIT]
        result = {
            "eval_reward": main.stats.reward_mean,
            "eval_reward_greedy": greedy[MAIN_SPLIT].stats.reward_mean,
            "by_num_turns": main.by_num_turns,
            "by_kind": main.by_kind,
            "tool_shares": main.stats.tool_shares,
            "turns_mean": main.stats.turns_mean,
            "splits": {
                split: {
                    "sampled": sampled[split].stats.reward_mean,
                    "greedy": greedy[split].stats.reward_mean,
                    "by_num_turns": sampled[split].by_num_turns,
                }
                for split in splits
            },
        }
        return result, main.trajectories

    def _log_held_out(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """This rank's rollouts of the main split, as groups of one."""
        rank, size = self.world.rank, self.world.size
        self._held_out.log(step, step, [Group(rank + n * size, (trajectory,)) for n, trajectory in enumerate(trajectories)])

    def _seconds(self) -> dict[str, float]:
        """By stage over the whole run, resumed parts included; "warm_up" when the model says how long it took."""
        totals: dict[str, float] = {}
        for record in read_lines(self._run_dir.path / "metrics.jsonl"):
            for key, value in record.items():
                if key.endswith("_s") and key != "tokens_per_s" and value is not None:
                    totals[key.removesuffix("_s")] = totals.get(key.removesuffix("_s"), 0.0) + value
        origin = Path(self._config.model.path) / "rft.json"
        if origin.exists():
            totals["warm_up"] = json.loads(origin.read_text())["seconds"]
        return {key: round(value, 3) for key, value in totals.items()}

    def _speed(self, stats: Mapping[str, float], train_s: float, peak_bytes: float) -> dict[str, float]:
        """What the training of a step cost. MFU counts FLOPs that the trees need, and is there where the device's peak is known."""
        budget = max(stats["num_rows"], 1) * self._config.train.token_budget
        speed = {
            "tokens_per_s": stats["num_packed_tokens"] / max(train_s, 1e-9),
            "row_fill": stats["num_packed_tokens"] / budget,
            "peak_memory_gb": peak_bytes / 1e9,
        }
        return {**speed, "mfu": 1e12 * stats["train_tflop"] / max(train_s, 1e-9) / self._peak_flops} if self._peak_flops else speed

    def _known_tflops(self) -> float:
        """0 where the table of devices does not tell."""
        is_told = self.world.device.type == "cuda" and self._config.model.dtype == "bfloat16"
        return (peak_tflops(torch.cuda.get_device_name()) or 0.0) if is_told else 0.0

    def _write(self, metrics: dict[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.log(metrics)
        self._progress.update(metrics)
