"""Nodes that lie, and the auditor that finds them:  python -m bench.liars [--json F] [--png F]

First table: a small model makes honest groups, each is spoiled in every way, and the auditor checks
them all on an engine of its own (`flowtrain/node/auditor.py`). Second table and picture: a node
pushes groups to a real ledger, the share q of them lies; the ledger draws the share p of all groups
for an audit, whose verdicts are those of the first table. How often the node is shut out by its
n-th group is compared with 1 - (1 - p q)^n. 2 minutes of one core.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.measure import print_table, write_json
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
    Register,
)
from flowtrain.dataflow.ledger import Ledger, open_ledger
from flowtrain.node.auditor import Auditor, Lie
from flowtrain.node.setup import Sampler, make_sampler
from flowtrain.training import model as models
from flowtrain.types import Call, Group
from flowtrain.utils.seeds import derive_seed
from flowtrain.weights import Publisher, WeightStore

NUM_GROUPS = 24
GROUP_SIZE = 4
BOUND = 1e-4
"""`dataflow.audit_bound`, for fp32 on one kind of CPU."""
SHARES_AUDITED = (0.05, 0.2, 0.5, 1.0)
SHARES_OF_LIES = (0.25, 1.0)
MOST_GROUPS, TRIALS = 32, 60
_VOCAB = 300


def other_weights(call: Call) -> Call:
    return replace(call, spans=tuple(replace(span, version=0) for span in call.spans))


def other_text(call: Call) -> Call:
    first, *rest = call.response_ids
    return replace(call, response_ids=((first + 1) % _VOCAB, *rest))


def other_logprobs(call: Call) -> Call:
    """Make every token a little likelier, which would shrink its ratio."""
    return replace(call, logprobs=tuple(min(logprob + 0.01, 0.0) for logprob in call.logprobs))


def spoiled(group: Group, change: Callable[[Call], Call]) -> Group:
    """Return the group with the planner's first call of its first rollout changed."""
    first, *others = group.trajectories
    turn, *turns = first.turns
    turn = replace(turn, calls={**turn.calls, "planner": change(turn.calls["planner"])})
    return replace(group, trajectories=(replace(first, turns=(turn, *turns)), *others))


def better_reward(group: Group) -> Group:
    first, *others = group.trajectories
    first = replace(first, reward=1.0 - (first.reward or 0.0))
    return replace(group, trajectories=(first, *others))


LIES: dict[str, Callable[[Group], Group]] = {
    "other weights": lambda group: spoiled(group, other_weights),
    "edited text": lambda group: spoiled(group, other_text),
    "edited log-probs": lambda group: spoiled(group, other_logprobs),
    "edited reward": better_reward,
}


def make_model(folder: Path) -> str:
    """Make a folder with a random model, which answers every prompt differently."""
    words = ["What is the capital of Chad? Sub-Goal: capital of Chad\nTool Name: Search"] * 9
    tokenizer = models.new_tokenizer(words, vocab_size=_VOCAB)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_positions": 512}
    model = models.new_model(tokenizer, **shape)
    models.export(model, tokenizer, models.full_weights(model), folder)
    return str(folder)


def make_config(model: str) -> Config:
    return Config.model_validate(
        {
            "model": {"path": model},
            "tasks": {"num_train": 200, "kinds": ("lookup",)},
            "agent": {"max_turns": 3, "tools": ("Search", "Base_Generator"), "prompt": "compact"},
            "rollout": {"group_size": GROUP_SIZE, "num_questions": 2, "max_new_tokens": 24},
            "run": {"device": "cpu", "threads": 1},
            "dataflow": {"audit_share": 1.0, "audit_bound": BOUND},
        }
    )


@contextmanager
def sampler_of(config: Config, folder: Path) -> Iterator[Sampler]:
    """Publish two versions, the second of them a small step away, and build a sampler of both."""
    model = models.load_model(config.model.path, torch.float32)
    store, rng = WeightStore(folder), torch.Generator().manual_seed(1)
    publisher = Publisher(store)
    weights = models.published_weights(model, "merged")
    publisher.publish(weights, 0)
    publisher.publish({name: _moved(weight, rng) for name, weight in weights.items()}, 1)
    with make_sampler(config, {"planner": str(folder)}, "") as sampler:
        sampler.engines["planner"].load(1)
        yield sampler


def _moved(weight: Tensor, rng: torch.Generator) -> Tensor:
    """Return the weight a step of AdamW at a learning rate of 1e-3 away."""
    return weight + 1e-3 * torch.randn(weight.shape, generator=rng).sign()


def open_ledger_of(config: Config, folder: Path, share: float) -> Ledger:
    """Open a ledger that draws this share for audits, with a trainer and a node."""
    dataflow = config.dataflow.model_copy(update={"audit_share": share, "max_waiting": 1000})
    ledger = open_ledger(config.model_copy(update={"dataflow": dataflow}), folder)
    register = Register(*("planner", "", "", 2, 8), vocab_size=_VOCAB, max_positions=512, step=1)
    ledger.register(register)  # both versions have been made
    ledger.join(Join("liar", "life"))
    return ledger


