"""Batches of a dataflow as a rank gets them, from a real ledger behind a real service; what goes
wrong with them is scripted.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import make
import pytest
import torch
from http_servers import running

from flowtrain.config import Config
from flowtrain.config.command import Interrupt
from flowtrain.evaluation import nodes as evaluations
from flowtrain.evaluation.evaluator import Part
from flowtrain.evaluation.nodes import PoolEvaluations
from flowtrain.records import Group, Outage, Rollouts, UserError, VersionSpan
from flowtrain.rollouts import batch_source as feeds
from flowtrain.rollouts import heartbeat as heartbeat_module
from flowtrain.rollouts.batch_source import BatchSource, connect, versions
from flowtrain.rollouts.codec import pack_group
from flowtrain.rollouts.contract import (
    AssignedGroup,
    Batch,
    EvalSettings,
    EvaluationRequest,
    EvaluationState,
    Progress,
    Refused,
    Register,
    Registered,
    Unavailable,
)
from flowtrain.rollouts.heartbeat import Heartbeat
from flowtrain.rollouts.ledger import Ledger
from flowtrain.rollouts.service import Service
from flowtrain.trainer.distributed import World
from tests.rollouts.fake_groups import TASKS, group, joined, lease, ledger, planner, push, turn

ALONE = World(0, 1, torch.device("cpu"))


class Place:
    """A ledger behind a service, and the feeds of its trainers."""

    def __init__(self, cleanup: ExitStack, folder: Path) -> None:
        self._cleanup, self.folder = cleanup, folder
        self.notes: list[str] = []
        self.interrupt = Interrupt()
        self.ledger = self.new_ledger("one")
        self.url = self.serve(self.ledger)

    def new_ledger(self, name: str) -> Ledger:
        made = ledger(self.folder / f"{name}.sqlite")
        self._cleanup.callback(made.close)
        return made

    def serve(self, ledger: Ledger) -> str:
        return self._cleanup.enter_context(running(Service(ledger, ledger.run, "secret")))

    def batch_source(self, url: str = "", client: Any = None, **dataflow: Any) -> BatchSource:
        values = {
            "rollout": {"num_questions": 4},
            "dataflow": {"url": url or self.url, "max_staleness": 1, "wait_s": 30, **dataflow},
        }
        config = Config.model_validate(values)
        made = BatchSource(
            client or connect(config), config, ALONE, self.interrupt, self.notes.append
        )
        self._cleanup.callback(made.close)
        return made

    def registered(self, **dataflow: Any) -> BatchSource:
        source = self.batch_source(**dataflow)
        source.register(planner(), "")
        return source

    def fill(self, num: int, version: int = 0) -> list[int]:
        joined(self.ledger)
        leases = lease(self.ledger, num)
        assert [push(self.ledger, each, version) for each in leases] == ["committed"] * num
        return [each.work_item for each in leases]


def batch(source: BatchSource, step: int) -> Rollouts:
    found = source.next_batch(step)
    assert found is not None
    return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("FLOWTRAIN_TOKEN", "secret")
    with ExitStack() as cleanup:
        yield Place(cleanup, tmp_path)


def test_the_groups_of_a_batch_are_numbered_by_their_places(place: Place) -> None:
    batch_source = place.registered()
    assert batch_source.run == place.ledger.run
    place.fill(5)
    groups, _, metrics = batch(batch_source, 1)
    assert [each.index for each in groups] == [0, 1, 2, 3]
    assert all(
        each.trajectories == group(each.trajectories[0].task).trajectories for each in groups
    )
    for name in ("staleness_mean", "staleness_max", "replay_share"):
        assert metrics[f"dataflow/{name}"] == 0
    assert metrics["dataflow/num_buffered"] == 1 and metrics["dataflow/waited_s"] >= 0


class Threads(World):
    """Ranks that are threads of this process."""

    def meet(self, shared: dict[int, Any], barrier: threading.Barrier) -> Threads:
        object.__setattr__(self, "_meeting", (shared, barrier))
        return self

    def reduce(self, sums: Any, maxima: Any) -> tuple[list[float], list[float]]:
        shared, barrier = self._meeting
        shared[self.rank] = (sums, maxima)
        barrier.wait(30)
        rows = [shared[rank] for rank in range(self.size)]
        barrier.wait(30)
        return (
            [sum(column) for column in zip(*(row[0] for row in rows), strict=True)],
            [max(column) for column in zip(*(row[1] for row in rows), strict=True)],
        )

    def gather_text(self, text: str) -> list[str]:
        shared, barrier = self._meeting
        shared[self.rank] = text
        barrier.wait(30)
        texts = [shared[rank] for rank in range(self.size)]
        barrier.wait(30)
        return texts


def ranks(place: Place, num: int, **dataflow: Any) -> tuple[list[BatchSource], list[list[int]]]:
    """The feeds of a run with so many ranks, and for each the lacking groups that it hears of."""
    shared, barrier = {}, threading.Barrier(num)
    made, heard = [], []
    for rank in range(num):
        source = place.batch_source(**dataflow)
        source._world = Threads(rank, num, torch.device("cpu")).meet(shared, barrier)
        lacking: list[int] = []

        def noting(request: Any, ask: Any = source._dataflow.batch, to: Any = lacking) -> Batch:
            answer: Batch = ask(request)
            to.append(answer.num_missing)
            return answer

        source._dataflow.batch = noting  # type: ignore[method-assign]
        source._dataflow.status = lambda: pytest.fail("a rank that waits reads no report")  # type: ignore[method-assign]
        made.append(source)
        heard.append(lacking)
    return made, heard


def test_rank_0_alone_asks_while_a_batch_fills(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "_TICK_S", 0.02)
    monkeypatch.setattr(feeds, "_ASK_S", 0.02)
    sources, heard = ranks(place, 4)
    has_heard_often = threading.Event()
    ask = sources[0]._dataflow.batch

    def noting(request: Any) -> Batch:
        if len(heard[0]) >= 10:
            has_heard_often.set()
        return ask(request)

    sources[0]._dataflow.batch = noting  # type: ignore[method-assign]

    def work(source: BatchSource) -> list[int]:
        source.register(planner(), "")
        return [each.index for each in batch(source, 1).groups]

    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(work, source) for source in sources]
        assert has_heard_often.wait(30)
        place.fill(4)
        assert [answer.result(30) for answer in answers] == [[0], [1], [2], [3]]
    assert len(heard[0]) > 10 and heard[0][0] == 4 and heard[0][-1] == 0
    assert heard[1:] == [[0]] * 3


@pytest.mark.parametrize("refused", [True, False])
def test_ranks_agree_whether_a_failure_may_pass(place: Place, refused: bool) -> None:
    sources, _ = ranks(place, 2)
    problem = Refused("no such step") if refused else Unavailable("nobody is there")

    def work(source: BatchSource) -> type[BaseException]:
        def fails(request: Any) -> Batch:
            raise problem

        source._dataflow.batch = fails  # type: ignore[method-assign]
        with pytest.raises(UserError, match=str(problem)) as caught:
            source.next_batch(1)
        return caught.type

    with ThreadPoolExecutor(2) as threads:
        kinds = set(threads.map(work, sources))
    assert kinds == {UserError if refused else Outage}


def test_the_dataflow_hears_how_far_the_run_is(place: Place) -> None:
    batch_source = place.registered()
    place.fill(4)
    batch_source.next_batch(1)
    batch_source.report_progress(1, 0)
    batch_source.report_progress(1, 1, is_done=True)
    batch_source.close()
    policy = place.ledger.status()["policies"]["planner"]
    assert (policy["state"], policy["version"], policy["checkpoint"]) == ("done", 1, 1)


def test_a_registration_that_arrives_twice_or_late_takes_nothing_back(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a proxy sends it again; every start of a trainer is another life."""
    batch_source = place.batch_source()
    sent: list[Register] = []
    real = batch_source._dataflow.register

    def noting(request: Register) -> Registered:
        sent.append(request)
        return real(request)

    monkeypatch.setattr(batch_source._dataflow, "register", noting)
    batch_source.register(planner(), "")
    place.fill(4)
    batch_source.next_batch(1)
    batch_source.report_progress(1, 0)
    batch_source.close()
    (request,) = sent
    assert place.ledger.register(request).step == 1
    assert place.ledger.status()["policies"]["planner"]["version"] == 1
    place.batch_source().register(planner(), "")
    assert place.ledger.status()["policies"]["planner"]["version"] == 0, "it goes on from step 0"


