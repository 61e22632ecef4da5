"""The options of configs/quickstart.toml that make AgentFlow's flow one for the tiny planner."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowtrain.config import Config

_QUICKSTART = Path(__file__).resolve().parents[1] / "configs" / "quickstart.toml"
_FILE = tomllib.loads(_QUICKSTART.read_text())
_AGENT = {key: value for key, value in _FILE["agent"].items() if key != "max_turns"}
OPTIONS: dict[str, dict[str, Any]] = {
    "agent": _AGENT | {"eval_max_turns": 3},
    "roles": _FILE["roles"],
    "rollout": _FILE["rollout"],
    "train": {"token_budget": _FILE["train"]["token_budget"]},
}
_FLOWS_OWN = ("prompt", "tools", "eval_max_turns")
"""Keys of [agent] that other agents have other defaults of."""


def words(options: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the words of a command line that say the same."""
    return tuple(
        word
        for section, table in options.items()
        for key, value in table.items()
        for word in (f"--{section}.{key}", value if isinstance(value, str) else json.dumps(value))
    )


FLOW = words(OPTIONS)


def toy(options: Mapping[str, Mapping[str, Any]] | None = None) -> Config:
    """Make a config of the toy's options with others over them."""
    given = {section: dict(table) for section, table in (options or {}).items()}
    base = OPTIONS
    if given.get("agent", {}).get("name", "agentflow") != "agentflow":
        agent = {key: value for key, value in OPTIONS["agent"].items() if key not in _FLOWS_OWN}
        base = {**OPTIONS, "agent": agent, "roles": {}}
    both = {section: base.get(section, {}) | given.get(section, {}) for section in base | given}
    return Config.model_validate(both)