def check_kinds(config: Config, sampler: Sampler, folder: Path) -> tuple[list[Any], Group]:
    """Audit honest groups and every kind of lie; returns the rows of the table and a group."""
    ledger = open_ledger_of(config, folder / "kinds.sqlite", 0.0)
    leases = ledger.lease(LeaseRequest("liar", "life", NUM_GROUPS)).leases
    auditor = Auditor(ledger, "auditor", config, sampler)

    async def made(lease: Lease) -> Group:
        rollouts = [
            sampler.rollout(lease.task, derive_seed(lease.seed, n)) for n in range(GROUP_SIZE)
        ]
        return Group(lease.index, tuple(await asyncio.gather(*rollouts)))

    async def is_lie(group: Group, lease: Lease) -> bool:
        try:
            await auditor.check(group, lease)
        except Lie:
            return True
        return False

    async def main() -> list[Any]:
        started = time.perf_counter()
        groups = [await made(lease) for lease in leases]
        made_s = (time.perf_counter() - started) / NUM_GROUPS
        rows = []
        kinds: dict[str, Callable[[Group], Group]] = {"honest": lambda group: group, **LIES}
        for name, change in kinds.items():
            changed = [change(group) for group in groups]
            # A change may leave a group as it is: a likelier token than a sure one there is not.
            cases = [
                (new, lease)
                for new, old, lease in zip(changed, groups, leases, strict=True)
                if name == "honest" or new != old
            ]
            started = time.perf_counter()
            found = [await is_lie(group, lease) for group, lease in cases]
            audit_s = (time.perf_counter() - started) / len(cases)
            rows.append(
                {
                    "groups": name,
                    "checked": len(cases),
                    "called lies": sum(found),
                    "ms to check": 1e3 * audit_s,
                    "ms to make": 1e3 * made_s,
                }
            )
        return [rows, groups[0]]

    rows, group = asyncio.run(main())
    ledger.close()
    rows[0]["largest mean difference"] = auditor.tally.largest_mean
    return rows, group


def detection(config: Config, group: Group, folder: Path) -> list[dict[str, Any]]:
    """Let a liar push groups until it is shut out, many times."""
    rows = []
    for share in SHARES_AUDITED:
        for lies in SHARES_OF_LIES:
            rng = random.Random(f"{share}/{lies}")
            ends = [
                shut_out_after(config, group, folder / f"{share}-{lies}-{n}", share, lies, rng)
                for n in range(TRIALS)
            ]
            found = [sum(end <= n for end in ends) / TRIALS for n in range(1, MOST_GROUPS + 1)]
            theory = [1 - (1 - share * lies) ** n for n in range(1, MOST_GROUPS + 1)]
            rows.append({"p": share, "q": lies, "found": found, "theory": theory})
    return rows


def shut_out_after(
    config: Config, group: Group, path: Path, share: float, lies: float, rng: random.Random
) -> int:
    """Return how many groups a liar could push; one more than `MOST_GROUPS`: it was not found."""
    ledger = open_ledger_of(config, path, share)
    leases = ledger.lease(LeaseRequest("liar", "life", MOST_GROUPS)).leases
    for number, lease in enumerate(leases, 1):
        own = [replace(rollout, task=lease.task) for rollout in group.trajectories]
        payload = pack_group(Group(lease.index, tuple(own)))
        ledger.push(Push("liar", lease.work_item, lease.attempt, payload))
        asked = ledger.to_audit(AuditRequest("auditor"))
        is_lie = rng.random() < lies
        if asked.lease is not None:
            at = (asked.lease.work_item, asked.lease.attempt)
            ledger.found(Finding("auditor", *at, "a lie" if is_lie else "", is_lie=is_lie))
        try:
            ledger.join(Join("liar", "life"))
        except NotAllowed:
            ledger.close()
            return number
    ledger.close()
    return MOST_GROUPS + 1


def draw(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Draw what was measured as points, and theory as lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    for place, lies in enumerate(SHARES_OF_LIES, 1):
        axes = figure.add_subplot(1, len(SHARES_OF_LIES), place)
        axes.set_title(f"{lies:.0%} of the groups lie")
        axes.set_xlabel("groups pushed")
        axes.set_ylabel("share of liars that are shut out")
        numbers = range(1, MOST_GROUPS + 1)
        for color, row in enumerate(row for row in rows if row["q"] == lies):
            axes.plot(numbers, row["theory"], color=f"C{color}")
            (points,) = axes.plot(numbers, row["found"], "o", markersize=3, color=f"C{color}")
            points.set_label(f"p = {row['p']:g}")
        axes.legend(title="audited")
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.liars", description=__doc__)
    parser.add_argument("--json", metavar="F", help="write the rows there")
    parser.add_argument("--png", metavar="F", help="draw detection against the groups pushed there")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = make_config(make_model(folder / "model"))
        with sampler_of(config, folder / "weights") as sampler:
            kinds, group = check_kinds(config, sampler, folder)
        print_table(kinds)
        curves = detection(config, group, folder)
    at = (4, 16, MOST_GROUPS)
    print_table(
        [
            {"p": row["p"], "q": row["q"]}
            | {f"shut out by {n}": row["found"][n - 1] for n in at}
            | {f"theory {n}": row["theory"][n - 1] for n in at}
            for row in curves
        ]
    )
    if options.json:
        write_json(options.json, [*kinds, *curves])
    if options.png:
        draw(curves, options.png)


if __name__ == "__main__":
    main()
