"""A rank's rollouts of a step as bytes, for `log.replay`: one zlib stream of records in the
dataflow's codec, and an index with the size and digest of each.

The stream is flushed after every record, so a changed byte is one of a record, and the index names
its group, rollout and turn.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from flowtrain.dataflow.codec import pack, unpack
from flowtrain.dataflow.contract import Refused
from flowtrain.run.records import Rollouts
from flowtrain.training.token_scores import Scored
from flowtrain.types import Group, SampleId, Trajectory, Turn, UserError

_LEVEL = 1
_OF_ROLLOUT, _OF_STEP = -1, -1
"""Turn of the record of a rollout without its turns; group of the record of log-probs."""


class Record(NamedTuple):
    """An entry of the index."""

    group: int
    trajectory: int
    turn: int
    num_bytes: int
    """Size in the stream."""
    sha256: str
    """Of these bytes, the first 16 hex digits."""

    @property
    def name(self) -> str:
        """The record in words."""
        if self.group == _OF_STEP:
            return "the log-probs of the search for branch points"
        turn = "" if self.turn == _OF_ROLLOUT else f", turn {self.turn}"
        return f"group {self.group}, rollout {self.trajectory}{turn}"


@dataclass(frozen=True, slots=True)
class _Logprobs:
    entries: tuple[tuple[SampleId, Scored], ...]


def encode(rollouts: Rollouts) -> tuple[bytes, dict[str, Any]]:
    """Return the stream and its index, which is JSON; the metrics are left out."""
    stream = zlib.compressobj(_LEVEL)
    parts, records = [], []
    for (group, trajectory, turn), value in _records(rollouts):
        part = stream.compress(pack(value)) + stream.flush(zlib.Z_SYNC_FLUSH)
        parts.append(part)
        records.append(Record(group, trajectory, turn, len(part), _digest(part)))
    parts.append(stream.flush())
    index = {"groups": [group.index for group in rollouts.groups], "records": records}
    return b"".join(parts), index


def decode(data: bytes, index: Mapping[str, Any]) -> Rollouts:
    """Return the rollouts of a stream. Raises UserError when it is none, or another one."""
    inflate = zlib.decompressobj()
    groups: dict[int, list[Trajectory]] = {number: [] for number in index["groups"]}
    logprobs: dict[SampleId, Scored] = {}
    place = 0
    for each in records_of(index):
        try:
            plain = inflate.decompress(data[place : place + each.num_bytes])
            if each.group == _OF_STEP:
                logprobs |= unpack(plain, _Logprobs).entries
            elif each.turn == _OF_ROLLOUT:
                groups[each.group].append(unpack(plain, Trajectory))
            else:
                last = groups[each.group][-1]
                last = replace(last, turns=(*last.turns, unpack(plain, Turn)))
                groups[each.group][-1] = last
        except (zlib.error, Refused) as error:
            raise UserError(f"{each.name} cannot be read: {error}") from error
        place += each.num_bytes
    found = [Group(number, tuple(members)) for number, members in groups.items()]
    return Rollouts(found, logprobs, {})


def changed_records(data: bytes, index: Mapping[str, Any]) -> list[Record]:
    """List the records whose bytes in the stream are not those that were written."""
    changed, place = [], 0
    for each in records_of(index):
        if _digest(data[place : place + each.num_bytes]) != each.sha256:
            changed.append(each)
        place += each.num_bytes
    return changed


def read_turn(data: bytes, index: Mapping[str, Any], record: Record) -> Turn | None:
    """Read the turn of a record whose bytes were changed, as far as it is still one; else None."""
    inflate, plain = zlib.decompressobj(), b""
    try:
        place = 0
        for each in records_of(index):
            plain = inflate.decompress(data[place : place + each.num_bytes])
            place += each.num_bytes
            if each == record:
                break
        return unpack(plain, Turn) if record.turn != _OF_ROLLOUT else None
    except (zlib.error, Refused):
        return None


def records_of(index: Mapping[str, Any]) -> list[Record]:
    """Read the entries of an index."""
    return [Record(*each) for each in index["records"]]


def _records(rollouts: Rollouts) -> Iterator[tuple[tuple[int, int, int], object]]:
    """Yield (group, trajectory, turn) and the record of each."""
    for group in rollouts.groups:
        for number, trajectory in enumerate(group.trajectories):
            yield (group.index, number, _OF_ROLLOUT), replace(trajectory, turns=())
            for turn, value in enumerate(trajectory.turns):
                yield (group.index, number, turn), value
    if rollouts.logprobs:
        yield (_OF_STEP, 0, 0), _Logprobs(tuple(rollouts.logprobs.items()))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
