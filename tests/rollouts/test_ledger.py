"""The ledger's answers, rule by rule: on SQLite by itself, on PostgreSQL through a service."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
from fake_groups import (
    LAYOUT,
    TASKS,
    Clock,
    begun,
    events,
    group,
    joined,
    lease,
    ledger,
    options,
    planner,
    push,
    rows,
    turn,
)

from flowtrain.records import Group, Task, VersionSpan
from flowtrain.rollouts.codec import pack_group, unpack_group
from flowtrain.rollouts.contract import (
    BatchRequest,
    Disown,
    Join,
    LeaseRequest,
    Progress,
    Push,
    Refused,
    Release,
    Renewal,
)
from flowtrain.rollouts.ledger import Ledger, batches, prompts
from flowtrain.rollouts.ledger.leases import LeaseBook
from flowtrain.rollouts.ledger.prompts import TaskOrder
from flowtrain.rollouts.ledger.sql import Transaction
from flowtrain.rollouts.rules import Outcome, Rules
from flowtrain.rollouts.rules.builtin import AllGroups, EarliestDeadline, Latest
from flowtrain.tasks.cursor import TaskCursor


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def flow(database: str, clock: Clock, request: pytest.FixtureRequest) -> Iterator[Ledger]:
    """A planner that trains 4 groups a step, at most 1 version old; node n1 has joined."""
    flow = ledger(database, clock, lease_s=60, max_attempts=3, trainer_timeout_s=120)
    if "://" in database:
        flow = request.getfixturevalue("front").serve(flow)
    joined(flow)
    flow.register(planner())
    yield flow
    assert flow.audit().problems == ()
    flow.close()


def batch(flow: Ledger, step: int, policy: str = "planner", life: str = "") -> list[int]:
    request = BatchRequest(policy, step, life=life)
    return [served.work_item for served in flow.batch(request).groups]


def trained(flow: Ledger, version: int, checkpoint: int = 0, life: str = "") -> None:
    flow.progress(Progress("planner", version, checkpoint, life=life))


def lost(flow: Ledger, *held: int, node: str = "n1", life: str = "a") -> tuple[int, ...]:
    """Renew first attempts at work items, and return those that are lost."""
    return flow.renew(Renewal(node, life, tuple((each, 1) for each in held))).lost


def places(flow: Ledger, num: int, node: str = "n1", **how: Any) -> list[tuple[int, int]]:
    """Lease, and return work items with their attempts."""
    return [(each.work_item, each.attempt) for each in lease(flow, num, node, **how)]


# ---- nodes


def test_units_come_in_the_order_of_the_tasks_with_seeds_of_their_own(flow: Ledger) -> None:
    leases = lease(flow, 6)
    cursor = TaskCursor(TASKS, 0)
    assert [each.task for each in leases] == [*cursor.take(4), *cursor.take(4)[:2]]
    found = [(each.work_item, each.attempt, each.index) for each in leases]
    assert found == [(work_item, 1, work_item - 1) for work_item in range(1, 7)]
    assert [each.seed for each in leases] == [
        *(1077100656669939322, 3958908509897490521, 2742100691126862562, 84581279504704783),
        *(1629593531276950026, 2884233412460747911),
    ]


def test_a_task_order_is_the_same_from_anywhere() -> None:
    cursor = TaskCursor(TASKS, 3)
    in_order = [task for _ in range(10) for task in cursor.take(4)]
    order = TaskOrder(TaskCursor(TASKS, 3), 4)
    found = [order[place] for place in (39, 0, 17, 16, 23, 5)]
    assert found == [in_order[place] for place in (39, 0, 17, 16, 23, 5)]


def test_a_request_sent_again_gets_the_same_leases(flow: Ledger) -> None:
    first = lease(flow, 3, key="k1")
    assert lease(flow, 3, key="k1") == first
    assert push(flow, first[0]) == "committed"
    assert lease(flow, 3, key="k1") == first, "as it was answered, whatever has happened since"
    assert [each.work_item for each in lease(flow, 2, key="k2")] == [4, 5]


def test_busy_seconds_of_a_request_sent_again_count_once(flow: Ledger) -> None:
    for _ in range(3):
        flow.lease(LeaseRequest("n1", "a", 1, busy_s=2.0, waited_s=1.0, key="k1"))
    flow.lease(LeaseRequest("n1", "a", 1, busy_s=0.5, key="k2"))
    node = flow.status()["nodes"]["n1"]
    assert (node["busy_s"], node["waited_s"]) == (2.5, 1.0)


def test_a_lease_that_ran_out_goes_to_another_node_first_of_all(flow: Ledger, clock: Clock) -> None:
    joined(flow, "n2")
    old = lease(flow, 2)
    clock.now += 59
    assert places(flow, 1, "n2") == [(3, 1)]
    clock.now += 2
    again = lease(flow, 3, "n2")
    assert [(each.work_item, each.attempt) for each in again] == [(1, 2), (2, 2), (4, 1)]
    assert [each.seed for each in again[:2]] == [each.seed for each in old]


def test_renewal_keeps_a_lease_and_tells_which_are_lost(flow: Ledger, clock: Clock) -> None:
    joined(flow, "n2")
    kept, taken, late = (each.work_item for each in lease(flow, 3))
    clock.now += 50
    assert lost(flow, kept) == ()
    clock.now += 20
    assert places(flow, 1, "n2") == [(taken, 2)]
    assert lost(flow, kept, taken, late) == (taken,), "nobody has taken the other that ran out"
    assert places(flow, 1, "n2") == [(4, 1)]
    assert lost(flow, kept, life="another life") == (kept,)


def test_a_new_life_of_a_node_ends_the_leases_of_the_last(flow: Ledger) -> None:
    joined(flow, "n2")
    first = lease(flow, 2)
    joined(flow, "n1", "a")
    assert flow.status()["work_items"]["leased"] == 2, "the same life joins again: nothing ends"
    joined(flow, "n1", "b")
    assert places(flow, 2, "n2") == [(each.work_item, 2) for each in first]
    with pytest.raises(Refused, match="another process has joined under this name"):
        lease(flow, 1, "n1", "a")
    joined(flow, "n1", "a")  # late, from the life that has ended
    held = places(flow, 1, "n1", life="b")[0][0]
    for work_item in (held, first[0].work_item):
        assert lost(flow, work_item) == (work_item,)
    assert push(flow, first[0]) == "committed", "what the old life has done is not thrown away"


def test_released_units_go_to_the_next_who_asks(flow: Ledger) -> None:
    joined(flow, "n2")
    first, second = lease(flow, 2)
    flow.release(Release("n2", ((first.work_item, 1),)))
    flow.release(Release("n1", ((first.work_item, 2), (second.work_item, 1)), "no engine"))
    flow.release(Release("n1", ((second.work_item, 1),), "no engine"))
    assert places(flow, 2, "n2") == [(second.work_item, 2), (3, 1)]
    flow.release(Release("n1", ((second.work_item, 1),), "sent again, late"))
    assert flow.status()["work_items"]["leased"] == 3
    assert flow.status()["lost_leases"] == {"released": 1}
    joined(flow, "n3")
    [(back, _)] = places(flow, 1, "n3")
    flow.release(Release("n3", ((back, 1),)))
    assert lost(flow, back, node="n3") == (back,), "sent before, arrived after"


def test_a_task_that_no_node_can_do_fails_and_is_counted(flow: Ledger, clock: Clock) -> None:
    """Three failures count; that a node was slow, ended or began anew does not."""
    (each,) = lease(flow)
    clock.now += 61
    flow.progress(Progress("planner", 0, 0))
    (each,) = lease(flow)
    flow.release(Release("n1", ((1, 2),), "the node has ended"))
    (each,) = lease(flow)
    joined(flow, life="a2")
    for attempt in (4, 5, 6):
        (each,) = lease(flow, life="a2")
        assert (each.work_item, each.attempt) == (1, attempt)
        flow.release(Release("n1", ((1, attempt),), "KeyError", is_failure=True))
        flow.release(Release("n1", ((1, attempt),), "KeyError", is_failure=True))
    work_item = each
    assert [each.work_item for each in lease(flow, life="a2")] == [2]
    assert flow.status()["work_items"] == {"leased": 1, "waiting": 0, "committed": 0, "failed": 1}
    assert push(flow, work_item) == "committed", "better late than never"


def test_a_task_that_ends_node_after_node_fails_in_the_end(flow: Ledger, clock: Clock) -> None:
    for attempt in range(1, 31):
        (each,) = lease(flow)
        assert (each.work_item, each.attempt) == (1, attempt)
        clock.now += 61
        flow.progress(Progress("planner", 0, 0))
    assert [each.work_item for each in lease(flow)] == [2]
    assert flow.status()["work_items"]["failed"] == 1


# ---- pushes


def test_whoever_pushes_first_wins(flow: Ledger, clock: Clock) -> None:
    joined(flow, "n2")
    (mine,) = lease(flow)
    clock.now += 61
    (yours,) = lease(flow, node="n2")
    assert push(flow, mine, rewards=(1.0, 1.0)) == "committed"
    assert push(flow, yours, node="n2") == "duplicate"
    assert push(flow, mine) == "duplicate"
    account = flow.audit().tokens["planner"]
    assert account.sampled == 16 and account.fates == {"waiting": 8, "duplicate": 8}
    found = [event.outcome.rewards for event in events(flow) if event.outcome]
    assert found in ([], [(1.0, 1.0)])
    for _ in range(3):
        push(flow, lease(flow)[0])
    served = flow.batch(BatchRequest("planner", 1)).groups
    assert [each.reward for each in unpack_group(served[0].payload).trajectories] == [1.0, 1.0]


def test_what_a_node_disowns_is_never_trained(database: str) -> None:
    """Not what waits, what comes late, or what a batch would take again."""
    flow = begun(database, replay_share=0.5, trainer=planner(2, max_staleness=9))
    joined(flow, "n2")
    *mine, late = lease(flow, 4)
    yours = lease(flow, 3, node="n2")
    for each in (mine[0], *yours[:1]):
        push(flow, each, node="n1" if each in mine else "n2")
    first = batch(flow, 1)
    assert first == [mine[0].work_item, yours[0].work_item]
    for each in mine[1:]:
        push(flow, each)
    for _ in range(2):  # it may be sent again
        flow.disown(Disown("n1", "a"))
    with pytest.raises(Refused, match="node 'n1' has disowned what it made"):
        push(flow, late)
    with pytest.raises(Refused, match="another process has joined under this name"):
        lease(flow)
    assert batch(flow, 1) == first, "a batch is chosen once"
    push(flow, yours[1], node="n2")
    assert batch(flow, 2) == [yours[1].work_item, yours[0].work_item]
    status = flow.status()
    groups = {name: each["num"] for name, each in status["policies"]["planner"]["groups"].items()}
    assert groups == {"assigned": 3, "disowned": 2}
    assert status["lost_leases"] == {"disowned": 1}
    (again,) = lease(flow, 1, node="n2")
    assert (again.work_item, again.attempt) == (late.work_item, 2)
    joined(flow, "n1", "b")
    assert push(flow, lease(flow, life="b")[0]) == "committed"
    assert flow.audit().problems == ()


def _changed(
    task: Task, /, at: int = 1, call: dict[str, Any] | None = None, **fields: Any
) -> Group:
    """A group one rollout of which differs, in itself or in the planner's call of its turn."""
    whole = group(task)
    rollouts = list(whole.trajectories)
    if call is not None:
        (one,) = rollouts[at].turns
        fields["turns"] = (replace(one, calls={"planner": replace(one.calls["planner"], **call)}),)
    rollouts[at] = replace(rollouts[at], **fields)
    return replace(whole, trajectories=tuple(rollouts))


