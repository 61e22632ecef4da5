"""A simulation of weights that go out to many nodes:  python -m bench.fanout [--json F]

No byte is sent: flows share links fairly (max-min), in small steps of time. The origin has one
link, each site another, and in a site nodes read from the relay over a link of its own. A relay
passes bytes on while they come. The size of a delta is the measured bytes per changed word of real
updates of a small model (bench/results), for as large a share of the words of a large one: that a
large model's updates are as sparse is an assumption.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.measure import print_table, write_json

Floats = NDArray[np.float64]
_STEP_S = 0.02


@dataclass(frozen=True, slots=True)
class Network:
    """Links in bits per second, and times in seconds."""

    origin_bps: float
    site_bps: float
    relay_bps: float
    """From a relay to the nodes of its site."""
    rtt_s: float
    """Between origin and sites."""
    hears_s: float
    """Nodes hear of a version at any time within this, with the answer to one of their requests."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    parser.add_argument("--words", type=float, default=70e9, help="of the model (default: 70e9)")
    parser.add_argument("--nodes", type=int, default=1000, help="default: 1000")
    parser.add_argument("--sites", default="8,32,128", help="nodes of a site (default: 8,32,128)")
    parser.add_argument("--origin-gbps", type=float, default=10.0, help="default: 10")
    parser.add_argument("--site-gbps", type=float, default=1.0, help="default: 1")
    parser.add_argument("--relay-gbps", type=float, default=10.0, help="default: 10")
    sizes = "bench/results/cpu/smollm2-delta.json"
    parser.add_argument("--sizes", default=sizes, help=f"measured deltas (default: {sizes})")
    update = "lr 1e-06, step 40"
    parser.add_argument("--update", default=update, help=f"one of them (default: {update})")
    args = parser.parse_args()
    network = Network(
        args.origin_gbps * 1e9, args.site_gbps * 1e9, args.relay_gbps * 1e9, rtt_s=0.1, hears_s=1.0
    )
    rows = []
    for level, num_bytes in _sizes(Path(args.sizes), args.update, args.words).items():
        for site in map(int, args.sites.split(",")):
            for has_relays in (False, True):
                last_s, sent = simulate(args.nodes, site, num_bytes, network, has_relays=has_relays)
                rows.append(
                    {
                        "simulated": level,
                        "delta_mb": num_bytes / 1e6,
                        "nodes": args.nodes,
                        "nodes_per_site": site,
                        "relays": has_relays,
                        "last_node_s": last_s,
                        "origin_gb": sent / 1e9,
                    }
                )
    print_table(rows)
    if args.json:
        write_json(args.json, [{**row, **asdict(network), "update": args.update} for row in rows])


def simulate(
    num_nodes: int, per_site: int, num_bytes: float, network: Network, *, has_relays: bool
) -> tuple[float, float]:
    """Return the seconds until the last node has a file, and the bytes that the origin sent."""
    rng = np.random.default_rng(0)
    num_sites = math.ceil(num_nodes / per_site)
    site_of = np.arange(num_nodes) // per_site
    # HEAD, manifest and delta: a round trip each, and one for each connection.
    asks = rng.uniform(0, network.hears_s, num_nodes) + 6 * network.rtt_s
    if has_relays:
        starts = np.full(num_sites, np.inf)
        np.minimum.at(starts, site_of, asks)
        links = np.arange(num_sites)
    else:
        starts, links = asks, site_of
    received, at_nodes = np.zeros(len(starts)), np.zeros(num_nodes)
    now, sent = 0.0, 0.0
    while at_nodes.min() < num_bytes:
        now += _STEP_S
        is_active = (starts <= now) & (received < num_bytes)
        rates = _fair(is_active, links, num_sites, network)
        step = np.minimum(rates * _STEP_S / 8, num_bytes - received)
        received += step
        sent += float(step.sum())
        if not has_relays:
            at_nodes = received
            continue
        wants = (asks <= now) & (at_nodes < received[site_of])
        num_wanting = np.bincount(site_of[wants], minlength=num_sites)
        share = network.relay_bps * _STEP_S / 8 / np.maximum(1, num_wanting)
        at_nodes[wants] = np.minimum(
            at_nodes[wants] + share[site_of[wants]], received[site_of[wants]]
        )
    return now, sent


def _fair(
    is_active: NDArray[np.bool_], links: NDArray[np.int64], num_sites: int, network: Network
) -> Floats:
    """Return the max-min fair rate of each flow: its share of its site's link, or less where the
    origin's is full, with one bound for all flows.
    """
    rates = np.zeros(len(is_active))
    if not is_active.any():
        return rates
    counts = np.bincount(links[is_active], minlength=num_sites)
    shares = network.site_bps / np.maximum(1, counts[links[is_active]])
    # Fill up: flows with small shares have them, the others divide what is left.
    ordered = np.sort(shares)
    used = np.concatenate(([0.0], np.cumsum(ordered)[:-1]))
    bounds = (network.origin_bps - used) / np.arange(len(ordered), 0, -1)
    full = np.nonzero(bounds < ordered)[0]
    rates[is_active] = np.minimum(shares, bounds[full[0]]) if len(full) else shares
    return rates


def _sizes(path: Path, update: str, num_words: float) -> dict[str, float]:
    """Return the bytes of a delta by level, as a measured update has them per word."""
    for row in json.loads(path.read_text())["rows"]:
        if (row["table"], row.get("weights")) == ("size", update):
            changed = row["density %"] / 100 * num_words
            return {level: changed * row[level] for level in ("level 1", "level 2")}
    raise SystemExit(f"{path} has no update {update!r}")


if __name__ == "__main__":
    main()
