"""Any interleaving of requests, late, repeated or reordered, against a model of what must hold."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_groups import Clock, group, ledger, planner
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from flowtrain.records.token_account import LOST, NO_SIGNAL, TRAINED
from flowtrain.rollouts.codec import pack_group, unpack_group
from flowtrain.rollouts.contract import (
    AssignedGroup,
    Batch,
    BatchRequest,
    Disown,
    Join,
    Lease,
    LeaseRequest,
    Progress,
    Push,
    Refused,
    Release,
    Renewal,
)
from flowtrain.rollouts.ledger import Ledger

NODES = ("n1", "n2", "n3")
POLICIES = ("planner", "verifier")
STALENESS = {"planner": 1, "verifier": 2}
NUM_GROUPS = {"planner": 2, "verifier": 3}
LEASE_S = 60.0
_SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)


class Trainer:
    """A trainer's own knowledge; a crash takes it back to its checkpoint."""

    def __init__(self) -> None:
        self.step = 0
        self.checkpoint = 0
        self.batches: dict[int, Batch] = {}
        """By step: each must stay as it was first answered."""
        self.registered = planner()


class LedgerMachine(RuleBasedStateMachine):
    make_database: Callable[[], str]
    replay_share = 0.0

    @initialize()
    def begin(self) -> None:
        self.clock = Clock()
        self.database = self.make_database()
        self.flow = self.opened()
        self.lives = dict.fromkeys(NODES, "life-0")
        self.leases: dict[tuple[int, int], tuple[str, str, Lease]] = {}
        """Every lease ever granted, by work item and attempt, with its node and life."""
        self.asked: dict[tuple[str, str, str], tuple[Lease, ...]] = {}
        self.committed: dict[int, float] = {}
        """Work items whose first push was taken, with a reward that tells that push from others."""
        self.makers: dict[int, tuple[str, str]] = {}
        """Node and life of that push."""
        self.disowned: set[tuple[str, str]] = set()
        self.sampled = Counter[tuple[str, str, str]]()
        """Tokens by node, life and policy."""
        self.made: dict[tuple[int, int], Counter[str]] = {}
        """Tokens by policy of the group that was first pushed for each lease."""
        self.told: dict[tuple[str, int], int] = {}
        """Tokens that a trainer has accounted for, by policy and step."""
        self.keys = itertools.count()
        self.rewards = itertools.count()
        self.trainers = {policy: Trainer() for policy in POLICIES}
        for node in NODES:
            self.flow.join(Join(node, "life-0"))
        for policy in POLICIES:
            self.register(policy)

    def opened(self) -> Ledger:
        return ledger(
            self.database,
            self.clock,
            both=True,
            lease_s=LEASE_S,
            max_attempts=3,
            replay_share=self.replay_share,
        )

    def register(self, policy: str) -> None:
        trainer = self.trainers[policy]
        trainer.registered = replace(
            planner(NUM_GROUPS[policy], STALENESS[policy], trainer.checkpoint, policy),
            life=str(next(self.keys)),
        )
        assert self.flow.register(trainer.registered).step >= trainer.checkpoint

    # ---- nodes

    @rule(node=st.sampled_from(NODES), num=st.integers(1, 6))
    def lease(self, node: str, num: int) -> None:
        key = f"key-{next(self.keys)}"
        answer = self.flow.lease(LeaseRequest(node, self.lives[node], num, key=key)).leases
        for each in answer:
            assert (each.work_item, each.attempt) not in self.leases, "leased twice"
            assert each.work_item not in self.committed
            self.leases[each.work_item, each.attempt] = (node, self.lives[node], each)
        if answer:
            self.asked[node, self.lives[node], key] = answer

    @rule(node=st.sampled_from(NODES))
    def work(self, node: str) -> None:
        """As a node does where nothing goes wrong."""
        self.lease(node, 6)
        policies = self.flow.status()["policies"]
        for (work_item, _), (owner, life, lease) in list(self.leases.items()):
            if owner == node and life == self.lives[node] and work_item not in self.committed:
                self.pushed(
                    node, lease, {policy: policies[policy]["version"] for policy in POLICIES}, 3
                )

    @rule(data=st.data())
    def lease_again(self, data: st.DataObject) -> None:
        if mine := [
            (asked, answer)
            for asked, answer in self.asked.items()
            if self.lives[asked[0]] == asked[1]
        ]:
            (node, life, key), answer = data.draw(st.sampled_from(mine))
            assert self.flow.lease(LeaseRequest(node, life, 6, key=key)).leases == answer

    @rule(data=st.data())
    def push(self, data: st.DataObject) -> None:
        """For any lease ever granted: in time, late, again, after it went to others."""
        if not self.leases:
            return
        node, _, lease = self.leases[data.draw(st.sampled_from(sorted(self.leases)))]
        policies = self.flow.status()["policies"]
        versions = {
            policy: data.draw(st.integers(0, policies[policy]["version"])) for policy in POLICIES
        }
        self.pushed(node, lease, versions, data.draw(st.sampled_from([0, 3, 300])))

    def pushed(self, node: str, lease: Lease, versions: dict[str, int], num_tokens: int) -> None:
        reward = next(self.rewards) / 2**20
        mine = group(
            lease.task, 2, versions["planner"], num_tokens, (reward, reward), versions["verifier"]
        )
        own = lease.work_item, lease.attempt
        maker = node, self.leases[own][1]
        if maker in self.disowned:
            with pytest.raises(Refused, match="has disowned what it made"):
                self.flow.push(Push(node, *own, pack_group(mine)))
            return
        if own not in self.made:
            self.made[own] = Counter({"planner": 2 * num_tokens, "verifier": 6})
            for policy, num in self.made[own].items():
                self.sampled[node, self.leases[own][1], policy] += num
        request = Push(node, *own, pack_group(mine), sampled=self.told_by(node, lease))
        status = self.flow.push(request).status
        assert status == ("duplicate" if lease.work_item in self.committed else "committed")
        self.committed.setdefault(lease.work_item, reward)
        self.makers.setdefault(lease.work_item, maker)
        assert self.flow.push(request).status == "duplicate"

    def told_by(self, node: str, lease: Lease) -> dict[str, int]:
        life = self.leases[lease.work_item, lease.attempt][1]
        return {policy: self.sampled[node, life, policy] for policy in POLICIES}

    @rule(node=st.sampled_from(NODES), policy=st.sampled_from(POLICIES), num=st.integers(1, 99))
    def sample_in_vain(self, node: str, policy: str, num: int) -> None:
        """Sample for rollouts that never end."""
        life = self.lives[node]
        self.sampled[node, life, policy] += num
        told = {policy: self.sampled[node, life, policy] for policy in POLICIES}
        self.flow.renew(Renewal(node, life, ((1, 1),), told))
        self.flow.renew(Renewal(node, life, ((1, 1),), {policy: 0}))  # comes late

    @rule(data=st.data(), node=st.sampled_from(NODES))
    def renew(self, data: st.DataObject, node: str) -> None:
        if work_items := [
            work_item for work_item, (owner, _, _) in sorted(self.leases.items()) if owner == node
        ]:
            some = data.draw(st.lists(st.sampled_from(work_items), min_size=1, unique=True))
            lost = self.flow.renew(Renewal(node, self.lives[node], tuple(some))).lost
            newest = {
                work_item: max(n for u, n in self.leases if u == work_item) for work_item, _ in some
            }
            assert {
                work_item
                for work_item, n in some
                if work_item in self.committed or n < newest[work_item]
            } <= set(lost)

    @rule(data=st.data(), is_failure=st.booleans())
    def release(self, data: st.DataObject, is_failure: bool) -> None:
        if self.leases:
            key = data.draw(st.sampled_from(sorted(self.leases)))
            self.flow.release(Release(self.leases[key][0], (key,), "ended", is_failure))

    @rule(node=st.sampled_from(NODES))
    def node_dies_and_comes_back(self, node: str) -> None:
        self.lives[node] = f"life-{next(self.keys)}"
        self.flow.join(Join(node, self.lives[node]))
        assert self.flow.status()["nodes"][node]["num_leased"] == 0

    @rule(node=st.sampled_from(NODES))
    def node_disowns_and_comes_back(self, node: str) -> None:
        request = Disown(node, self.lives[node])
        self.flow.disown(request)
        self.disowned.add((node, self.lives[node]))
        self.node_dies_and_comes_back(node)
        self.flow.disown(request)

    @rule(node=st.sampled_from(NODES))
    def join_arrives_late(self, node: str) -> None:
        self.flow.join(Join(node, "life-0"))

    @rule(seconds=st.sampled_from([1.0, 31.0, 61.0, 130.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    # ---- trainers

    @rule(policy=st.sampled_from(POLICIES), is_checkpoint=st.booleans())
    def train(self, policy: str, is_checkpoint: bool) -> None:
        trainer = self.trainers[policy]
        step = trainer.step + 1
        life = trainer.registered.life
        answer = self.flow.batch(BatchRequest(policy, step, life=life))
        if answer.num_missing:
            assert not answer.groups and step not in trainer.batches
            return
        if step not in trainer.batches:
            makers = {self.makers[each.work_item] for each in answer.groups}
            assert not makers & self.disowned, "it was disowned before the batch was made"
        found = trainer.batches.setdefault(step, answer)
        assert found == answer, "a batch came again as another one"
        self.check(policy, step, answer)
        trainer.step = step
        if is_checkpoint:
            trainer.checkpoint = step
        self.told[policy, step] = sum(self.tokens_of(policy, each) for each in answer.groups)
        kept = self.told[policy, step] // 3
        tokens = {TRAINED: kept, NO_SIGNAL: self.told[policy, step] - kept}
        self.flow.progress(Progress(policy, step, trainer.checkpoint, tokens=tokens, life=life))

    def tokens_of(self, policy: str, each: AssignedGroup) -> int:
        rollouts = unpack_group(each.payload).trajectories
        return sum(rollout.num_tokens(policy) for rollout in rollouts)

    def check(self, policy: str, step: int, answer: Batch) -> None:
        """The bound holds for every token; what is served is what the first push brought."""
        assert [each.position for each in answer.groups] == list(range(NUM_GROUPS[policy]))
        for each in answer.groups:
            rollouts = unpack_group(each.payload).trajectories
            assert {rollout.reward for rollout in rollouts} == {self.committed[each.work_item]}
            turns = [turn for rollout in rollouts for turn in rollout.turns]
            spans = [s for t in turns if policy in t.calls for s in t.calls[policy].spans]
            assert all(0 <= step - 1 - span.version <= STALENESS[policy] for span in spans)

    @rule(policy=st.sampled_from(POLICIES))
    def trainer_crashes_and_resumes(self, policy: str) -> None:
        self.trainers[policy].step = self.trainers[policy].checkpoint
        self.register(policy)

    @rule(policy=st.sampled_from(POLICIES))
    def registration_arrives_late(self, policy: str) -> None:
        before = self.flow.status()["policies"][policy]
        self.flow.register(self.trainers[policy].registered)
        assert self.flow.status()["policies"][policy] == before

    @rule(policy=st.sampled_from(POLICIES), back=st.integers(1, 3))
    def progress_arrives_late(self, policy: str, back: int) -> None:
        trainer = self.trainers[policy]
        step = max(0, trainer.step - back)
        told = Progress(policy, step, min(step, trainer.checkpoint))
        self.flow.progress(replace(told, life=trainer.registered.life))

    @rule(policy=st.sampled_from(POLICIES), ahead=st.integers(2, 4))
    def a_step_is_left_out(self, policy: str, ahead: int) -> None:
        step = self.flow.status()["policies"][policy]["step"] + ahead
        with pytest.raises(Refused):
            life = self.trainers[policy].registered.life
            self.flow.batch(BatchRequest(policy, step, life=life))

    @rule()
    def service_restarts(self) -> None:
        self.flow.close()
        self.flow = self.opened()

    # ---- what must hold after each of them

    @invariant()
    def it_adds_up(self) -> None:
        if not hasattr(self, "flow"):
            return
        audit = self.flow.audit()
        assert audit.problems == ()
        assert audit.counts.get("committed", 0) == len(self.committed)
        for policy in POLICIES:
            account = audit.tokens[policy]
            lives = [num for (_, _, name), num in self.sampled.items() if name == policy]
            made = sum(tokens[policy] for tokens in self.made.values())
            told = [num for (name, _), num in self.told.items() if name == policy]
            fates = account.fates
            assert account.sampled == sum(lives) and account.difference == 0
            assert fates.get(LOST, 0) + fates.get("under_way", 0) == sum(lives) - made
            assert fates.get(TRAINED, 0) == sum(num // 3 for num in told)
            assert fates.get(TRAINED, 0) + fates.get(NO_SIGNAL, 0) == sum(told)
        work_items = self.flow.status()["work_items"]
        assert sum(work_items.values()) == len({work_item for work_item, _ in self.leases}), (
            "a work item was lost, or made by nobody's request"
        )
        for policy, trainer in self.trainers.items():
            fresh = [
                each.work_item
                for batch in trainer.batches.values()
                for each in batch.groups
                if not each.is_replay
            ]
            assert len(fresh) == len(set(fresh)), "served twice"
            served = audit.counts.get(f"{policy}.assigned", 0)
            assert served == len(fresh)
            found = sum(n for name, n in audit.counts.items() if name.startswith(policy))
            assert found == len(self.committed)

    def teardown(self) -> None:
        if hasattr(self, "flow"):
            self.flow.close()


def run(make_database: Callable[[], str], replay_share: float, num_examples: int) -> None:
    kind = type(
        "Machine",
        (LedgerMachine,),
        {"make_database": staticmethod(make_database), "replay_share": replay_share},
    )
    # derandomize: the same interleavings in every run of the tests.
    run_state_machine_as_test(
        kind,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=_SLOW,
        ),
    )


@pytest.mark.parametrize("replay_share", [0.0, 0.5])
def test_any_interleaving_adds_up_on_sqlite(tmp_path: Path, replay_share: float) -> None:
    run(
        lambda: str(Path(tempfile.mkdtemp(dir=tmp_path)) / "ledger.db"),
        replay_share,
        num_examples=5,
    )


def test_any_interleaving_adds_up_on_postgres(postgres_server: Any) -> None:
    numbers = itertools.count()

    def make_database() -> str:
        name = f"machine_{next(numbers)}"
        postgres_server.execute(f"CREATE DATABASE {name}")
        return postgres_server.url(name)

    run(make_database, 0.5, num_examples=2)