def _without_planner(task: Task) -> Group:
    (one,) = group(task).trajectories[0].turns
    turns = (replace(one, calls={}),)
    return _changed(task, 0, turns=turns, reward=None, error="generator: down")


def test_a_group_that_is_not_the_unit_s_is_refused_and_the_unit_goes_on(flow: Ledger) -> None:
    (each,) = lease(flow)
    task, other = each.task, next(one for one in TASKS if one != each.task)
    uncovered = [[(0, 2, 0), (3, 4, 0)], [(0, 3, 0)], [(0, 4, -1)]]
    spans = [tuple(VersionSpan(*one) for one in some) for some in uncovered]
    for wrong, why in (
        (group(other), "the group of another"),
        (group(task, num=3), "has 3 rollouts, but groups of this run have 2"),
        (group(task, rewards=(float("nan"), 1.0)), "reward is nan"),
        (_changed(task, 0, reward=None), "reward is None, it must be from 0 to 1"),
        (_changed(task, 0, policy_rewards={"planner": 1.5}), "must be from 0 to 1"),
        (_changed(task, 0, policy_rewards={"judge": 1.0}), "'judge', which is no policy"),
        (group(task, version=1), "version 1 of planner does not exist"),
        *((_changed(task, call={"spans": some}), "spans must cover") for some in spans),
        (_changed(task, call={"logprobs": (-0.5,) * 3}), "needs as many log-probs"),
        (_changed(task, call={"logprobs": (float("-inf"),) * 4}), "log-prob -inf"),
        (_changed(task, task=other), "the group has rollouts of both"),
        (_without_planner(task), "a turn has no call of a policy"),
    ):
        with pytest.raises(Refused, match=why):
            flow.push(Push("n1", each.work_item, 1, pack_group(wrong)))
    assert push(flow, each) == "committed"


