"""Extracts the main text of a page; a text that `extract.py` runs in the sandbox."""

from __future__ import annotations

import re
import sys

import trafilatura

_META = re.compile(rb"<meta[^>]{1,200}?charset\s*=\s*[\"']?([\w.:-]{1,40})", re.IGNORECASE)
_META_BYTES = 4096
_WIDER = {
    **dict.fromkeys(
        ("iso-8859-1", "iso8859-1", "latin1", "latin-1", "l1", "ascii", "us-ascii"), "cp1252"
    ),
    **dict.fromkeys(("iso-8859-9", "latin5"), "cp1254"),
    **dict.fromkeys(("gb2312", "gbk", "gb_2312-80", "x-gbk"), "gb18030"),
    **dict.fromkeys(("shift_jis", "shift-jis", "sjis", "x-sjis"), "cp932"),
    **dict.fromkeys(("euc-kr", "ks_c_5601-1987", "ksc5601"), "cp949"),
    "tis-620": "cp874",
}
"""Encodings that browsers use for these labels (the WHATWG's encoding standard)."""
_BOMS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
_FEW = 2


def write(page: bytes, content_type: str, charset: str, max_chars: int) -> None:
    """Write the text to stdout, nothing when there is none."""
    sys.stdout.write(main_text(page, content_type, charset)[:max_chars])


def main_text(page: bytes, content_type: str, charset: str) -> str:
    """Return the text of a page without menus and comments."""
    html = decoded(page, charset)
    if content_type == "text/plain":
        return html if isinstance(html, str) else html.decode(errors="replace")
    # The tag may be left out of HTML, but the extractor needs it.
    if "html" not in str(html[:200]).lower():
        html = "<html>" + html if isinstance(html, str) else b"<html>" + html
    # Of a short page trafilatura takes all there is, so what says that it is a menu goes before.
    # The second function is for pages without anything that looks like an article.
    return trafilatura.extract(
        html, include_comments=False, include_tables=True, prune_xpath=["//nav"]
    ) or trafilatura.html2txt(html)


def decoded(page: bytes, charset: str) -> str | bytes:
    """Decode a page by its mark, its header or its own words, or else as UTF-8. A charset that is
    not known, or that more of the page contradicts than confirms, is left to be guessed.
    """
    meta = _META.search(page[:_META_BYTES])
    label = (charset or (meta[1].decode() if meta else "utf-8")).lower()
    label = next((name for mark, name in _BOMS.items() if page.startswith(mark)), label)
    try:
        text = page.decode(_WIDER.get(label, label), errors="replace")
    except LookupError:
        return page
    num_bad = text.count("\ufffd")
    num_good = sum(letter > "\x7f" for letter in text) - num_bad if num_bad > _FEW else 0
    return page if num_bad > max(_FEW, num_good) else text
