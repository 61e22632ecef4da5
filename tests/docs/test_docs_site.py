"""The site is built without a warning, its links lead somewhere, and it has every option."""

from __future__ import annotations

import html
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from processes import run_program

from flowtrain.config.options import all_options

ROOT = Path(__file__).resolve().parents[2]
NEEDS = ("sphinx", "myst_parser", "furo")
if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
    pytest.skip(f"not installed: {missing} (extra docs)", allow_module_level=True)


class Html(HTMLParser):
    """What a page links to, what it loads, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif value and tag == "a" and name == "href":
                self.links.append(value)
            elif value and name in ("src", "href") and ("rel", "canonical") not in attrs:
                self.loaded.append(value)


@pytest.fixture(scope="session")
def site(once: Callable[..., Path]) -> Path:
    """The site, built by the command of `make docs`."""
    [command] = re.findall(r"^docs:.*\n\t\$\(BIN\)/python (.*)$", _makefile(), re.MULTILINE)

    def make(folder: Path) -> None:
        words = command.replace("build/doctrees", str(folder / "doctrees")).split()
        assert words[-2:] == ["docs", "site"] and "--fail-on-warning" in words
        words[-1] = str(folder / "site")
        done = run_program([sys.executable, *words], cwd=ROOT, timeout=600)
        assert done.returncode == 0, done.stderr

    return once("docs", make) / "site"


def _makefile() -> str:
    return (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Html]:
    return {path: Html(path) for path in site.rglob("*.html") if "_static" not in path.parts}


def broken(page: Path, link: str, pages: dict[Path, Html]) -> bool:
    path, _, anchor = unquote(link).partition("#")
    path = path.partition("?")[0]
    if re.match(r"[a-z]+:", link):
        return False
    target = (page.parent / path).resolve() if path else page
    if target not in pages:
        return not target.is_file()
    return bool(anchor) and anchor not in pages[target].anchors


def test_every_link_of_the_site_leads_somewhere(pages: dict[Path, Html]) -> None:
    assert len(pages) > 40
    found = [
        (page.name, link)
        for page, content in pages.items()
        for link in (*content.links, *content.loaded)
        if broken(page, link, pages)
    ]
    assert found == []


def test_links_into_the_repository_name_what_is_there(pages: dict[Path, Html]) -> None:
    conf = (ROOT / "docs" / "conf.py").read_text(encoding="utf-8")
    [url] = re.findall(r'^repo_url = "(.*)"$', conf, re.MULTILINE)
    found = {
        re.split("[?#]", html.unescape(link))[0]
        for content in pages.values()
        for link in content.links
        if re.match(rf"{url}/(?:blob|tree)/main/", link)
    }
    assert len(found) > 40
    assert [link for link in found if not (ROOT / link.split("/main/")[1]).exists()] == []


def test_the_site_loads_nothing_from_elsewhere(site: Path, pages: dict[Path, Html]) -> None:
    loaded = {each for content in pages.values() for each in content.loaded}
    assert [each for each in loaded if re.match(r"(https?:)?//", each)] == []
    sheets = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert "@import url(http" not in sheets and "url(http" not in sheets
    assert "Search.setIndex" in (site / "searchindex.js").read_text(encoding="utf-8")


def test_every_option_has_its_place(site: Path, pages: dict[Path, Html]) -> None:
    anchors = pages[site / "reference" / "options.html"].anchors
    assert [o.name for o in all_options() if f"confval-{o.name}" not in anchors] == []
    linked = [link for link in pages[site / "lora.html"].links if "#confval-lora.rank" in link]
    assert linked, "a name of an option in the text leads there"


@pytest.mark.parametrize("package", ["flowkernels", "flowtrain.weights", "flowtrain.records"])
def test_every_public_name_has_its_place(package: str, site: Path, pages: dict[Path, Html]) -> None:
    page = {"flowtrain.weights": "weights", "flowtrain.records": "records"}.get(package, package)
    anchors = pages[site / "reference" / f"{page}.html"].anchors
    named = {anchor.rpartition(".")[2] for anchor in anchors}
    assert [name for name in importlib.import_module(package).__all__ if name not in named] == []


def test_the_table_of_the_readme_and_constants_are_there(site: Path) -> None:
    records = (site / "reference" / "records.html").read_text(encoding="utf-8")
    assert "Largest number of tool calls per turn" in records
    results = re.sub("<[^>]*>", "", (site / "results.html").read_text(encoding="utf-8"))
    assert "python -m bench.delta" in results and "What is where" not in results


def test_its_contents_are_there_for_programs(site: Path) -> None:
    text = (site / "llms.txt").read_text(encoding="utf-8")
    assert text.startswith("# flowtrain\n")
    links = re.findall(r"\]\((?!https:)([^)#]+)", text)
    assert len(links) > 40 and all((site / link).is_file() for link in links)