def test_staleness_is_counted_in_tokens(place: Place) -> None:
    """Two groups of 8 tokens of version 0, two of version 1, for step 2."""
    batch_source = place.registered()
    place.fill(4)
    batch_source.next_batch(1)
    batch_source.report_progress(1, 0)
    place.fill(2, version=0)
    place.fill(2, version=1)
    metrics = batch(batch_source, 2).metrics
    assert metrics["dataflow/staleness_mean"] == 0.5
    assert metrics["dataflow/staleness_max"] == 1


# ---- what is refused


@pytest.mark.parametrize(
    ("register", "token", "words"),
    [
        (planner(step=3), "secret", "a checkpoint of step 3 belongs to another run"),
        (
            replace(planner(), layout="other"),
            "secret",
            "has layout other, this run has trained one of layout-1",
        ),
        (planner(), "wrong", "the token is missing or wrong; set FLOWTRAIN_TOKEN"),
    ],
)
def test_who_does_not_fit_is_told_why(
    place: Place, register: Register, token: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = place.registered()
    place.fill(4)
    first.next_batch(1)
    monkeypatch.setenv("FLOWTRAIN_TOKEN", token)
    with pytest.raises(UserError, match=f"^dataflow.url='{place.url}': .*{words}"):
        place.batch_source().register(register, "")


def test_a_batch_that_was_not_announced_is_refused(place: Place) -> None:
    batch_source = place.registered()
    with pytest.raises(UserError, match="step 7 of planner"):
        batch_source.next_batch(7)


def test_a_checkpoint_of_another_database_is_refused_before_anything_is_changed_there(
    place: Place,
) -> None:
    batch_source = place.registered()
    other = place.new_ledger("two")
    told = f"this is run '{other.run}', but the checkpoint was trained from '{batch_source.run}'"
    with pytest.raises(UserError, match=told):
        place.batch_source(place.serve(other)).register(planner(), batch_source.run)
    assert other.status()["policies"] == {}
    place.batch_source().register(planner(), batch_source.run)


# ---- waiting


def test_waiting_ends_with_what_is_missing(place: Place) -> None:
    batch_source = place.registered(wait_s=0.6)
    place.fill(3)
    told = (
        "step 1 lacks 1 of 4 groups; 0 under way; nodes joined: 1; "
        "dataflow.wait_s=0.6 s have passed"
    )
    with pytest.raises(Outage, match=told):
        batch_source.next_batch(1)


def test_who_watches_learns_what_is_missing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "_FIRST_NOTE_S", 0.1)
    monkeypatch.setattr(feeds, "_TICK_S", 0.02)
    monkeypatch.setattr(feeds, "_ASK_S", 0.02)
    batch_source = place.registered()
    told = threading.Event()
    batch_source._note = lambda text: (place.notes.append(text), "lacks" in text and told.set())  # type: ignore[func-returns-value,assignment]
    thread = threading.Thread(target=lambda: told.wait(30) and place.fill(4))
    thread.start()
    assert batch_source.next_batch(1) is not None
    thread.join()
    # Later notes may see the groups under way.
    first = next(note for note in place.notes if "lacks" in note)
    assert first.startswith("step 1 lacks 4 of 4 groups; 0 under way; nodes joined: 0 (")


