"""What every test costs, and the mark `slow` for those above `SLOW_S`.

`make durations` records seconds in durations.json. A test that stands there is `slow`, unless it is
marked `smoke`: one of each expensive kind stays in `make test`. With --refuse-slow a test without
either mark fails when it takes twenty times as long. A test costs its own time and its share of the
fixtures that it has in common with others.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter  # by its own name, which tests of virtual time leave alone
from typing import Any

import pytest

SLOW_S = 0.25
REFUSED_S = 20 * SLOW_S
"""Other work may share the cores, and the first test of a process imports for the next ones."""
FILE = Path(__file__).with_name("durations.json")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("durations")
    help_ = f"fail tests of more than {REFUSED_S} s that are not marked slow"
    group.addoption("--refuse-slow", action="store_true", help=help_)
    help_ = "record in tests/durations.json which tests are slow; again: the faster of two runs"
    group.addoption("--record-slow", choices=["first", "again"], help=help_)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Costs(config))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = _read()
    for item in items:
        is_slow = item.nodeid in slow or _starts_all(item)
        if is_slow and item.get_closest_marker("smoke") is None:
            item.add_marker(pytest.mark.slow)


class _Costs:
    """Measure tests. Each process of a run measures its own; the first adds them up."""

    def __init__(self, config: pytest.Config) -> None:
        self._refuse = config.getoption("--refuse-slow")
        self._record = config.getoption("--record-slow")
        self._made: dict[str, float] = {}
        self._start = 0.0
        self._begun: set[Path] = set()
        self._reports: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        start = perf_counter()
        yield
        if fixturedef.scope != "function":
            self._made[_name(fixturedef)] = perf_counter() - start

    def pytest_runtest_logstart(self) -> None:
        self._start, self._made = perf_counter(), {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[None]:
        outcome = yield
        report = outcome.get_result()
        if call.when != "teardown" and report.passed:
            return
        own = perf_counter() - self._start - sum(self._made.values())
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        uses = {_name(each[-1]) for each in fixtures if each[-1].scope != "function"}
        cost = {"own": own, "made": self._made, "uses": sorted(uses)}
        report.user_properties.append(("cost", cost))
        # The first test of a file may import what the others use.
        is_first = item.path not in self._begun
        self._begun.add(item.path)
        marks = ("slow", "smoke", "clock")
        is_marked = any(map(item.get_closest_marker, marks))
        is_refused = self._refuse and own > REFUSED_S and not (is_marked or is_first)
        if is_refused and report.passed:
            report.outcome = "failed"
            report.longrepr = f"took {own:.1f} s without the mark `slow`: make durations"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, cost in report.user_properties:
            if name == "cost":
                self._reports[report.nodeid] = cost

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._record and not hasattr(session.config, "workerinput"):
            costs = _costs(self._reports)
            before = _read() if self._record == "again" else costs
            _write({**before, **{t: min(s, before.get(t, s)) for t, s in costs.items()}})


def _costs(reports: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Seconds by test, with what it shares spread over all that use it."""
    users = Counter(name for report in reports.values() for name in report["uses"])
    made: dict[str, list[float]] = defaultdict(list)
    for report in reports.values():
        for name, seconds in report["made"].items():
            made[name].append(seconds)
    shares = {name: max(times) / users[name] for name, times in made.items() if users[name]}
    return {
        test: report["own"] + sum(shares.get(name, 0.0) for name in report["uses"])
        for test, report in reports.items()
    }


def _starts_all(item: Any) -> bool:
    """Whether a test needs a process that imports everything: seconds and half a gigabyte."""
    servers = item._fixtureinfo.name2fixturedefs.get("server", ())
    is_run = any(each.func.__module__ == "cli_runs" for each in servers)
    return is_run or item.get_closest_marker("dist") is not None


def _name(fixture: Any) -> str:
    return f"{fixture.baseid}::{fixture.argname}"


def _read() -> dict[str, float]:
    """Seconds by test, of those that are slow."""
    found: dict[str, dict[str, float]] = json.loads(FILE.read_text(encoding="utf-8"))
    return {f"{path}::{name}": s for path, tests in found.items() for name, s in tests.items()}


def _write(costs: dict[str, float]) -> None:
    slow: dict[str, dict[str, float]] = defaultdict(dict)
    for test, seconds in sorted(costs.items()):
        if seconds > SLOW_S:
            path, _, name = test.partition("::")
            slow[path][name] = round(seconds, 1 if seconds > 1 else 2)
    FILE.write_text(json.dumps(slow, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
