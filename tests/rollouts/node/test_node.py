"""A node on one event loop, with a real ledger and scripted rollouts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import make
import pytest
from http_servers import running
from loopback_dataflow import make_config

from flowtrain.inference.protocol import EngineError
from flowtrain.records import (
    BranchPoint,
    BranchStart,
    Group,
    Task,
    ToolResult,
    Trajectory,
    UserError,
    Verdict,
)
from flowtrain.rollouts.client import Client
from flowtrain.rollouts.codec import unpack_group
from flowtrain.rollouts.contract import (
    BatchRequest,
    EvalSettings,
    Evaluate,
    EvaluationRequest,
    Join,
    Lease,
    LeaseRequest,
    PolicyState,
    Progress,
    Push,
    Pushed,
    Refused,
    Register,
)
from flowtrain.rollouts.ledger import Ledger
from flowtrain.rollouts.node import main as node_main
from flowtrain.rollouts.node.node import Branching, Node, _WorkItem
from flowtrain.rollouts.node.weight_syncer import PoliciesChanged, WeightSyncer
from flowtrain.rollouts.node_client import NodeClient
from flowtrain.rollouts.service import Service
from flowtrain.tasks.cursor import TaskCursor
from flowtrain.utils.event_loop import first_of
from flowtrain.utils.seeds import derive_seed
from flowtrain.weights import StoreError

G = 3
TASKS = [Task(f"task-{i}", f"question {i}", ("x",), "kind") for i in range(10)]


@dataclass
class Clock:
    now: float = 1e9
    """Time of the ledger, far from the clock of any node."""

    def __call__(self) -> float:
        return self.now


@dataclass
class Engine:
    """An engine that only has a version."""

    version: int = 0
    max_tokens: int = 64
    loads: list[int] = field(default_factory=list)
    error: Exception | None = None
    num_damaged: int = 0
    """Tensors that the last load found changed."""

    def metrics(self) -> dict[str, float]:
        return {"weights_damaged": self.num_damaged}

    def load(self, version: int) -> None:
        if self.error is not None:
            raise self.error
        self.loads.append(version)
        self.version = version


@dataclass
class Store:
    newest: int | None = 0

    def __str__(self) -> str:
        return "the store"

    def head(self) -> int | None:
        return self.newest


def trajectory(task: Task, seed: int, version: int = 0) -> Trajectory:
    said = make.call((seed % 97, 5), (1, 2), version=version)
    turn = make.turn(said, "Search", result=ToolResult("r"), verdict=Verdict.STOP)
    fields = {"reward": float(seed % 2), "scored_by": "exact", "sub_goals": 0.0}
    return make.rollout(turn, task=task, answer="x", seed=seed, **fields)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowtrain.rollouts.node.node._TICK_S", 0.01)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def new_ledger(folder: Path, clock: Clock | None = None, **dataflow: Any) -> Ledger:
    rollout = {"group_size": G, "num_questions": 4}
    config = make_config("tiny", rollout=rollout, dataflow=dataflow)
    ledger: Any = Ledger(folder / "ledger.sqlite", config, TaskCursor(TASKS, 0), clock=clock)
    ledger.ask = lambda name, request: asyncio.to_thread(getattr(ledger, name), request)
    return ledger


TRAINER = Register("planner", "layout", "store", 4, 8, 1 << 16, 1 << 16)


@pytest.fixture
def ledger(tmp_path: Path, clock: Clock) -> Iterator[Ledger]:
    # No trainer takes what these nodes make.
    ledger = new_ledger(tmp_path, clock, lease_s=0.3, max_attempts=3, max_waiting=36)
    ledger.register(TRAINER)
    yield ledger
    assert not ledger.audit().problems
    ledger.close()


Script = Callable[[Task, int], Any]


@dataclass
class Nodes:
    """Makes nodes, each with its own syncer."""

    dataflow: Any

    def join(self, name: str) -> NodeClient:
        return NodeClient(self.dataflow, name, {"planner": "layout"})

    def make(
        self,
        rollout: Script,
        name: str = "a",
        *,
        max_in_flight: int = 2 * G,
        num_groups: int = 0,
        engine: Engine | None = None,
        answer: Any = None,
    ) -> Node:
        syncer, member = make_syncer(engine or Engine(), Store()), self.join(name)
        syncer.on_policy_state(member.joined.policies)
        bounds = {"max_in_flight": max_in_flight, "max_staleness": 8, "num_groups": num_groups}
        return Node(member, rollout, answer or rollout, syncer, **bounds)


@pytest.fixture
def nodes(ledger: Ledger) -> Nodes:
    return Nodes(ledger)


async def soon(task: Task, seed: int) -> Trajectory:
    await asyncio.sleep(0)
    return trajectory(task, seed)


async def never(task: Task, seed: int) -> Trajectory:
    await asyncio.sleep(3600)
    raise AssertionError


def run(*nodes: Node) -> list[int]:
    async def together() -> list[int]:
        async with asyncio.timeout(30):
            return await asyncio.gather(*(node.run() for node in nodes))

    return asyncio.run(together())


def stopped_after(node: Node, story: Callable[[], Awaitable[Any]]) -> int:
    """Run a node beside a story, and stop it at its end."""

    async def main() -> int:
        async with asyncio.timeout(60):
            running = asyncio.create_task(node.run())
            await story()
            assert not running.done()
            node.stop()
            return await running

    return asyncio.run(main())


def watch(ledger: Ledger, method: str) -> list[Any]:
    """The requests that a method of a ledger gets from now on."""
    asked, real = [], getattr(ledger, method)
    setattr(ledger, method, lambda request: (asked.append(request), real(request))[1])
    return asked


def work_items(ledger: Ledger) -> dict[str, int]:
    return dict(ledger.status()["work_items"])


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.005)


def groups(ledger: Ledger, num: int) -> list[tuple[int, Any]]:
    """Work items and groups of the first batches."""
    batches = (ledger.batch(BatchRequest("planner", 1 + n)) for n in range(num // 4))
    served = [each for batch in batches for each in batch.groups]
    return [(each.work_item, unpack_group(each.payload)) for each in served]


def test_a_node_ends_after_num_groups(ledger: Ledger, nodes: Nodes) -> None:
    assert run(nodes.make(soon, num_groups=8)) == [8]
    assert work_items(ledger) == {"leased": 0, "waiting": 0, "committed": 8, "failed": 0}
    made = dict(groups(ledger, 8))
    seeds = [
        *(2414703463602546965, 2981351282807819523, 4277481952468360719, 8629586129475830552),
        *(7288640223496339559, 3930242925423473293, 3682950988592703081, 8669283471505276087),
    ]
    assert [made[n].trajectories[0].seed for n in range(1, 9)] == seeds and len(made) == 8
    for group in made.values():
        assert len(group.trajectories) == G
        assert len({t.seed for t in group.trajectories}) == G
        assert len({t.task.id for t in group.trajectories}) == 1


@pytest.mark.parametrize(("most", "num_at_once"), [(G, G), (2 * G + 1, 2 * G), (1, 1)])
def test_rollouts_in_flight_are_bounded(
    ledger: Ledger, nodes: Nodes, most: int, num_at_once: int
) -> None:
    """As many work items as the slots are enough for; at least one, whose rollouts take turns."""
    now, seen = 0, []

    async def rollout(task: Task, seed: int) -> Trajectory:
        nonlocal now
        now += 1
        seen.append(now)
        await asyncio.sleep(0.002)
        now -= 1
        return trajectory(task, seed)

    run(nodes.make(rollout, max_in_flight=most, num_groups=6))
    assert max(seen) == num_at_once


def test_several_nodes_make_every_group_once(ledger: Ledger, nodes: Nodes) -> None:
    pushed = run(*(nodes.make(soon, name, num_groups=6) for name in "abc"))
    assert pushed == [6, 6, 6]
    assert work_items(ledger)["committed"] == 18


def test_a_node_ends_with_training(ledger: Ledger, nodes: Nodes) -> None:
    ledger.progress(Progress("planner", 0, 0, is_done=True))
    assert run(nodes.make(soon)) == [0]


def test_stop_pushes_finished_groups_and_releases_other_leases(
    ledger: Ledger, nodes: Nodes
) -> None:
    """Another node need not wait until the leases run out."""
    num_done = 0

    async def rollout(task: Task, seed: int) -> Trajectory:
        nonlocal num_done
        if num_done >= 2 * G:
            return await never(task, seed)
        num_done += 1
        return trajectory(task, seed)

    async def story() -> None:
        await until(lambda: {"leased": 2, "committed": 2}.items() <= work_items(ledger).items())

    assert stopped_after(nodes.make(rollout), story) == 2
    assert work_items(ledger) == {"leased": 0, "waiting": 2, "committed": 2, "failed": 0}
    assert run(nodes.make(soon, "b", num_groups=2)) == [2]
    assert work_items(ledger)["waiting"] == 0 and work_items(ledger)["committed"] == 4


def test_leases_that_arrive_during_stop_are_released(ledger: Ledger, nodes: Nodes) -> None:
    """The node is stopped while the answer to its lease request is on the way."""
    lease, asked = ledger.lease, threading.Event()

    def late(request: LeaseRequest) -> Any:
        answer = lease(request)
        asked.set()
        time.sleep(0.2)
        return answer

    ledger.lease = late
    assert stopped_after(nodes.make(never), lambda: asyncio.to_thread(asked.wait)) == 0
    assert work_items(ledger) == {"leased": 0, "waiting": 2, "committed": 0, "failed": 0}


def test_a_node_without_work_waits_for_an_answer_and_can_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has one request under way, asks nothing else, and gets nothing that it cannot do."""
    monkeypatch.setenv("no_proxy", "*")
    ledger = new_ledger(tmp_path)
    ledger.register(replace(TRAINER, max_staleness=0))
    asked = watch(ledger, "lease")

    async def story() -> None:
        await until(lambda: node.waiting == "full" and work_items(ledger)["committed"] == 4)
        num = len(asked)
        await until(lambda: len(asked) > num)
        await asyncio.sleep(1.0)  # in which a node that polls would have asked again
        assert len(asked) == num + 1

    with running(Service(ledger, ledger.run, "t")) as url, Client(url, "t", 20.0) as client:
        node = Nodes(client).make(soon)
        assert stopped_after(node, story) == 4
    assert work_items(ledger) == {"leased": 0, "waiting": 0, "committed": 4, "failed": 0}
    assert len(ledger.status()["nodes"]) == 1 and not ledger.audit().problems
    ledger.close()


