"""Whether a run is under way, has ended or was broken off, from its folder alone."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flowtrain.utils.lock import Lock
from flowtrain.view.run import is_run, read_json

Name = Literal["waiting", "running", "ended", "stopped"]


_COPIED_NS = 30_000_000_000
"""A summary is the last file that a run writes; of a copied run it may be older than others, by as
much."""


@dataclass(frozen=True, slots=True)
class State:
    """The state of a run, and what a person is told about it."""

    name: Name
    text: str
    quiet_s: float | None = None
    """Seconds since something was logged; None: nothing was."""

    def record(self) -> dict[str, Any]:
        """Return it as JSON values, without the seconds, which change all the time."""
        return {"name": self.name, "text": self.text}


def run_state(run_dir: Path) -> State:
    """Look at the lock and the last file of a run."""
    if not is_run(run_dir):
        return State("waiting", f"No run has begun in {run_dir} yet: this page waits for it.")
    logged = _time_ns(run_dir / "metrics.jsonl")
    quiet_s = None if logged is None else max(time.time() - logged / 1e9, 0.0)
    holder = Lock.holder(run_dir)
    if holder is not None:
        began = str(read_json(run_dir / "manifest.json").get("time", ""))
        # The lock is taken before the manifest is written, which a resumed run leaves as it is.
        is_resumed = bool(began) and holder.since > began
        how = f"Resumed at {_minute(holder.since)}, on" if is_resumed else "On"
        return State("running", f"{how} host {holder.host}, process {holder.pid}.", quiet_s)
    for end in (run_dir / "summary.json", run_dir / "model" / "rft.json"):
        ended = _time_ns(end)
        if ended is not None and (logged is None or ended >= logged - _COPIED_NS):
            return State("ended", "It is complete.", quiet_s)
    text = "It crashed or was ended: --resume auto goes on from its last checkpoint."
    return State("stopped", text, quiet_s)


def _minute(time_utc: str) -> str:
    return f"{time_utc[:16].replace('T', ' ')} UTC"


def _time_ns(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
