"""Makes pages of the site from pages that are written for GitHub.

Links to files outside of docs/ lead to the repository. The list of `index.md` becomes the
navigation. Parts from `<!-- site: KIND ... -->` to `<!-- end of KIND -->`, which
`docs._ext.markdown` writes for readers of the repository, are replaced:

    site: options                the reference of the config, from the source of `--help all`
    site: api NAME ...           what the docstrings of these objects, or of a module's names, say
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

from docs._ext.options import names, option_page
from docs._ext.reference import MARK, api_page

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
_FENCE = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?P<target>[^)\s]+)(?=\))")
_ENTRY = re.compile(r"^- \[(?P<title>[^\]]*)\]\((?P<page>[^)#]+)\.md\)", re.MULTILINE)


class Repository(NamedTuple):
    """Where files are that are no pages of the site."""

    url: str
    branch: str

    def address(self, path: str) -> str:
        """Return the address of a file or folder, named from the root of the repository."""
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{self.url}/{kind}/{self.branch}/{path}"


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """Change a page, but not its blocks of code."""
    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def relink(text: str, folder: str, repository: Repository) -> str:
    """Lead links of a page in `folder`, seen from the root: to pages by relative links, to other
    files by addresses in the repository.
    """

    def target(match: re.Match[str]) -> str:
        link = match["target"]
        if ":" in link or link.startswith("#"):
            return link
        path, hash_sign, anchor = link.partition("#")
        full = posixpath.normpath(posixpath.join(folder, path))
        if full.startswith("docs/"):
            return posixpath.relpath(full, folder) + hash_sign + anchor
        return repository.address(full) + hash_sign + anchor

    return outside_fences(text, lambda part: _LINK.sub(target, part))


def navigation(text: str) -> str:
    """Return the navigation of the site: the lists of `index.md` with their headings."""
    trees = []
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        caption, _, below = part.partition("\n")
        if found := [f"{entry['title']} <{entry['page']}>" for entry in _ENTRY.finditer(below)]:
            entries = "\n".join(found)
            trees.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n")
    return "\n".join(trees)


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    repository = Repository(app.config.repo_url, app.config.repo_branch)
    folder = posixpath.dirname(f"docs/{docname}")

    def replaced(mark: re.Match[str]) -> str:
        if mark["kind"] == "options":
            return option_page()
        assert mark["kind"] == "api", mark[0]
        return api_page(mark["words"].split())

    text = relink(MARK.sub(replaced, source[0]), folder, repository)
    if docname == app.config.root_doc:
        text += "\n" + navigation(text)
    source[0] = text


class OptionLinks(SphinxTransform):
    """Leads from options that the text names, such as `train.lr` or `train.lr = 1e-6`, to their
    places in the reference.
    """

    default_priority = 400

    def apply(self, **kwargs: Any) -> None:
        for literal in list(self.document.findall(nodes.literal)):
            name = literal.astext().partition(" = ")[0]
            if name not in names() or isinstance(literal.parent, nodes.reference):
                continue
            link = pending_xref(
                "",
                refdomain="std",
                reftype="confval",
                reftarget=name,
                refdoc=self.env.docname,
                refwarn=True,
                refexplicit=False,
            )
            literal.replace_self(link)
            link += literal


def contents(text: str) -> str:
    """Return `llms.txt`: the index, its links leading to the pages of the site."""
    return outside_fences(text, lambda part: re.sub(r"\]\(([\w/-]+)\.md", r"](\1.html", part))


def _write_contents(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.name == "html":
        index = (DOCS / "index.md").read_text(encoding="utf-8")
        repository = Repository(app.config.repo_url, app.config.repo_branch)
        text = contents(relink(index, "docs", repository))
        (Path(app.outdir) / "llms.txt").write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register this with Sphinx."""
    app.add_config_value("repo_url", "", "env")
    app.add_config_value("repo_branch", "main", "env")
    app.connect("source-read", _read)
    app.connect("build-finished", _write_contents)
    app.add_transform(OptionLinks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
