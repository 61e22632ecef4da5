"""Rollouts that try to be more than text in the page of a run: markup, links, unseen characters."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest

from flowtrain.logging.page.page import build_page, render
from tests.attacks.composer import PIECES
from tests.attacks.tally import Tally
from tests.attacks.test_terminal import RAW, TEXTS
from tests.logging.page.conftest import RunMaker, runs, tokenizer  # noqa: F401 - fixtures

SURFACE = "hostile rollouts in the viewer"
MARKUP = (*PIECES["markup"], *TEXTS)


class Tags(HTMLParser):
    """Collects what a browser would take for markup."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[object] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, sorted(name for name, _ in attrs)))

    def handle_comment(self, data: str) -> None:
        self.found.append(data)


def data_of(page: str) -> dict[str, object]:
    (block,) = re.findall(r'id="data">(.*?)</script>', page, re.DOTALL)
    return dict(json.loads(block))


def test_what_a_rollout_says_is_data(runs: RunMaker, tally: Tally) -> None:  # noqa: F811
    plain = Tags(build_page(runs.make("plain", "plain"), 100)).found
    through = []
    for number, text in enumerate(MARKUP):
        page = build_page(runs.make(text, f"run{number}"), 100)
        has_data = data_of(page)["rollouts"][0]["question"] == f"{text} 1"
        if Tags(page).found != plain or set(page) & RAW or not has_data:
            through.append(text)
    tally.add(SURFACE, len(MARKUP), len(through))
    assert through == []


def test_any_data_is_data(campaign: Iterator[int], tally: Tally) -> None:
    empty: dict[str, object] = {"name": "run"}
    plain = Tags(render(empty)).found
    for seed in campaign:
        rng = random.Random(seed)
        through = []
        for _ in range(100):
            parts = rng.choices([*MARKUP, *RAW, "<", ">", "/", "script", "x"], k=8)
            text = "".join(parts)
            data = {"name": text, text: {"x": [text]}}
            page = render(data)
            if Tags(page).found != plain or set(page) & RAW or data_of(page) != data:
                through.append(text)
        tally.add(SURFACE, 100, len(through))
        assert through == [], f"seed {seed}"


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js here: apt-get install nodejs")
def test_what_is_not_seen_is_shown(tmp_path: Path, tally: Tally) -> None:
    """The page's own function, without a browser."""
    script = (files("flowtrain.logging.page") / "base.js").read_text(encoding="utf-8")
    lines = [
        line for line in script.splitlines() if re.match("const (UNSEEN|symbol|visible) ", line)
    ]
    texts = [*sorted(RAW), *TEXTS, "a\ud800b", "\U0001f600 é\n\t"]
    program = tmp_path / "visible.js"
    shown = f"console.log(JSON.stringify({json.dumps(texts)}.map(visible)))"
    program.write_text("\n".join([*lines, shown]), encoding="utf-8")
    done = subprocess.run(["node", program], capture_output=True, check=True, timeout=60)
    answers = json.loads(done.stdout)
    through = [text for text in answers if set(text) & RAW or re.search("[\ud800-\udfff]", text)]
    tally.add(SURFACE, len(texts), len(through))
    assert through == [] and answers[-2:] == ["a\\ud800b", "\U0001f600 é\n\t"]
    assert answers[texts.index("\x1b[31mred")] == "\u241b[31mred"
