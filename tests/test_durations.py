"""The mark `slow`: what a test costs, and what is refused without the mark."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import durations

pytest_plugins = ("pytester",)

TESTS = """
import pytest

@pytest.mark.smoke
def test_first(): pass

def test_plain(): pass

@pytest.mark.smoke
def test_smoke(): pass

@pytest.mark.clock
def test_clock(): pass

def test_recorded(): pass
"""


@pytest.fixture
def run(
    pytester: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., pytest.RunResult]:
    """Runs TESTS where nothing is quick; one of them is recorded as slow."""
    file = tmp_path / "durations.json"
    file.write_text(json.dumps({"test_some.py": {"test_recorded": 1.0, "test_smoke": 1.0}}))
    monkeypatch.setattr(durations, "FILE", file)
    monkeypatch.setattr(durations, "SLOW_S", 0.0)
    monkeypatch.setattr(durations, "REFUSED_S", 0.0)
    pytester.makepyfile(test_some=TESTS)
    marks = ["slow", "smoke", "clock"]
    pytester.makeini("[pytest]\nmarkers =\n" + "".join(f"    {mark}\n" for mark in marks))
    return lambda *words: pytester.runpytest_inprocess(
        *words, "-p", "no:cacheprovider", plugins=[durations]
    )


def test_recorded_tests_are_slow_unless_they_are_the_smoke_of_their_kind(
    run: Callable[..., pytest.RunResult],
) -> None:
    run("-m", "slow").assert_outcomes(passed=1, deselected=4)
    run("-m", "not slow").assert_outcomes(passed=4, deselected=1)


def test_a_slow_test_without_a_mark_is_refused(run: Callable[..., pytest.RunResult]) -> None:
    run().assert_outcomes(passed=5)
    result = run("--refuse-slow")
    result.assert_outcomes(passed=5, errors=1)
    result.stdout.fnmatch_lines(["*test_plain*", "*without the mark `slow`: make durations*"])


def test_what_takes_long_is_recorded_and_the_faster_of_two_runs_counts(
    run: Callable[..., pytest.RunResult],
) -> None:
    run("--record-slow", "first")
    (first,) = json.loads(durations.FILE.read_text()).values()
    names = ("first", "plain", "smoke", "clock", "recorded")
    assert first.keys() == {f"test_{name}" for name in names}
    durations.FILE.write_text(json.dumps({"test_some.py": {"test_plain": 7.0, "test_gone": 3.0}}))
    run("--record-slow", "again", "-m", "slow")
    (again,) = json.loads(durations.FILE.read_text()).values()
    assert again["test_plain"] < 1.0 and again["test_gone"] == 3.0


def test_a_fixture_of_many_tests_is_shared_out() -> None:
    reports = {
        "a": {"own": 1.0, "made": {"f": 4.0}, "uses": ["f"]},
        "b": {"own": 0.5, "made": {}, "uses": ["f"]},
        "c": {"own": 0.1, "made": {"f": 6.0}, "uses": ["f"]},
        "d": {"own": 0.2, "made": {}, "uses": []},
    }
    found = durations._costs(reports)
    assert found == pytest.approx({"a": 3.0, "b": 2.5, "c": 2.1, "d": 0.2}), "6 s by three tests"
