"""What Prometheus gets from a real service over a real ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fake_groups
import httpx2
import pytest
from http_servers import running
from prometheus_text import samples

from flowtrain.rollouts.client import Client
from flowtrain.rollouts.contract import BatchRequest, Progress, Release, Unavailable
from flowtrain.rollouts.ledger.sql import SqliteDatabase
from flowtrain.rollouts.measures import Measures
from flowtrain.rollouts.service import Service
from flowtrain.utils.net import monitoring
from flowtrain.utils.net.credentials import Access, Role, TokenFile, issue

TOKEN = "a-token-of-the-tests"
_NAME = "flowtrain_dataflow"


def app(ledger: Any, access: Access | None = None, tokens: TokenFile | None = None) -> Any:
    measures = Measures(ledger, access or Access(TOKEN, tokens))
    service = Service(ledger, ledger.run, TOKEN, tokens, measures.ledger_seconds)
    return measures.monitor.watching(service)


def scrape(url: str, token: str = TOKEN) -> dict[str, float]:
    answer = httpx2.get(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"})
    assert answer.status_code == 200
    return samples(answer.text)


@pytest.fixture
def used(tmp_path: Path) -> Any:
    """A ledger with a trainer, a node, three groups, two of which are trained, and a lost lease."""
    clock = fake_groups.Clock()
    ledger = fake_groups.begun(
        tmp_path / "flow.sqlite", clock, trainer=fake_groups.planner(num_groups=2)
    )
    *pushed, lost, _ = fake_groups.lease(ledger, 4)
    for lease in pushed:
        fake_groups.push(ledger, lease)
    given_back = ((lost.work_item, lost.attempt),)
    ledger.release(Release("n1", given_back, "a reason\nof\x1b[2J 'mine'"))
    ledger.batch(BatchRequest("planner", 1))
    (lease,) = fake_groups.lease(ledger)
    fake_groups.push(ledger, lease)
    ledger.clock = clock
    yield ledger
    ledger.close()


def test_the_ledger_in_numbers(used: Any) -> None:
    with running(app(used)) as url:
        found = scrape(url)
    assert found[f"{_NAME}_up"] == 1
    assert found[f"{_NAME}_leases"] == 1
    assert found[f"{_NAME}_work_items{{state=committed}}"] == 3
    assert found[f"{_NAME}_groups{{policy=planner,state=trained}}"] == 2
    assert found[f"{_NAME}_groups{{policy=planner,state=waiting}}"] == 1
    assert found[f"{_NAME}_groups{{policy=planner,state=stale}}"] == 0
    assert found[f"{_NAME}_nodes{{state=alive}}"] == 1
    assert found[f"{_NAME}_lost_leases{{reason=released}}"] == 1
    assert found[f"{_NAME}_trainer_up{{policy=planner}}"] == 1
    assert found[f"{_NAME}_sampled_tokens_total{{policy=planner}}"] == 24
    assert found[f"{_NAME}_tokens{{fate=in_batches,policy=planner}}"] == 16
    assert found[f"{_NAME}_tokens{{fate=waiting,policy=planner}}"] == 8
    assert found[f"{_NAME}_ledger_time_seconds"] == used.clock.now


def test_nodes_fall_silent_and_are_gone(used: Any) -> None:
    for later, state in ((61.0, "silent"), (4000.0, "gone")):
        used.clock.now = 1000.0 + later
        with running(app(used)) as url:
            found = scrape(url)
        counted = {key: num for key, num in found.items() if key.startswith(f"{_NAME}_nodes{{")}
        assert counted.pop(f"{_NAME}_nodes{{state={state}}}") == 1 and not sum(counted.values())
        assert found[f"{_NAME}_trainer_up{{policy=planner}}"] == (later < 120)


def test_a_trainer_that_is_done_is_not_missed(used: Any) -> None:
    used.progress(Progress("planner", 1, 1, is_done=True))
    with running(app(used)) as url:
        assert f"{_NAME}_trainer_up{{policy=planner}}" not in scrape(url)


def test_no_name_that_others_choose_is_a_label(used: Any) -> None:
    with running(app(used)) as url, httpx2.Client() as stranger:
        before = scrape(url)
        for number in range(50):
            fake_groups.joined(used, f"node-{number}-of-a-stranger")
            stranger.post(f"{url}/v6/method-{number}-of-a-stranger")
        busy = scrape(url)
    with running(app(used)) as url:
        after = scrape(url)
    text = " ".join((*busy, *after))
    assert "stranger" not in text and "mine" not in text and "n1" not in text
    assert after[f"{_NAME}_nodes{{state=alive}}"] == 51
    assert busy[f"{_NAME}_requests_total{{method=other,status=401}}"] == 50
    assert len(after) == len(before)


def test_requests_by_method_with_the_time_of_the_ledger(used: Any) -> None:
    with running(app(used)) as url:
        with Client(url, TOKEN) as client:
            client.status()
            client.status()
        httpx2.post(f"{url}/v6/join", headers={"Authorization": f"Bearer {TOKEN}"}, content=b"?")
        first = scrape(url)
        with Client(url, TOKEN) as client:
            client.status()
        second = scrape(url)
    assert first[f"{_NAME}_requests_total{{method=status,status=200}}"] == 2
    assert first[f"{_NAME}_requests_total{{method=join,status=400}}"] == 1
    assert first[f"{_NAME}_ledger_seconds_count{{method=status}}"] == 2
    assert first[f"{_NAME}_sent_bytes_total{{method=status}}"] > 100
    assert second[f"{_NAME}_requests_total{{method=status,status=200}}"] == 3
    grown = [key for key in first if key.endswith("_total") or "_total{" in key]
    assert grown and all(second[key] >= first[key] for key in grown)


def test_any_token_of_the_file_may_scrape_and_a_monitors_no_more(used: Any, tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    token = issue(path, "prometheus", Role.MONITOR)
    with running(app(used, tokens=TokenFile(path))) as url:
        assert scrape(url, token)[f"{_NAME}_up"] == 1
        headers = {"Authorization": f"Bearer {token}"}
        for method in ("join", "lease", "push", "register", "batch", "progress"):
            answer = httpx2.post(f"{url}/v6/{method}", headers=headers)
            assert answer.status_code == 403, method
        assert httpx2.get(f"{url}/metrics").status_code == 401


def test_the_database_is_asked_once_however_often_one_scrapes(
    used: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitoring, "_FRESH_S", 60.0)  # however slow the machine is
    num_asked = 0

    class Counting:
        answers = staticmethod(used.answers)

        def status(self) -> Any:
            nonlocal num_asked
            num_asked += 1
            return used.status()

    measures = Measures(Counting(), None)
    with running(measures.monitor.watching(Service(used, used.run, TOKEN))) as url:
        for _ in range(10):
            httpx2.get(f"{url}/metrics")
            httpx2.get(f"{url}/health")
    assert num_asked == 1


def test_a_scrape_waits_for_no_writer_and_keeps_none_waiting(used: Any) -> None:
    with running(app(used)) as url, used.database.write() as transaction:
        transaction.run("UPDATE nodes SET seen_s = seen_s")
        assert scrape(url)[f"{_NAME}_up"] == 1
    with used.database.read() as transaction:  # as during a scrape that takes long
        transaction.all("SELECT * FROM groups")
        fake_groups.joined(used, "n2")
    assert "n2" in used.status()["nodes"]


def test_a_database_that_is_down_shows_and_that_it_is_back(
    used: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(database: Any) -> Any:
        raise Unavailable("postgresql://secret@host did not answer")

    with running(app(used)) as url:
        with monkeypatch.context() as patch:
            patch.setattr(SqliteDatabase, "read", down)
            answer = httpx2.get(f"{url}/health")
            assert (answer.status_code, answer.json()) == (503, {"status": "failing"})
            found = scrape(url)
        assert httpx2.get(f"{url}/health").status_code == 200
    assert found[f"{_NAME}_up"] == 0 and f"{_NAME}_leases" not in found


def test_a_report_that_takes_too_long_is_no_illness(used: Any, tmp_path: Path) -> None:
    """As where a statement of a report is cancelled: the database answers all the same."""

    class Slow:
        answers = staticmethod(used.answers)

        def status(self) -> Any:
            raise Unavailable("canceling statement due to statement timeout")

    measures = Measures(Slow(), None)
    with running(measures.monitor.watching(Service(used, used.run, TOKEN))) as url:
        assert samples(httpx2.get(f"{url}/metrics").text)[f"{_NAME}_up"] == 0
        assert httpx2.get(f"{url}/health").status_code == 200
