"""The dataflow over bad links:  python -m bench.links --model runs/warm/model [--json F]

Needs root and /dev/net/tun. Service, weight server and trainer run in one network namespace, each
node in one of its own, behind a link of `bench/emulated_network.py`: the kernel's TCP meets real
delays, losses and partitions. All of them are the real processes, with the quickstart's config in
bfloat16; its rollouts take a second where an agent's take minutes, so that a round trip weighs
about a hundred times what it would.

Per shape of the links, from the trainer's fourth step on: groups and tokens that came in per
second; staleness of the trained tokens; the share of its time that the trainer waited, and that
nodes had no rollout under way; seconds from the publishing of a version to its load on a node, of
the versions that nodes loaded; MB that crossed the links; leases that ran out; groups that came a
second time, which count once. Where half of the nodes are cut off: seconds from the partition's end
to their first push. "problems" are those of `dataflow audit` and the tensors of loaded versions
that differ from their digests.

Then, one at a time through one such link: seconds for a full snapshot of --mb MB, and for a push of
as much.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.emulated_network import Network, obstacle
from bench.links_crew import (
    CONFIG,
    END_S,
    FLOW_PORT,
    PARTITIONED,
    SHAPES,
    START_S,
    WEIGHTS_PORT,
    Crew,
    urls,
)
from bench.links_transfers import large_row
from bench.measure import print_table, write_json
from flowtrain.dataflow.ledger import audit_database
from flowtrain.dataflow.ledger.sql import connect

NUM_FIRST = 3
"""Steps that are left out, until all nodes work."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a warm model: the folder of flowtrain.rft")
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--nodes", type=int, default=4, help="(default: 4)")
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="of a shape; 0: none (default: 30)"
    )
    parser.add_argument("--partition", type=float, default=60.0, help="seconds (default: 60)")
    parser.add_argument("--mb", type=int, default=4, help="of the snapshot; 0: none (default: 4)")
    parser.add_argument(
        "--congestion",
        default="reno",
        help="TCP's, of both ends: bbr, or reno, which losses slow down as they do cubic (default)",
    )
    args = parser.parse_args()
    if problem := obstacle():
        parser.error(problem)
    flows = [partial(flow_row, name, args) for name in args.shapes if args.seconds]
    large = [
        partial(large_row, name, args) for name in args.shapes if args.mb and name != PARTITIONED
    ]
    rows = []
    for measure in flows + large:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(Path(folder)))
        print_table(rows[-1:])
        print(flush=True)
    if args.json:
        write_json(args.json, rows)


# ---- the dataflow


