"""The page: one HTML file with its style, its script and its data, and nothing that it would fetch.

All text of a run reaches the document as JSON in a block that no browser executes, and from there
through `textContent`. Should something of it become markup all the same, the policy lets nothing
run but our own script, named by its hash, and nothing be loaded.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from flowtrain.logging.page.data import LoggedRun
from flowtrain.utils.text import printable

MAX_BYTES = 18_000_000
"""Size of a page that browsers, mail and phones still take."""


def build_page(run_dir: Path, num_rollouts: int) -> str:
    """Build the page of a run with at most `num_rollouts` rollouts."""
    return render(page_data(run_dir, num_rollouts))


def page_data(run_dir: Path, num_rollouts: int, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Return what the page of a run shows, with at most `num_rollouts` rollouts, or fewer where it
    would be larger than `max_bytes`.
    """
    run = LoggedRun(run_dir)
    if run.places:  # a rollout takes about as much here as in the log
        mean_bytes = sum(place.end - place.start for place in run.places) / len(run.places)
        num_rollouts = min(num_rollouts, int(2 * max_bytes / mean_bytes) + 1)
    # Rollouts differ in size: what the mean promised is corrected until the page fits.
    while True:
        data = run.data(num_rollouts)
        num_bytes, num_shown = len(json_block(data)), len(data["rollouts"])
        if num_bytes <= max_bytes or not num_shown:
            return data
        num_rollouts = min(num_shown - 1, int(num_shown * 0.95 * max_bytes / num_bytes))


def render(data: dict[str, Any]) -> str:
    """Write the page as HTML, pure ASCII but for the title and our own files."""
    assets = files(__package__)
    style, *parts = (
        (assets / name).read_text("utf-8") for name in ("page.css", "base.js", "page.js")
    )
    script = "\n".join(parts)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    template = Template((assets / "page.html").read_text(encoding="utf-8"))
    title = html.escape(printable(f"{data['name']} · flowtrain", keep=""))
    return template.substitute(
        policy=policy, title=title, style=style, script=script, data=json_block(data)
    )


def json_block(data: Any) -> str:
    """Write JSON in which no tag, comment or entity can begin: `<`, `>`, `&` and all beyond ASCII
    are escaped, lone surrogates too.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    """Return a source expression of Content-Security-Policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
