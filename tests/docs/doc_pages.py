"""The pages of the documentation, taken apart for the tests: links, anchors, blocks, commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])
_FENCE = re.compile(
    r"^(?P<fence>```|~~~)(?P<language>\w*)\n(?P<text>.*?)^(?P=fence)$", re.MULTILINE | re.DOTALL
)
_SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PROGRAM = re.compile(r"(?:\S*python3? |torchrun |make |\S+ -m )")


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        """A name for the test of this block."""
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    """The path of a page from the root of the repository."""
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[Block]:
    """The fenced blocks of a page in these languages."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text[: found.start()].count("\n") + 1, found["language"], found["text"])
        for found in _FENCE.finditer(text)
        if found["language"] in languages
    ]


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", text)


def spans(text: str) -> list[str]:
    """The code within the lines of a page."""
    return [" ".join(found[2].split()) for found in _SPAN.finditer(prose(text))]


def links(text: str) -> list[str]:
    """The targets of the links and images of a page."""
    return _LINK.findall(_SPAN.sub("", prose(text)))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings; a second heading of one name gets a number."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.*)$", prose(page.read_text(encoding="utf-8")), re.MULTILINE):
        name = slug(heading)
        found[name if name not in found else f"{name}-{found[name]}"] = 1
        found[name] += 1
    return set(found)


def commands(page: Path) -> Iterator[str]:
    """Every command of a page: in blocks, in indented lines, and in code within a line."""
    text = page.read_text(encoding="utf-8")
    lines = [line for block in blocks(page, "", "sh") for line in joined(block.text)]
    lines += [line for line in joined(prose(text)) if line.startswith("    ")]
    for line in (*lines, *spans(text)):
        if re.match(r"at [0-9a-f]{7,8}: ", line):  # a command of an older tree
            continue
        bare = re.sub(r"(^|\s+)#.*", "", line).strip()
        for part in re.split(r" && | ; |\$\(|`", bare):
            start = _PROGRAM.search(part)
            if start and not re.search(r"[^\w\s=.,:/$'\"{}()-]", part[: start.start()]):
                yield part[start.start() :].rstrip(")&; ")


def joined(text: str) -> list[str]:
    """The lines of a text; one that ends in a backslash goes on."""
    return re.sub(r" *\\\n\s*", " ", text).splitlines()


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