def flow_row(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Service, weights, trainer and nodes work for --seconds; then the books are read."""
    cut_s = args.partition if name == PARTITIONED else 0.0
    half, names = args.nodes // 2, [f"node-{number}" for number in range(args.nodes)]
    with (
        closing(Network.open(SHAPES[name], args.nodes, congestion=args.congestion)) as network,
        Crew(folder) as crew,
    ):
        _start(crew, network, names, Path(args.model), folder)
        watch = _Watch(crew, folder)
        watch.until(lambda: len(watch.steps()) >= NUM_FIRST, START_S)
        first, began = _books(folder), time.time()
        if cut_s:
            watch.pass_s(args.seconds / 3)
            network.cut(range(half), True)
            watch.pass_s(cut_s)
            network.cut(range(half), False)
        healed = time.time()
        watch.pass_s(began + args.seconds + cut_s - healed)
        last, seconds = _books(folder), time.time() - began
        crew.end("trainer")
        crew.end(*names)
    gains = {key: last[key] - first[key] for key in last}
    notes = [_lines(folder / f"{each}.jsonl") for each in names]
    row = {
        "links": name,
        "congestion": args.congestion,
        "seconds": seconds,
        "groups_per_s": gains["groups"] / seconds,
        "tokens_per_s": gains["tokens"] / seconds,
        "steps": gains["steps"],
        **_trained(watch.steps()[NUM_FIRST:][: int(gains["steps"])], seconds),
        "nodes_idle": max(0.0, 1 - gains["busy_s"] / (args.nodes * seconds)),
        **_loads(notes, watch.published, began),
        "MB": network.counts["bytes"] / 1e6,
        "packets_lost": network.counts["lost"],
        **_outcome(folder, notes, ended=began + seconds),
        "forwarder_late_ms": 1e3 * network.worst_s,
    }
    if cut_s:
        pushes = [[each["at"] for each in of if each.get("pushed")] for of in notes[:half]]
        firsts = [min((at for at in times if at > healed), default=math.inf) for times in pushes]
        row["back_after_s"] = max(firsts) - healed
    return row


def _start(crew: Crew, network: Network, names: Sequence[str], model: Path, folder: Path) -> None:
    hub, common = network.hub, (*CONFIG, "--model.path", model)
    flow, weights = urls(hub)
    listen = ("--host", hub.address, "--port")
    served = ("serve", "--database", folder / "ledger.db", *listen, FLOW_PORT)
    crew.start("service", hub, "flowtrain.dataflow", *served, *common)
    store = folder / "run/weights"
    crew.start("weights", hub, "flowtrain.weights", "serve", store, *listen, WEIGHTS_PORT)
    places = ("--run.dir", folder / "run", "--dataflow.url", flow, "--dataflow.store", weights)
    crew.start("trainer", hub, "flowtrain.train", *common, *places)
    for name, node in zip(names, network.nodes, strict=True):
        words = ("--dataflow", flow, "--name", name)
        crew.start(name, node, "bench.links_node", folder / f"{name}.jsonl", *words)


@dataclass
class _Watch:
    """Notes when versions are published while it waits."""

    crew: Crew
    folder: Path
    published: dict[int, float] = field(default_factory=dict)

    def steps(self) -> list[dict[str, Any]]:
        return _lines(self.folder / "run/metrics.jsonl")

    def until(self, is_so: Callable[[], bool], limit_s: float) -> None:
        def look() -> bool:
            with suppress(OSError, ValueError):
                head = int((self.folder / "run/weights/HEAD").read_text())
                self.published.setdefault(head, time.time())
            return is_so()

        self.crew.until(look, limit_s)

    def pass_s(self, seconds: float) -> None:
        end = time.time() + seconds
        self.until(lambda: time.time() >= end, seconds + END_S)


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may still grow."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _books(folder: Path) -> dict[str, float]:
    """Sums of the ledger so far."""
    with closing(connect(folder / "ledger.db")) as database, database.read() as transaction:
        groups = transaction.one(
            "SELECT count(*) AS num, coalesce(sum(num_tokens), 0) AS tokens FROM groups"
        )
        nodes = transaction.one("SELECT coalesce(sum(busy_s), 0.0) AS busy_s FROM nodes")
    steps = len(_lines(folder / "run/metrics.jsonl"))
    return {"groups": groups.num, "tokens": groups.tokens, "busy_s": nodes.busy_s, "steps": steps}


def _trained(steps: Sequence[dict[str, Any]], seconds: float) -> dict[str, float]:
    if not steps:
        return {}
    return {
        "staleness_mean": fmean(step["dataflow/staleness_mean"] for step in steps),
        "staleness_max": max(step["dataflow/staleness_max"] for step in steps),
        "trainer_idle": min(1.0, sum(step["dataflow/waited_s"] for step in steps) / seconds),
    }


def _loads(
    notes: Sequence[list[dict[str, Any]]], published: dict[int, float], began: float
) -> dict[str, float]:
    loads = [each for of in notes for each in of if each["at"] > began]
    loads = [each for each in loads if each.get("version") in published]
    waits = [each["at"] - published[each["version"]] for each in loads]
    if not loads:
        return {"loads": 0}
    return {"loads": len(loads), "version_s": fmean(waits), "version_max_s": max(waits)}


def _outcome(folder: Path, notes: Sequence[list[dict[str, Any]]], ended: float) -> dict[str, Any]:
    """What went wrong, and what must not have. Nodes that end push once more what was under way,
    which is not counted.
    """
    audit = audit_database(folder / "ledger.db")
    damaged = sum(each["damaged"] for of in notes for each in of if "version" in each)
    answers = Counter(
        each["status"] for of in notes for each in of if "pushed" in each and each["at"] < ended
    )
    return {
        "leases_ran_out": audit.counts.get("ran out", 0),
        "duplicates": answers["duplicate"],
        "problems": len(audit.problems) + damaged,
    }


if __name__ == "__main__":
    main()
