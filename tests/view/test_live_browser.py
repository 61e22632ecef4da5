"""The page that is served in a real browser, where there is one: what a run adds appears, what it
says stays text, and who may not look is told so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowtrain.metrics import MetricsLog, TrajectoryLog
from flowtrain.view import server as module
from flowtrain.view.server import Server
from tests.view.browser import Browser, needs_chromium
from tests.view.test_browser import HOSTILE, texts
from tests.view.test_view_server import served

pytestmark = needs_chromium


@pytest.fixture
def browser(shared_browser: Browser, monkeypatch: pytest.MonkeyPatch) -> Iterator[Browser]:
    """At the size of a desktop; the test fails if the page complains or asks another server."""
    monkeypatch.setattr(module, "_PAUSE", 0)
    shared_browser.complaints.clear()
    shared_browser.view(1280, 900)
    yield shared_browser
    shared_browser.leave()
    assert shared_browser.complaints == []


@contextmanager
def followed(browser: Browser, root: Path) -> Iterator[Server]:
    """Serves until the page is left, which would complain otherwise."""
    with served(root) as server:
        yield server
        browser.leave()


def shows(selector: str, text: str) -> str:
    return (
        f"[...document.querySelectorAll({json.dumps(selector)})]"
        f".some((x) => x.textContent.includes({json.dumps(text)}))"
    )


def test_what_a_run_adds_appears(browser: Browser, run: Path, runs: Any) -> None:
    with followed(browser, run) as server:
        browser.open(server.url)
        browser.until("document.querySelectorAll('.item').length === 38")
        assert browser.eval("location.hash + location.search") == "", "the token is gone"
        assert texts(browser, ".panel:first-child .legend b") == ["0.4"]
        log = TrajectoryLog(run, 0, 4)
        log.log(5, 4, [runs.group(0, 5, "a new one")])
        MetricsLog(run, 4, tensorboard=False).log(
            {"step": 5, "version": 5, "reward_mean": 0.75, "eval_reward": 0.5}
        )
        browser.until(shows(".tile b", "5 of 4"))
        browser.until("document.querySelectorAll('.item').length === 42")
        assert texts(browser, ".panel:first-child .legend b") == ["0.75", "0.5"]
        browser.eval("(location.hash = 'train.2.1.3')")
        log.log(6, 5, [runs.group(0, 6, "another one")])
        browser.until("!document.querySelector('.state button').hidden")
        assert len(texts(browser, ".item")) == 42, "who reads is not disturbed"
        browser.eval("document.querySelector('.state button').click()")
        browser.until("document.querySelectorAll('.item').length === 46")
        assert texts(browser, ".crumbs span")[:2] == ["training", "step 2"]


def test_a_run_is_waited_for_and_hostile_text_stays_text(
    browser: Browser, tmp_path: Path, runs: Any
) -> None:
    with followed(browser, tmp_path / "run") as server:
        browser.open(server.url)
        browser.until(shows(".state", "there is no folder"))
        run = runs.make(HOSTILE)
        TrajectoryLog(run, 0, 4).log(5, 4, [runs.branched(HOSTILE)])
        browser.until("document.querySelectorAll('.item').length === 43")
        for fragment in ("train.2.1.3", "group.train.2.1", "group.train.5.0"):
            browser.eval(f"(location.hash = {fragment!r})")
            browser.until("document.querySelector('.one h2')")
            assert "<img src=x onerror=" in texts(browser, ".one h2")[0]
            assert browser.eval("window.pwned === undefined")
            assert browser.eval("document.querySelectorAll('img, b b, script').length") == 2
    assert all("503" in each for each in browser.complaints)
    browser.complaints.clear()


def test_a_wrong_token_is_told(browser: Browser, run: Path) -> None:
    with followed(browser, run) as server:
        browser.open(server.url.partition("#")[0], "#token=wrong")
        browser.until(shows(".state .wrong", "the token is missing or wrong"))
        assert texts(browser, ".item") == [] and texts(browser, ".tile") == []
        assert all("401" in each for each in browser.complaints)
        browser.eval(f"(location.hash = {server.url.partition('#')[2]!r})")
        browser.until("document.querySelectorAll('.item').length === 38")
        browser.complaints.clear()


def test_a_click_that_leaves_the_page_need_not_answer(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<p>here</p>")
    browser.open(page.as_uri())
    assert browser.eval("new Promise(() => location.assign('about:blank'))") is None
    browser.until("location.protocol === 'about:'")


def test_a_table_leads_to_its_runs(browser: Browser, tmp_path: Path, runs: Any) -> None:
    runs.make(name="one"), runs.make(name="two <b>")
    with followed(browser, tmp_path) as server:
        browser.open(server.url)
        browser.until("document.querySelectorAll('.runs tbody').length === 2")
        assert sorted(texts(browser, ".runs .name")) == ["one", "two <b>"]
        assert len(texts(browser, ".panel")) == 1 and len(texts(browser, ".legend b")) == 2
        browser.eval("document.querySelector('.pick input').click()")
        assert len(texts(browser, ".legend b")) == 1
        MetricsLog(tmp_path / "one", 4, tensorboard=False).log(
            {"step": 5, "version": 5, "reward_mean": 0.75, "eval_reward": 0.5}
        )
        browser.until(shows(".runs td", "0.750"))
        browser.eval("[...document.querySelectorAll('.runs a')].at(-1).click()")
        browser.until("document.querySelectorAll('.item').length === 38")
        browser.eval("document.querySelector('.state a').click()")
        browser.until("document.querySelectorAll('.runs tbody').length === 2")
