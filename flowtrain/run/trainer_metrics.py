"""The metrics of a trainer for Prometheus. A step hands its numbers over; what is made of them, is
made when somebody asks.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from flowtrain.config import Config
from flowtrain.net.credentials import Access
from flowtrain.net.monitoring import Monitor, Place, counter, gauge
from flowtrain.net.serving import TOKEN_VARIABLE
from flowtrain.report.loggers import RolloutText
from flowtrain.training.world import World
from flowtrain.types import UserError, account_of
from flowtrain.utils.step_timer import STAGES
from flowtrain.weights.ranks import together

if TYPE_CHECKING:
    from prometheus_client import Metric

_NAME = "flowtrain_trainer"
_GAUGES = {
    "reward_mean": ("reward", "Mean reward of the step's rollouts."),
    "eval_reward": ("eval_reward", "Mean reward on held-out questions, when last measured."),
    "loss": ("loss", "Loss of the step."),
    "kl": ("kl_nats", "KL from the reference policy, per token."),
    "entropy": ("entropy_nats", "Entropy of the policy, per token."),
    "grad_norm": ("gradient_norm", "Norm of the gradient before it is clipped."),
    "lr": ("learning_rate", "Learning rate."),
    "clip_fraction": ("clipped_ratio", "Share of tokens whose ratio is clipped."),
    "mismatch_kl": ("mismatch_kl_nats", "KL of the trainer's log-probs from the sampler's."),
    "logprob_mismatch": ("mismatch_nats", "Mean difference of trainer's and sampler's log-probs."),
    "dataflow/staleness_mean": ("staleness_mean_versions", "Age of the step's tokens, mean."),
    "dataflow/staleness_max": ("staleness_max_versions", "Age of the step's oldest token."),
    "response_len_mean": ("response_length_tokens", "Mean length of a response."),
    "failed_rollouts": ("failed_rollouts", "Rollouts of the step that failed."),
    "tokens_per_s": ("tokens_per_second", "Packed tokens trained per second of training."),
    "mfu": ("model_flops_utilization_ratio", "FLOPs of training by the device's peak."),
    "version": ("weights_version", "Newest version of the weights."),
}
"""Metrics of a step by their keys in metrics.jsonl. Keys that hold names of users' are not here."""


class TrainerMetrics:
    """A `report.loggers.Logger` that keeps what a scrape asks for."""

    def __init__(self, num_steps: int, step: int, monitor: Monitor) -> None:
        """`step`: that of the checkpoint that is resumed."""
        self._num_steps, self._step = num_steps, step
        self._step_at = time.time()
        self._latest: dict[str, float] = {}
        self._tokens: Counter[str] = Counter()
        self._num_sampled = 0
        self._seconds: defaultdict[str, float] = defaultdict(float)
        monitor.add(self.collect)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Keep the numbers of a step; no more than a few sums are made here."""
        self._latest = {**self._latest, **numbers, "version": max(step, self._step)}
        self._step = max(step, self._step)
        self._step_at = time.time()
        account = account_of(numbers)
        self._num_sampled += account.sampled
        self._tokens.update(account.fates)
        for stage in (*STAGES, "other"):
            self._seconds[stage] += numbers.get(f"{stage}_s", 0.0)

    def log_rollouts(self, step: int, rollouts: Sequence[RolloutText]) -> None:
        """Nothing: Prometheus has numbers alone."""

    def close(self) -> None:
        """Nothing is open."""

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; on any thread."""
        latest = self._latest
        yield gauge(f"{_NAME}_step", "Newest step that is done.", self._step)
        yield gauge(f"{_NAME}_steps", "Steps of the whole run (train.num_steps).", self._num_steps)
        text = "Seconds since 1970 when the newest step was done, or the run began."
        yield gauge(f"{_NAME}_step_time_seconds", text, self._step_at)
        for key, (name, text) in _GAUGES.items():
            values = {(): latest[key]} if key in latest else {}
            yield gauge(f"{_NAME}_{name}", text, values)
        memory = {(): 1e9 * latest["peak_memory_gb"]} if "peak_memory_gb" in latest else {}
        text = "Most memory that a rank has taken since the run began."
        yield gauge(f"{_NAME}_peak_memory_bytes", text, memory)
        text = "Seconds of this process by stage of a step."
        yield counter(f"{_NAME}_stage_seconds", text, self._seconds, ("stage",))
        text = "What became of the tokens of the steps of this process."
        yield counter(f"{_NAME}_tokens", text, self._tokens, ("fate",))
        text = "Tokens that were sampled for the steps of this process."
        yield counter(f"{_NAME}_sampled_tokens", text, self._num_sampled)


class TrainerMonitor:
    """Answers `/health` and `/metrics` of a trainer on the main rank, where `log.metrics_port`
    says so.
    """

    def __init__(self, config: Config, world: World) -> None:
        """Answer from now on; collective. Raises UserError on every rank when it cannot."""
        self.monitor: Monitor | None = None
        self._place: Place | None = None
        together(world, lambda: self._open(config, world.is_main), other_failed=UserError)

    def _open(self, config: Config, is_main: bool) -> None:
        log = config.log
        if not log.metrics_port or not is_main:
            return
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token and not log.open_metrics:
            raise UserError(
                f"log.metrics_port={log.metrics_port} needs the variable {TOKEN_VARIABLE}, the "
                "token that Prometheus sends, or log.open_metrics = true"
            )
        self.monitor = Monitor(_NAME, None if log.open_metrics else Access(token))
        self._place = Place(self.monitor, log.metrics_host, log.metrics_port)

    def logger(self, num_steps: int, step: int) -> list[TrainerMetrics]:
        """Return the logger that fills the metrics, if they are asked for."""
        return [] if self.monitor is None else [TrainerMetrics(num_steps, step, self.monitor)]

    def close(self) -> None:
        """End the server."""
        if self._place is not None:
            self._place.close()
