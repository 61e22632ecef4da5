"""The recheck: every recorded decision is made again from what the ledger says it was based on.

A difference shows that someone changed the ledger, that a rule has changed, or that a rule decides
by something the ledger did not tell it. The order in which a prompt filter is asked, the events it
had seen by then and the draw are on record. A batch is chosen from the groups that had been
committed by then and were neither in an earlier batch nor left out before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flowtrain.config import Config
from flowtrain.dataflow.ledger.prompts import (
    Event,
    Prompts,
    candidate,
    draw_of,
    observe,
    outcome,
    read_events,
)
from flowtrain.dataflow.ledger.sql import Transaction
from flowtrain.dataflow.rules import Rules, replays
from flowtrain.types import Task
from flowtrain.utils.seeds import derive_seed

_MOST = 1 << 62


@dataclass(frozen=True, slots=True)
class History:
    """Everything that the rules have decided, and what they based it on."""

    seed: int
    """Seed of the run."""
    replay_share: float
    rules: Rules
    """New rules, which have observed nothing."""
    tasks: tuple[Task, ...]
    """In their order, as many as were decided about."""
    decisions: list[Any]
    """Rows of decisions of the prompt filter, in order."""
    events: tuple[Event, ...]
    shares: list[Any]
    """Rows of shares, each with its group and work item, in the order of their commits."""
    batches: list[Any]
    """Rows of batches by policy, in the order of steps."""
    assignments: list[Any]
    """Rows of assignments in the order of their batches."""


def read_history(
    transaction: Transaction, config: Config, rules: Rules, prompts: Prompts
) -> History:
    decisions = transaction.all("SELECT * FROM decisions ORDER BY position")
    return History(
        seed=config.run.seed,
        replay_share=config.dataflow.replay_share,
        rules=rules,
        tasks=prompts.first_tasks(len(decisions)),
        decisions=decisions,
        events=tuple(read_events(transaction, 0, _MOST)),
        shares=transaction.all(
            "SELECT s.policy, s.work_item, s.state, s.min_version, s.step, g.event, g.rewards,"
            " g.num_tokens, w.task_id, w.kind FROM shares s"
            " JOIN groups g ON g.work_item = s.work_item"
            " JOIN work_items w ON w.id = s.work_item ORDER BY g.event"
        ),
        batches=transaction.all("SELECT * FROM batches ORDER BY policy, step"),
        assignments=transaction.all("SELECT * FROM assignments ORDER BY policy, step, position"),
    )


@dataclass(frozen=True, slots=True)
class Recheck:
    num_prompts: int
    """Number of prompts that the prompt filter decided about."""
    num_groups: int
    """Number of groups that the group filter decided about, counted per policy."""
    num_batches: int
    differences: tuple[str, ...]
    """The first difference of prompt filter, group filter and selector each; empty: none."""


def recheck(history: History) -> Recheck:
    """Make every decision again with the rules that the ledger was opened with."""
    checks = (check_prompt_filter, check_group_filter, check_selector)
    return Recheck(
        num_prompts=len(history.decisions),
        num_groups=len(history.shares),
        num_batches=len(history.batches),
        differences=tuple(
            difference for check in checks if (difference := next(check(history), ""))
        ),
    )


def check_prompt_filter(history: History) -> Iterator[str]:
    prompt_filter = history.rules.prompt_filter
    events = iter(history.events)
    num_seen = 0
    for position, (task, decision) in enumerate(zip(history.tasks, history.decisions, strict=True)):
        where = f"position {position} in the order of tasks"
        draw = draw_of(history.seed, position)
        recorded = (decision.task_id, decision.kind, decision.draw, decision.position)
        if (task.id, task.kind, draw, position) != recorded:
            yield (
                f"{where}: it is {task.id!r} and the draw {draw}, the ledger has "
                f"{decision.task_id!r} and {decision.draw}"
            )
        while num_seen < decision.num_events:
            num_seen += 1
            if (event := next(events, None)) is None or event.number != num_seen:
                yield (
                    f"{where}: the prompt filter had seen {decision.num_events} events, the ledger "
                    f"has no number {num_seen}"
                )
                return
            observe(prompt_filter, event)
        if (admits := prompt_filter.admits(task.id, task.kind, draw)) != bool(decision.admitted):
            yield (
                f"{where}, {task.id!r}: the prompt filter says {_yes(admits)}, the ledger has "
                f"{_yes(decision.admitted)}"
            )


def check_group_filter(history: History) -> Iterator[str]:
    """Shares that are empty or surplus did not depend on the filter."""
    for share in history.shares:
        keeps = history.rules.group_filter.keeps(outcome(share))
        was_kept = share.state != "filtered"
        if keeps != was_kept and share.state not in ("empty", "surplus"):
            yield (
                f"group of work item {share.work_item}, {share.policy}: the group filter "
                f"says {_yes(keeps)}, the ledger has {_yes(was_kept)}"
            )


def check_selector(history: History) -> Iterator[str]:
    for policy in dict.fromkeys(batch.policy for batch in history.batches):
        shares = [
            share
            for share in history.shares
            if share.policy == policy and share.state not in ("filtered", "empty")
        ]
        batches = [batch for batch in history.batches if batch.policy == policy]
        yield from _check_batches(history, shares, batches)


def _check_batches(history: History, shares: list[Any], batches: list[Any]) -> Iterator[str]:
    by_work_item = {share.work_item: share for share in shares}
    assigned: dict[tuple[str, int], list[Any]] = {}
    for row in history.assignments:
        assigned.setdefault((row.policy, row.step), []).append(row)
    waiting: dict[int, Any] = {}
    trained: list[Any] = []
    coming = iter([share for share in shares if share.event])
    share = next(coming, None)
    for batch in batches:
        while share is not None and share.event <= batch.num_events:
            waiting[share.work_item] = share
            share = next(coming, None)
        waiting = {
            work_item: each
            for work_item, each in waiting.items()
            if each.state not in ("stale", "surplus") or each.step > batch.step
        }
        in_time = [
            candidate(each, batch.max_staleness)
            for each in trained
            if each.min_version + batch.max_staleness >= batch.step - 1
        ]
        again = replays(in_time, batch.num_groups, history.replay_share, batch.step - 1)
        candidates = [candidate(each, batch.max_staleness) for each in waiting.values()]
        seed = derive_seed(history.seed, "select", batch.policy, batch.step)
        fresh = history.rules.selector.select(candidates, batch.num_groups - len(again), seed)
        rows = assigned.get((batch.policy, batch.step), [])
        old_fresh = [row.work_item for row in rows if not row.is_replay]
        old_again = [row.work_item for row in rows if row.is_replay]
        if (list(fresh), list(again)) != (old_fresh, old_again):
            yield (
                f"batch of step {batch.step}, {batch.policy}: the selector takes {fresh} and again "
                f"{again}, the ledger has {old_fresh} and again {old_again}"
            )
        for work_item in old_fresh:
            waiting.pop(work_item, None)
            trained += [by_work_item[work_item]] if work_item in by_work_item else []


def _yes(decision: bool) -> str:
    return "yes" if decision else "no"
