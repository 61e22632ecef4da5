"""The page in a real browser: it draws and filters, and hostile text stays text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from flowtrain.logging import TrajectoryLog
from flowtrain.logging.page.page import build_page
from tests.logging.page.browser import Browser, needs_chromium
from tests.logging.page.conftest import RunMaker

HOSTILE = (
    "</script><img src=x onerror='window.pwned = 1'><script>window.pwned = "
    "1</script>\u2028\ud800\x1b[31m <b>bold</b>"
)
MINUS = "\u2212"

pytestmark = needs_chromium


@pytest.fixture
def browser(shared_browser: Browser) -> Iterator[Browser]:
    """At the size of a desktop; the test fails if the page complains or fetches anything."""
    shared_browser.complaints.clear()
    shared_browser.view(1280, 900)
    yield shared_browser
    assert shared_browser.complaints == []


@pytest.fixture(scope="module")
def page(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(build_page(RunMaker(tokenizer, path.parent).make(), 100), encoding="utf-8")
    return path


def texts(browser: Browser, selector: str) -> list[str]:
    found = browser.eval(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((x) => x.textContent)"
    )
    assert isinstance(found, list)
    return found


def test_a_run_is_drawn(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.eval("document.title") == "run · flowtrain" and texts(browser, "h1") == ["run"]
    assert texts(browser, ".tile b") == ["4 of 4", "1 \u2013 4", "38", "8 s"]
    assert texts(browser, ".notes li") == []
    assert texts(browser, ".panel h3") == ["Reward", "KL", "Tool use", "Seconds per step"]
    found = browser.eval(
        "document.querySelector('.panel path').getAttribute('d').match(/[ML]/g).join('')"
    )
    assert found == "MLLL"
    assert len(texts(browser, ".item")) == 38
    assert texts(browser, ".count span") == ["38 of 38 rollouts"]
    assert texts(browser, ".turn h3") == ["Turn 1 Search", "Turn 2 Search", "Turn 3 Search"]


def test_the_curves_tell_their_values(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert texts(browser, ".panel:first-child .legend b") == ["0.4"]
    browser.hover(".panel:nth-child(2) svg")
    assert texts(browser, ".panel:first-child .legend b") in (["0.2"], ["0.3"])
    assert len(texts(browser, ".cross")) == 4 and texts(browser, "#curves .above span")[
        0
    ].startswith("Step ")


def test_times_beside_a_curve_are_round_and_whole(
    browser: Browser, run: Path, tmp_path: Path
) -> None:
    log, path = run / "metrics.jsonl", tmp_path / "times.html"
    text = log.read_text()
    for times, top in ((2.0, "2 s"), (75.0, "75 s"), (315.0, "6 min"), (40000.0, "15 h")):
        log.write_text(text.replace('"collect_s": 2.0', f'"collect_s": {times}'))
        path.write_text(build_page(run, 1))
        browser.open(path)
        ticks = texts(browser, ".panel:last-child g text")
        assert ticks[0].startswith("0 ") and ticks[-1] == top
        left = "document.querySelectorAll('.panel g text')"
        assert browser.eval(f"Math.min(...[...{left}].map((text) => text.getBBox().x))") >= 0


def test_filters(browser: Browser, page: Path) -> None:
    browser.open(page)

    def left(name: str, value: str) -> int:
        browser.eval("document.querySelector('.count button').click()")
        label = {
            "outcome": "Any outcome",
            "step": "All steps",
            "split": "All splits",
            "kind": "All kinds",
            "search": "Search",
        }[name]
        field = f"document.querySelector('[aria-label=\"{label}\"]')"
        event = "input" if name == "search" else "change"
        browser.eval(
            f"({field}.value = {json.dumps(value)}, {field}.dispatchEvent(new Event('{event}')))"
        )
        assert texts(browser, ".count span") == [f"{len(texts(browser, '.item'))} of 38 rollouts"]
        return len(texts(browser, ".item"))

    # In step s, s + index of the four rollouts of a group are right, modulo 5; three of the six
    # held-out ones.
    assert left("outcome", "right") == (1 + 2) + (2 + 3) + (3 + 4) + (4 + 0) + 3
    assert left("step", "2") == 8
    assert left("split", "held-out") == 6
    assert left("kind", "lookup") == 38
    assert left("search", "CHAD Capital") == 38 and left("search", "train.3.") == 8
    assert left("search", "train.2.1.3") == 1
    assert left("search", "nowhere") == 0


def test_keys_and_links(browser: Browser, page: Path) -> None:
    browser.open(page, "#train.2.1.3")
    where = "location.hash"
    assert texts(browser, ".crumbs span")[:2] == ["training", "step 2"]
    assert browser.eval("document.querySelector('.item[aria-current]').hash") == "#train.2.1.3"
    browser.press("j")
    assert browser.eval(where) == "#train.3.0.0"
    browser.press("k")
    assert browser.eval(where) == "#train.2.1.3"
    browser.press("g")
    assert browser.eval(where) == "#group.train.2.1" and len(texts(browser, ".member")) == 4
    assert "3 of 4 right, mean reward 0.750" in texts(browser, ".rows dd")[1]
    expected = ["✓ 1", "✓ 1", "✓ 1", "✗ 0"]
    assert [text[:3] for text in texts(browser, ".member .split span:first-child")] == expected
    found = texts(browser, ".member .split span:last-child")
    assert found == ["advantage +0.50"] * 3 + [f"advantage {MINUS}0.50"]
    browser.press("/")
    assert browser.eval("document.activeElement.placeholder") == "Search"
    browser.press("j")
    assert browser.eval(where) == "#group.train.2.1", "typed, not followed"
    browser.open(page, "#no-such-rollout%zz")
    assert len(texts(browser, ".turn")) == 3


@pytest.fixture
def branched(runs: Any, tmp_path: Path) -> Path:
    run = runs.make()
    TrajectoryLog(run, 0, 4).log(5, 4, [runs.branched("Chad?")])
    path = tmp_path / "branched.html"
    path.write_text(build_page(run, 100), encoding="utf-8")
    return path


def test_roots_show_where_others_left_and_how_these_went_on(
    browser: Browser, branched: Path
) -> None:
    """A branch stands under its root, from its first own token on."""
    browser.open(branched, "#group.train.5.0")
    assert texts(browser, ".member") == [] and len(texts(browser, ".path.root")) == 2
    found = texts(browser, ".path > .num > a")
    assert found == ["✓ 1", "✗ 0", "✗ 0", "✗ 0", "✓ 1"], "by their place in the root"
    assert texts(browser, ".root .fork") == ["⑂ 2.5", "⑂ 3", "⑂ 1.25"]
    forks = browser.eval("[...document.querySelectorAll('.fork')].map((x) => x.hash)")
    assert forks == ["#train.5.0.2", "#train.5.0.4", "#train.5.0.3"]
    whole = "Chad?"
    first, second = (
        browser.eval(
            f"[...document.querySelectorAll('.root')[{n}].querySelectorAll('.tokens')].map((x) => "
            "x.innerText)"
        )
        for n in (0, 1)
    )
    assert "⑂" not in first[0] + first[2]
    assert "".join(first[1].split("⑂ 2.5")).split() == first[0].split()
    assert second[0].startswith("⑂ 3")
    assert second[0].count("⑂") == 2
    assert second[1].split() == first[0].split()
    own = browser.eval(
        "[...document.querySelectorAll('.branch')].map((x) => "
        "[...x.querySelectorAll('.tokens')].map((y) => y.innerText))"
    )
    found = [len(turns) for turns in own]
    assert found == [2, 3, 3], "turns that were taken over are not told again"
    assert first[1].endswith(own[0][0])
    assert own[1][0].split() == first[0].split()
    assert second[0].endswith(own[2][0])
    assert whole in first[0] and len(own[2][0]) < len(own[1][0])
    assert [
        text.endswith(f"Answer branch {n}")
        for text, n in zip(texts(browser, ".branch"), (2, 4, 3), strict=True)
    ] == [True] * 3
    browser.eval("document.querySelector('.fork').click()")
    assert browser.eval("location.hash") == "#train.5.0.2"
    assert "left another rollout in turn 2, before token 2; score 2.5" in texts(browser, ".rows dd")
    browser.eval("document.querySelector('.rows dd a').click()")
    assert browser.eval("location.hash") == "#train.5.0.0"


def test_tokens_tell_their_log_prob(browser: Browser, page: Path) -> None:
    browser.open(page, "#train.2.1.3")
    browser.eval("document.querySelector('.turn').scrollIntoView()")
    browser.hover(".tokens span:nth-child(4)")
    tip = dict(
        zip(
            texts(browser, "#tip span:first-child"),
            texts(browser, "#tip span:last-child"),
            strict=True,
        )
    )
    assert tip["sampler"].startswith(f"{MINUS}0.03000")
    assert tip["weights"].startswith("version 7, tokens 3 to ")
    strengths = browser.eval(
        "[...document.querySelector('.tokens').children].map((x) => "
        "+x.style.getPropertyValue('--s'))"
    )
    assert strengths[0] == 0 and strengths == sorted(strengths) and strengths[3] == 0.005
    color = "getComputedStyle(document.querySelector('.tokens span:nth-child(4)')).backgroundColor"
    assert browser.eval(color) != browser.eval(color.replace("4", "1"))


def test_of_a_prompt_what_is_new_is_told(browser: Browser, page: Path) -> None:
    browser.open(page, "#train.2.1.3")
    question = "What is the capital of Chad? 2"
    first, second, third = (texts(browser, f".turn:nth-of-type({n}) dd")[0] for n in (2, 3, 4))
    assert first == f"Question: {question}\nSub-Goal:"
    assert second.endswith(f" tokens as in turn 1, then\n1. {question}\nSub-Goal:")
    assert third.endswith(" tokens as in turn 2, then\n2. more\nSub-Goal:")


def test_hostile_text_stays_text(browser: Browser, runs: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    run = runs.make(HOSTILE)
    TrajectoryLog(run, 0, 4).log(5, 4, [runs.branched(HOSTILE)])
    path.write_text(build_page(run, 100), encoding="utf-8", errors="backslashreplace")
    for fragment in ("#train.2.1.3", "#group.train.2.1", "#group.train.5.0"):
        browser.open(path, fragment)
        browser.eval("document.querySelectorAll('details').forEach((x) => { x.open = true; })")
        assert browser.eval(
            "window.pwned === undefined && document.querySelectorAll('img, b b, script').length "
            "=== 2"
        )
        assert "<img src=x onerror=" in texts(browser, ".one h2")[0]
        assert "␛[31m" in texts(browser, ".one h2")[0]


@pytest.mark.parametrize(
    ("fragment", "dark"), [("", True), ("#train.2.1.3", False), ("#group.train.2.1", False)]
)
def test_a_phone_shows_one_thing_at_a_time_and_never_scrolls_sideways(
    browser: Browser, page: Path, fragment: str, dark: bool
) -> None:
    browser.view(390, 844, dark=dark, touch=True)
    browser.open(page, fragment)
    assert browser.eval("document.documentElement.scrollWidth") == 390
    shown = [
        browser.eval(f"document.querySelector('{part}').offsetHeight > 0")
        for part in (".side", ".one")
    ]
    assert shown == ([False, True] if fragment else [True, False])
    assert browser.eval("scrollY === 0") == (not fragment)
    background = browser.eval("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(22, 22, 20)" if dark else "rgb(247, 246, 243)")


def test_a_run_of_nothing_is_drawn_too(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    path = tmp_path / "page.html"
    path.write_text(build_page(tmp_path, 10), encoding="utf-8")
    browser.open(path, "#train.1.1.1")
    assert len(texts(browser, ".notes li")) == 2 and texts(browser, ".panel, .item") == []
    browser.press("j")
