"""Rollouts as bytes: every bit comes back, and what is cut is refused."""

from __future__ import annotations

import math
import zlib
from array import array
from dataclasses import replace

import make
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.records import Group, Rollouts, SampleId, SamplingMask, ToolResult, Turn, UserError
from flowtrain.replay.log import decode, encode
from flowtrain.rollouts.codec import pack
from tests.long_histories import history

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple)
FLOATS = st.floats(width=64)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    ids = draw(IDS)
    logprobs = tuple(draw(st.lists(FLOATS, min_size=len(ids), max_size=len(ids))))
    mask = (
        SamplingMask(array("i", ids), array("i", [1] * len(ids))) if draw(st.booleans()) else None
    )
    version = draw(st.integers(0, 99))
    call = make.call(ids, draw(IDS), logprobs, version, text="text", sampling_mask=mask)
    return make.turn(call, "Search", ToolResult("\u00e9"), seconds=draw(FLOATS))


@st.composite
def groups(draw: st.DrawFn) -> Group:
    return make.group(
        *(
            make.rollout(*each, seed=draw(st.integers(0, 2**64 - 1)), reward=draw(FLOATS))
            for each in draw(st.lists(st.lists(turns(), max_size=3), max_size=3))
        )
    )


@st.composite
def rollouts(draw: st.DrawFn) -> Rollouts:
    made = [
        replace(each, index=3 * n) for n, each in enumerate(draw(st.lists(groups(), max_size=3)))
    ]
    scored = {SampleId(3, 0, 1): ((0.1, -0.0), ()), SampleId(0, 1, 2): ((), (math.inf,))}
    return Rollouts(made, scored if draw(st.booleans()) else {}, {"a": 1.0})


@given(rollouts())
def test_every_bit_comes_back(made: Rollouts) -> None:
    again = decode(encode(made))
    # repr, because NaN is not equal to itself; it tells -0.0 from 0.0
    assert repr(again.groups) == repr(tuple(made.groups)) and again.metrics == {}
    assert repr(again.logprobs) == repr(made.logprobs)


def test_a_prompt_is_not_written_again_with_every_turn() -> None:
    def num_bytes(num_turns: int) -> int:
        turns = (make.turn(make.call(said, prompt)) for prompt, said in history(num_turns, 400))
        return len(encode(Rollouts([make.group(make.rollout(*turns))], {}, {})))

    assert num_bytes(32) < 2.1 * num_bytes(16)


@given(rollouts())
def test_logs_with_whole_prompts_are_read(made: Rollouts) -> None:
    """As they were written before."""
    older = {"groups": tuple(made.groups), "logprobs": tuple(made.logprobs.items())}
    assert repr(decode(zlib.compress(pack(older)))) == repr(decode(encode(made)))


@given(rollouts(), st.data())
def test_what_is_cut_is_refused(made: Rollouts, data: st.DataObject) -> None:
    stream = encode(made)
    with pytest.raises(UserError, match="cannot be read"):
        decode(stream[: data.draw(st.integers(0, len(stream) - 1))])