def test_a_node_that_waits_for_a_trainer_has_joined_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = new_ledger(tmp_path)
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 20:
            ledger.register(TRAINER)

    monkeypatch.setattr(node_main.time, "sleep", sleep)
    member = NodeClient(ledger, "a")
    assert node_main._wait_for_trainers(member, ledger.config, {}) == {"planner": "store"}
    assert len(pauses) == 20 and pauses[0] == 2.0 and pauses[-1] == 10.0
    member.announce({"planner": "layout"}, dict)
    with ledger.database.read() as transaction:
        (row,) = transaction.all("SELECT layouts FROM nodes")
    assert row.layouts == '{"planner": "layout"}'
    with pytest.raises(Refused, match="layout other"):
        member.announce({"planner": "other"}, dict)
    ledger.close()


def test_engine_error_ends_the_node_and_releases_its_leases(ledger: Ledger, nodes: Nodes) -> None:
    async def rollout(task: Task, seed: int) -> Trajectory:
        if task.id == TASKS[3].id:
            raise EngineError("vLLM died twice")
        return await soon(task, seed)

    with pytest.raises(ExceptionGroup) as caught:
        run(nodes.make(rollout))
    assert caught.group_contains(EngineError, match="died twice")
    left = work_items(ledger)
    assert left["leased"] == 0 and left["waiting"] >= 1


