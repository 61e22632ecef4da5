"""Which policies need an engine while someone demonstrates."""

from __future__ import annotations

from typing import Any

import pytest
from toy_options import toy

from flowtrain.rft.demonstrators import asked_policies

OWN = {"roles": {"verifier": "own"}}
ENGINES = {"engines": {"gpt": {"model": "m"}}}


@pytest.mark.parametrize(
    ("expert", "options", "asked"),
    [
        ("scripted", {}, ()),
        ("scripted", OWN, ()),
        ("scripted", {"roles": {"refiner": "policy"}}, ("planner",)),
        ("policy", OWN, ("planner", "verifier")),
        ("gpt", {}, ()),
        ("gpt", OWN, ("verifier",)),
        ("gpt", {**OWN, "train": {"policy": "verifier"}}, ("planner",)),
        ("gpt", {"roles": {"generator": "policy"}}, ("planner",)),
    ],
)
def test_a_teacher_needs_no_engine_of_its_student(
    expert: str, options: dict[str, Any], asked: tuple[str, ...]
) -> None:
    config = toy({**ENGINES, **options, "rft": {"expert": expert}})
    assert asked_policies(config) == asked
