"""Groups that a hostile node pushes: refused at the door, or harmless to training."""

from __future__ import annotations

import dataclasses
import math
import random
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import batch
from flowkernels import LossSpec

from flowtrain.algorithms import filter_samples
from flowtrain.logging.rollouts import RolloutStats, count_rollouts
from flowtrain.records import FilterReason, Group, SamplingMask, Task, ToolCall, ToolResult
from flowtrain.rollouts.codec import inflated, pack_group, unpack_group
from flowtrain.rollouts.contract import BatchRequest, Push, Refused
from flowtrain.rollouts.ledger import Ledger
from flowtrain.rollouts.ledger.group_checks import GroupLimits
from flowtrain.tasks.cursor import TaskCursor
from flowtrain.trainer.distributed import World
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.packing import pack
from flowtrain.trainer.trainer import OptimSpec, Trainer
from tests.attacks.tally import Tally
from tests.rollouts.fake_groups import TASKS, group, joined, lease, options, planner

VOCAB_SIZE, MAX_POSITIONS = 280, 64
"""Those of the model at `tiny_path`."""
ALONE = World(0, 1, torch.device("cpu"))
NUM_GROUPS = 60


@pytest.fixture
def flow(tmp_path: Path) -> Iterator[Ledger]:
    config = options(max_waiting=10**6)
    config = config.model_copy(
        update={"algorithm": config.algorithm.model_copy(update={"name": "infoflow"})}
    )
    made = Ledger(tmp_path / "ledger.sqlite", config, TaskCursor(TASKS, 0))
    joined(made)
    register(made)
    yield made
    made.close()


def register(flow: Ledger) -> None:
    limits = {"vocab_size": VOCAB_SIZE, "max_positions": MAX_POSITIONS}
    flow.register(replace(planner(num_groups=1, max_staleness=10**6), **limits))


def honest(task: Task) -> Group:
    """A group with all that a node may send: masks, entropies, a verifier's text."""
    whole = group(task)
    mask = SamplingMask.of([(index, 9, 200) for index in range(4)])
    return _with_call(whole, sampling_mask=mask, entropies=(0.5,) * 4)


def _with_call(whole: Group, **changes: Any) -> Group:
    """Change the planner's call of the first rollout."""
    first, *others = whole.trajectories
    turn = first.turns[0]
    call = replace(turn.calls["planner"], **changes)
    first = replace(first, turns=(replace(turn, calls={**turn.calls, "planner": call}),))
    return replace(whole, trajectories=(first, *others))


def test_the_largest_group_of_a_run_is_no_bomb(flow: Ledger) -> None:
    """Prompts and responses of all positions, each token among 128, with texts."""
    rollout = flow.config.rollout.model_copy(update={"top_p": 0.9})
    config = flow.config.model_copy(update={"rollout": rollout})
    limits = GroupLimits(config, {"planner": (VOCAB_SIZE, MAX_POSITIONS)})
    num = MAX_POSITIONS - 1
    mask = SamplingMask.of([range(200, 200 + 128)] * num)
    call = replace(
        honest(TASKS[0]).trajectories[0].turns[0].calls["planner"],
        prompt_ids=(1,),
        response_ids=(VOCAB_SIZE - 1,) * num,
        logprobs=(-0.123456789,) * num,
        entropies=(0.123456789,) * num,
        text="\u20ac" * num,
        sampling_mask=mask,
    )
    whole = group(TASKS[0], num=config.rollout.group_size)
    turn = replace(whole.trajectories[0].turns[0], calls={"planner": call}, evidence="x" * 800_000)
    turns = (turn,) * config.agent.max_turns
    rollouts = tuple(replace(each, turns=turns) for each in whole.trajectories)
    num_bytes = len(inflated(pack_group(replace(whole, trajectories=rollouts))))
    assert num_bytes < limits.max_bytes < 1.5 * num_bytes


def _with_rollout(whole: Group, **changes: Any) -> Group:
    first, *others = whole.trajectories
    return replace(whole, trajectories=(replace(first, **changes), *others))


def _with_turn(whole: Group, **changes: Any) -> Group:
    turn = whole.trajectories[0].turns[0]
    return _with_rollout(whole, turns=(replace(turn, **changes),))