def test_who_was_not_leased_a_unit_does_not_push_it(flow: Ledger) -> None:
    (each,) = lease(flow)
    strange = [("n2", 1, 1), ("n1", 1, 2), ("n1", 77, 1), ("n1", 2**63, 1), ("n1", 1, -(2**70))]
    for node, work_item, attempt in strange:
        with pytest.raises(Refused, match=r"was not leased to|64 bits"):
            flow.push(Push(node, work_item, attempt, pack_group(group(each.task))))
    with pytest.raises(Refused, match="malformed group"):
        flow.push(Push("n1", each.work_item, 1, b"nonsense"))
    assert push(flow, each) == "committed"


def test_what_cannot_be_trained_never_waits_for_a_batch(flow: Ledger) -> None:
    leases = lease(flow, 6)
    push(flow, leases[0], rewards=(None, None))
    push(flow, leases[1], num_tokens=0)
    for each in leases[2:5]:
        push(flow, each)
    assert flow.batch(BatchRequest("planner", 1)).num_missing == 1
    push(flow, leases[5], rewards=(None, 1.0))
    answer = flow.batch(BatchRequest("planner", 1))
    assert [served.work_item for served in answer.groups] == [3, 4, 5, 6]
    assert answer.stats["num_empty"] == 2


def test_filtered_groups_are_counted_with_their_lengths(database: str) -> None:
    flow = begun(database, Clock(), group_filter="mixed", trainer=planner(num_groups=2))
    for each, rewards in zip(
        lease(flow, 4), [(1.0, 1.0), (0.0, 1.0), (0.0, 0.0), (1.0, 0.0)], strict=True
    ):
        push(flow, each, rewards=rewards, num_tokens=3)
    answer = flow.batch(BatchRequest("planner", 1))
    assert ([each.work_item for each in answer.groups], answer.stats["num_filtered"]) == ([2, 4], 2)
    expected = {"num": 2, "tokens_mean": 6.0}
    assert flow.status()["policies"]["planner"]["groups"]["filtered"] == expected
    assert flow.audit().problems == ()


# ---- batches and staleness


def test_a_batch_is_put_together_once_for_all_ranks(flow: Ledger) -> None:
    leases = lease(flow, 8)
    assert flow.batch(BatchRequest("planner", 1)).num_missing == 4
    for each in leases[:6]:
        push(flow, each)
    whole = flow.batch(BatchRequest("planner", 1))
    push(flow, leases[6])
    assert flow.batch(BatchRequest("planner", 1)) == whole, "stats and all"
    assert whole.num_missing == 0
    ranks = [flow.batch(BatchRequest("planner", 1, rank, 3)).groups for rank in range(3)]
    assert [[each.position for each in rank] for rank in ranks] == [[0, 3], [1], [2]]
    found = sorted((each for rank in ranks for each in rank), key=lambda each: each.position)
    assert found == list(whole.groups)
    found = [unpack_group(each.payload) for each in whole.groups]
    assert found == [group(each.task) for each in leases[:4]]
    for step in (0, 3):
        with pytest.raises(Refused, match="only batches of steps 1 to 2 are available"):
            flow.batch(BatchRequest("planner", step))


def test_the_bound_of_staleness_is_strict(flow: Ledger) -> None:
    """Step 3 trains version 2; it takes tokens of versions 1 and 2, and none of 0."""
    first = lease(flow, 8)
    for each in first[:4]:
        push(flow, each)
    assert batch(flow, 1) == [1, 2, 3, 4]
    trained(flow, 1)
    old = lease(flow, 4)
    for each in first[4:]:
        push(flow, each)
    assert batch(flow, 2) == [5, 6, 7, 8]
    trained(flow, 2)
    for number, each in enumerate(old):
        push(flow, each, version=0 if number < 2 else 1, num_tokens=100 if number < 2 else 4)
    assert flow.batch(BatchRequest("planner", 3)).num_missing == 2
    for each in lease(flow, 2):
        push(flow, each, version=2)
    answer = flow.batch(BatchRequest("planner", 3))
    assert [each.work_item for each in answer.groups] == [11, 12, 13, 14]
    assert {
        name: answer.stats[name]
        for name in ("num_stale", "stale_tokens_mean", "assigned_tokens_mean", "staleness_max")
    } == {
        "num_stale": 2,
        "stale_tokens_mean": 200.0,
        "assigned_tokens_mean": 8.0,
        "staleness_max": 1,
    }
    assert answer.stats["staleness_mean"] == 0.5


