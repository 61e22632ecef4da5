"""The auditor: checks groups that nodes have pushed, on engines of its own that the run trusts.

`score` asks its engine for the log-probs of each response, by the weights that the node says it
sampled with, and scores the answers again. That finds other weights, another temperature, edited
tokens, log-probs and rewards. `sample` rolls out again with the same seeds and weights, which with
`train.exact` gives the same bits: that finds edited prompts, tool results and answers too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from flowtrain.config import NO_ENGINE, Config
from flowtrain.dataflow.codec import unpack_group
from flowtrain.dataflow.contract import AuditRequest, Dataflow, Finding, Lease, ToAudit
from flowtrain.dataflow.payloads import PayloadStore
from flowtrain.node.setup import Sampler
from flowtrain.types import Call, Group, PolicyName, Sample, Trajectory, UserError
from flowtrain.utils.seeds import derive_seed
from flowtrain.weights import StoreError

_log = logging.getLogger(__name__)
_PAUSE_S = 1.0
_TOKENS_TIMES = 20
"""The largest difference of one token may be so many times that of the mean."""


class Lie(Exception):
    """A group is not what its node says; the text says where."""


class Unclear(Exception):
    """Nobody can tell whether a group is what its node says."""


class Piece(NamedTuple):
    """Tokens of a response that one version of a policy sampled."""

    policy: PolicyName
    version: int
    rollout: int
    turn: int
    start: int
    end: int
    call: Call


@dataclass(slots=True)
class Tally:
    """The findings of an auditor so far."""

    num: dict[str, int] = field(default_factory=lambda: {"sound": 0, "lie": 0, "unclear": 0})
    largest_mean: float = 0.0
    """Largest mean difference of log-probs in a group that was believed, in nats:
    `dataflow.audit_bound` should be some times as much."""

    def text(self) -> str:
        counts = ", ".join(f"{num} {state}" for state, num in self.num.items())
        return f"{counts}; mean |log-prob difference| of sound groups up to {self.largest_mean:.2g}"


def check_audit(config: Config) -> None:
    """Raise UserError for a config whose groups no auditor can check."""
    if config.rollout.frequency_penalty:
        raise UserError(
            f"rollout.frequency_penalty={config.rollout.frequency_penalty:g}: a forward pass knows "
            "no penalty, so groups cannot be audited"
        )
    if config.dataflow.audit == "sample" and not config.train.exact:
        raise UserError(
            "dataflow.audit='sample' needs train.exact=true: otherwise honest nodes sample other "
            "tokens now and then"
        )


@dataclass(slots=True)
class Auditor:
    """Serves for one `run`."""

    dataflow: Dataflow
    name: str
    config: Config
    sampler: Sampler
    payloads: PayloadStore | None = None
    tally: Tally = field(default_factory=Tally)
    loaded: dict[str, int] = field(default_factory=dict)
    """By policy, the version that was loaded last: an engine holds none before its first."""
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self) -> None:
        """End after the group that is being checked."""
        self.stopped.set()

    async def run(self) -> None:
        """Check groups until `stop` or the end of training. Raises Refused and Unavailable."""
        while not self.stopped.is_set():
            asked = await asyncio.to_thread(self.dataflow.to_audit, AuditRequest(self.name))
            if asked.lease is None and asked.is_over:
                return
            if asked.lease is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.stopped.wait(), _PAUSE_S)
                continue
            finding = await self._finding(asked, asked.lease)
            if finding.problem:
                _log.warning("work item %d: %s", finding.work_item, finding.problem)
            await asyncio.to_thread(self.dataflow.found, finding)

    async def _finding(self, asked: ToAudit, lease: Lease) -> Finding:
        state, problem = "sound", ""
        try:
            payload = asked.payload
            if asked.stored is not None and self.payloads is not None:
                payload = await asyncio.to_thread(self.payloads.get, asked.stored)
            await self.check(unpack_group(payload), lease)
        except Lie as lie:
            state, problem = "lie", str(lie)
        except (Unclear, StoreError) as unclear:  # the weights may be gone
            state, problem = "unclear", str(unclear)
        self.tally.num[state] += 1
        return Finding(self.name, lease.work_item, lease.attempt, problem, is_lie=state == "lie")

    async def check(self, group: Group, lease: Lease) -> None:
        """Check a group. Raises Lie, Unclear, and StoreError where the weights are gone."""
        await self._check_rewards(group)
        await self._check_tokens(group)
        if self.config.dataflow.audit == "sample":
            for number, rollout in enumerate(group.trajectories):
                if rollout.branch is None and not rollout.error:
                    await self._check_again(number, rollout, lease)

    async def _check_rewards(self, group: Group) -> None:
        for number, rollout in enumerate(group.trajectories):
            if rollout.error or rollout.scored_by.startswith(
                "judge"
            ):  # a model may change its mind
                continue
            bare = replace(rollout, reward=None, scored_by="", sub_goals=None, reward_parts={})
            again = await self.sampler.score(bare)
            if again.error:
                raise Unclear(f"rollout {number} cannot be scored: {again.error}")
            if again.reward != rollout.reward:
                raise Lie(
                    f"rollout {number} has the reward {rollout.reward}, its answer earns "
                    f"{again.reward}"
                )

    async def _check_tokens(self, group: Group) -> None:
        """Compare the log-probs of all tokens with those of the weights that sampled them."""
        bound = 0.0 if self.config.train.exact else self.config.dataflow.audit_bound
        total, count = 0.0, 0
        pieces = sorted(_pieces(group), key=itemgetter(slice(0, 4)))
        for (policy, version), found in groupby(pieces, key=itemgetter(slice(0, 2))):
            if policy not in self.sampler.engines:
                raise Lie(f"it has tokens of {policy!r}, which is no policy of this run")
            some = list(found)
            for piece, logprobs in zip(some, await self._score(policy, version, some), strict=True):
                for token in range(piece.start, piece.end):
                    told, scored = piece.call.logprobs[token], logprobs[token]
                    total, count = total + abs(told - scored), count + 1
                    if not abs(told - scored) <= _TOKENS_TIMES * bound:
                        raise Lie(
                            f"rollout {piece.rollout}, turn {piece.turn}, token {token}: its "
                            f"log-prob is {told:.6g}, the {policy} of version {version} gives it "
                            f"{scored:.6g}"
                        )
        mean = total / max(count, 1)
        if not mean <= bound:
            raise Lie(f"its log-probs differ by {mean:.3g} in the mean, at most {bound:g} is usual")
        self.tally.largest_mean = max(self.tally.largest_mean, mean)

    async def _score(
        self, policy: PolicyName, version: int, pieces: list[Piece]
    ) -> list[tuple[float, ...]]:
        engine = self.sampler.engines[policy]
        await self._load(policy, version)
        _, temperature = self.config.sampling_of(policy)
        zeros = [(0.0,) * len(piece.call.response_ids) for piece in pieces]
        samples = [
            Sample(
                call.prompt_ids,
                call.response_ids,
                call.logprobs,
                zero,
                zero,
                sampling_mask=call.sampling_mask,
            )
            for (*_, call), zero in zip(pieces, zeros, strict=True)
        ]
        return (await engine.score(samples, temperature))[1]

    async def _load(self, policy: str, version: int) -> None:
        if policy in self.sampler.stores and self.loaded.get(policy) != version:
            await asyncio.to_thread(self.sampler.engines[policy].load, version)
            self.loaded[policy] = version

    async def _check_again(self, number: int, rollout: Trajectory, lease: Lease) -> None:
        """Roll out again and compare turn by turn, then the answer."""
        versions = {(piece.policy, piece.version) for piece in _pieces(Group(0, (rollout,)))}
        if len({policy for policy, _ in versions}) < len(versions):
            return  # new weights came in between, when nobody knows
        for policy, version in versions:
            await self._load(policy, version)
        again = await self.sampler.rollout(lease.task, derive_seed(lease.seed, number))
        for turn, (old, new) in enumerate(zip(rollout.turns, again.turns, strict=False)):
            where = f"rollout {number}, turn {turn}"
            for policy, call in old.calls.items():
                other = new.calls.get(policy)
                if other is None or call.prompt_ids != other.prompt_ids:
                    raise Lie(f"{where}: the {policy} read another prompt than it says")
                if call.response_ids != other.response_ids:
                    raise Lie(f"{where}: the {policy} samples other tokens than it says")
            if old.result.text != new.result.text:
                raise Unclear(f"{where}: the tool gives another result now")
        if len(rollout.turns) != len(again.turns):
            if rollout.truncated in ("time", "straggler") or again.truncated == "time":
                raise Unclear(f"rollout {number} ended by the clock")
            raise Lie(f"rollout {number} has {len(rollout.turns)} turns, not {len(again.turns)}")
        if rollout.answer != again.answer:
            if self.config.roles.generator not in NO_ENGINE:
                raise Unclear(f"rollout {number}: the generator gives another answer now")
            raise Lie(f"rollout {number}: the answer is not that of its turns")


def _pieces(group: Group) -> Iterator[Piece]:
    """Yield the sampled tokens of a group by turn, policy and version."""
    for number, rollout in enumerate(group.trajectories):
        for index, turn in enumerate(rollout.turns):
            for policy, call in turn.calls.items():
                for span in call.spans:
                    yield Piece(policy, span.version, number, index, span.start, span.end, call)
