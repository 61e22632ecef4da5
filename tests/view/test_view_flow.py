"""The dataflow's status on the page: from a service, or the word that there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from http_servers import running

from flowtrain.dataflow.service import Service
from flowtrain.types import UserError
from flowtrain.view.flow import DataflowWatch, check_own, status_tables
from flowtrain.view.server import View
from tests.dataflow import fake_groups


def status(**changes: Any) -> dict[str, Any]:
    node = {"busy_s": 3.0, "waited_s": 1.0, "num_leased": 2, "num_groups": 1234}
    node |= {"groups_per_s": 0.5, "versions": {"planner": 7}, "seen_s_ago": 0.4}
    policy = {"state": "live", "version": 7, "step": 8, "max_staleness": 2, "seen_s_ago": 1.0}
    policy |= {"batch": {"staleness_mean": 1.25, "staleness_max": 2}, "busy_s": 0.0}
    policy |= {"waited_s": 0.0, "tokens": {"tokens/sampled": 5.0, "tokens/to/trained": 5.0}}
    policy |= {"groups": {"fresh": {"num": 3}, "stale": {"num": 4}}}
    items = {"leased": 2, "waiting": 1, "committed": 9, "failed": 0}
    return {
        "run": "r",
        "work_items": items,
        "tasks": {"asked": 20, "admitted": 12},
        "groups_per_s": 1.0,
        "tokens_per_s": 1000.0,
        "lost_leases": {"ran out": 2},
        "policies": {"planner": policy},
        "nodes": {"n1": node, "n2": {**node, "seen_s_ago": 300.0}},
        "evaluations": [],
        "audits": {"groups": {}, "distrusted": {"n3": "it lied"}},
        **changes,
    }


def test_nodes_policies_leases_and_tokens() -> None:
    found = status_tables(status())
    nodes, policies = found["tables"]
    assert [row["cells"] for row in nodes["rows"]] == [
        ["n1", "alive", "0 s ago", "2", "1,234", "0.50", "25%", "planner 7"],
        ["n2", "silent", "5 min ago", "2", "1,234", "0.50", "25%", "planner 7"],
    ]
    assert [row["is_silent"] for row in nodes["rows"]] == [False, True]
    assert policies["rows"][0]["cells"] == [
        *("planner", "live", "1 s ago", "8", "7", "3", "4", "1.2, 2", "2", "-")
    ]
    text = "\n".join(found["lines"])
    for part in (
        "2 under way, 1 waiting to be taken, 9 done, 0 failed",
        "12 of 20 prompts",
        "ended without a group: 2 ran out",
        "tokens of planner: 5 sampled = 5 trained",
        "n3 is shut out: it lied",
    ):
        assert part in text
    assert status_tables(status(nodes={}, policies={}))["tables"][0]["rows"] == []


def test_a_service_that_cannot_be_reached_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowtrain.view.flow._WAIT_S", 0.3)
    watch = DataflowWatch("http://127.0.0.1:9")
    problem = watch.answer()["problem"]
    assert problem.startswith("The dataflow cannot be reached: http://127.0.0.1:9 did not answer")
    watch.close()


def test_the_token_goes_where_a_person_says_and_no_further(run: Path) -> None:
    """A folder, which may be of somebody else, does not decide who gets it."""
    for url in ("http://evil.example:8400", "http://127.0.0.1.evil.example", "http://10.0.0.1:1"):
        with pytest.raises(UserError, match=f"--dataflow {url}"):
            check_own(url)
    for url in ("http://127.0.0.1:8400", "http://localhost:1", "http://[::1]:1"):
        check_own(url)
    config = run / "config.toml"
    config.write_text(f'{config.read_text()}\n[dataflow]\nurl = "http://evil.example:8400"\n')
    view = View(run, 10)
    assert b"--dataflow http://evil.example:8400" in view.answer("/api/dataflow", {})
    view.close()


def test_a_run_that_is_complete_does_not_miss_its_service(run: Path) -> None:
    config = run / "config.toml"
    config.write_text(f'{config.read_text()}\n[dataflow]\nurl = "http://127.0.0.1:9"\n')

    def is_told(asked: str = "") -> bool:
        view = View(run, 10, asked)
        answer = view.answer("/api/dataflow", {})
        view.close()
        return b"problem" in answer

    assert not is_told() and is_told("http://127.0.0.1:9")
    (run / "summary.json").unlink()
    assert is_told()


def test_a_real_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    clock = fake_groups.Clock()
    ledger = fake_groups.ledger(tmp_path / "flow.sqlite", clock)
    fake_groups.joined(ledger)
    ledger.register(fake_groups.planner(num_groups=2, max_staleness=0))
    clock.now += 150
    with running(Service(ledger, ledger.run, "of-the-tests")) as url:
        for token, problem in (("of-the-tests", ""), ("wrong", "HTTP 401")):
            monkeypatch.setenv("FLOWTRAIN_TOKEN", token)
            watch = DataflowWatch(url)
            found = watch.answer()
            assert problem in found.get("problem", "") and bool(problem) == ("problem" in found)
            if not problem:
                nodes, policies = found["tables"]
                assert nodes["rows"][0]["cells"][:3] == ["n1", "silent", "2 min ago"]
                assert policies["rows"][0]["cells"][:2] == ["planner", "silent"]
            watch.close()
    ledger.close()
