"""Evaluations that rollout nodes answer: asked for through the dataflow, while this run goes on.

Asking and fetching are the work of threads. Rank 0 alone asks whether an evaluation is complete;
then every rank fetches its share of the questions, as in an evaluation with engines of its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from threading import Event
from typing import TypeVar

from flowtrain.config import Config
from flowtrain.evaluation.evaluator import Evaluator, Part, PartRollouts
from flowtrain.logging.tally import Tally
from flowtrain.logging.token_counts import versions
from flowtrain.records import Group, Trajectory
from flowtrain.rollouts.batch_source import BatchSource
from flowtrain.rollouts.codec import unpack_group
from flowtrain.rollouts.contract import (
    EvalResult,
    Evaluate,
    EvaluationRequest,
    EvaluationState,
    Unavailable,
)
from flowtrain.trainer.distributed import World
from flowtrain.utils.seeds import derive_seed

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_MAX_WATCHED = 8
"""Evaluations that are looked at; further ones are asked for, and looked at when one is done."""


@dataclass(slots=True, eq=False)
class _Evaluation:
    """An evaluation that nodes were asked for."""

    step: int
    parts: Sequence[Part]
    at_end: bool
    is_known: bool
    """Whoever ran before this process has asked for it, or it is left out."""
    asking: Future[bool] = field(default_factory=Future)
    answered: Future[bool] = field(default_factory=Future)
    """On rank 0, done once no question is left; on others at once."""
    answers: Future[PartRollouts] | None = None
    """This rank's, once they are fetched; empty where it was left out."""
    left: dict[str, int] = field(default_factory=dict)
    """Questions without an answer, by part."""
    moved: float = field(default_factory=time.monotonic)
    """When `left` changed last."""

    def name(self, part: Part) -> str:
        """Return the name that the ledger knows a part by."""
        return f"at the ends, {part.name}" if self.at_end else part.name

    def text(self) -> str:
        total = sum(len(part.tasks) for part in self.parts)
        num_done = total - sum(self.left.get(part.name, len(part.tasks)) for part in self.parts)
        return f"evaluation after step {self.step}: {num_done} of {total} questions are answered"


