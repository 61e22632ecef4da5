"""The auditor on groups of a real engine: it believes honest ones and finds each kind of lie, and a
node that lied is shut out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loopback_dataflow import Trainer, make_config, make_model

from flowtrain.config import Config
from flowtrain.dataflow.codec import pack_group
from flowtrain.dataflow.contract import (
    AuditRequest,
    Finding,
    Join,
    Lease,
    LeaseRequest,
    NotAllowed,
    Push,
    Refused,
)
from flowtrain.dataflow.ledger import Ledger, open_ledger
from flowtrain.node.auditor import Auditor, Lie, check_audit
from flowtrain.node.setup import Sampler, make_sampler
from flowtrain.types import Call, Group, UserError
from flowtrain.utils.seeds import derive_seed

BOUND = 1e-4
Setting = tuple[Config, Sampler, Trainer]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    """A run with two versions of weights, and an honest sampler."""
    folder = tmp_path_factory.mktemp("audited")
    model = make_model(folder / "model")
    config = make_config(model, dataflow={"audit_share": 1.0, "audit_bound": BOUND})
    ledger = open_ledger(config, folder / "ledger.sqlite")
    trainer = Trainer(ledger, model, folder / "weights")
    trainer.register()
    trainer.publish(1)
    with make_sampler(config, {"planner": str(trainer.store.root)}, "") as sampler:
        yield config, sampler, trainer
    ledger.close()


def opened(setting: Setting, folder: Path) -> Ledger:
    """A new ledger, whose trainer has made two versions."""
    config, _, trainer = setting
    ledger = open_ledger(config, folder / "ledger.sqlite")
    ledger.register(_registered(trainer))
    for node in ("honest", "liar"):
        ledger.join(Join(node, "life"))
    return ledger


def _registered(trainer: Trainer) -> Any:
    shape = trainer.model.config
    from flowtrain.dataflow.contract import Register

    return Register(
        "planner",
        trainer.layout,
        str(trainer.store.root),
        2,
        8,
        vocab_size=shape.vocab_size,
        max_positions=shape.max_position_embeddings,
    )


async def honest(sampler: Sampler, lease: Lease, version: int) -> Group:
    """The group that a node makes of a lease."""
    await asyncio.to_thread(sampler.engines["planner"].load, version)
    rollouts = [await sampler.rollout(lease.task, derive_seed(lease.seed, n)) for n in range(2)]
    return Group(lease.index, tuple(rollouts))


def edited(group: Group, change: Callable[[Call], Call]) -> Group:
    """The group with the planner's last call of its last rollout changed."""
    *others, rollout = group.trajectories
    *turns, turn = rollout.turns
    turn = replace(turn, calls={**turn.calls, "planner": change(turn.calls["planner"])})
    return replace(group, trajectories=(*others, replace(rollout, turns=(*turns, turn))))


def other_token(call: Call) -> Call:
    first, *rest = call.response_ids
    return replace(call, response_ids=((first + 1) % 300, *rest))


def other_logprob(call: Call) -> Call:
    """One token, by more than 20 times the bound; the mean over 24 tokens stays below it."""
    first, *rest = call.logprobs
    return replace(call, logprobs=(first - 22 * BOUND, *rest))


def other_prompt(call: Call) -> Call:
    return replace(call, prompt_ids=call.prompt_ids[1:])


def other_version(call: Call) -> Call:
    return replace(call, spans=tuple(replace(span, version=0) for span in call.spans))


def other_reward(group: Group) -> Group:
    first, *rest = group.trajectories
    return replace(group, trajectories=(replace(first, reward=1.0 - (first.reward or 0)), *rest))


LIES: dict[str, Callable[[Group], Group]] = {
    "other weights": lambda group: edited(group, other_version),
    "an edited token": lambda group: edited(group, other_token),
    "an edited log-prob": lambda group: edited(group, other_logprob),
    "an edited prompt": lambda group: edited(group, other_prompt),
    "an edited reward": other_reward,
}


