"""The dashboard and the alerts name metrics that there are, and a real Prometheus takes them."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from http_servers import running
from ports import free_port
from processes import run_program

from flowtrain.rollouts.measures import Measures
from flowtrain.rollouts.service import Service
from flowtrain.utils.net.credentials import Access
from flowtrain.utils.net.monitoring import Monitor
from flowtrain.weights import WeightStore
from flowtrain.weights.stores.serve import make_app
from flowtrain.weights.stores.serve import monitor as weights_monitor
from tests.rollouts import fake_groups

ROOT = Path(__file__).resolve().parents[1]
BOARD = json.loads((ROOT / "deploy" / "grafana" / "flowtrain.json").read_text())
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
SCALING = ROOT / "deploy" / "kubernetes" / "scaling.yaml"
SCRAPES = ROOT / "deploy" / "prometheus" / "prometheus.yml"
TOKEN = "a-token-of-the-tests"
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
[TRIGGER] = yaml.safe_load(SCALING.read_text())["spec"]["triggers"]
WANTED = TRIGGER["metadata"]["query"]
"""The number of nodes that there should be."""
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def apps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Monitor, Any]]]:
    """Monitors and applications of a service and a server of weights."""
    folder = tmp_path_factory.mktemp("dashboard")
    ledger = fake_groups.begun(folder / "flow.sqlite")
    for lease in fake_groups.lease(ledger, 2):
        fake_groups.push(ledger, lease)
    store, readers = WeightStore(folder), Access(TOKEN)
    measures = Measures(ledger, readers)
    weights = weights_monitor(store, readers)
    service = Service(ledger, ledger.run, TOKEN, seconds=measures.ledger_seconds)
    yield {"dataflow": (measures.monitor, service), "weights": (weights, make_app(store, TOKEN))}
    ledger.close()


def exported(apps: dict[str, tuple[Monitor, Any]]) -> set[str]:
    ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    return {
        family.name + end
        for monitor, _ in apps.values()
        for family in monitor.registry.collect()
        for end in ends[family.type]
    }


def named(expression: str) -> set[str]:
    return set(re.findall(r"\bflowtrain_[a-z0-9_]+", expression))


def test_names_follow_the_conventions(apps: Any) -> None:
    names = exported(apps)
    assert len(names) > 25
    for monitor, _ in apps.values():
        for family in monitor.registry.collect():
            assert re.fullmatch(r"flowtrain_(dataflow|weights)_[a-z_]+", family.name)
            assert family.documentation.endswith("."), family.name
            assert not family.name.endswith(("_total", "_count", "_sum", "_bucket", "_s"))


def test_the_dashboard_names_what_there_is(apps: Any) -> None:
    names = exported(apps)
    for expression in EXPRESSIONS:
        assert named(expression) and named(expression) <= names, expression


def test_the_alerts_name_what_there_is(apps: Any) -> None:
    names = exported(apps)
    for rule in RULES:
        assert named(rule["expr"]) <= names, rule["alert"]
        assert rule["annotations"]["summary"].endswith(".")
    assert sum(bool(named(rule["expr"])) for rule in RULES) >= 4


def test_the_number_of_nodes_follows_from_what_there_is(apps: Any) -> None:
    found = named(WANTED)
    assert found == {"flowtrain_dataflow_nodes_target"} <= exported(apps)


def test_the_dashboard_is_well_formed() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids) and BOARD["uid"] == BOARD["title"] == "flowtrain"
    (variable,) = BOARD["templating"]["list"]
    assert (variable["name"], variable["query"]) == ("datasource", "prometheus")
    taken = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in PANELS:
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert {source["uid"] for source in sources} == {"${datasource}"}
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) and all(t["legendFormat"] for t in panel["targets"])


def test_every_metric_is_described_on_the_page(apps: Any) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    for monitor, _ in apps.values():
        for family in monitor.registry.collect():
            name = family.name + ("_total" if family.type == "counter" else "")
            assert f"`{name.removeprefix('flowtrain_')}" in page, name


def test_promtool_takes_the_rules(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("there is no promtool")
    shutil.copy(ALERTS, tmp_path)
    (tmp_path / "token").write_text(TOKEN)
    text = SCRAPES.read_text().replace("/etc/prometheus/flowtrain-token", f"{tmp_path}/token")
    (tmp_path / "prometheus.yml").write_text(text)
    done = run_program(["promtool", "check", "config", str(tmp_path / "prometheus.yml")])
    assert done.returncode == 0, done.stdout + done.stderr


def wait_until(is_so: Any) -> None:
    deadline = time.monotonic() + 40
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@contextlib.contextmanager
def prometheus(folder: Path, urls: dict[str, str]) -> Iterator[httpx2.Client]:
    """A real Prometheus that scrapes these addresses with the config of the repository."""
    (folder / "token").write_text(TOKEN)
    shutil.copy(ALERTS, folder)
    config = yaml.safe_load(SCRAPES.read_text())
    config["global"]["scrape_interval"] = config["global"]["evaluation_interval"] = "1s"
    (job,) = config["scrape_configs"]
    job["authorization"]["credentials_file"] = str(folder / "token")
    for target in job["static_configs"]:
        target["targets"] = [urls[target["labels"]["role"]].removeprefix("http://")]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    words = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "log").open("w") as log, subprocess.Popen(words, stderr=log, stdout=log) as ran:
        try:
            with httpx2.Client(base_url=f"http://{address}/api/v1") as client:
                yield client
        finally:
            ran.terminate()


def test_a_real_prometheus_evaluates_every_expression(
    apps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("there is no prometheus")
    monkeypatch.setenv("no_proxy", "*")
    with contextlib.ExitStack() as stack:
        urls = {
            role: stack.enter_context(running(monitor.watching(app)))
            for role, (monitor, app) in apps.items()
        }
        client = stack.enter_context(prometheus(tmp_path, urls))

        def query(expression: str) -> list[Any]:
            answer = client.get("/query", params={"query": expression}).json()
            assert answer["status"] == "success", (expression, answer)
            return answer["data"]["result"]

        def is_scraped() -> bool:
            with contextlib.suppress(httpx2.ConnectError, KeyError, ValueError):
                return len(query('up{job="flowtrain"} == 1')) == 2
            return False

        wait_until(is_scraped)
        for expression in (*EXPRESSIONS, WANTED):
            query(expression)
        (found,) = query('flowtrain_dataflow_groups{state="waiting"}')
        assert found["value"][1] == "2"
        groups = client.get("/rules").json()["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        wait_until(
            lambda: all(
                rule["health"] == "ok"
                for group in client.get("/rules").json()["data"]["groups"]
                for rule in group["rules"]
            )
        )
        assert len(rules) == len(RULES)
