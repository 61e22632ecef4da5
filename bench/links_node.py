"""A `flowtrain.node` that writes down, a JSON line each, the versions that it loads and the answers
to its pushes:  python -m bench.links_node NOTES OPTIONS_OF_THE_NODE

After each load all words of the weights are compared with the digests of the version.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from flowtrain.dataflow.contract import Lease, Pushed
from flowtrain.node.__main__ import main
from flowtrain.node.membership import Membership
from flowtrain.weights import Loaded, WeightReader


def take_notes(path: Path) -> None:
    """From now on, of all readers and memberships of this process."""
    load, push = WeightReader.load, Membership.push
    notes = path.open("a")

    def note(**facts: Any) -> None:
        print(json.dumps(facts), file=notes, flush=True)

    def noted_load(reader: WeightReader, version: int) -> Loaded:
        loaded = load(reader, version)
        damaged = len(reader.damaged())
        note(version=version, at=time.time(), mode=loaded.mode, damaged=damaged)
        return loaded

    async def noted_push(member: Membership, lease: Lease, payload: bytes) -> Pushed:
        answer = await push(member, lease, payload)
        note(pushed=lease.work_item, at=time.time(), status=answer.status)
        return answer

    setattr(WeightReader, "load", noted_load)  # noqa: B010  # mypy knows methods as fixed
    setattr(Membership, "push", noted_push)  # noqa: B010


if __name__ == "__main__":
    take_notes(Path(sys.argv[1]))
    code = main(sys.argv[2:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as the node's own command does
