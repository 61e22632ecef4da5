"""The documentation as a site: `make docs` builds it into `site/`, and a warning is an error.

The pages are those of this folder as GitHub shows them; `docs._ext` makes a site of them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
# Kernels have docstrings where there is no GPU, too.
os.environ.setdefault("TRITON_INTERPRET", "1")

project = "flowtrain"
author = "the authors of flowtrain"
copyright = "the authors of flowtrain, Apache-2.0"

repo_url = "https://github.com/flowtrain/flowtrain"
"""Where links to files outside of this folder lead; the only place that says so."""
repo_branch = "main"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "docs._ext.pages",
    "docs._ext.docstrings",
]
root_doc = "index"
exclude_patterns = ["_ext", "_static"]
source_suffix = {".md": "markdown"}

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
# A lexer that meets "..." in a command says so; what is shown is right all the same.
suppress_warnings = ["misc.highlighting_failure"]
highlight_language = "text"
pygments_style = "friendly"
pygments_dark_style = "github-dark"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
default_role = "literal"
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "flowtrain"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "source_repository": repo_url,
    "source_branch": repo_branch,
    "source_directory": "docs/",
}
