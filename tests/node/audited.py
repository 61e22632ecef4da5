"""Honest groups of a real engine for the tests of auditors, and how to spoil them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from loopback_dataflow import Trainer, make_config, make_model

from flowtrain.config import Config
from flowtrain.dataflow.contract import Join, Lease, Register
from flowtrain.dataflow.ledger import Ledger, open_ledger
from flowtrain.node.setup import Sampler, make_sampler
from flowtrain.types import Call, Group
from flowtrain.utils.seeds import derive_seed

BOUND = 1e-4
Setting = tuple[Config, Sampler, Trainer]


@contextmanager
def make_setting(folder: Path, audit: str) -> Iterator[Setting]:
    model = make_model(folder / "model")
    dataflow = {"audit_share": 1.0, "audit_bound": BOUND, "audit": audit}
    config = make_config(model, dataflow=dataflow, train={"exact": audit == "sample"})
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


def _registered(trainer: Trainer) -> Register:
    shape = trainer.model.config
    return Register(
        "planner",
        trainer.layout,
        str(trainer.store.root),
        2,
        8,
        vocab_size=shape.vocab_size,
        max_positions=shape.max_position_embeddings,
    )


async def honest(sampler: Sampler, lease: Lease, version: int, first: int = 0) -> Group:
    """The group that a node makes of a lease; `first` is 0 unless it chooses its seeds."""
    await asyncio.to_thread(sampler.engines["planner"].load, version)
    numbers = range(first, first + 2)
    rollouts = [await sampler.rollout(lease.task, derive_seed(lease.seed, n)) for n in numbers]
    return Group(lease.index, tuple(rollouts))


def edited(group: Group, change: Callable[[Call], Call]) -> Group:
    """The group with the planner's last call of its last rollout changed."""
    *others, rollout = group.trajectories
    *turns, turn = rollout.turns
    turn = replace(turn, calls={**turn.calls, "planner": change(turn.calls["planner"])})
    return replace(group, trajectories=(*others, replace(rollout, turns=(*turns, turn))))