def test_the_oldest_token_of_a_group_decides(flow: Ledger) -> None:
    first = lease(flow, 8)
    for early in first[:4]:
        push(flow, early)
    batch(flow, 1)
    trained(flow, 1)
    (each,) = lease(flow)
    for early in first[4:]:
        push(flow, early)
    batch(flow, 2)
    trained(flow, 2)
    whole = group(each.task, version=2)
    mixed = turn((VersionSpan(0, 3, 2), VersionSpan(3, 4, 0)))
    rollouts = (
        whole.trajectories[0],
        replace(whole.trajectories[1], turns=(*whole.trajectories[1].turns, mixed)),
    )
    flow.push(Push("n1", each.work_item, 1, pack_group(replace(whole, trajectories=rollouts))))
    assert flow.batch(BatchRequest("planner", 3)).num_missing == 4
    assert flow.status()["policies"]["planner"]["groups"]["stale"]["num"] == 1


def test_leases_stop_where_what_they_bring_could_not_be_trained_in_time(flow: Ledger) -> None:
    joined(flow, "n2")
    answer = flow.lease(LeaseRequest("n1", "a", 20))
    assert (len(answer.leases), answer.reason) == (8, "full")
    assert answer.retry_after_s > 0
    *early, last = answer.leases
    for each in early:
        push(flow, each)
    assert lease(flow, 1, "n2") == []
    batch(flow, 1)
    assert lease(flow, 1) == [], (
        "4 wait or are under way for step 2; a fifth could be trained by step 3, if version 1 or "
        "newer had sampled it"
    )
    trained(flow, 1)
    assert lease(flow, 5, versions={"planner": 0}) == [], "a node that has not pulled it yet"
    assert len(lease(flow, 5, versions={"planner": 1})) == 4
    push(flow, last)
    batch(flow, 2)
    trained(flow, 2)
    assert len(lease(flow, 9)) == 4


@pytest.mark.parametrize(("max_waiting", "num"), [(0, 0), (8, 4)])
def test_none_begins_while_a_whole_batch_waits(database: str, max_waiting: int, num: int) -> None:
    """Unless the run says how many may wait."""
    flow = begun(database, Clock(), max_waiting=max_waiting)
    *early, fourth = lease(flow, 4)
    for each in early:
        push(flow, each)
    assert len(lease(flow, 1)) == 1, "three wait"
    push(flow, fourth)
    answer = flow.lease(LeaseRequest("n1", "a", 20))
    assert (len(answer.leases), answer.reason) == (num - (num > 0), "full")
    batch(flow, 1)
    assert lease(flow, 1), "none waits any more"


def test_groups_that_the_next_step_may_not_take_stop_no_rollout(database: str) -> None:
    flow = ledger(database, Clock())
    joined(flow)
    flow.register(planner(num_groups=2, max_staleness=1))
    *early, late, last = lease(flow, 4, versions={"planner": 0})
    for step in (1, 2):
        for each in early:
            push(flow, each, version=step - 1)
        assert batch(flow, step)
        trained(flow, step)
        early = lease(flow, 2, versions={"planner": step})
    for each in (late, last):
        push(flow, each, version=0)
    flow.release(Release("n1", tuple((each.work_item, each.attempt) for each in early), ""))
    assert len(lease(flow, 9, versions={"planner": 2})) == 4, "a whole batch waits, but it is stale"


def test_nodes_that_are_long_gone_are_forgotten(database: str) -> None:
    """Each of a pool's machines comes by a name of its own."""
    clock = Clock()
    flow = ledger(database, clock, wait_s=1800.0)
    flow.register(planner())
    for number in range(20):
        joined(flow, f"machine-{number}")
        clock.now += 1000
    names = set(flow.status()["nodes"])
    assert names == {f"machine-{number}" for number in range(16, 20)}
    assert flow.audit().problems == ()


def test_max_waiting_bounds_what_waits_and_is_under_way(database: str) -> None:
    flow = ledger(database, Clock(), max_waiting=5)
    joined(flow)
    told = r"dataflow\.max_waiting=5 must be at least the 6 groups of a batch"
    with pytest.raises(Refused, match=told):
        flow.register(planner(num_groups=6))
    flow.register(planner(num_groups=2))
    leases = lease(flow, 20)
    assert len(leases) == 5
    push(flow, leases[0])
    push(flow, leases[1])
    assert lease(flow, 1) == []
    batch(flow, 1)
    assert len(lease(flow, 20)) == 2


def test_without_a_live_trainer_nothing_is_leased(database: str, clock: Clock) -> None:
    flow = ledger(database, clock)
    joined(flow)
    assert flow.lease(LeaseRequest("n1", "a", 1)).reason == "no trainer"
    flow.register(planner())
    assert len(lease(flow)) == 1
    clock.now += 121
    assert flow.lease(LeaseRequest("n1", "a", 1)).reason == "no trainer"
    flow.batch(BatchRequest("planner", 1))
    assert len(lease(flow)) == 1, "asking for a batch is a sign of life"
    flow.progress(Progress("planner", 0, 0, is_done=True))
    assert flow.lease(LeaseRequest("n1", "a", 1)).reason == "done"
    flow.register(planner())
    assert len(lease(flow)) == 1


def test_a_share_of_each_batch_is_trained_again(database: str) -> None:
    flow = begun(
        database, Clock(), replay_share=0.5, trainer=planner(num_groups=4, max_staleness=2)
    )
    for each in lease(flow, 8):
        push(flow, each)
    assert batch(flow, 1) == [1, 2, 3, 4], "nothing has been trained yet"
    trained(flow, 1)
    second = flow.batch(BatchRequest("planner", 2))
    expected = [(5, False), (6, False), (4, True), (3, True)]
    assert [(each.work_item, each.is_replay) for each in second.groups] == expected
    trained(flow, 2, 2)
    found = batch(flow, 3)
    assert found == [7, 8, 6, 5], "the latest first; the checkpoint of step 2 has not deleted them"
    trained(flow, 3, 3)
    for each in lease(flow, 4):
        push(flow, each, version=3)
    assert len(batch(flow, 4)) == 4
    found = {each.is_replay for each in flow.batch(BatchRequest("planner", 4)).groups}
    assert found == {False}, "what there is is too old"
    assert flow.audit().problems == ()


