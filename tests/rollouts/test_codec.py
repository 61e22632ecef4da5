"""Groups as bytes: what is packed comes out again, whatever its calls have in common."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace

import fake_groups as fake
import make
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.records import Call, Group, Routes
from flowtrain.rollouts import codec
from flowtrain.rollouts.codec import decoded, inflated, pack, pack_group, unpack_group
from flowtrain.rollouts.contract import Refused

IDS = st.lists(st.integers(0, 3), max_size=6).map(tuple)
CALLS = st.dictionaries(st.sampled_from(("planner", "verifier")), st.tuples(IDS, IDS))
ROLLOUTS = st.lists(st.lists(CALLS, max_size=3), max_size=3)


def group_of(rollouts: list[list[dict[str, tuple[tuple[int, ...], tuple[int, ...]]]]]) -> Group:
    first = fake.group(fake.TASKS[0]).trajectories[0]
    (turn,) = first.turns

    made = [
        [{name: make.call(*reversed(ids)) for name, ids in calls.items()} for calls in turns]
        for turns in rollouts
    ]
    turned = [tuple(replace(turn, calls=calls) for calls in turns) for turns in made]
    return make.group(*(replace(first, turns=turns) for turns in turned), index=3)


def with_routes(group: Group, seed: int, num_noisy: int = 5) -> Group:
    """Give each call the experts of its tokens, some of them otherwise than in other calls."""
    rng, table = random.Random(seed), random.Random(0).randbytes(1 << 16)

    def of(call: Call) -> Call:
        ids = call.prompt_ids + call.response_ids[:-1]
        words = bytearray(b"".join(table[6 * i : 6 * i + 6] for i in ids))
        for _ in range(min(num_noisy, len(words))):
            words[rng.randrange(len(words))] ^= 1
        return replace(call, routes=Routes(bytes(words), 3, 2))

    return codec._each_call(group, lambda _, call: (of(call), call))


@given(ROLLOUTS, st.integers(0, 9), st.booleans())
def test_routes_come_out_as_they_went_in(
    rollouts: list[list[dict]],
    seed: int,
    is_partial: bool,
) -> None:
    group = with_routes(group_of(rollouts), seed)
    if is_partial and group.trajectories:  # as where engines differ
        first = group_of(rollouts).trajectories[0]
        group = replace(group, trajectories=(first, *group.trajectories[1:]))
    assert unpack_group(pack_group(group)) == group
    assert unpack_group(zlib.compress(pack(group))) == group


def test_routes_of_tokens_that_were_read_before_take_next_to_nothing() -> None:
    """Also where a hundred of them differ, as those of prompts that were prefilled anew."""
    rng = random.Random(1)
    prompt, turns = tuple(rng.choices(range(9_000), k=9_000)), []
    for _ in range(4):
        turns.append({"planner": (prompt, (7,) * 50)})
        prompt += (7,) * 50 + tuple(rng.choices(range(9_000), k=200))
    group = group_of([turns])
    plain, routed = (len(pack_group(each)) for each in (group, with_routes(group, 0, 100)))
    assert unpack_group(pack_group(with_routes(group, 0, 100))) == with_routes(group, 0, 100)
    assert routed - plain < 1.15 * 6 * len(prompt), "those of one call, and what differs"


@given(ROLLOUTS)
def test_a_group_comes_out_as_it_went_in(rollouts: list[list[dict]]) -> None:
    group = group_of(rollouts)
    assert unpack_group(pack_group(group)) == group
    assert unpack_group(zlib.compress(pack(group))) == group, "with whole prompts"


def test_prompts_that_go_on_are_stored_once_at_any_distance() -> None:
    """Each turn of 12,000 tokens and more begins with the turn before; so do the rollouts."""
    prompt, turns = tuple(range(12_000)), []
    for number in range(4):
        turns.append({"planner": (prompt, (7,) * 50)})
        prompt += (7,) * 50 + tuple(range(number, 500))
    one, eight = (pack_group(group_of([turns] * num)) for num in (1, 8))
    assert len(eight) < 1.2 * len(one) + 5000
    assert len(one) < len(zlib.compress(pack(group_of([turns])), 1)) / 2
    assert unpack_group(eight) == group_of([turns] * 8)


@pytest.mark.parametrize("shared", [(0,), (0, 0, 0), (1, 0), (0, 6), (0, -1)])
def test_what_is_not_there_cannot_be_shared(shared: tuple[int, ...]) -> None:
    group = group_of([[{"planner": ((1, 2), (3, 4, 5))}, {"planner": ((9,), ())}]])
    data = zlib.compress(pack(codec._Packed(group, shared)))
    with pytest.raises(Refused, match="malformed group"):
        unpack_group(data)


def test_what_prompts_share_counts_as_if_it_were_there() -> None:
    calls = [{"planner": (tuple(range(1000)), ())}] * 50
    plain = inflated(pack_group(group_of([calls])))
    assert len(plain) < 30_000
    with pytest.raises(Refused, match="a group may have 200000 bytes, this one has more"):
        decoded(plain, 200_000)
    assert decoded(plain, 300_000) == group_of([calls])