def test_a_failing_rollout_costs_its_work_item_alone(
    ledger: Ledger, nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    """The work item goes back, and counts as failed once it has gone back `max_attempts` times.
    Failures with groups between them do not end the node, however many they are.
    """

    async def rollout(task: Task, seed: int) -> Trajectory:
        if task in (TASKS[1], TASKS[3], TASKS[5]):
            raise KeyError("a bug of ours")
        return await soon(task, seed)

    run(nodes.make(rollout, num_groups=9))
    assert work_items(ledger)["failed"] == 3 and work_items(ledger)["committed"] == 9
    told = [record.exc_text for record in caplog.records if record.exc_text]
    assert sum("a bug of ours" in text for text in told) == 9


def test_a_branching_score_that_fails_costs_its_work_item_alone(
    ledger: Ledger, nodes: Nodes
) -> None:
    async def points(roots: Group, seed: int) -> list[BranchPoint]:
        if roots.index < 2:
            raise ValueError("a bad score")
        return []

    node = nodes.make(soon, num_groups=3)
    node._branching = Branching(2, points)
    run(node)
    assert work_items(ledger)["committed"] == 3


def test_a_node_ends_after_many_failures_in_a_row(ledger: Ledger, nodes: Nodes) -> None:
    async def rollout(task: Task, seed: int) -> Trajectory:
        raise KeyError("a bug of ours")

    with pytest.raises(ExceptionGroup) as caught:
        run(nodes.make(rollout))
    told = "work items in a row failed; the last: KeyError"
    assert told in str(first_of(caught.value, UserError))
    assert work_items(ledger)["leased"] == 0


def test_a_refused_group_is_released_and_the_node_goes_on(
    ledger: Ledger, nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    push = ledger.push

    def picky(request: Push) -> Pushed:
        if request.work_item == 2:
            raise Refused("malformed group: it is too long")
        return push(request)

    ledger.push = picky
    assert run(nodes.make(soon, num_groups=6)) == [6]
    assert work_items(ledger)["committed"] == 6
    assert work_items(ledger)["failed"] == 1, "after three attempts"
    assert "it is too long" in caplog.text


def test_branches_leave_the_roots_where_the_rule_says(ledger: Ledger, nodes: Nodes) -> None:
    """Roots first, then a branch per point, then whole rollouts, each by its number."""
    asked: list[tuple[int, BranchStart | None]] = []

    async def rollout(task: Task, seed: int, start: BranchStart | None = None) -> Trajectory:
        asked.append((seed, start))
        own = trajectory(task, seed)
        if start is None:
            return own
        return replace(start.parent, seed=seed, branch=start.point)

    async def points(roots: Group, seed: int) -> list[BranchPoint]:
        assert len(roots.trajectories) == 2 and seed == 7
        return [BranchPoint(1, 0, 1, 0.5)]

    node = nodes.make(rollout, max_in_flight=4, num_groups=1)
    node._branching = Branching(2, points)
    node._member.joined = replace(node._member.joined, group_size=4)
    item = _WorkItem(Lease(1, 1, TASKS[0], seed=7, index=3), 4)
    made = asyncio.run(node._group(item))
    roots, branch, whole = made.trajectories[:2], made.trajectories[2], made.trajectories[3]
    assert [t.branch for t in roots] == [None, None] and whole.branch is None
    assert branch.branch == BranchPoint(1, 0, 1, 0.5) and branch.turns == roots[1].turns
    expected = [4960160340689486031, 5031157793364214920, 6209236212809548937, 3188567590293704303]
    assert [t.seed for t in made.trajectories] == expected
    assert [start.parent for _, start in asked if start] == [roots[1]] and item.num_left == 0
    assert made.index == 3


def test_a_node_that_is_too_busy_keeps_its_leases(ledger: Ledger, nodes: Nodes) -> None:
    """Nothing else gets a turn on its event loop until three renewals have been answered."""
    renewed = threading.Semaphore(0)
    renew = ledger.renew

    def counted(request: Any) -> Any:
        answer = renew(request)
        assert answer.lost == ()
        renewed.release()
        return answer

    ledger.renew = counted

    async def rollout(task: Task, seed: int) -> Trajectory:
        assert all(renewed.acquire(timeout=60) for _ in range(3))
        return trajectory(task, seed)

    assert run(nodes.make(rollout, max_in_flight=G, num_groups=1)) == [1]


def test_a_lost_lease_ends_its_rollouts(ledger: Ledger, nodes: Nodes, clock: Clock) -> None:
    """The lease runs out before the node renews it, and another node gets the work items."""
    cancelled = 0

    async def rollout(task: Task, seed: int) -> Trajectory:
        nonlocal cancelled
        try:
            return await never(task, seed)
        except asyncio.CancelledError:
            cancelled += 1
            raise

    is_taken, renew = threading.Event(), ledger.renew

    def late(request: Any) -> Any:
        assert is_taken.wait(60)
        return renew(request)

    async def story() -> None:
        await until(lambda: work_items(ledger)["leased"] == 1)
        clock.now += 1.0
        assert await nodes.make(soon, "b", num_groups=2).run() == 2
        is_taken.set()
        await until(lambda: cancelled == G)

    ledger.renew = late
    stopped_after(nodes.make(rollout, max_in_flight=G), story)
    assert work_items(ledger)["committed"] == 2


def test_leases_are_renewed_during_long_rollouts(
    ledger: Ledger, nodes: Nodes, clock: Clock
) -> None:
    """Ten times as long as a lease lasts."""
    renewals, renew = [], ledger.renew

    async def rollout(task: Task, seed: int) -> Trajectory:
        await until(lambda: len(renewals) > 10)
        return trajectory(task, seed)

    def counted(request: Any) -> Any:
        answer = renew(request)
        clock.now += 0.2  # of 0.3
        renewals.append(request.work_items)
        return answer

    ledger.renew = counted
    assert run(nodes.make(rollout, max_in_flight=G, num_groups=1)) == [1]
    assert set(renewals) == {((1, 1),)}
    life = nodes.join("b")._request.life
    (lease,) = ledger.lease(LeaseRequest("b", life, 1)).leases
    assert (lease.work_item, lease.attempt) == (2, 1), "nobody else had to do work item 1"


def test_a_node_ends_when_another_process_joins_by_its_name(ledger: Ledger, nodes: Nodes) -> None:
    node = nodes.make(never)
    ledger.join(Join("a", "another-life", {}))
    with pytest.raises(ExceptionGroup) as caught:
        run(node)
    assert caught.group_contains(Refused, match="another process has joined under this name")


# ---- weights


def test_a_node_with_damaged_weights_disowns_what_it_made(ledger: Ledger, nodes: Nodes) -> None:
    """Groups of its that wait or that it still holds are not trained; leases go to others."""
    engine = Engine()
    node = nodes.make(soon, engine=engine)

    def states() -> dict[str, int]:
        groups = ledger.status()["policies"]["planner"]["groups"]
        return {state: group["num"] for state, group in groups.items()}

    async def story() -> None:
        running = asyncio.create_task(node.run())
        await until(lambda: states().get("fresh", 0) >= 6)
        assert not ledger.batch(BatchRequest("planner", 1)).num_missing
        engine.num_damaged, node._syncer._stores["planner"].newest = 2, 1
        ledger.progress(Progress("planner", 1, 0))
        async with asyncio.timeout(30):
            await running

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(story())
    why = "changed the planner's weights before version 1 .* this node disowns its groups"
    assert caught.group_contains(EngineError, match=why, depth=None)
    assert states().keys() == {"assigned", "disowned"} and states()["disowned"] >= 2
    assert work_items(ledger)["leased"] == 0
    assert ledger.batch(BatchRequest("planner", 2)).num_missing == 4
    run(nodes.make(soon, "b", num_groups=1))
    assert states()["fresh"] == 1


def make_syncer(engine: Engine, store: Store, **options: Any) -> WeightSyncer:
    return WeightSyncer({"planner": engine}, {"planner": store}, {"planner": "layout"}, **options)


def announced(version: int, layout: str = "layout") -> dict[str, PolicyState]:
    return {"planner": PolicyState(version, "store", layout)}


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowtrain.rollouts.node.weight_syncer._RETRY_S", 0.01)


def run_beside(syncer: WeightSyncer, script: Callable[[], Any]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            running = asyncio.create_task(syncer.run())
            done, _ = await asyncio.wait(
                [running, asyncio.create_task(script())], return_when=asyncio.FIRST_COMPLETED
            )
            running.cancel()
            for task in done:
                task.result()

    asyncio.run(main())


def test_syncer_loads_announced_versions_also_older_ones() -> None:
    """A trainer that resumes from a checkpoint announces an older version."""
    engine = Engine()
    syncer = make_syncer(engine, Store(5))

    async def script() -> None:
        syncer.on_policy_state(announced(4))
        for version in (4, 5, 3):
            syncer.on_policy_state(announced(version))
            await until(lambda: engine.version == version)  # noqa: B023

    run_beside(syncer, script)
    assert engine.loads == [4, 5, 3]


def test_syncer_loads_from_a_lagging_store_and_catches_up(
    quick_retries: None, caplog: pytest.LogCaptureFixture
) -> None:
    engine, store = Engine(), Store(None)
    syncer = make_syncer(engine, store)
    behind = "the store is at version 4 of the planner, the trainer at 5: sampling continues with 4"

    async def script() -> None:
        syncer.on_policy_state(announced(5))
        await until(lambda: "holds no weights" in caplog.text)
        assert syncer.obstacle(8) == "no weights of the planner yet"
        store.newest = 4
        await until(lambda: engine.version == 4)
        await until(lambda: behind in caplog.text)
        assert not syncer.obstacle(1)
        could_not_train = "of version 4, the trainer's of 5"
        assert could_not_train in syncer.obstacle(0), "what it samples now"
        store.newest = 6
        await until(lambda: engine.version == 5)
        await until(lambda: "the planner's weights are at version 5 now" in caplog.text)

    run_beside(syncer, script)
    assert engine.loads == [4, 5]
    assert len(caplog.records) == 3, "announced once each, not at every look"


def test_syncer_repeats_a_failed_load(
    quick_retries: None, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()
    syncer = make_syncer(engine, Store(2))

    async def script() -> None:
        syncer.on_policy_state(announced(1))
        await until(lambda: engine.version == 1)
        engine.error = StoreError("v2 arrived damaged twice")
        syncer.on_policy_state(announced(2))
        await until(
            lambda: "the planner stays at version 1: v2 arrived damaged twice" in caplog.text
        )
        engine.error = None
        await until(lambda: engine.version == 2)

    run_beside(syncer, script)


def test_a_first_load_by_a_dead_engine_ends_the_node(nodes: Nodes) -> None:
    error = EngineError("vLLM died twice while it loaded")
    with pytest.raises(ExceptionGroup) as caught:
        run(nodes.make(soon, engine=Engine(error=error)))
    assert caught.group_contains(EngineError, match=str(error))


def test_a_first_load_is_tried_again(quick_retries: None, caplog: pytest.LogCaptureFixture) -> None:
    """The server of weights may be restarted just then."""
    engine = Engine(error=StoreError("no answer, 6 times"))

    async def script() -> None:
        await until(lambda: "no weights of the planner yet: no answer, 6 times" in caplog.text)
        engine.error = None
        await until(lambda: engine.loads == [0])

    run_beside(make_syncer(engine, Store(), patience_s=20.0), script)


@pytest.mark.parametrize(
    ("store", "error", "text"),
    [
        (None, None, "the store holds no weights of the planner yet"),
        (0, StoreError("no answer, 6 times"), "no weights of the planner yet: no answer, 6 times"),
    ],
)
def test_first_weights_that_do_not_come_end_the_node(
    quick_retries: None, store: int | None, error: StoreError | None, text: str
) -> None:
    syncer = make_syncer(Engine(error=error), Store(store), patience_s=0.05)
    with pytest.raises(ExceptionGroup) as caught:
        run_beside(syncer, lambda: asyncio.sleep(3600))
    found = str(first_of(caught.value, UserError))
    assert found.startswith(f"{text}, after dataflow.wait_s=0.05 seconds")


def test_syncer_refuses_another_model() -> None:
    syncer = make_syncer(Engine(), Store())
    told = r"another model than the trainer.s.*layout here, other there"
    with pytest.raises(UserError, match=told):
        syncer.on_policy_state(announced(0, "other"))
    not_in_the_flow = {"verifier": PolicyState(0, "store", "other")}
    syncer.on_policy_state(not_in_the_flow)


def test_syncer_raises_when_a_frozen_policy_is_trained() -> None:
    syncer = WeightSyncer(
        {"planner": Engine(), "verifier": Engine()},
        {"planner": Store()},
        {"planner": "layout", "verifier": "v"},
    )
    syncer.on_policy_state(announced(0))
    with pytest.raises(PoliciesChanged):
        syncer.on_policy_state({"verifier": PolicyState(0, "store", "v")})


def test_a_node_with_stale_weights_leases_nothing(ledger: Ledger, nodes: Nodes) -> None:
    """The store has version 0 alone; a token of it is of no use to a trainer that is at 20."""
    ledger.register(replace(TRAINER, step=20))
    node, asked = nodes.make(soon), watch(ledger, "lease")

    async def story() -> None:
        await until(lambda: "of version 0, the trainer's of 20" in node.waiting)
        await asyncio.sleep(0.05)

    stopped_after(node, story)
    assert not asked, "the ledger, which would refuse it, need not be asked"


def test_a_node_reports_its_busy_and_idle_time(
    ledger: Ledger, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Busy while rollouts are under way, waiting while it wants leases and gets none."""
    clock = Clock()
    asked: list[LeaseRequest] = []
    lease = ledger.lease

    def noted(request: LeaseRequest) -> Any:
        asked.append(request)
        clock.now += 5.0
        return lease(request)

    ledger.lease = noted

    async def rollout(task: Task, seed: int) -> Trajectory:
        await asyncio.sleep(0)
        clock.now += 20.0
        return trajectory(task, seed)

    monkeypatch.setattr("flowtrain.rollouts.node.progress.time", SimpleNamespace(monotonic=clock))
    run(nodes.make(rollout, max_in_flight=G, num_groups=2))
    assert len({request.key for request in asked}) == len(asked) == 2
    assert (asked[1].busy_s, asked[1].waited_s) == (20.0 * G, 5.0)
    assert asked[1].versions == {"planner": 0}
    assert ledger.status()["nodes"]["a"]["state"] == "ended"


def test_questions_are_answered_with_the_seeds_and_settings_of_their_evaluation(
    ledger: Ledger, nodes: Nodes
) -> None:
    """They end no node that has groups to push, and are no groups."""
    settings = EvalSettings(max_turns=3, temperature=0.0, trials=2)
    ledger.evaluate(Evaluate("planner", 0, "texts", settings, 77, tuple(TASKS[:5])))
    asked: list[tuple[str, int, EvalSettings]] = []

    async def answer(task: Task, seed: int, settings: EvalSettings) -> Trajectory:
        asked.append((task.id, seed, settings))
        return trajectory(task, seed)

    assert run(nodes.make(soon, num_groups=4, answer=answer)) == [4]
    assert sorted(asked) == sorted(
        (task.id, derive_seed(77, index, task.id, number), settings)
        for index, task in enumerate(TASKS[:5])
        for number in range(2)
    )
    assert ledger.evaluation(EvaluationRequest("planner", 0, "texts")).num_left == 0
    assert work_items(ledger)["committed"] == 4