RULE = """
class Oldest:
    def select(self, candidates, num, seed):
        by_time = sorted(candidates, key=lambda each: each.outcome.pushed_s)
        return [each.outcome.work_item for each in by_time][:num]
"""


def test_what_is_trained_again_is_a_rule_that_sees_when_groups_came(
    database: str, tmp_path: Path
) -> None:
    (tmp_path / "rule.py").write_text(RULE)
    clock = Clock()
    rule = f"{tmp_path / 'rule.py'}:Oldest"
    options = {"replay_share": 0.3, "replay_selector": rule, "selector": rule}
    flow = begun(database, clock, **options, trainer=planner(num_groups=4, max_staleness=2))
    for each in reversed(lease(flow, 7)):
        push(flow, each)
        clock.now += 1
    assert batch(flow, 1) == [7, 6, 5, 4]
    trained(flow, 1)
    found = flow.batch(BatchRequest("planner", 2)).groups
    assert [(each.work_item, each.is_replay) for each in found] == [
        *((3, False), (2, False), (1, False), (7, True)),
    ]


@pytest.mark.parametrize(("share", "num"), [(0.0, 12), (0.3, 10), (0.5, 8)])
def test_replays_leave_room_for_fewer_groups(database: str, share: float, num: int) -> None:
    """The next step may take 4 fresh groups, and the two after it what replays leave of theirs."""
    flow = begun(
        database, Clock(), replay_share=share, trainer=planner(num_groups=4, max_staleness=2)
    )
    assert len(lease(flow, 20)) == num


# ---- trainers that come back


def test_after_a_crash_the_batches_since_the_checkpoint_come_again(
    flow: Ledger, database: str, clock: Clock
) -> None:
    for each in lease(flow, 8):
        push(flow, each)
    first = flow.batch(BatchRequest("planner", 1))
    trained(flow, 1, 1)
    second = flow.batch(BatchRequest("planner", 2))
    trained(flow, 2, 1)
    for each in lease(flow, 4):
        push(flow, each, version=2)
    third = flow.batch(BatchRequest("planner", 3))
    flow.close()
    again = ledger(database, clock, lease_s=60, max_attempts=3, trainer_timeout_s=120)
    assert again.run == flow.run
    assert again.register(planner(step=1)).step == 3
    assert again.batch(BatchRequest("planner", 2)) == second
    again.progress(Progress("planner", 2, 1))
    assert again.batch(BatchRequest("planner", 3)) == third
    found = [event.version for event in events(again) if event.outcome is None]
    assert found == [1, 2], "a version that comes again is no news"
    found = {each.work_item for each in (*first.groups, *second.groups, *third.groups)}
    assert found == set(range(1, 13))
    with pytest.raises(Refused, match="its checkpoint is of step 1"):
        again.batch(BatchRequest("planner", 1))


def test_a_registration_that_comes_again_late_takes_nothing_back(flow: Ledger) -> None:
    first = replace(planner(), life="t1")
    flow.register(first)
    for each in lease(flow, 8):
        push(flow, each)
    for step in (1, 2):
        batch(flow, step, life="t1")
        trained(flow, step, life="t1")
    assert flow.register(first).step == 2
    assert flow.status()["policies"]["planner"]["version"] == 2
    assert len(lease(flow, 1)) == 1, "and what is sampled can still be trained in time"
    assert flow.register(replace(first, life="t2")).step == 2
    found = flow.status()["policies"]["planner"]["version"]
    assert found == 0, "it has crashed and goes on from step 0"


@pytest.mark.parametrize("life", ["t1", ""], ids=["named", "nameless"])
def test_a_trainer_is_not_heard_once_another_has_taken_its_place(flow: Ledger, life: str) -> None:
    flow.register(replace(planner(), life=life))
    for each in lease(flow, 4):
        push(flow, each)
    assert len(flow.batch(BatchRequest("planner", 1, life=life)).groups) == 4
    flow.register(replace(planner(), life="t2"))
    with pytest.raises(Refused, match="another process has registered it since and now trains it"):
        flow.progress(Progress("planner", 1, 1, life=life))
    with pytest.raises(Refused, match="another process has registered it since and now trains it"):
        flow.batch(BatchRequest("planner", 1, life=life))
    assert flow.status()["policies"]["planner"]["checkpoint"] == 0
    assert len(flow.batch(BatchRequest("planner", 1, life="t2")).groups) == 4
    flow.progress(Progress("planner", 1, 1, life="t2"))


