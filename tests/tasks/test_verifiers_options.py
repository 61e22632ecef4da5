"""What the options of verifiers' environments need; tests/agents/test_verifiers.py has the rest."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from flowtrain.config import Config
from flowtrain.records import UserError
from flowtrain.tasks.sets import task_set


def options() -> dict[str, Any]:
    return {
        "agent": {"name": "gateway"},
        "gateway": {"function": "flowtrain.agents.gateway.hub:solve"},
        "tasks": {"name": "verifiers", "verifiers": {"taskset": {"id": "gsm8k"}}},
    }


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("verifiers", "verifiers.v1"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[verifiers\]'"):
        task_set(Config.model_validate(options()))


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("tasks", "verifiers", {}), ("tasks", "name", "facts"), ("agent", "name", "tools")],
)
def test_options_that_do_not_go_together(section: str, key: str, value: Any) -> None:
    given = options()
    given[section][key] = value
    with pytest.raises(ValueError, match="verifiers"):
        Config.model_validate(given)
