"""Links and anchors of the pages lead to what is there; paths in backticks exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from doc_pages import PAGES, ROOT, anchors, links, name_of, spans

PLACES = (ROOT, ROOT / "flowtrain", ROOT / "kernels", ROOT / "docs", ROOT / "bench" / "results")
NOT_OURS = ("runs/", "weights/v", "checkpoints/", "folder/NAME")
FILE = re.compile(r"[\w./-]+/[\w.-]+\.(?:py|toml|md|cpp|h|json|css)")


def broken(page: Path, text: str) -> list[str]:
    """The links of a page's text that lead nowhere."""
    found = []
    for link in links(text):
        path, _, anchor = link.partition("#")
        if ":" in link:
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors(target)
        ):
            found.append(link)
    return found


def gone(page: Path, text: str) -> list[str]:
    """Files that a page's text names in backticks, and that are not there."""
    places = (*PLACES, page.parent)
    return [
        name
        for name in spans(text)
        if FILE.fullmatch(name)
        and not name.startswith(NOT_OURS)
        and not any((place / name).exists() for place in places)
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert broken(page, text) == []
    assert gone(page, text) == []


def test_mistakes_would_be_found() -> None:
    page = ROOT / "docs" / "design.md"
    text = "[a](no.md) [b](kernels.md#no) [c](#no) [d](../flowtrain) `run/is.py` `utils/files.py`"
    assert broken(page, text) == ["no.md", "kernels.md#no", "#no"]
    assert gone(page, text) == ["run/is.py"]


def test_every_page_is_in_the_index() -> None:
    docs = ROOT / "docs"
    index = (docs / "index.md").read_text(encoding="utf-8")
    listed = [str(docs / link) for link in re.findall(r"^- \[[^\]]*\]\(([^)]+)\)", index, re.M)]
    pages = {str(page) for page in PAGES if page.is_relative_to(docs)} - {str(docs / "index.md")}
    assert sorted(listed) == sorted(pages)


def test_the_repository_has_one_address() -> None:
    conf = (ROOT / "docs" / "conf.py").read_text(encoding="utf-8")
    [url] = re.findall(r'^repo_url = "(.*)"$', conf, re.M)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for other in project.get("urls", {}).values():
        assert other.startswith(url)


def test_pages_install_from_the_clone_while_the_index_has_no_release() -> None:
    wrong = re.compile(r"pip install [\"']?flow(train|kernels)\b")
    assert [name_of(page) for page in PAGES if wrong.search(page.read_text(encoding="utf-8"))] == []
