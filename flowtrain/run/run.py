"""A training run while it runs: what `train.py` needs beside its eight verbs.

Opening and resuming, evaluation, logging, checkpoints, and the report at the end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from flowtrain import report
from flowtrain.agents.flow import Flow
from flowtrain.algorithms.branching import find_points
from flowtrain.config import Config
from flowtrain.config.command import Interrupt
from flowtrain.engines.protocol import Engine, EngineError
from flowtrain.report.curves import plot_curves
from flowtrain.report.jsonl import read_lines
from flowtrain.rewards import Judge
from flowtrain.run import recipe
from flowtrain.run.batch_source import BatchSource, connect
from flowtrain.run.components import RunComponents, resume_point
from flowtrain.run.evaluation import Evaluation, comparison, evaluate
from flowtrain.run.memory_plan import plan_memory
from flowtrain.run.placement import Placement
from flowtrain.run.policy_trainer import PolicyTrainer
from flowtrain.run.rollout_stats import RolloutStats
from flowtrain.run.verdict_stats import verdict_metrics
from flowtrain.tasks.cursor import TaskCursor
from flowtrain.tasks.mixture import MixedCursor
from flowtrain.tasks.sets import MAIN_SPLIT
from flowtrain.training import checkpoint
from flowtrain.training.devices import MemoryPeak, peak_tflops
from flowtrain.training.model import layout_digest
from flowtrain.training.token_scores import Scored, attach_logprobs, with_training_stats
from flowtrain.training.trainer import ResponseScores
from flowtrain.training.tree import PackedRow
from flowtrain.training.world import World
from flowtrain.types import BranchPoint, Group, Sample, SampleId, TrainBatch, Trajectory, UserError
from flowtrain.utils.seeds import derive_seed
from flowtrain.utils.step_timer import StepTimer
from flowtrain.weights import WeightStore


class Run:
    """Use with `with`; attributes are what the main loop touches."""

    world: World
    cursor: TaskCursor | MixedCursor
    judge: Judge | None
    algorithm: Callable[[Sequence[Group], int], TrainBatch]
    """(scored groups, number of groups over all ranks) -> what is trained."""
    start_step: int

    def __init__(self, config: Config, interrupt: Interrupt | None = None) -> None:
        self._config, self._interrupt = config, interrupt or Interrupt()
        self.num_questions = config.rollout.num_questions
        self._samples = not config.dataflow.url or config.eval.at_ends or config.eval.every > 0
        self._batch_source: BatchSource | None = None
        self._trained_from = ""
        self._saved_step = 0
        self._cleanup = ExitStack()
        self._checkpoint_s = 0.0
        self._weights_metrics: dict[str, float | str] = {}
        self._scored: Mapping[SampleId, Scored] = {}

    def __enter__(self) -> Run:
        with ExitStack() as cleanup:  # closes what is open when a later part fails to
            self._cleanup = cleanup
            self._open()
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def _open(self) -> None:
        config = self._config
        # Where some ranks only train, they wait for whole rollouts and evaluations of the others.
        self.world = World.join(
            config.run.device, timeout_s=3600.0 if config.rollout.num_engine_ranks else 600.0
        )
        self._cleanup.callback(self.world.leave)
        self._memory = MemoryPeak(self.world.device)
        self._placement = Placement.of(config, self.world)
        self._peak_flops = (
            1e12
            * (config.train.peak_tflops or self._known_tflops())
            * self._placement.trainers.size
        )
        self._components = RunComponents.prepare(config, self.world)
        self._cleanup.callback(self._components.close)
        sampled = (
            [policy.num_parameters() for policy in self._components.policies.values()]
            if self._samples
            else []
        )
        self._memory_plan = plan_memory(
            config,
            self._components.model,
            sampled,
            self._placement.trainers.size,
            self._gpu_bytes(),
        )
        if self._placement.trainers.is_member:
            self._memory_plan.check(config)
        store = WeightStore(Path(config.run.dir) / "weights")
        self._engines = self._make_engines(store)
        for engine in self._engines.values():
            self._cleanup.callback(engine.close)
        self._engine = self._engines[config.train.policy]
        self._flow = self._components.make_flow(self._engines, config.agent.max_turns)
        self.judge = self._components.make_judge()
        self._run_dir = self._components.open_run_dir({"memory_plan": self._memory_plan.parts})
        if self.world.is_main:  # the ids in the logs are words as long as this lies beside them
            planner = self._components.policies["planner"].tokenizer
            report.atomic_write_text(self._run_dir.tokenizer, planner.backend_tokenizer.to_str())
        self.algorithm = recipe.algorithm(config)
        self._policy_trainer = self._make_policy_trainer(store)
        self._resume()
        if self.world.is_main:
            print(self._memory_plan.text())
        self._open_logs()
        if config.dataflow.url:
            self._batch_source = self._open_batch_source()
        self._warm = self._evaluate_warm()

    def _gpu_bytes(self) -> int:
        device = self.world.device
        return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0

    def _make_engines(self, store: WeightStore) -> dict[str, Engine]:
        """The trained policy has its weights from the store; the other one, if there is one, is
        frozen.
        """
        if self._placement.samplers.is_member and self._samples:
            return self._components.make_policy_engines({self._config.train.policy: store})
        return self._components.make_no_engines()

    def _make_policy_trainer(self, store: WeightStore) -> PolicyTrainer | None:
        """None on a rank that only samples."""
        if self._placement.trainers.is_member:
            return PolicyTrainer.make(self._components, self._placement.trainers, store)
        self._components.model.to("meta")  # its memory is not needed here
        return None

    def _resume(self) -> None:
        """Take up the newest checkpoint, or begin; either way version `start_step` is published and
        loaded.
        """
        place = resume_point(self._config, self._run_dir)
        state: dict[str, Any] = {"step": 0, "cursor": 0}
        if place is not None:
            state = checkpoint.load_state(place)
            if self._policy_trainer is not None:
                self._policy_trainer.restore(place)
        self.start_step = self._saved_step = state["step"]
        self._trained_from = state.get("dataflow", "")
        if self._trained_from and not self._config.dataflow.url:
            raise UserError(
                f"dataflow.url is empty, but {place} was trained from the dataflow "
                f"{self._trained_from!r}: name its service"
            )
        self.cursor = self._components.tasks.cursor(self._config.run.seed, state["cursor"])
        if self._policy_trainer is not None:
            self._weights_metrics = self._policy_trainer.republish(self.start_step)
        self._placement.wait()
        self.load(self.start_step)

    def _open_logs(self) -> None:
        config, path, world, rank = (
            self._config,
            self._run_dir.path,
            self.world,
            self._placement.samplers.rank,
        )
        last_step = self.start_step or -1  # from the start also means: without the line of step 0
        self._trajectories, self._held_out = (
            report.TrajectoryLog(path, rank, last_step, name, self._placement.samplers.size)
            for name in ("trajectories", "held_out")
        )
        self._progress = report.Progress(config.train.num_steps, self.start_step, world.is_main)
        self._cleanup.callback(self._progress.close)
        self._metrics = None
        if world.is_main:
            log = config.log
            self._metrics = report.MetricsLog(
                path, last_step, log.tensorboard, log.wandb_project or None, config.model_dump()
            )
            self._cleanup.callback(self._metrics.close)

    def _open_batch_source(self) -> BatchSource:
        """Where nodes make the rollouts. They may pull the weights from now on."""
        config, components = self._config, self._components
        batch_source = BatchSource(
            connect(config), config, self.world, self._interrupt, self._progress.note
        )
        self._cleanup.callback(batch_source.close)
        layout = layout_digest(
            components.model, components.tokenizer, getattr(torch, config.model.dtype)
        )
        store = config.dataflow.store or str((Path(config.run.dir) / "weights").resolve())
        batch_source.register(layout, store, self.start_step, self._trained_from)
        return batch_source

    def is_interrupted(self) -> bool:
        """Some rank was asked to end; collective."""
        return bool(self.world.max([self._interrupt.requested])[0])

    def next_batch(self, step: int) -> list[Group] | None:
        """This rank's share of the step's batch; None when the run was asked to end before there
        was one. Collective.
        """
        assert self._batch_source is not None, "without dataflow.url a run samples by itself"
        return self._batch_source.next_batch(step)

    def flow(self, step: int) -> Flow:
        """What makes the rollouts of a training step."""
        return replace(self._flow, hints=recipe.hints(self._config, step))

    def collect_options(self, step: int) -> dict[str, Any]:
        """Keyword arguments of `collect` for a training step."""
        rollout, samplers = self._config.rollout, self._placement.samplers
        seed = derive_seed(self._config.run.seed, "train", step)
        group_size = (
            self._config.appo.num_roots
            if self._config.algorithm.name == "appo"
            else rollout.group_size
        )
        ranks = {"rank": samplers.rank, "num_ranks": samplers.size}
        return {
            "group_size": group_size,
            "seed": seed,
            "max_in_flight": rollout.max_in_flight,
            **self._waits(),
            **ranks,
        }

    def branch_points(self, step: int, groups: Sequence[Group]) -> list[list[BranchPoint]]:
        """Where rollouts are to branch; none but for APPO. Collective."""
        config = self._config
        if config.algorithm.name != "appo":
            return [[] for _ in groups]

        def score(samples: Sequence[Sample], entropies: Sequence[float]) -> ResponseScores:
            assert self._policy_trainer is not None, "branching ranks train"
            told = entropies if recipe.sampler_tells_entropies(config) else None
            against_reference = recipe.branches_against_reference(config)
            scores = self._policy_trainer.trainer.score_samples(
                samples, config.train.token_budget, against_reference, told
            )
            self._scored = scores.by_sample(samples, *recipe.scored_before(config))
            return scores

        num_branches = config.rollout.group_size - config.appo.num_roots
        seed = derive_seed(config.run.seed, "branch", step)
        return find_points(
            groups, score, recipe.branch_rule(config), num_branches, seed, self._is_blank_V
        )

    @cached_property
    def _is_blank_V(self) -> torch.Tensor:
        """Decodes the whole vocabulary, which only those who branch need."""
        return recipe.blank_tokens(
            self._components.tokenizer, self._components.model.config.vocab_size
        )

    def branch_options(self, step: int) -> dict[str, Any]:
        """Keyword arguments of `collect_branches`."""
        rollout = self._config.rollout
        seed = derive_seed(self._config.run.seed, "branch", step)
        return {
            "group_size": rollout.group_size,
            "seed": seed,
            "max_in_flight": rollout.max_in_flight,
            **self._waits(),
        }

    def _waits(self) -> dict[str, float]:
        rollout = self._config.rollout
        return {"straggler_share": rollout.straggler_share, "straggler_s": rollout.straggler_s}

    @property
    def max_positions(self) -> int:
        """Tokens of a sample that the model has positions for."""
        return int(self._components.model.config.max_position_embeddings)

    def deal(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """What this rank trains of what all ranks have sampled; collective."""
        return self._placement.deal(attach_logprobs(samples, self._scored))

    def train(self, step: int, minibatches: Sequence[Sequence[PackedRow]]) -> dict[str, float]:
        """One optimizer step per mini-batch, while the engine sleeps. Returns statistics of all
        ranks that train; none on the others.
        """
        if self._policy_trainer is None:
            return {}
        self._engine.sleep()
        return self._policy_trainer.train(step, minibatches)

    def publish(self, version: int) -> None:
        """Put the policy's weights into the store; collective, and done on every rank when it
        returns.
        """
        if self._policy_trainer is not None:
            self._weights_metrics = self._policy_trainer.publish(version)
        self._placement.wait()
        if self._batch_source is not None:
            self._batch_source.report_progress(version, self._saved_step)

    def load(self, version: int) -> None:
        """Have the engine sample with `version` from now on; where nodes sample, only if it is to
        be evaluated.
        """
        if self._batch_source is not None and not (
            self._is_evaluated(version) or version == self._config.train.num_steps
        ):
            return
        self._engine.load(version)
        self._weights_metrics.update(self._placement.of_first_sampler(self._engine.metrics()))

    def log(
        self,
        step: int,
        groups: Sequence[Group],
        batch: TrainBatch,
        stats: Mapping[str, float],
        timer: StepTimer,
    ) -> None:
        """Evaluate if that is due, write the step down, save if that is due: a kill in between
        leaves too many lines, not too few.
        """
        config = self._config
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        rollouts = RolloutStats.of(trajectories, config.agent.tools, self.world)
        if rollouts.failed_rollouts == rollouts.num_rollouts:
            reason = next((trajectory.error for trajectory in trajectories), "")
            raise EngineError(
                f"all {rollouts.num_rollouts} rollouts of step {step} failed, so there is nothing "
                f"to go on with: {reason}"
            )
        numbers = [batch.num_groups_dropped, *batch.num_filtered.values()]
        (num_dropped, *num_excluded), (peak_bytes,) = self.world.reduce(
            numbers, [self._memory.num_bytes()]
        )
        left_out = {
            f"num_excluded/{reason}": number
            for reason, number in zip(batch.num_filtered, num_excluded, strict=True)
        }
        chats = {
            **self._components.chats.metrics(),
            **(self.judge.metrics() if self.judge is not None else {}),
        }
        chats = dict(zip(chats, self.world.sum(list(chats.values())), strict=True))
        evaluation = {}
        if self._is_evaluated(step):
            with timer("eval"):
                held_out = self._evaluate(MAIN_SPLIT, step)
            evaluation = {"eval_reward": held_out.stats.reward_mean}
            self._log_held_out(step, held_out.trajectories)
        scores = self._placement.gather_scores(
            {} if self._policy_trainer is None else self._policy_trainer.trainer.own_scores()
        )
        self._trajectories.log(
            step, step - 1, with_training_stats(groups, batch.samples, scores, config.train.policy)
        )
        verdicts = (
            verdict_metrics(trajectories, config, self.world)
            if "verifier" in config.policy_names
            else {}
        )
        head = {"step": step, "version": step, **rollouts.metrics(), **verdicts, **evaluation}
        seconds = {**timer.metrics(), "checkpoint_s": self._checkpoint_s}
        speed = {"peak_memory_gb": peak_bytes / 1e9, **self._speed(stats, seconds["train_s"])}
        fed = {} if self._batch_source is None else self._batch_source.metrics
        counts = {"num_groups_dropped": num_dropped, **left_out, **fed}
        self._write(
            {**head, **counts, **stats, **speed, **self._weights_metrics, **chats, **seconds}
        )
        self._checkpoint_s = 0.0
        if (
            config.checkpoint.every
            and step % config.checkpoint.every == 0
            and step < config.train.num_steps
        ):
            self.save(step)

    def _is_evaluated(self, step: int) -> bool:
        every = self._config.eval.every
        return every > 0 and step % every == 0

    def save(self, step: int) -> None:
        """Write a checkpoint of `step`; collective. Its seconds are in the next line of the log."""
        started = time.monotonic()
        state: dict[str, int | str] = {"cursor": self.cursor.position, "version": step}
        if self._batch_source is not None:
            state["dataflow"] = self._batch_source.run
        if self._policy_trainer is not None:
            self._policy_trainer.save(self._run_dir.checkpoints, step, state)
        self._saved_step = step
        self._checkpoint_s += time.monotonic() - started

    def finish(self) -> None:
        """Save, evaluate the trained policy as the frozen one was, and write summary.json,
        curves.png and the table.
        """
        config = self._config
        self.save(config.train.num_steps)
        if self._batch_source is not None:
            self._batch_source.report_progress(
                config.train.num_steps, config.train.num_steps, is_done=True
            )
        trained, shown = self._evaluate_all() if config.eval.at_ends else ({}, ())
        self._progress.close()
        (peak_bytes,) = self.world.max([self._memory.num_bytes()])
        if self._placement.samplers.is_main:
            for trajectory in shown[: config.log.num_rollouts]:
                print(report.rollout_text(trajectory))
        if not self.world.is_main:
            return
        path = self._run_dir.path
        memory = {
            "planned_memory_gb": self._memory_plan.num_bytes / 1e9,
            "peak_memory_gb": peak_bytes / 1e9,
        }
        report.write_summary(
            path / "summary.json",
            {"warm": self._warm, "trained": trained, "seconds": self._seconds(), **memory},
        )
        plot_curves(path)
        if trained:
            print(report.comparison_table(self._warm, trained))
        model = checkpoint.place(self._run_dir.checkpoints, config.train.num_steps)
        print(f"{path}/curves.png, summary.json, metrics.jsonl, trajectories.jsonl; model: {model}")
        print(f"to look at it: python -m flowtrain.report.viewer {path}")

    def _evaluate(self, split: str, step: int, temperature: float | None = None) -> Evaluation:
        """One rollout of each held-out task; at a given step always with the same random numbers."""
        config = self._config
        flow = self._components.make_flow(self._engines, config.agent.eval_max_turns, temperature)
        seed = derive_seed(config.run.seed, "eval", step)
        tasks, ranks = (
            self._components.tasks.held_out[split],
            (self.world, config.rollout.max_in_flight, self.judge, self._placement.samplers),
        )
        return evaluate(flow, tasks, seed, config.agent.tools, *ranks)

    def _evaluate_warm(self) -> dict[str, Any]:
        """The policy that training starts from, measured once per run; nothing where the ends are
        not evaluated.
        """
        if not self._config.eval.at_ends:
            return {}
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
                self._write(
                    {
                        "step": 0,
                        "version": 0,
                        "eval_reward": warm["eval_reward"],
                        "eval_s": time.monotonic() - started,
                    }
                )
        return warm

    def _evaluate_all(self) -> tuple[dict[str, Any], tuple[Trajectory, ...]]:
        """Every held-out split, sampled and greedy; and the sampled rollouts of the main one."""
        splits = self._components.tasks.held_out
        sampled = {split: self._evaluate(split, -1) for split in splits}
        greedy = {split: self._evaluate(split, -1, temperature=0.0) for split in splits}
        return comparison(sampled, greedy, MAIN_SPLIT), sampled[MAIN_SPLIT].trajectories

    def _log_held_out(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """This rank's rollouts of the main split, as groups of one."""
        rank, size = self._placement.samplers.rank, self._placement.samplers.size
        self._held_out.log(
            step,
            step,
            [Group(rank + n * size, (trajectory,)) for n, trajectory in enumerate(trajectories)],
        )

    def _seconds(self) -> dict[str, float]:
        """By stage over the whole run, resumed parts included; "warm_up" when the model says how
        long it took.
        """
        totals: dict[str, float] = {}
        for record in read_lines(self._run_dir.path / "metrics.jsonl"):
            for key, value in record.items():
                if key.endswith("_s") and key != "tokens_per_s" and value is not None:
                    totals[key.removesuffix("_s")] = totals.get(key.removesuffix("_s"), 0.0) + value
        origin = Path(self._config.model.path) / "rft.json"
        if origin.exists():
            totals["warm_up"] = json.loads(origin.read_text())["seconds"]
        return {key: round(value, 3) for key, value in totals.items()}

    def _speed(self, stats: Mapping[str, float], train_s: float) -> dict[str, float]:
        """How fast a step was trained, on ranks that train. MFU counts FLOPs that the trees need,
        and is there where the peak is known.
        """
        if not stats:
            return {}
        train_s, budget = (
            max(train_s, 1e-9),
            max(stats["num_rows"], 1) * self._config.train.token_budget,
        )
        speed = {
            "tokens_per_s": stats["num_packed_tokens"] / train_s,
            "packing_efficiency": stats["num_packed_tokens"] / budget,
        }
        return (
            {**speed, "mfu": 1e12 * stats["train_tflop"] / train_s / self._peak_flops}
            if self._peak_flops
            else speed
        )

    def _known_tflops(self) -> float:
        """0 where the table of devices does not tell."""
        is_told = self.world.device.type == "cuda" and self._config.model.dtype == "bfloat16"
        return (peak_tflops(torch.cuda.get_device_name()) or 0.0) if is_told else 0.0

    def _write(self, metrics: dict[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.log(metrics)
        self._progress.update(metrics)
