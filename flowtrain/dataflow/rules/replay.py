"""Every decision that is on record, made again from what the ledger says it was made on.

What differs shows that the ledger was changed by another hand, that a rule is not the one it was,
or that it decides by something that it was not told. The order in which a curator is asked, what it
had seen by then and the draw are on record; a batch is chosen from what had been committed when it
was put together, and was neither in an earlier batch nor left out before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flowtrain.dataflow.ledger.history import History, MadeBatch, Share
from flowtrain.dataflow.ledger.ledger import Ledger
from flowtrain.dataflow.rules import Candidate, reused
from flowtrain.utils.seeds import derive_seed, derive_uniform


@dataclass(frozen=True, slots=True)
class Replay:
    num_prompts: int
    """That the curator was asked about."""
    num_groups: int
    """That were filtered, per policy."""
    num_batches: int
    differences: tuple[str, ...]
    """The first of curator, filter and selector each; empty: all is as it was."""


def replay(ledger: Ledger) -> Replay:
    """With the rules that the ledger was opened with."""
    history = ledger.history()
    first = [next(differing(history), "") for differing in (curation, filtering, selection)]
    return Replay(
        len(history.decisions),
        len(history.shares),
        len(history.batches),
        tuple(filter(None, first)),
    )


def curation(history: History) -> Iterator[str]:
    """What differs in the curator's decisions."""
    curator, events = history.rules.curator, iter(history.events)
    num_seen = 0
    for position, (task, decision) in enumerate(zip(history.tasks, history.decisions, strict=True)):
        where = f"place {position} in the order of tasks"
        draw = derive_uniform(history.seed, "curate", position)
        if (task.id, task.kind, draw, position) != (
            decision.task_id,
            decision.kind,
            decision.draw,
            decision.position,
        ):
            yield (
                f"{where}: it is {task.id!r} and the draw {draw}, the ledger has "
                f"{decision.task_id!r} and {decision.draw}"
            )
        while num_seen < decision.num_events:
            num_seen += 1
            if (event := next(events, None)) is None or event.number != num_seen:
                yield (
                    f"{where}: the curator had seen {decision.num_events} events, the ledger has "
                    f"no number {num_seen}"
                )
                return
            if event.outcome is None:
                curator.on_version(event.version)
            else:
                curator.observe(event.outcome)
        if (admits := curator.admits(task.id, task.kind, draw)) != decision.is_admitted:
            yield (
                f"{where}, {task.id!r}: the curator says {_yes(admits)}, the ledger has "
                f"{_yes(decision.is_admitted)}"
            )


def filtering(history: History) -> Iterator[str]:
    """What differs in the filter's decisions; what was empty or surplus did not depend on them."""
    for share in history.shares:
        keeps, was_kept = history.rules.filter.keeps(share.outcome), share.state != "filtered"
        if keeps != was_kept and share.state not in ("empty", "surplus"):
            yield (
                f"group of unit {share.outcome.unit}, {share.policy}: the filter says "
                f"{_yes(keeps)}, the ledger has {_yes(was_kept)}"
            )


def selection(history: History) -> Iterator[str]:
    """What differs in batches."""
    for policy in dict.fromkeys(batch.policy for batch in history.batches):
        shares = [
            share
            for share in history.shares
            if share.policy == policy and share.state not in ("filtered", "empty")
        ]
        yield from _batches(
            history, shares, [batch for batch in history.batches if batch.policy == policy]
        )


def _batches(history: History, shares: list[Share], batches: list[MadeBatch]) -> Iterator[str]:
    by_unit = {share.outcome.unit: share for share in shares}
    waiting: dict[int, Share] = {}
    served: list[Share] = []
    coming = iter([share for share in shares if share.event])
    share = next(coming, None)
    for batch in batches:
        while share is not None and share.event <= batch.num_events:
            waiting[share.outcome.unit] = share
            share = next(coming, None)
        gone = [
            unit
            for unit, each in waiting.items()
            if each.state in ("stale", "surplus") and each.step <= batch.step
        ]
        for unit in gone:
            del waiting[unit]
        in_time = [
            _candidate(each, batch)
            for each in served
            if each.min_version + batch.max_staleness >= batch.step - 1
        ]
        again = reused(in_time, batch.num_groups, history.replay_share, batch.step - 1)
        candidates = [_candidate(each, batch) for each in waiting.values()]
        seed = derive_seed(history.seed, "select", batch.policy, batch.step)
        fresh = history.rules.selector.select(candidates, batch.num_groups - len(again), seed)
        if (tuple(fresh), tuple(again)) != (batch.fresh, batch.again):
            yield (
                f"batch of step {batch.step}, {batch.policy}: the selector takes {fresh} and again "
                f"{again},"
                f" the ledger has {list(batch.fresh)} and again {list(batch.again)}"
            )
        for unit in batch.fresh:
            waiting.pop(unit, None)
            served += [by_unit[unit]] if unit in by_unit else []


def _candidate(share: Share, batch: MadeBatch) -> Candidate:
    return Candidate(share.outcome, share.min_version + batch.max_staleness, share.event)


def _yes(decision: bool) -> str:
    return "yes" if decision else "no"