IDS = (0, 1, 2, 3)
HOLES: dict[str, Callable[[Group], Group]] = {
    "an id of -1": lambda g: _with_call(g, response_ids=(0, 1, 2, -1)),
    "an id of 10^6": lambda g: _with_call(g, response_ids=(0, 1, 2, 10**6)),
    "an id of 2^31": lambda g: _with_call(g, response_ids=(0, 1, 2, 2**31)),
    "an id just beyond": lambda g: _with_call(g, response_ids=(0, 1, 2, VOCAB_SIZE)),
    "a prompt id of -5": lambda g: _with_call(g, prompt_ids=(1, -5)),
    "an empty prompt": lambda g: _with_call(g, prompt_ids=()),
    "a long prompt": lambda g: _with_call(g, prompt_ids=(1,) * (MAX_POSITIONS - 2)),
    "a reward of 1e308": lambda g: _with_rollout(g, reward=1e308),
    "a reward below 0": lambda g: _with_rollout(g, reward=-0.5),
    "no sub-goals": lambda g: _with_rollout(g, sub_goals=None),
    "a log-prob of 5": lambda g: _with_call(g, logprobs=(-1.0, 5.0, -1.0, -1.0)),
    "a log-prob of 1e30": lambda g: _with_call(g, logprobs=(-1.0, 1e30, -1.0, -1.0)),
    "a log-prob of -1e30": lambda g: _with_call(g, logprobs=(-1.0, -1e30, -1.0, -1.0)),
    "an entropy too few": lambda g: _with_call(g, entropies=(0.5,)),
    "a mask without its token": lambda g: _with_call(g, sampling_mask=SamplingMask.of([(7,)] * 4)),
    "a mask with a token twice": lambda g: _with_call(
        g, sampling_mask=SamplingMask.of([(i, 9, 9) for i in IDS])
    ),
    "a mask beyond": lambda g: _with_call(
        g, sampling_mask=SamplingMask.of([(i, 10**6) for i in IDS])
    ),
    "a mask of another length": lambda g: _with_call(g, sampling_mask=SamplingMask.of([(0,)])),
    "too many turns": lambda g: _with_rollout(g, turns=g.trajectories[0].turns * 50),
    "a branch of nobody": lambda g: _with_rollout(g, branch=_branch(g, parent=0)),
    "a branch that shares no prompt": lambda g: _with_branch(g, 0, prompt_ids=(9, 9)),
    "a branch that shares no tokens": lambda g: _with_branch(g, 2, response_ids=(0, 9, 2, 3)),
    "a branch beyond the end": lambda g: _with_branch(g, 5),
    "a branch by weights that are not there": lambda g: _with_version(g, 10**6),
    "a branch by weights before its tokens": lambda g: _with_version(g, -1),
    "tool calls without end": lambda g: _with_turn(g, tool_calls=(ToolCall("f", "{}"),) * 65),
    "a tool's time that is no number": lambda g: _with_turn(
        g, tool_calls=(ToolCall("f", "{}", ToolResult(seconds=math.nan)),)
    ),
    "reported parts that are no numbers": lambda g: _with_rollout(g, reported={"a": math.inf}),
    "a turn's reward that is no number": lambda g: _with_rollout(
        g, turn_rewards=(math.nan,) * len(g.trajectories[0].turns)
    ),
    "rewards of more turns than there are": lambda g: _with_rollout(g, turn_rewards=(0.0,) * 9),
    "time that is no number": lambda g: _with_rollout(g, seconds=math.nan),
    "time without end": lambda g: _with_rollout(g, seconds=math.inf),
    "another question by its name": lambda g: replace(
        g,
        trajectories=tuple(
            replace(t, task=replace(t.task, question="another")) for t in g.trajectories
        ),
    ),
    "an id of -1 in a rollout that failed": lambda g: _with_rollout(
        _with_call(g, prompt_ids=(-1,)), reward=None, error="down"
    ),
    "tokens of a module that is no policy": lambda g: _with_verifier(g),
}


def _branch(whole: Group, parent: int, token: int = 0) -> Any:
    from flowtrain.records import BranchPoint

    return BranchPoint(parent, 0, token, 0.0)


def _with_branch(whole: Group, token: int, **changes: Any) -> Group:
    """Make the second rollout a branch of the first, with another call than it can have."""
    root, *others = whole.trajectories
    call = replace(root.turns[0].calls["planner"], sampling_mask=None, **changes)
    turn = replace(root.turns[0], calls={"planner": call})
    leaf = replace(others[0], turns=(turn,), branch=_branch(whole, 0, token))
    return replace(whole, trajectories=(root, leaf, *others[1:]))


def _with_version(whole: Group, version: int) -> Group:
    """Make the second rollout a branch that it can be, but for what chose its place."""
    branched = _with_branch(whole, 0)
    root, leaf, *others = branched.trajectories
    leaf = replace(leaf, branch=replace(_branch(whole, 0), version=version))
    return replace(branched, trajectories=(root, leaf, *others))


def _with_verifier(whole: Group) -> Group:
    turn = whole.trajectories[0].turns[0]
    calls = {**turn.calls, "verifier": turn.calls["planner"]}
    return _with_rollout(whole, turns=(replace(turn, calls=calls),))