def test_a_run_that_is_asked_to_end_waits_no_longer(place: Place) -> None:
    batch_source = place.registered()
    place.interrupt.requested = True
    assert batch_source.next_batch(1) is None
    batch_source.close()
    assert not batch_source._thread._threads or not any(
        thread.is_alive() for thread in batch_source._thread._threads
    )


def test_one_that_waits_for_a_service_that_never_came_can_be_ended(place: Place) -> None:
    place.interrupt.requested = True
    with pytest.raises(KeyboardInterrupt):
        place.batch_source("http://127.0.0.1:9").register(planner(), "")


def test_a_batch_that_is_there_is_trained_before_a_run_ends(place: Place) -> None:
    batch_source = place.registered()
    place.fill(4)
    batch_source.settle(
        batch_source._thread.submit(batch_source._ask_until_full, 1), batch_source._missing_text
    )
    place.interrupt.requested = True
    while (rollouts := batch_source.next_batch(1)) is None:
        pass  # asked for before it was there, if the machine is slow
    assert len(rollouts.groups) == 4


# ---- a service that is wrong


class Serving:
    """Answers with one batch, whatever is asked."""

    def __init__(self, *groups: AssignedGroup) -> None:
        self._batch = Batch(groups, 0)

    def batch(self, request: Any) -> Batch:
        return self._batch

    def close(self) -> None:
        """There is nothing to close."""


