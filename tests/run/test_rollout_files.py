"""Rollouts as bytes: every bit comes back, and a changed byte is that of a record."""

from __future__ import annotations

import math
import zlib
from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.run.records import Rollouts
from flowtrain.run.rollout_files import changed_records, decode, encode, read_turn, records_of
from flowtrain.types import (
    Call,
    FinishReason,
    Group,
    SampleId,
    SamplingMask,
    Task,
    ToolResult,
    Trajectory,
    Turn,
    UserError,
    Verdict,
    VersionSpan,
)

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple)
FLOATS = st.floats(width=64)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    ids = draw(IDS)
    logprobs = tuple(draw(st.lists(FLOATS, min_size=len(ids), max_size=len(ids))))
    mask = (
        SamplingMask(array("i", ids), array("i", [1] * len(ids))) if draw(st.booleans()) else None
    )
    spans = (VersionSpan(0, len(ids), draw(st.integers(0, 99))),)
    call = Call(draw(IDS), ids, logprobs, spans, FinishReason.STOP, "text", mask)
    return Turn({"planner": call}, None, "", ToolResult("é"), Verdict.STOP, draw(FLOATS))


@st.composite
def groups(draw: st.DrawFn) -> Group:
    task = Task("t-1", "?", ("a",))
    members = [
        Trajectory(task, tuple(each), "", 0.5, draw(st.integers(0, 2**64 - 1)), reward=draw(FLOATS))
        for each in draw(st.lists(st.lists(turns(), max_size=3), max_size=3))
    ]
    return Group(0, tuple(members))


@st.composite
def rollouts(draw: st.DrawFn) -> Rollouts:
    made = [
        replace(each, index=3 * n) for n, each in enumerate(draw(st.lists(groups(), max_size=3)))
    ]
    scored = {SampleId(3, 0, 1): ((0.1, -0.0), ()), SampleId(0, 1, 2): ((), (math.inf,))}
    return Rollouts(made, scored if draw(st.booleans()) else {}, {"a": 1.0})


@given(rollouts())
def test_every_bit_comes_back(made: Rollouts) -> None:
    data, index = encode(made)
    again = decode(data, index)
    # repr, because NaN is not equal to itself; it tells -0.0 from 0.0
    assert repr(again.groups) == repr(list(made.groups)) and again.metrics == {}
    assert repr(again.logprobs) == repr(made.logprobs)
    assert changed_records(data, index) == []
    zlib.decompress(data)  # one stream, for other readers


@given(rollouts(), st.data())
def test_a_changed_byte_is_of_one_record(made: Rollouts, data: st.DataObject) -> None:
    stream, index = encode(made)
    at = data.draw(st.integers(0, len(stream) - 1))
    changed = bytearray(stream)
    changed[at] ^= data.draw(st.integers(1, 255))
    found = changed_records(bytes(changed), index)
    ends, end = [], 0
    for each in records_of(index):
        end += each.num_bytes
        ends.append(end)
    expected = [r for r, end in zip(records_of(index), ends, strict=True) if at < end][:1]
    assert found == expected
    for each in found:
        read_turn(bytes(changed), index, each)  # None or a turn, but no error


def test_a_stream_that_is_cut_is_refused_with_the_place() -> None:
    call = Call((1,), (2,), (-0.5,), (VersionSpan(0, 1, 0),), FinishReason.STOP)
    turn = Turn({"planner": call}, None, "", ToolResult(), Verdict.STOP, 0.1)
    member = Trajectory(Task("t", "?", ()), (turn, turn), "", 0.1, 7)
    data, index = encode(Rollouts([Group(4, (member,))], {}, {}))
    last = records_of(index)[-1]
    with pytest.raises(UserError, match="group 4, rollout 0, turn 1 cannot be read"):
        decode(data[: -last.num_bytes - 6], index)