@pytest.mark.parametrize("name", HOLES)
def test_what_training_cannot_digest_is_refused(name: str, flow: Ledger, tally: Tally) -> None:
    (each,) = lease(flow)
    poisoned = HOLES[name](honest(each.task))
    tally.add("poisoned groups", 1)
    with pytest.raises(Refused):
        flow.push(Push("n1", each.work_item, 1, pack_group(poisoned)))
    assert flow.status()["work_items"]["committed"] == 0
    taken = flow.push(Push("n1", each.work_item, 1, pack_group(honest(each.task))))
    assert taken.status == "committed"


# ---- any poison


INTS = (
    -1,
    0,
    1,
    VOCAB_SIZE - 1,
    VOCAB_SIZE,
    10**6,
    2**31 - 1,
    2**31,
    -(2**31),
    2**63 - 1,
    -(2**63),
)
FLOATS = (math.nan, math.inf, -math.inf, 1e308, -1e308, 1e30, -1e30, 5.0, -0.0, 2e-3, 1e-9, -49.0)
TEXTS = ("", "\0", "\x1b[2J", "rollouts", "planner", "No matched tool given: ", "9" * 10**5)


_WEIGHTS = {"trajectories": 30, "turns": 30, "calls": 30}
"""How often a field is chosen: most of what training reads is in the calls."""


def poisoned(value: Any, rng: random.Random) -> Any:
    """Change a leaf of a record, or the shape of a part of it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        (name,) = rng.choices(names, [_WEIGHTS.get(name, 1) for name in names])
        return replace(value, **{name: poisoned(getattr(value, name), rng)})
    if isinstance(value, Mapping):
        if not value or rng.random() < 0.05:
            return {}
        key = rng.choice(sorted(value))
        new = rng.choice(("planner", "verifier", key))
        return {**value, new: poisoned(value[key], rng)}
    if isinstance(value, tuple | list) or (isinstance(value, array) and len(value)):
        return _poisoned_sequence(value, rng)
    if isinstance(value, bool | int) and not isinstance(value, str):
        return rng.choice(INTS)
    if isinstance(value, float):
        return rng.choice(FLOATS)
    if isinstance(value, str):
        return rng.choice(TEXTS) if type(value) is str else value
    return rng.choice((None, 0.5, *INTS[:2]))


def _poisoned_sequence(value: Any, rng: random.Random) -> Any:
    kind = rng.randrange(10)
    if kind == 0:
        return value[: rng.randrange(len(value) + 1)]
    if kind == 1:
        return value * rng.choice((2, 20))
    if kind == 2:
        return value[::-1]
    if not value:
        return value
    index = rng.randrange(len(value))
    inner = poisoned(value[index], rng)
    if isinstance(value, array):
        inner = max(-(2**31), min(2**31 - 1, int(inner)))
        return value[:index] + array("i", [inner]) + value[index + 1 :]
    return (*value[:index], inner, *value[index + 1 :])


@pytest.fixture
def digest(tiny_path: str) -> Callable[[Group], None]:
    """Do with a group what a trainer does; raises where it cannot."""
    model = models.load_model(tiny_path, torch.float32)
    found = (model.config.vocab_size, model.config.max_position_embeddings)
    assert found == (VOCAB_SIZE, MAX_POSITIONS)
    trainer = Trainer(model, ALONE, LossSpec(), OptimSpec(lr=1e-3))

    def digest(whole: Group) -> None:
        RolloutStats.of_counts(count_rollouts(whole.trajectories, ("Search",)), ("Search",))
        for name in ("flow_grpo", "infoflow"):
            made = batch(name, [replace(whole, index=0)], algorithm={"mode": "released"})
            kept = filter_samples(made, MAX_POSITIONS, VOCAB_SIZE)
            left_out = {reason: num for reason, num in kept.num_filtered.items() if num}
            assert left_out.keys() <= {FilterReason.EMPTY}
        if kept.samples:
            stats = trainer.step(pack(kept.samples, 1, 256))
            assert stats["num_steps_skipped"] == 0 and all(map(math.isfinite, stats.values()))

    return digest


def test_what_gets_in_can_be_trained(
    flow: Ledger, digest: Callable[[Group], None], campaign: Iterator[int], tally: Tally
) -> None:
    step = 1
    for seed in campaign:
        rng = random.Random(seed)
        num_refused = 0
        for _ in range(NUM_GROUPS):
            (each,) = lease(flow)
            bad = honest(each.task)
            for _ in range(rng.choice((1, 1, 2))):
                bad = poisoned(bad, rng)
            try:
                flow.push(Push("n1", each.work_item, each.attempt, pack_group(bad)))
            except Refused:
                num_refused += 1
                continue
            batch = flow.batch(BatchRequest("planner", step))
            if not batch.num_missing:  # it is, where all rollouts of the group failed
                digest(unpack_group(batch.groups[0].payload))
                step += 1
        tally.add("poisoned groups", NUM_GROUPS)
        assert 0.3 < num_refused / NUM_GROUPS < 0.95, "the poison is too weak, or too strong"
        assert flow.audit().problems == ()