def spans(*versions: int) -> Group:
    """A rollout with one token of each version in its first turn, and none in the second."""
    whole = group(TASKS[0], num=1)
    parts = tuple(VersionSpan(index, index + 1, version) for index, version in enumerate(versions))
    return replace(
        whole, trajectories=(replace(whole.trajectories[0], turns=(turn(parts), turn(()))),)
    )


def served(*groups: Group, first: int = 0) -> list[AssignedGroup]:
    return [
        AssignedGroup(first + index, 10 + index, pack_group(each), False)
        for index, each in enumerate(groups)
    ]


@pytest.mark.parametrize("step", [6, 7])
def test_a_token_that_is_too_old_is_an_error_that_names_it(place: Place, step: int) -> None:
    """Every span counts: the first and the last of this group are fresh."""
    batch_source = place.batch_source(
        client=Serving(*served(spans(6), spans(6, 4, 6), spans(6), spans(6)))
    )
    if step == 6:
        metrics = batch(batch_source, step).metrics
        assert metrics["dataflow/staleness_max"] == 1
        assert metrics["dataflow/staleness_mean"] == pytest.approx(-4 / 6)
        return
    told = "work item 11 came for step 7 with tokens of version 4, 2 versions behind; .*staleness=1"
    with pytest.raises(RuntimeError, match=told):
        batch_source.next_batch(step)


def test_a_group_at_another_place_is_an_error(place: Place) -> None:
    batch_source = place.batch_source(client=Serving(*served(*[spans(0)] * 4, first=1)))
    with pytest.raises(RuntimeError, match="item 10 came for position 1 of its batch instead of 0"):
        batch_source.next_batch(1)


def test_versions_are_those_of_the_policy_that_is_trained() -> None:
    call = make.call(2, version=9)
    both = spans(3, 4)
    (trajectory,) = both.trajectories
    first, second = trajectory.turns
    turns = (replace(first, calls={**first.calls, "verifier": call}), second)
    both = replace(
        both,
        trajectories=(replace(trajectory, turns=turns), replace(trajectory, error="planner: down")),
    )
    assert list(versions(both, "planner")) == [(3, 1), (4, 1)]
    assert list(versions(both, "verifier")) == [(9, 2)]


# ---- reports


class Hearing:
    """Notes what is told, one at a time; the first times the service is not there."""

    def __init__(self, failures: list[Exception]) -> None:
        self.failures, self.told = failures, queue.Queue[Progress]()

    def progress(self, progress: Progress) -> None:
        if self.failures:
            raise self.failures.pop()
        self.told.put(progress)


