"""The reference in docs/reference is what `python -m docs._ext.markdown` writes of the sources."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from docs._ext.markdown import PAGES, page, stub
from docs._ext.reference import MARK

GENERATED = [path for path in sorted(PAGES.glob("*.md")) if MARK.search(path.read_text())]


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.stem)
def test_the_reference_is_up_to_date(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert page(text) == text, "run: python -m docs._ext.markdown"


def test_a_page_without_its_generated_parts_gets_them_again() -> None:
    text = (PAGES / "records.md").read_text(encoding="utf-8")
    bare = MARK.sub(lambda mark: mark[0].partition("\n")[0], text)
    assert len(bare) < len(text) / 10 and page(bare) == text


def test_a_stub_has_signatures_and_docstrings_and_no_code() -> None:
    code = '''
class Other:
    """Left out."""

@final
class Thing(Base):
    """It is shown."""
    size: int = 3
    """In bytes."""
    _hidden = 4
    """Left out."""

    def ask(
        self, question: str
    ) -> str:
        """Answer it."""
        return self._think(question)

    def close(self) -> None:  # noqa: B027
        pass

    def _think(self, question: str) -> str:
        """Left out."""
'''.splitlines()
    shown = stub(ast.parse("\n".join(code)).body, code, "Thing")
    assert (
        "\n".join(shown)
        == '''@final
class Thing(Base):
    """It is shown."""

    size: int = 3
    """In bytes."""

    def ask(
        self, question: str
    ) -> str:
        """Answer it."""

    def close(self) -> None: ...'''
    )
