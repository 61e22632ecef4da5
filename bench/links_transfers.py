"""Large transfers over a bad link, one at a time, for `bench.links`."""

from __future__ import annotations

import argparse
import math
import os
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from bench.emulated_network import Network
from bench.links_crew import (
    CONFIG,
    FLOW_PORT,
    PATIENCE_S,
    SHAPES,
    START_S,
    WEIGHTS_PORT,
    Crew,
    urls,
)
from flowtrain.dataflow.client import Client
from flowtrain.dataflow.contract import Join, Push, Refused, Unavailable
from flowtrain.weights import HttpStore, Publisher, WeightStore, pull


def large_row(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One node pulls a full snapshot and pushes a payload of noise, which is refused when all of
    it is there.
    """
    torch.manual_seed(0)
    store = WeightStore(folder / "store")
    words = torch.randint(-(1 << 15), 1 << 15, (args.mb << 19,), dtype=torch.int16)
    with closing(Publisher(store)) as publisher:
        publisher.publish({"weight": words.view(torch.bfloat16)}, 0)
    with (
        closing(Network.open(SHAPES[name], 1, congestion=args.congestion)) as network,
        Crew(folder) as crew,
    ):
        hub, (node,) = network.hub, network.nodes
        (flow, weights), listen = urls(hub), ("--host", hub.address, "--port")
        served = ("--database", folder / "ledger.db", *listen, FLOW_PORT, *CONFIG)
        crew.start("service", hub, "flowtrain.dataflow", "serve", *served)
        crew.start("weights", hub, "flowtrain.weights", "serve", store.root, *listen, WEIGHTS_PORT)
        for log in ("service", "weights"):
            said = folder / f"{log}.log"
            crew.until(lambda said=said: "serving" in said.read_text(), START_S)  # type: ignore[misc]
        with node.entered():
            source = HttpStore(weights, folder / "cache", crew.token)
            began = time.monotonic()
            found = pull(source, 0)["weight"].view(torch.int16)
            pulled_s = time.monotonic() - began
            with Client(flow, crew.token, wait_s=PATIENCE_S) as client:
                client.join(Join("node", "life"))
                began = time.monotonic()
                try:
                    client.push(Push("node", 1, 1, os.urandom(args.mb << 20)))
                except Refused:
                    pushed_s = time.monotonic() - began
                except Unavailable:
                    pushed_s = math.inf
    return {
        "links": name,
        "congestion": args.congestion,
        "MB": args.mb,
        "pull_s": pulled_s,
        "push_s": pushed_s,
        "problems": int(not torch.equal(found, words)),
        "forwarder_late_ms": 1e3 * network.worst_s,
    }
