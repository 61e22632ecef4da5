"""A training run between its first and last step: its parts, and the verbs of the loop that need
several parts. The parts are fixed once the run is open; verbs return their results.

Each trained policy has a `Run`: the first one samples, evaluates and decides on checkpoints, and
the others learn from the same rollouts.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from flowtrain.agents.base import Agent
from flowtrain.algorithms import Branches
from flowtrain.config import Config
from flowtrain.config.command import Interrupt
from flowtrain.evaluation.evaluator import Evaluator, Measured, PartRollouts, held_out_name
from flowtrain.evaluation.nodes import PoolEvaluations
from flowtrain.inference.protocol import Engine
from flowtrain.logging import atomic_write_text
from flowtrain.logging.learning_signal import LearningSignal, count_signal
from flowtrain.logging.mismatch import MismatchGate
from flowtrain.logging.profiler import profiled
from flowtrain.logging.rollout_parts import count_parts, part_metrics
from flowtrain.logging.rollouts import RolloutStats, count_rollouts
from flowtrain.logging.survivors import count_survivors, survivor_metrics
from flowtrain.logging.tally import Tally
from flowtrain.logging.token_counts import account, count_tokens
from flowtrain.records import (
    Group,
    PolicyName,
    Rollouts,
    Task,
    TokenAccount,
    TrainBatch,
    Trajectory,
)
from flowtrain.tasks.cursor import TaskCursor
from flowtrain.tasks.mixture import MixedCursor
from flowtrain.tasks.sets import MAIN_SPLIT
from flowtrain.trainer.devices import MemoryPeak
from flowtrain.trainer.run.run_logger import Counted, RunLogger
from flowtrain.trainer.setup.components import RunComponents
from flowtrain.trainer.setup.learner import Follower, Rows
from flowtrain.trainer.setup.memory_plan import MemoryPlan
from flowtrain.trainer.setup.placement import Placement
from flowtrain.utils.waiting import waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The parts that all policies of a run share."""

    interrupt: Interrupt
    memory: MemoryPeak
    memory_plan: MemoryPlan
    engines: dict[str, Engine]
    """Engines by policy; the trained policy's engine follows the published versions."""
    agent: Agent
    sampled: Counter[PolicyName]
    """Sampled tokens by policy that no step has counted yet."""
    benchmarks: Mapping[str, Sequence[Task]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The parts of an open run. Methods are collective unless they say otherwise."""

    components: RunComponents
    shared: Shared
    learner: Follower
    cursor: TaskCursor | MixedCursor
    signal: LearningSignal
    gate: MismatchGate
    evaluator: Evaluator
    pool: PoolEvaluations | None
    """Evaluations by the rollout nodes of `dataflow.url`; None if this run samples."""
    logger: RunLogger
    start_step: int
    """Step of the resumed checkpoint; 0 for a new run."""
    beside: tuple[Run, ...] = ()
    """The runs of the other trained policies."""

    @property
    def config(self) -> Config:
        return self.components.config

    def steps(self) -> Iterator[int]:
        """Yield the remaining steps, profiling `run.profile` of them after the first."""
        steps = range(self.start_step + 1, self.config.train.num_steps + 1)
        end = 1 + self.config.run.profile
        yield from steps[:1]
        with ExitStack() as profile:
            world, folder = self.components.world, self.logger.run_dir.profile
            if steps[1:end] and world.is_main:
                profile.enter_context(profiled(folder, world.device))
            yield from steps[1:end]
        yield from steps[end:]

    def is_interrupted(self) -> bool:
        """Return whether any rank was asked to end. Raises a checkpoint's error on every rank."""
        # One exchange for both, after which all ranks do the same.
        flags = [self.shared.interrupt.requested, self.learner.has_failed()]
        is_requested, has_failed = self.components.world.max(flags)
        if has_failed:
            self.learner.wait_for_checkpoint()
        return bool(is_requested)

    def agent_of(self, step: int) -> Agent:
        """Return the agent for a training step, with the step's hints. Not collective."""
        return self.shared.agent.with_hints(self.components.algorithm.hints(step))

    def waiting_for_rollouts(self, step: int) -> AbstractContextManager[Callable[[], None]]:
        """Report the first step's number of finished rollouts, if slow. Not collective."""
        samplers, rollout = self.components.placement.samplers, self.config.rollout
        is_shown = samplers.rank == 0 and step == self.start_step + 1
        total = rollout.num_questions // samplers.size * self.components.algorithm.num_roots
        return waiting(f"rollouts of step {step}", is_shown, total=total)

    def sleep(self) -> None:
        """Release the memory of the engines on a training rank, with `vllm.sleep`."""
        if self.components.placement.trainers.is_member:
            for engine in self.shared.engines.values():
                engine.sleep()
            self.components.chats.sleep()

    def branch(self, step: int, groups: Sequence[Group]) -> Branches:
        """Return the branch points of a step's rollouts; engines sleep while the trainer scores."""
        if self.components.algorithm.num_roots < self.config.rollout.group_size:
            self.sleep()
        return self.learner.branch(step, groups)

    def count(
        self,
        step: int,
        rollouts: Rollouts,
        batch: TrainBatch,
        packed: Rows,
        trained: Mapping[str, float],
    ) -> Counted:
        """Return the statistics of a step over all ranks: rollouts, tokens, and mismatch of trainer
        and sampler.

        Args:
            batch, packed: the training samples of the rollouts, before and after packing.
            trained: statistics of the optimizer steps; empty on a rank that does not train.
        """
        config, groups = self.config, rollouts.groups
        policy, judge = config.train.policy, self.components.judge
        # What nodes sample they count themselves.
        num_sampled = self.shared.sampled.pop(policy, 0) if self.pool is None else None
        chat_metrics = {**self.components.chats.metrics(), **(judge.metrics() if judge else {})}
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        tally = Tally()
        tally.add(count_rollouts(trajectories, config.agent.tools))
        tally.add({"num_groups_dropped": batch.num_groups_dropped})
        tally.add({f"num_excluded/{reason}": num for reason, num in batch.num_filtered.items()})
        count_parts(tally, trajectories, config)
        policy_groups = [group.of_policy(policy) for group in groups]
        has_teacher = self.components.algorithm.distill_spec() is not None
        count_signal(tally, policy_groups, batch, config.reward.low, has_teacher)
        count_survivors(tally, policy_groups, batch)
        count_tokens(tally, groups, batch, packed, policy=policy, sampled=num_sampled)
        tally.add(chat_metrics)
        if (gap := batch.divergence_sum) is not None:
            tally.add({"divergence": gap})
        tally.highest("peak_bytes", self.logger.peak_bytes())
        for name in ("num_tokens", "num_tokens_skipped"):  # which only ranks that train know
            tally.highest(name, trained.get(name, 0))
        if trained:
            mismatch = {name: x for name, x in trained.items() if name.startswith("mismatch_")}
            tally.say("mismatch", mismatch)
        # One exchange for all that is counted; ranks need not have the same names.
        totals = tally.of_all(self.components.world)
        tokens = account(
            totals, int(totals.maxima["num_tokens"]), int(totals.maxima["num_tokens_skipped"])
        )
        counts = {name: num for name, num in totals.sums.items() if name.startswith("num_")}
        metrics = {
            **RolloutStats.of_counts(totals.sums, config.agent.tools).metrics(),
            **part_metrics(totals),
            **survivor_metrics(totals),
            **counts,
            **{name: totals.sums[name] for name in chat_metrics},
            "peak_memory_gb": totals.maxima["peak_bytes"] / 1e9,
            **tokens.metrics(),
        }
        if gap is not None:
            metrics["divergence"] = totals.sums["divergence"] / max(totals.maxima["num_tokens"], 1)
        return Counted(totals, tokens, totals.said["mismatch"][0], metrics)

    def watch(self, step: int, counted: Counted) -> None:
        """Warn of a step without a learning signal. Raises UserError, after writing the checkpoint,
        if trainer and sampler disagree.
        """
        self.signal.watch(step, counted.total)
        self.gate.watch(step, counted.mismatch)

    def publish(self, version: int, tokens: TokenAccount) -> dict[str, float | str]:
        """Publish the policy's weights and return metrics, after all ranks have finished.

        Reports to the dataflow the oldest step that a crash may fall back to, and the account of
        the step's `tokens`.
        """
        metrics = self.learner.publish(version)
        if self.pool is not None:
            oldest = self.learner.oldest_step()
            evaluated = self.pool.saved.get(oldest, -1)
            self.pool.source.report_progress(
                version, oldest, evaluated=evaluated, tokens=tokens.fates
            )
        return metrics

    def load(self, version: int) -> dict[str, float]:
        """Load `version` into the engine, if any, for subsequent sampling, and return the engine's
        metrics.
        """
        engine = self.shared.engines[self.config.train.policy]
        return load(engine, version, self.components.placement)

    def evaluate(self, step: int) -> Measured | None:
        """Evaluate the policy on held-out tasks and benchmarks; returns None if not due.

        With nodes it also returns None without waiting, and logs evaluations that are complete.
        """
        if self.pool is None:
            return self.evaluator.evaluate(step) if self.evaluator.is_due(step) else None
        if self.evaluator.is_due(step):
            self.pool.ask(step, self.evaluator.parts(step))
        self._log_evaluations(self.pool.complete())
        return None

    def _log_evaluations(self, evaluations: Iterable[tuple[int, PartRollouts]]) -> None:
        for step, rollouts in evaluations:
            versions = self.pool.version_metrics(step, rollouts) if self.pool else {}
            self.logger.log_evaluation(step, self.evaluator.measured(step, rollouts, versions))

    def checkpoint(self, step: int) -> None:
        """Write a checkpoint of `step` in the background, after the step's log and after the other
        policies' checkpoints are on disk, because these resume from a step of this one.
        """
        for policy_run in self.beside:
            policy_run.end(step)
        # No checkpoint of a step whose rollouts are not on the disk: a resumed run skips them.
        self.logger.flush()
        state: dict[str, int | str] = {"cursor": self.cursor.position, "version": step}
        pool, evaluated = self.pool, self.logger.evaluated
        if pool is not None:
            state["dataflow"] = pool.source.run
        self.learner.save(
            step, state, lambda: pool.on_checkpoint(step, evaluated) if pool else None
        )

    def end(self, step: int) -> None:
        """Write a checkpoint of `step` and wait until it is on disk."""
        self.checkpoint(step)
        self.learner.wait_for_checkpoint()

    def is_checkpoint_due(self, step: int) -> bool:
        """Return whether `checkpoint.every` requires one after `step`, other than the last."""
        interval = self.config.checkpoint.every
        return interval > 0 and step % interval == 0 and step < self.config.train.num_steps

    def finish(self, warm: dict[str, Any]) -> None:
        """Save, evaluate the trained policy like the initial one, and write the report."""
        last_step = self.config.train.num_steps
        self.end(last_step)
        if self.pool is not None:
            if self.config.eval.at_ends:
                self.pool.ask_at_end(last_step, self.evaluator.parts_of_ends())
            self.pool.wait_until_asked()  # or nodes would hear that there is nothing left to do
            self.pool.source.report_progress(last_step, last_step, is_done=True)
            self._log_evaluations(self.pool.wait())
        for policy_run in self.beside:
            policy_run.report({}, {})
        trained: dict[str, Any] = {}
        if self.config.eval.at_ends:
            trained, trajectories = self._compare(last_step)
            self.logger.log_trained(trajectories)
        self.report(warm, trained)

    def report(self, warm: Mapping[str, Any], trained: Mapping[str, Any]) -> None:
        """Write the report, with the comparisons before and after training, if made."""
        tokens = None
        if self.pool is not None and self.components.world.is_main:
            tokens = self.pool.source.token_account()
        self.logger.report(
            self.shared.memory_plan, warm, trained, signal=self.signal.summary(), tokens=tokens
        )

    def evaluate_warm(self) -> dict[str, Any]:
        """Evaluate the initial policy, once per run; {} without `eval.at_ends`."""
        if not self.config.eval.at_ends:
            return {}
        path, world = self.logger.run_dir.path / "warm.json", self.components.world
        # The main rank's word counts: others may have no file system in common with it.
        if self.start_step:
            saved_text = path.read_text() if world.is_main and path.exists() else ""
            if warm_text := world.gather_text(saved_text)[0]:
                return dict(json.loads(warm_text))
        started = time.monotonic()
        warm, trajectories = self._compare(self.start_step)
        if not self.start_step:
            self.logger.log_held_out(0, trajectories)
        if self.components.world.is_main:
            atomic_write_text(path, json.dumps(warm))
            if not self.start_step:
                seconds = time.monotonic() - started
                metrics = self.evaluator.logged(warm)
                self.logger.write({"step": 0, "version": 0, **metrics, "eval_s": seconds})
        return warm

    def _compare(self, step: int) -> tuple[dict[str, Any], tuple[Trajectory, ...]]:
        """Evaluate the policy before or after training, after `step`; waits for nodes, if any.

        Returns the comparison for summary.json and the sampled rollouts of the main split.
        """
        parts = self.evaluator.parts_of_ends()
        if self.pool is None:
            rollouts, versions = self.evaluator.roll_out(parts), {}
        else:
            self.pool.ask_at_end(step, parts)
            rollouts = self.pool.wait_for_end(step)
            versions = self.pool.version_metrics(step, rollouts)
        results = self.evaluator.compared(rollouts) | ({"versions": versions} if versions else {})
        return results, rollouts[held_out_name(MAIN_SPLIT)]


def load(engine: Engine, version: int, placement: Placement) -> dict[str, float]:
    """Load `version` into each rank's engine, if any, and return the engine's metrics."""
    engine.load(version)
    return placement.of_first_sampler(engine.metrics())
