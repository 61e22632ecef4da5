"""What the options of Harbor's tasks need; tests/agents/test_harbor.py has the rest."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from flowtrain.config import Config
from flowtrain.tasks.harbor import harbor_tasks
from flowtrain.tasks.sets import task_set
from flowtrain.types import UserError

EXAMPLE = Path(__file__).parents[2] / "examples" / "harbor"


def options() -> dict[str, Any]:
    return {
        "agent": {"name": "gateway"},
        "tasks": {"name": "harbor", "harbor": {"dataset": {"path": "tasks"}}},
    }


def test_a_python_without_harbor_says_what_it_needs() -> None:
    with pytest.raises(UserError, match=r"No module named 'harbor'.*needs harbor and dockerfile"):
        task_set(Config.model_validate(options()))


def test_a_python_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match=r"tasks\.harbor\.python='/no/python'"):
        harbor_tasks({"python": "/no/python", "dataset": {"path": "tasks"}})


def test_the_example_is_a_config_whose_tasks_are_there() -> None:
    given = tomllib.loads((EXAMPLE / "train.toml").read_text())
    table = Config.model_validate(given).tasks.harbor
    assert table["dataset"]["path"] == "examples/harbor/tasks"
    for name in table["dataset"]["task_names"]:
        assert (EXAMPLE / "tasks" / name / "instruction.md").is_file()


def test_an_unknown_key_is_named() -> None:
    with pytest.raises(UserError, match="unknown key 'agents'"):
        harbor_tasks({"dataset": {"path": "tasks"}, "agents": {}})


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("tasks", "harbor", {}),
        ("tasks", "name", "facts"),
        ("agent", "name", "tools"),
        ("gateway", "command", ["true"]),
    ],
)
def test_options_that_do_not_go_together(section: str, key: str, value: Any) -> None:
    given = options()
    given.setdefault(section, {})[key] = value
    with pytest.raises(ValueError, match="harbor"):
        Config.model_validate(given)
