"""Rules by name: those of the package, and those of packages made up here by their metadata."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from flowtrain.config import Config
from flowtrain.records import UserError
from flowtrain.rollouts.rules import Outcome, load, registry
from tests.packages import check_shown, lay_out

HALF = """
from typing import Annotated
from pydantic import Field, validate_call

class Half:
    @validate_call
    def __init__(self, threshold: Annotated[float, Field(le=1)] = 0.5):
        self.threshold = threshold

    def keeps(self, outcome):
        return sum(outcome.rewards) >= self.threshold * len(outcome.rewards)

def failing():
    raise KeyError("HALF_KEY")

def strict(size):
    if size < 3:
        raise ValueError(f"size: must be 3 or more, not {size}")
    return Half()

def nothing():
    return object()
"""


def install(folder: Path, entries: dict[str, str], group: str = "flowtrain.group_filters") -> None:
    lay_out(folder, "halves", group, entries, HALF)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "halves", raising=False)
    return tmp_path


def config(plugins: dict[str, Any] | None = None, **dataflow: Any) -> Config:
    return Config.model_validate({"dataflow": dataflow, "plugins": plugins or {}})


def refused(plugins: dict[str, Any] | None = None, **dataflow: Any) -> str:
    with pytest.raises(UserError) as raised:
        load(config(plugins, **dataflow))
    return str(raised.value)


@pytest.mark.parametrize("key", registry.BUILT_IN)
def test_every_built_in_rule_is_made(key: str) -> None:
    for name, value in registry.BUILT_IN[key].items():
        options = {"weighted": {"weights": {"sum": 2}}} if name == "weighted" else {}
        rules = load(config(options, **{key: name}))
        rule = getattr(rules, key)
        assert type(rule).__name__ == value.partition(":")[2]
        assert all(callable(getattr(rule, method)) for method in registry.METHODS[key])


def test_every_run_has_a_new_prompt_filter() -> None:
    first, second = load(config(prompt_filter="greso")), load(config(prompt_filter="greso"))
    for _ in range(9):
        first.prompt_filter.observe(Outcome(1, "a", "", (1.0, 1.0), 10))
    assert not first.prompt_filter.admits("a", "", 0.9)
    assert second.prompt_filter.admits("a", "", 0.9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"prompt_filter": "gresso"},
            "dataflow.prompt_filter='gresso': there is no such prompt filter; there are all, "
            "greso, curriculum, and ",
        ),
        (
            {"group_filter": "greso"},
            "dataflow.group_filter='greso': there is no such group filter; there are all, mix",
        ),
        (
            {"selector": ""},
            "dataflow.selector='': there is no such selector; there are deadline, arrival, late",
        ),
        (
            {"plugins": {"all": {"x": 1}}},
            "plugins.all: got an unexpected keyword argument 'x'; it takes no options",
        ),
        (
            {"plugins": {"curriculum": {"exploraton": 1}}, "prompt_filter": "curriculum"},
            "plugins.curriculum: got an unexpected keyword argument 'exploraton'; it takes "
            "exploration, memory",
        ),
        (
            {"plugins": {"greso": {"floor_easy": 0}}, "prompt_filter": "greso"},
            "plugins.greso.floor_easy=0: Input should be greater than 0",
        ),
        (
            {"plugins": {"weighted": {"weights": {"sum": -1}}}, "selector": "weighted"},
            "plugins.weighted.weights.sum=-1: Input should be greater than 0",
        ),
        (
            {"selector": "weighted"},
            "plugins.weighted: missing a required argument: 'weights'; it takes weights",
        ),
    ],
)
def test_a_bad_name_or_option_is_refused_with_what_there_is(
    options: dict[str, Any], message: str
) -> None:
    assert refused(**options).startswith(message)


def test_an_installed_rule_gets_its_options(site: Path) -> None:
    install(site, {"half": "halves:Half"})
    keeps = load(config({"half": {"threshold": 0.75}}, group_filter="half")).group_filter.keeps
    assert keeps(Outcome(1, "a", "", (1, 1, 1, 0), 10))
    assert not keeps(Outcome(1, "a", "", (1, 1, 0, 0), 10))
    assert refused({"half": {"threshold": 2}}, group_filter="half").startswith(
        "plugins.half.threshold=2: Input should be less"
    )
    assert refused({"half": {"x": 2}}, group_filter="half").endswith(
        "unexpected keyword argument 'x'; it takes threshold"
    )
    found = refused(group_filter="full")
    assert "no such group filter; there are all, mixed, half, and" in found


def test_a_rule_of_a_file_gets_its_options() -> None:
    path = f"{Path(__file__).parents[2]}/examples/my_rule.py:Rest"
    rest = load(config({"Rest": {"num_versions": 2}}, prompt_filter=path)).prompt_filter
    answers = [rest.admits("a", "", 0.5)]
    rest.observe(Outcome(1, "a", "", (1.0, 1.0), 10))
    rest.observe(Outcome(2, "b", "", (1.0, 0.0), 10))
    for version in (1, 2):
        answers += [rest.admits("a", "", 0.5), rest.admits("b", "", 0.5)]
        rest.on_version(version)
    # a rests for versions 0 and 1, b was not solved
    assert [*answers, rest.admits("a", "", 0.5)] == [True, False, True, False, True, True]
    assert "has no 'Reste'" in refused(prompt_filter=f"{path}e")


def test_the_docs_show_the_example_as_it_is() -> None:
    check_shown("my_rule.py", "dataflow-rules.md")


IMPORTED, MADE = "of package halves 1.2 cannot be imported:", "cannot be constructed:"


@pytest.mark.parametrize(
    ("value", "options", "reason"),
    [
        ("halves:Haff", {}, f"{IMPORTED} AttributeError: module 'halves' has no attribute 'Haff'"),
        ("halves:failing", {}, f"{MADE} KeyError: 'HALF_KEY'"),
        ("halves:strict", {"size": 2}, f"{MADE} ValueError: size: must be 3 or more, not 2"),
        ("halves:nothing", {}, "has no method keeps; it needs keeps"),
    ],
)
def test_a_package_whose_rule_cannot_be_made_is_named(
    site: Path, value: str, options: dict[str, Any], reason: str
) -> None:
    install(site, {"half": value})
    problem = refused({"half": options}, group_filter="half")
    assert problem == f"dataflow.group_filter='half' {reason}"


def test_a_rule_of_another_place_is_none_here(site: Path) -> None:
    install(site, {"half": "halves:Half"}, group="flowtrain.prompt_filters")
    assert "'half': there is no such group filter" in refused(group_filter="half")
    assert refused(prompt_filter="half").startswith(
        "dataflow.prompt_filter='half' has no method admits; it needs admits, observe"
    )