def test_reports_come_in_order_with_the_seconds_of_their_step_and_survive_a_silence() -> None:
    hearing = Hearing([Unavailable("down"), Refused("odd")])
    heartbeat = Heartbeat(hearing, interval_s=60.0, wait_s=30.0)  # type: ignore[arg-type]
    heartbeat.start(Progress("planner", 0, 0))
    heartbeat.report_progress(Progress("planner", 1, 0))
    for version in (2, 3):
        heartbeat.waited(0.25)
        heartbeat.waited(0.5)
        heartbeat.report_progress(Progress("planner", version, 0))
    heartbeat.close()
    told = [hearing.told.get_nowait() for _ in range(2)]
    assert [each.version for each in told] == [2, 3] and hearing.told.empty()
    assert [each.waited_s for each in told] == [0.75, 0.75] and all(
        each.busy_s == 0 for each in told
    )


def test_a_trainer_that_is_busy_gives_signs_of_life() -> None:
    hearing = Hearing([])
    heartbeat = Heartbeat(hearing, interval_s=0.01, wait_s=30.0)  # type: ignore[arg-type]
    heartbeat.start(Progress("planner", 0, 0))
    heartbeat.waited(2.0)
    heartbeat.report_progress(Progress("planner", 1, 0))
    told = (hearing.told.get(timeout=30) for _ in itertools.count())
    news, sign_of_life = itertools.islice((each for each in told if each.version == 1), 2)
    heartbeat.close()
    assert (news.waited_s, sign_of_life.waited_s) == (2.0, 0.0)


@pytest.mark.parametrize("is_done", [True, False])
def test_the_end_of_training_is_told_however_long_that_takes(
    is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other last words may get lost: whoever goes on with the run says them again."""
    monkeypatch.setattr(heartbeat_module, "_LAST_WORDS_S", 0.05)
    is_back, told = threading.Event(), queue.Queue[Progress]()

    class Away:
        def progress(self, progress: Progress) -> None:
            assert is_back.wait(30)
            told.put(progress)

    heartbeat = Heartbeat(Away(), interval_s=60.0, wait_s=30.0)  # type: ignore[arg-type]
    heartbeat.start(Progress("planner", 0, 0))
    heartbeat.report_progress(Progress("planner", 1, 1, is_done=is_done))
    with ThreadPoolExecutor(1) as threads:
        closing = threads.submit(heartbeat.close)
        if not is_done:
            closing.result(20)
        else:
            with pytest.raises(TimeoutError):
                closing.result(0.5)
        is_back.set()
        closing.result(20)
    assert [told.get(timeout=20).is_done for _ in range(2)] == [False, is_done]


def test_rank_0_alone_asks_whether_an_evaluation_is_complete(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluations, "_LONGEST_PAUSE_S", 0.02)
    monkeypatch.setattr(evaluations, "_FIRST_PAUSE_S", 0.02)
    sources, _ = ranks(place, 4)
    heard: list[list[int]] = [[] for _ in sources]
    has_heard_often = threading.Event()
    part = Part("dev", TASKS[:4], 1, EvalSettings(max_turns=1))

    def work(source: BatchSource) -> list[str]:
        ask, to = source._dataflow.evaluation, heard[source._world.rank]

        def noting(request: EvaluationRequest) -> EvaluationState:
            to.append((answer := ask(request)).num_left)
            if heard[0].count(4) >= 10:
                has_heard_often.set()
            return answer

        source._dataflow.evaluation = noting  # type: ignore[method-assign]
        source.register(planner(), "")
        config = Config.model_validate({})
        pool = PoolEvaluations(source, config, source._world, place.notes.append)
        pool.ask(0, [part])
        assert list(pool.complete()) == []
        ((step, found),) = pool.wait()
        pool.close()
        assert step == 0
        return [each.task.id for each in found["dev"]]

    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(work, source) for source in sources]
        assert has_heard_often.wait(30)
        joined(place.ledger)
        for leased in lease(place.ledger, 4, versions={"planner": 0}):
            assert leased.evaluation is not None
            assert push(place.ledger, leased, num=1) == "committed"
        found = [answer.result(30) for answer in answers]
    assert found == [[task.id] for task in TASKS[:4]]
    assert [len(left) <= 3 for left in heard] == [False, True, True, True]