class PoolEvaluations:
    """Evaluations that this run asks of nodes. All methods but `close` are collective."""

    def __init__(
        self, source: BatchSource, config: Config, world: World, note: Callable[[str], None]
    ) -> None:
        """`note` shows a line to the person who watches."""
        self.source, self._world, self._note = source, world, note
        self._policy, self._policies = config.train.policy, config.policy_names
        self._pending: deque[_Evaluation] = deque()
        self._end: _Evaluation | None = None
        self._has_ended = Event()
        self._asking = ThreadPoolExecutor(1, "ask_evaluation")
        self._watching = ThreadPoolExecutor(_MAX_WATCHED, "watch_evaluation")
        self._fetching = ThreadPoolExecutor(1, "fetch_evaluation")
        self.saved: dict[int, int] = {}
        """Newest step whose evaluation is in the log of a checkpoint, by its step."""

    def resume(self, evaluator: Evaluator, evaluated: int, start_step: int) -> None:
        """Ask for the evaluations after `evaluated` that the log lacks, though their steps are
        done. Only that of the weights at hand may be a new one: others would not be asked theirs.
        """
        for step in range(max(evaluated, 0) + 1, start_step + 1):
            if evaluator.is_due(step):
                self.ask(step, evaluator.parts(step), is_known=step < start_step)

    def ask(self, step: int, parts: Sequence[Part], *, is_known: bool = False) -> None:
        """Ask for the evaluation of the weights after `step`; returns at once.

        `is_known`: only if an earlier process of this run has asked.
        """
        self._pending.append(self._begin(_Evaluation(step, parts, at_end=False, is_known=is_known)))

    def ask_at_end(self, step: int, parts: Sequence[Part]) -> None:
        """Ask for the evaluation before or after training, once; returns at once."""
        if self._end is None or self._end.step != step:
            self._end = self._begin(_Evaluation(step, parts, at_end=True, is_known=False))

    def wait_until_asked(self) -> None:
        """Wait until the service has the requests; KeyboardInterrupt if the run should end."""
        for evaluation in (*self._pending, *([self._end] if self._end else [])):
            self._settle(evaluation.asking, evaluation)

    def complete(self) -> Iterator[tuple[int, PartRollouts]]:
        """Return the complete evaluations with their steps, in the order of the requests."""
        while self._pending:
            evaluation = self._pending[0]
            is_answered = evaluation.answered.done()
            is_fetched = evaluation.answers is not None and evaluation.answers.done()
            # All ranks decide alike: what is taken is measured by all of them together.
            is_waiting, is_fetching = self._world.max([not is_answered, not is_fetched])
            if not is_waiting:
                self._begin_to_fetch(evaluation)
            if is_fetching:
                return
            yield from self._take()

    def wait(self) -> Iterator[tuple[int, PartRollouts]]:
        """Wait for all of `ask`'s evaluations and return them; KeyboardInterrupt if the run should
        end.
        """
        while self._pending:
            yield from self._take()

    def wait_for_end(self, step: int) -> PartRollouts:
        """Wait for the evaluation of `ask_at_end`; KeyboardInterrupt if the run should end."""
        assert self._end is not None and self._end.step == step, "it was asked for"
        return self._rollouts(self._end)

    def on_checkpoint(self, step: int, evaluated: int) -> None:
        """Note that the log of a checkpoint has the evaluations up to a step."""
        self.saved[step] = evaluated

    def version_metrics(self, step: int, rollouts: PartRollouts) -> dict[str, float]:
        """Compute the oldest and the newest version of each policy that sampled, and the share of
        the trained policy's tokens that is newer than `step`.
        """
        tally = Tally()
        group = Group(0, tuple(chain(*rollouts.values())))
        for policy in self._policies:
            for version, num_tokens in versions(group, policy):
                tally.highest(f"eval_version_min/{policy}", -version)
                tally.highest(f"eval_version_max/{policy}", version)
                if policy == self._policy:
                    tally.mean("eval_newer_share", num_tokens * (version > step), num_tokens)
        total = tally.of_all(self._world)
        return {name: abs(number) for name, number in total.maxima.items()} | total.all_means()

    def close(self) -> None:
        """Look at nothing any more; questions that are asked stay so. A second call does nothing.

        Requests under way end with the source's client.
        """
        self._has_ended.set()
        for threads in (self._asking, self._watching, self._fetching):
            threads.shutdown(wait=False, cancel_futures=True)

    def _take(self) -> Iterator[tuple[int, PartRollouts]]:
        evaluation = self._pending[0]
        rollouts = self._rollouts(evaluation)
        self._pending.popleft()
        if rollouts:
            yield evaluation.step, rollouts

    def _rollouts(self, evaluation: _Evaluation) -> PartRollouts:
        self._settle(evaluation.answered, evaluation)
        return self._settle(self._begin_to_fetch(evaluation), evaluation)

    def _begin_to_fetch(self, evaluation: _Evaluation) -> Future[PartRollouts]:
        if evaluation.answers is None:
            evaluation.answers = self._fetching.submit(self._fetch, evaluation)
        return evaluation.answers

    def _settle(self, future: Future[T], evaluation: _Evaluation) -> T:
        if self._world.max([not future.done()])[0]:
            self._note(f"waiting: {evaluation.text()}")
        last_change = (lambda: evaluation.moved) if self._world.is_main else time.monotonic
        result = self.source.settle(future, evaluation.text, last_change)
        if result is None:
            raise KeyboardInterrupt
        return result

    # ---- on threads

    def _begin(self, evaluation: _Evaluation) -> _Evaluation:
        evaluation.asking = self._asking.submit(self._ask, evaluation)
        if self._world.is_main:
            evaluation.answered = self._watching.submit(self._until_answered, evaluation)
        else:
            evaluation.answered.set_result(True)
        return evaluation

    def _ask(self, evaluation: _Evaluation) -> bool:
        """Ask for the parts that nobody has asked for; False where the evaluation is left out."""
        for part in evaluation.parts:
            if self._state(self._request(evaluation, part)).num_questions:
                continue
            if evaluation.is_known:
                return False
            if self._world.is_main:
                self.source.dataflow.evaluate(
                    Evaluate(
                        self._policy,
                        evaluation.step,
                        evaluation.name(part),
                        part.settings,
                        part.seed,
                        tuple(part.tasks),
                    )
                )
        return True

    def _until_answered(self, evaluation: _Evaluation) -> bool:
        """Wait until no question is left; False where the evaluation is left out."""
        if not evaluation.asking.result():
            return False
        for part in evaluation.parts:
            request, pause_s = self._request(evaluation, part), _FIRST_PAUSE_S
            while not (state := self._state(request)).num_questions or state.num_left:
                num_left = state.num_left or len(part.tasks)
                if evaluation.left.get(part.name) != num_left:
                    evaluation.left[part.name], evaluation.moved = num_left, time.monotonic()
                if self._has_ended.wait(pause_s):
                    raise Unavailable("the trainer no longer waits for this evaluation")
                pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
            evaluation.left[part.name] = 0
        return True

    def _fetch(self, evaluation: _Evaluation) -> PartRollouts:
        if not evaluation.asking.result():
            return {}
        return {part.name: tuple(self._answers(evaluation, part)) for part in evaluation.parts}

    def _answers(self, evaluation: _Evaluation, part: Part) -> Iterator[Trajectory]:
        """Yield this rank's rollouts of a part that is complete."""
        request = self._request(evaluation, part)
        while results := self._state(request).results:
            for result in results:
                yield from _rollouts(part, result)
            request = replace(request, first=results[-1].index + 1)

    def _request(self, evaluation: _Evaluation, part: Part) -> EvaluationRequest:
        name, ranks = evaluation.name(part), self._world
        return EvaluationRequest(self._policy, evaluation.step, name, ranks.rank, ranks.size)

    def _state(self, request: EvaluationRequest) -> EvaluationState:
        return self.source.dataflow.evaluation(request)


def _rollouts(part: Part, result: EvalResult) -> tuple[Trajectory, ...]:
    """Return the rollouts of a question; they have failed where no node could make them."""
    if result.payload:
        return unpack_group(result.payload).trajectories
    task = part.tasks[result.index]
    return tuple(
        Trajectory(
            *(task, (), "", 0.0, derive_seed(part.seed, result.index, task.id, number)),
            error="no node could answer the question",
        )
        for number in range(part.settings.trials)
    )