def test_leases_do_not_wait_while_a_batch_is_read(
    flow: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The groups of a step are megabytes; a service reads them behind the lock."""
    for each in lease(flow, 4):
        push(flow, each)
    num_leased = []
    real = batches._read

    def reading(*arguments: Any) -> Any:
        num_leased.append(len(lease(flow, 1)))
        return real(*arguments)

    monkeypatch.setattr(batches, "_read", reading)
    assert len(flow.batch(BatchRequest("planner", 1)).groups) == 4
    assert num_leased == [1]


def test_groups_that_a_checkpoint_has_released_meanwhile_are_refused(
    flow: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in lease(flow, 4):
        push(flow, each)
    batch(flow, 1)
    real = batches._read

    def late(*arguments: Any) -> Any:
        trained(flow, 1, 1)
        with flow.database.read() as transaction:
            return real(transaction, *arguments[1:])

    monkeypatch.setattr(batches, "_read", late)
    with pytest.raises(Refused, match="step 1 of planner: its groups were deleted"):
        batch(flow, 1)


def test_a_trainer_resumes_only_what_this_run_has_trained(flow: Ledger) -> None:
    for each in lease(flow, 8):
        push(flow, each)
    batch(flow, 1)
    trained(flow, 1, 1)
    batch(flow, 2)
    kept = [row.work_item for row in rows(flow, "payloads", "work_item")]
    assert kept == [5, 6, 7, 8], "those of step 1 are not needed any more"
    trained(flow, 2, 2)
    assert rows(flow, "payloads", "work_item") == []
    told = "the batches after step 0 were deleted; planner had a checkpoint of step 2"
    with pytest.raises(Refused, match=told):
        flow.register(planner(step=0))
    with pytest.raises(Refused, match="checkpoint of step 3 belongs to another run"):
        flow.register(planner(step=3))
    with pytest.raises(Refused, match="use the original model"):
        flow.register(replace(planner(step=2), layout="another"))
    assert flow.register(planner(step=2)).step == 2


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        *(
            (methodcaller("register", replace(planner(), **changes)), why)
            for changes, why in (
                ({"policy": "critic"}, "this run has only planner"),
                ({"num_groups": 0}, "num_groups"),
                ({"num_groups": 2**40}, "num_groups"),
                ({"max_staleness": -1}, "max_staleness"),
                ({"step": -1}, "step"),
                ({"step": 2**62}, "step"),
                ({"vocab_size": 0}, "vocab_size"),
                ({"max_positions": 2**62}, "max_positions"),
                ({"store": "s" * 5000}, "store has 5000 characters"),
            )
        ),
        *(
            (partial(lease, versions={"planner": version}), "of 'planner' does not exist")
            for version in (-1, 2**41, 2**63 - 1)
        ),
        *(
            (methodcaller("progress", Progress("planner", *each)), "cannot have version")
            for each in ((1, 0), (0, 1), (-1, -1))
        ),
        *(
            (methodcaller("join", Join(name, "a")), "must have 1 to 100 letters")
            for name in ("", "../n", "a b", "n" * 101, "n\n")
        ),
        *(
            (methodcaller("lease", request), "")
            for request in (
                LeaseRequest("n1", "a", 0),
                LeaseRequest("n1", "a", 1025),
                LeaseRequest("n1", "a", 1, busy_s=float("nan")),
                LeaseRequest("n1", "a", 1, waited_s=-1.0),
                LeaseRequest("n1", "a", 1, key="k" * 101),
                LeaseRequest("n1", "b", 1),
                LeaseRequest("stranger", "a", 1),
            )
        ),
    ],
)
def test_requests_that_make_no_sense_are_refused(
    flow: Ledger, ask: Callable[[Ledger], object], why: str
) -> None:
    """A trainer is never ahead of its batches, and names of nodes are plain."""
    with pytest.raises(Refused, match=why):
        ask(flow)
    assert flow.status()["work_items"]["leased"] == 0


def test_progress_that_comes_late_or_twice_changes_nothing(flow: Ledger) -> None:
    for each in lease(flow, 8):
        push(flow, each)
    batch(flow, 1)
    batch(flow, 2)
    late = Progress("planner", 1, 0, busy_s=5.0, waited_s=1.0)
    for request in (late, late, Progress("planner", 2, 1, 5.0, 1.0), late):
        flow.progress(request)
    policy = flow.status()["policies"]["planner"]
    found = (policy["version"], policy["checkpoint"], policy["busy_s"], policy["waited_s"])
    assert found == (2, 1, 10.0, 2.0)
    assert [event.version for event in events(flow) if event.outcome is None] == [1, 2]


def test_a_node_with_another_model_is_refused_and_the_others_go_on(
    flow: Ledger, database: str
) -> None:
    flow.join(Join("good", "a", {"planner": LAYOUT}))
    told = "node 'bad' has a planner of layout other, the trainer's is layout-1"
    with pytest.raises(Refused, match=told):
        flow.join(Join("bad", "a", {"planner": "other"}))
    assert len(lease(flow, node="good")) == 1


def test_a_node_that_came_before_the_trainer_is_checked_when_it_asks(database: str) -> None:
    flow = ledger(database, Clock())
    flow.join(Join("early", "a", {"planner": "other"}))
    flow.register(planner())
    with pytest.raises(Refused, match="node 'early' has a planner of layout other"):
        lease(flow, node="early")


# ---- two policies


def test_each_policy_has_its_own_share_and_its_own_pace(database: str, clock: Clock) -> None:
    """The verifier's trainer is dead for a while, and nothing of its loses its turn."""
    flow = begun(database, clock, both=True, trainer=planner(num_groups=2))
    flow.register(planner(num_groups=4, policy="verifier"))
    leases = lease(flow, 8)
    for each in leases:
        flow.push(Push("n1", each.work_item, 1, pack_group(group(each.task, verifier=0))))
    assert batch(flow, 1) == [1, 2]
    clock.now += 121
    flow.progress(Progress("planner", 1, 1))
    assert batch(flow, 2) == [3, 4]
    assert flow.status()["policies"]["verifier"]["state"] == "silent"
    assert batch(flow, 1, "verifier") == [1, 2, 3, 4]
    flow.progress(Progress("verifier", 1, 1))
    assert batch(flow, 2, "verifier") == [5, 6, 7, 8]
    assert flow.audit().problems == ()


def test_what_a_slow_trainer_cannot_use_is_counted_as_surplus(database: str, clock: Clock) -> None:
    flow = begun(database, clock, both=True, trainer=planner(num_groups=2, max_staleness=1))
    flow.register(planner(num_groups=1, max_staleness=1, policy="verifier"))
    for step in (1, 2):
        for each in lease(flow, 2):
            flow.push(
                Push("n1", each.work_item, 1, pack_group(group(each.task, version=0, verifier=0)))
            )
        assert len(batch(flow, step)) == 2
    flow.progress(Progress("planner", 2, 0))
    lease(flow, 1)
    groups = flow.status()["policies"]["verifier"]["groups"]
    assert {state: groups[state]["num"] for state in groups} == {"fresh": 2, "surplus": 2}
    assert batch(flow, 1, "verifier") == [3]
    assert flow.audit().problems == ()


# ---- the replayed state of the prompt filter


class Recorder:
    """Admits every other task, and remembers what it observed."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def admits(self, task_id: str, kind: str, draw: float) -> bool:
        return draw < 0.5

    def observe(self, outcome: Outcome) -> None:
        self.seen.append(outcome.work_item)

    def on_version(self, version: int) -> None:
        self.seen.append(f"v{version}")


def recording() -> tuple[Callable[[], Rules], list[Recorder]]:
    """Rules for each ledger that is opened, and their prompt filters."""
    made: list[Recorder] = []

    def make_rules() -> Rules:
        made.append(Recorder())
        return Rules(made[-1], AllGroups(), EarliestDeadline(), Latest())

    return make_rules, made


def test_a_prompt_filter_is_told_the_events_on_record_in_their_order(database: str) -> None:
    make_rules, made = recording()
    flow = begun(database, Clock(), make_rules, max_waiting=8)
    for step in (1, 2):
        leases = lease(flow, 8)
        for each in leases[:4]:
            push(flow, each, version=step - 1)
        batch(flow, step)
        flow.progress(Progress("planner", step, 0))
        for each in leases[4:]:
            push(flow, each, version=step - 1)
    lease(flow, 4)
    decided = rows(flow, "decisions", "position")
    assert [each.position for each in decided] == list(range(len(decided)))
    assert {each.admitted for each in decided} == {0, 1}
    recorded = events(flow)
    assert [event.number for event in recorded] == list(range(1, len(recorded) + 1))
    assert max((each.seen for each in made), key=len) == [
        event.outcome.work_item if event.outcome else f"v{event.version}" for event in recorded
    ]
    flow.close()
    flow = ledger(database, Clock(), make_rules)
    lease(flow, 1)
    joined(flow, "n2")
    flow.lease(LeaseRequest("n2", "a", 1))
    assert flow.audit().problems == ()


def test_a_restarted_service_decides_as_one_that_went_on(tmp_path: Path) -> None:
    """The prompt filter's state comes from the database alone."""
    rules = {
        "prompt_filter": "greso",
        "group_filter": "mixed",
        "selector": "weighted",
        "replay_share": 0.25,
        "plugins": {
            "greso": {"step": 0.1, "floor_easy": 0.3, "floor_hard": 0.2},
            "weighted": {"weights": {"odd": 3.0}},
        },
    }

    class Restarted:
        def __getattr__(self, name: str) -> Callable[[object], object]:
            def ask(request: object) -> object:
                flow = ledger(tmp_path / "restarted.db", **rules)
                answer = getattr(flow, name)(request)
                flow.close()
                return answer

            return ask

    flows: list[Any] = [Restarted(), ledger(tmp_path / "whole.db", **rules)]
    for flow in flows:
        order = random.Random(0)
        joined(flow)
        flow.register(planner())
        for step in range(1, 5):
            while flow.batch(BatchRequest("planner", step)).num_missing:
                for each in lease(flow, 3, versions={"planner": step - 1}):
                    rewards = order.choice([(0.0, 0.0), (1.0, 1.0), (0.0, 1.0)])
                    version = max(0, step - 1 - order.randrange(2))
                    push(flow, each, version=version, rewards=rewards)
            flow.progress(Progress("planner", step, step // 2))
    flows[0] = ledger(tmp_path / "restarted.db", **rules)
    for table, key in (("decisions", "position"), ("assignments", "step, position")):
        again, went_on = (rows(flow, table, key) for flow in flows)
        assert again == went_on and len(went_on) >= 16


def test_a_prompt_filter_observes_each_event_once_whatever_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_rules, made = recording()
    flow = begun(tmp_path / "l.db", Clock(), make_rules, max_waiting=8)
    for each in lease(flow, 4):
        push(flow, each)
    with monkeypatch.context() as patch:
        patch.setattr(LeaseBook, "_grant", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            lease(flow, 1)
    with pytest.raises(Refused):
        lease(flow, 1, life="nobody's")
    for _ in range(2):
        lease(flow, 1)
    assert made[0].seen == [1, 2, 3, 4] and len(made) == 1


def test_a_long_history_is_observed_in_portions_and_before_the_lock_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_rules, made = recording()
    flow = begun(tmp_path / "l.db", Clock(), make_rules, max_waiting=30)
    for each in lease(flow, 10):
        push(flow, each)
    batch(flow, 1)
    flow = ledger(tmp_path / "l.db", Clock(), make_rules, max_waiting=30)
    read: list[tuple[int, bool]] = []
    real = prompts.read_events

    def watched(transaction: Any, after: int, to: int) -> Any:
        events = real(transaction, after, to)
        read.append((len(events), not flow.database._writing.locked()))
        return events

    monkeypatch.setattr(prompts, "_PORTION", 4)
    monkeypatch.setattr(prompts, "read_events", watched)
    lease(flow, 1)
    assert made[1].seen == list(range(1, 11))
    assert read == [(4, True), (4, True), (2, True), (0, True), (0, False)]


def test_a_ledger_is_where_it_was_in_the_order_of_tasks_before_it_is_asked(database: str) -> None:
    flow = begun(database, max_waiting=1000)
    lease(flow, 1)
    again = TaskCursor(TASKS, 0)
    Ledger(database, options(max_waiting=1000), again)
    assert again.position > prompts._AHEAD


def test_a_filter_that_admits_all_reads_no_history_and_draws_ahead(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = begun(database, Clock(), max_waiting=1000)
    monkeypatch.setattr(prompts, "read_events", lambda *_: 1 / 0)
    num = prompts._AHEAD
    first = lease(flow, 3)
    with monkeypatch.context() as patch:
        patch.setattr(prompts, "locked", lambda *_: 1 / 0)
        first += lease(flow, num - 3)
        with pytest.raises(ZeroDivisionError):
            lease(flow, 1)
    assert [each.work_item for each in first + lease(flow, 1)] == list(range(1, num + 2))
    found = flow.status()["work_items"]
    assert found == {"leased": num + 1, "waiting": 0, "committed": 0, "failed": 0}
    assert flow.audit().problems == ()


def test_no_lease_runs_out_because_the_service_was_away(database: str, clock: Clock) -> None:
    flow = begun(database, clock, max_waiting=64)
    joined(flow, "n2")
    (held,) = lease(flow, 1)
    flow.close()
    clock.now += 600
    flow = ledger(database, clock, max_waiting=64)
    flow.progress(Progress("planner", 0, 0))
    assert lease(flow, 1, "n2")[0].work_item != held.work_item
    clock.now += 10
    assert not flow.renew(Renewal("n1", "a", ((held.work_item, 1),))).lost
    clock.now += 61
    assert lease(flow, 1, "n2")[0].work_item == held.work_item, "but who is gone for good loses it"
    assert flow.audit().problems == ()


def test_a_lease_that_ran_out_is_an_opening_once_the_next_request_ends_it(
    database: str, clock: Clock
) -> None:
    flow = begun(database, clock, max_waiting=4)
    lease(flow, 4)
    flow.close()
    clock.now += 600
    flow = ledger(database, clock, max_waiting=4)
    flow.progress(Progress("planner", 0, 0))
    wanted = LeaseRequest("n2", "a", 1, heard={"planner": 0})
    assert not flow.openings().take(wanted), "its node may still come back"
    clock.now += 61
    assert flow.openings().take(wanted)


def test_leases_that_ran_out_are_looked_for_once_in_a_while(
    database: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads the whole history makes that look as long as there have been renewals."""
    flow = begun(database, clock, max_waiting=64, lease_s=60)
    lease(flow, 1)
    looks = []
    real = Transaction.run

    def noting(self: Transaction, statement: str, *values: object) -> int:
        looks.extend([clock.now] * ("v.until_s < ?" in statement))
        return real(self, statement, *values)

    monkeypatch.setattr(Transaction, "run", noting)
    for _ in range(30):
        clock.now += 1
        lease(flow, 1)
    assert looks == [], "none could be renewed before"
    clock.now += 31
    for _ in range(12):
        clock.now += 1
        lease(flow, 1)
    assert len(looks) == 4


def test_rows_of_a_node_that_joins_again_and_again_do_not_pile_up(
    database: str, clock: Clock
) -> None:
    flow = ledger(database, clock, max_waiting=64)
    flow.register(planner())
    flow.join(Join("n1", "first"))
    flow.lease(LeaseRequest("n1", "first", 1, busy_s=5.0, waited_s=3.0))
    (late,) = lease(flow, 1, life="first")
    for number in range(200):
        clock.now += 60
        flow.join(Join("n1", f"{number}"))
    with flow.database.read() as transaction:
        assert transaction.one("SELECT count(*) AS num FROM nodes").num <= 62
        current = "SELECT life FROM nodes WHERE is_current = 1"
        assert [row.life for row in transaction.all(current)] == ["199"]
    node = flow.status()["nodes"]["n1"]
    assert (node["busy_s"], node["waited_s"]) == (5.0, 3.0)
    group_of_first = pack_group(group(late.task))
    flow.push(Push("n1", late.work_item, 1, group_of_first, sampled={"planner": 50}))
    account = flow.audit().tokens["planner"]
    assert (account.sampled, account.difference) == (50, 0)
    assert flow.audit().problems == ()


def test_a_prompt_filter_that_admits_nothing_ends_a_request(database: str) -> None:
    class Nobody(Recorder):
        def admits(self, task_id: str, kind: str, draw: float) -> bool:
            return False

    flow = begun(
        database, Clock(), lambda: Rules(Nobody(), AllGroups(), EarliestDeadline(), Latest())
    )
    answer = flow.lease(LeaseRequest("n1", "a", 2))
    assert (answer.leases, answer.reason) == ((), "filtered")
    assert answer.retry_after_s > 0
    assert len(rows(flow, "decisions", "position")) == 1002
    assert flow.audit().problems == ()


def test_status_shows_rates_of_the_last_minute_and_lengths(flow: Ledger, clock: Clock) -> None:
    joined(flow, "n2")
    for each in lease(flow, 3):
        push(flow, each, num_tokens=100)
    clock.now += 61
    flow.progress(Progress("planner", 0, 0))
    lease(flow, 1)
    for each in lease(flow, 1, "n2"):
        push(flow, each, node="n2", num_tokens=300)
    status = flow.status()
    assert {
        name: (node["num_groups"], node["num_leased"], node["groups_per_s"])
        for name, node in status["nodes"].items()
    } == {"n1": (3, 1, 0.0), "n2": (1, 0, 1 / 60)}
    assert (status["groups_per_s"], status["tokens_per_s"]) == (1 / 60, 10.0)
    assert status["policies"]["planner"]["groups"] == {"fresh": {"num": 4, "tokens_mean": 300.0}}
    assert status["tasks"] == {"asked": 256, "admitted": 256}, "drawn ahead"


def test_the_run_s_options_cross_to_the_node(flow: Ledger) -> None:
    answer = flow.join(Join("n9", "a"))
    assert (answer.group_size, answer.lease_s, answer.run) == (2, 60.0, flow.run)
    assert "group_size = 2" in answer.config
    assert answer.policies["planner"].layout == LAYOUT
    assert options().rollout.group_size == 2


def test_the_status_tells_who_lives_is_silent_or_has_ended(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flowtrain.rollouts")
    clock = Clock()
    flow = ledger(database, clock, lease_s=60)
    flow.register(planner())
    for node in ("lives", "dies", "ends"):
        joined(flow, node)
    for node in ("dies", "ends"):
        (each,) = lease(flow, node=node)
        push(flow, each, node=node)
        lease(flow, node=node)
    (left,) = lease(flow, node="ends")
    flow.release(Release("ends", ((left.work_item, 1),), "interrupted", life="a"))
    clock.now += 61
    lease(flow, node="lives")
    clock.now += 61  # leases run out once the service has been there for as long
    lease(flow, node="lives")
    nodes = flow.status()["nodes"]
    assert {name: node["state"] for name, node in nodes.items()} == {
        "lives": "live",
        "dies": "silent",
        "ends": "ended",
    }
    assert nodes["dies"]["num_groups"] == 1 and nodes["dies"]["groups_per_s"] == 0
    told = [record.getMessage() for record in caplog.records]
    assert told[:4] == [
        *(f"node {node} joined" for node in ("lives", "dies", "ends")),
        "node ends ended: interrupted",
    ]
    assert "node dies has been silent for 60 s: its 1 work items go to other nodes" in told[4:]
    joined(flow, "ends", "b")
    joined(flow, "dies", "b")
    assert {node["state"] for node in flow.status()["nodes"].values()} == {"live"}
    assert flow.audit().problems == ()
