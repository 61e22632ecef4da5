"""Options of the tools that search and read: the web, Wikipedia, and passages of a corpus."""

from __future__ import annotations

from typing import Literal

from flowtrain.config.section import Section


class WebSearch(Section):
    provider: Literal["serper", "searxng"] = "serper"
    """serper: Google by serper.dev; searxng: an instance of yours"""
    base_url: str = ""
    """address of the service; empty: the provider's own (an instance of SearXNG has to be named)"""
    api_key_env: str = "SERPER_API_KEY"
    """provider = "serper": environment variable that holds the key"""


class Wikipedia(Section):
    base_url: str = ""
    """api.php of another wiki, or of Wikipedia in another language; empty: the English one"""
    contact: str = ""
    """e-mail address or URL in the User-Agent, as Wikimedia asks of programs"""


class WebReader(Section):
    allow_private: bool = False
    """read private, loopback and other addresses that are not on the public internet too; for
    intranets"""
    embedder: str = ""
    """name in [engines] of an embedding model that ranks the chunks; empty: BM25"""


class Corpus(Section):
    retriever: str = ""
    """address of a server that finds passages by Search-R1's protocol, POST /retrieve, in place of
    BM25 over path"""
    path: str = ""
    """.jsonl, .json or .parquet file of passages, for the tool Search"""
    text_key: str = "text"
    """key or column of the passage"""
    index: str = ""
    """folder of the search index, which is built once; empty: path with .index behind it"""
