"""Batches that rollout nodes have made: this run as the dataflow knows it (`rollouts/contract.py`).

While a batch fills rank 0 alone asks; then every rank fetches its share by itself. Waiting requests
run on a thread, so that an interrupted run can end.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from threading import Event
from typing import TYPE_CHECKING, TypeVar

from flowtrain.config import Config
from flowtrain.config.command import Interrupt
from flowtrain.logging.token_counts import versions
from flowtrain.records import Group, Outage, Rollouts, TokenAccount, UserError, account_of
from flowtrain.rollouts.codec import unpack_group
from flowtrain.rollouts.contract import (
    AssignedGroup,
    Batch,
    BatchRequest,
    Dataflow,
    Progress,
    Refused,
    Register,
    Unavailable,
)
from flowtrain.rollouts.heartbeat import Heartbeat
from flowtrain.trainer.distributed import World
from flowtrain.utils.net.serving import TOKEN_VARIABLE

if TYPE_CHECKING:
    from flowtrain.rollouts.client import Client

T = TypeVar("T")

_TICK_S = 0.25
"""Between two looks at whether the run was asked to end."""
_ASK_S = 20.0
"""How long the service may think about a batch that is not full."""
_PAUSE_S = 0.05
_SILENT_S = 30.0
"""Without an answer, after which the service is said to be silent."""
_FIRST_NOTE_S = 10.0


class BatchSource:
    """The trainer's end of the dataflow: registers a policy, receives its batches, reports its
    progress.
    """

    def __init__(
        self,
        dataflow: Client,
        config: Config,
        world: World,
        interrupt: Interrupt,
        note: Callable[[str], None],
    ) -> None:
        """`note` shows a line to the person who watches."""
        self._dataflow, self._world, self._interrupt, self._note = dataflow, world, interrupt, note
        self._options, self._policy, self._num_groups = (
            config.dataflow,
            config.train.policy,
            config.rollout.num_questions,
        )
        self._run = self._life = ""
        self._seen, self._heard, self._has_ended = "", time.monotonic(), Event()
        self._thread = ThreadPoolExecutor(1, "batch_source")
        interval_s = config.dataflow.trainer_timeout_s / 4
        self._heartbeat = Heartbeat(dataflow, interval_s, config.dataflow.wait_s)

    @property
    def dataflow(self) -> Dataflow:
        """Return the service, as this rank asks it."""
        return self._dataflow

    @property
    def run(self) -> str:
        """Return the identity of the dataflow's run; checkpoints keep it."""
        return self._run

    def register(self, policy: Register, trained_from: str) -> None:
        """Begin, or go on from the checkpoint of `policy.step`, which was trained from the run
        `trained_from`; collective. All ranks register as one life: a request that comes twice or
        late then takes nothing back.

        Raises UserError when the dataflow refuses, or is another one, Outage when it does not
        answer; KeyboardInterrupt when the run is asked to end meanwhile.
        """
        self._life = self._world.gather_text(uuid.uuid4().hex)[0]
        request = replace(policy, life=self._life, run=trained_from)
        future = self._thread.submit(self._dataflow.register, request)
        registered = self.settle(future, lambda: "the service does not answer")
        if registered is None:
            raise KeyboardInterrupt
        self._run = registered.run
        if self._world.is_main:
            progress = Progress(self._policy, policy.step, policy.step, life=self._life)
            self._heartbeat.start(progress)

    def next_batch(self, step: int) -> Rollouts | None:
        """Wait for the batch of `step` and return this rank's groups, numbered by their index in
        it.

        None when the run is asked to end first. Collective. Raises Outage when none comes within
        dataflow.wait_s, UserError when the dataflow refuses, RuntimeError for a batch that is not
        what was asked for.
        """
        started = time.monotonic()
        self._seen, self._heard = f"no answer for step {step} yet", started
        batch = self._fetch(step)
        if batch is None:
            return None
        waited_s = time.monotonic() - started
        self._heartbeat.waited(waited_s)
        groups = [
            _unpack(assigned, position)
            for assigned, position in zip(batch.groups, self._positions, strict=True)
        ]
        return Rollouts(groups, {}, self._metrics(step, batch, groups, waited_s))

    def report_progress(
        self,
        version: int,
        checkpoint: int,
        *,
        is_done: bool = False,
        evaluated: int = -1,
        tokens: Mapping[str, int] | None = None,
    ) -> None:
        """Report that nodes can pull `version`, and that a run that breaks off goes back to
        `checkpoint` at most, with a log of all evaluations up to step `evaluated`; returns at once.

        `tokens`: what became of the tokens of the version's batch; None: not known.
        """
        if self._world.is_main:
            report = Progress(
                self._policy,
                version,
                checkpoint,
                is_done=is_done,
                evaluated=evaluated,
                tokens=tokens or {},
                life=self._life,
            )
            self._heartbeat.report_progress(report)

    def token_account(self) -> TokenAccount | None:
        """End the reports of progress, and ask for the account of all tokens of the policy, those
        of earlier processes too; None, with a note, when the service does not answer.
        """
        self._heartbeat.close()
        try:
            return account_of(self._dataflow.status()["policies"][self._policy]["tokens"])
        except (Refused, Unavailable) as error:
            self._note(f"the token account is not available: {error}")
            return None

    def close(self) -> None:
        """End the reports and the requests; a second call does nothing."""
        if self._has_ended.is_set():
            return
        self._has_ended.set()
        self._heartbeat.close()
        self._dataflow.close()  # ends what is still asked
        self._thread.shutdown()

    @property
    def _positions(self) -> range:
        return range(self._world.rank, self._num_groups, self._world.size)

    def _fetch(self, step: int) -> Batch | None:
        """Wait on rank 0 until the batch is full, then return this rank's part; None when the run
        is asked to end first. Collective.
        """
        future: Future[Batch] = Future()
        if self._world.is_main:
            future = self._thread.submit(self._ask_until_full, step)
        else:
            future.set_result(Batch((), 0))
        batch = self.settle(future, self._missing_text)
        if batch is None or self._world.size == 1:
            return batch
        if not self._world.is_main:
            future = self._thread.submit(self._ask_until_full, step)
        return self.settle(future, self._missing_text)

    def _ask_until_full(self, step: int) -> Batch:
        """Ask until this rank's part of the batch is there."""
        rank, size = self._world.rank, self._world.size
        request = BatchRequest(self._policy, step, rank, size, life=self._life)
        while (batch := self._dataflow.batch(request)).num_missing:
            lacks = f"step {step} lacks {batch.num_missing} of {self._num_groups} groups"
            self._seen = "; ".join(filter(None, (lacks, batch.waiting)))
            self._heard = time.monotonic()
            request = replace(request, wait_s=_ASK_S)
            if self._has_ended.wait(_PAUSE_S):
                raise Unavailable("the trainer no longer waits for this batch")
        return batch

    def _missing_text(self) -> str:
        silent_s = time.monotonic() - self._heard
        return (
            self._seen
            if silent_s < _SILENT_S
            else f"{self._seen}; the service has been silent for {silent_s:.0f} s"
        )

    def settle(
        self, answer: Future[T], why: Callable[[], str], moved: Callable[[], float] | None = None
    ) -> T | None:
        """Return the answer on this rank once all ranks have one; None when a rank is asked to end
        first. Collective.

        Args:
            why: says what is missing.
            moved: when something was heard of what is waited for, by time.monotonic; None: since
                the beginning nothing.

        Raises:
            UserError: the dataflow refuses.
            Outage: it does not answer, or nothing moved for dataflow.wait_s.
        """
        started, next_note_s = time.monotonic(), _FIRST_NOTE_S
        while True:
            wait([answer], _TICK_S)
            is_done, waited_s = answer.done(), time.monotonic() - started
            error = answer.exception() if is_done else None
            if error is not None and not isinstance(error, Refused | Unavailable):
                raise error
            stuck_s = waited_s if moved is None else min(waited_s, time.monotonic() - moved())
            is_refused = isinstance(error, Refused)
            flags = [
                *(not is_done, error is not None, is_refused, self._interrupt.requested),
                stuck_s,
            ]
            # All ranks decide by the same flags, so that they leave this loop together.
            is_waiting, has_failed, was_refused, is_asked, longest_s = self._world.max(flags)
            if has_failed:
                problem = next(
                    filter(None, self._world.gather_text("" if error is None else str(error)))
                )
                kind = UserError if was_refused else Outage
                raise kind(f"dataflow.url={self._options.url!r}: {problem}")
            if not is_waiting:
                return answer.result()
            if is_asked:
                return None
            if longest_s > self._options.wait_s:
                raise Outage(f"{why()}; dataflow.wait_s={self._options.wait_s:g} s have passed")
            if waited_s > next_note_s:
                self._note(f"{why()} ({waited_s:.0f} s)")
                next_note_s *= 2

    def _metrics(
        self, step: int, batch: Batch, groups: list[Group], waited_s: float
    ) -> dict[str, float]:
        """Compute the metrics of a batch, the same on every rank; collective."""
        ages = [
            age
            for assigned, group in zip(batch.groups, groups, strict=True)
            for age in self._ages(step, assigned.work_item, group)
        ]
        sums = [
            sum(age * number for age, number in ages),
            sum(number for _, number in ages),
            sum(assigned.is_replay for assigned in batch.groups),
        ]
        own_oldest = max((age for age, _ in ages), default=0)
        (total, num_tokens, num_replays), (oldest, longest_s) = self._world.reduce(
            sums, [own_oldest, waited_s]
        )
        return {f"dataflow/{name}": value for name, value in batch.stats.items()} | {
            "dataflow/staleness_mean": total / max(num_tokens, 1),
            "dataflow/staleness_max": oldest,
            "dataflow/replay_share": num_replays / self._num_groups,
            "dataflow/waited_s": longest_s,
        }

    def _ages(self, step: int, work_item: int, group: Group) -> list[tuple[int, int]]:
        """Return (versions that tokens are behind those that `step` trains, number of them).
        RuntimeError where that is too many.
        """
        ages = [(step - 1 - version, number) for version, number in versions(group, self._policy)]
        if ages and (oldest := max(ages)[0]) > self._options.max_staleness:
            raise RuntimeError(
                f"work item {work_item} came for step {step} with tokens of version "
                f"{step - 1 - oldest}, {oldest} versions behind; "
                f"dataflow.max_staleness={self._options.max_staleness}"
            )
        return ages


def connect(config: Config) -> Client:
    """Make the client of the service at dataflow.url; the token is FLOWTRAIN_TOKEN. Its patience
    exceeds that of `BatchSource`, which knows the cause of a wait.
    """
    from flowtrain.rollouts.client import Client

    return Client(
        config.dataflow.url, os.environ.get(TOKEN_VARIABLE, ""), config.dataflow.wait_s + _ASK_S
    )


def _unpack(assigned: AssignedGroup, position: int) -> Group:
    if assigned.position != position:
        raise RuntimeError(
            f"work item {assigned.work_item} came for position {assigned.position} of its batch "
            f"instead of {position}"
        )
    return replace(unpack_group(assigned.payload), index=position)