def test_honest_groups_are_believed_and_lies_are_not(setting: Setting, tmp_path: Path) -> None:
    config, sampler, _ = setting
    ledger = opened(setting, tmp_path)
    leases = ledger.lease(LeaseRequest("honest", "life", 2)).leases
    auditor = Auditor(ledger, "auditor", config, sampler)

    async def main() -> None:
        for lease, version in zip(leases, (0, 1), strict=True):
            group = await honest(sampler, lease, version)
            await auditor.check(group, lease)
            for name, lie in LIES.items():
                if name == "other weights" and version == 0:
                    continue  # it says the truth
                with pytest.raises(Lie):
                    await auditor.check(lie(group), lease)
                    pytest.fail(f"{name} is not found")

    asyncio.run(main())
    assert 0 <= auditor.tally.largest_mean < BOUND
    ledger.close()


def test_a_liar_is_shut_out_and_its_groups_are_dropped(setting: Setting, tmp_path: Path) -> None:
    config, sampler, _ = setting
    ledger = opened(setting, tmp_path)

    def push(node: str, lease: Lease, lie: Callable[[Group], Group] = lambda group: group) -> None:
        group = lie(asyncio.run(honest(sampler, lease, 0)))
        ledger.push(Push(node, lease.work_item, lease.attempt, pack_group(group)))

    (first,) = ledger.lease(LeaseRequest("honest", "life", 1)).leases
    told = ledger.lease(LeaseRequest("liar", "life", 3)).leases
    push("honest", first)
    push("liar", told[0])
    push("liar", told[1], LIES["an edited token"])
    auditor = Auditor(ledger, "auditor", config, sampler)

    async def audit() -> None:
        work = asyncio.create_task(auditor.run())
        while ledger.status()["audits"]["groups"].get("open"):
            await asyncio.sleep(0.01)
        auditor.stop()
        await work

    asyncio.run(audit())
    status = ledger.status()
    assert auditor.tally.num == {"sound": 2, "lie": 1, "unclear": 0}
    assert status["audits"]["groups"] == {"lie": 1, "sound": 2}
    assert list(status["audits"]["distrusted"]) == ["liar"]
    groups = status["policies"]["planner"]["groups"]
    assert {state: found["num"] for state, found in groups.items()} == {
        "fresh": 1,
        "distrusted": 2,
    }
    assert status["work_items"]["leased"] == 0 and ledger.audit().problems == ()
    for request in (
        lambda: ledger.lease(LeaseRequest("liar", "life", 1)),
        lambda: ledger.join(Join("liar", "next-life")),
        lambda: push("liar", told[2]),
    ):
        with pytest.raises(NotAllowed, match="node 'liar' is shut out: its group of work item 3"):
            request()
    assert ledger.audit().tokens["planner"].difference == 0
    ledger.close()


def test_who_may_find_what(setting: Setting, tmp_path: Path) -> None:
    ledger = opened(setting, tmp_path)
    (lease,) = ledger.lease(LeaseRequest("honest", "life", 1)).leases
    assert ledger.to_audit(AuditRequest("one")).lease is None
    group = asyncio.run(honest(setting[1], lease, 0))
    ledger.push(Push("honest", lease.work_item, lease.attempt, pack_group(group)))
    own = (lease.work_item, lease.attempt)
    with pytest.raises(Refused, match="was not given to the auditor 'one'"):
        ledger.found(Finding("one", *own, "I say so", is_lie=True))
    asked = ledger.to_audit(AuditRequest("one"))
    assert asked.lease == lease and asked.payload == pack_group(group)
    assert ledger.to_audit(AuditRequest("two")).lease is None, "one has it"
    ledger.found(Finding("one", *own))
    ledger.found(Finding("one", *own, "I have changed my mind", is_lie=True))
    assert ledger.status()["audits"] == {"groups": {"sound": 1}, "distrusted": {}}
    ledger.close()


def test_a_config_that_cannot_be_audited(setting: Setting) -> None:
    config = setting[0]
    rollout = config.rollout.model_copy(update={"frequency_penalty": 0.5})
    with pytest.raises(UserError, match=r"rollout\.frequency_penalty=0\.5: a forward pass knows"):
        check_audit(config.model_copy(update={"rollout": rollout}))
