"""Options of the tools that search and read: the web, Wikipedia, and passages of a corpus."""

from __future__ import annotations

from typing import Literal

from flowtrain.config.section import Section


class WebSearch(Section):
    provider: Literal["serper", "searxng"] = "serper"
    """serper: Google through serper.dev; searxng: a self-hosted instance"""
    base_url: str = ""
    """address of the service; empty: the provider's own (required for SearXNG)"""
    api_key_env: str = "SERPER_API_KEY"
    """provider = "serper": environment variable with the API key"""


class Wikipedia(Section):
    base_url: str = ""
    """api.php of another wiki, or of Wikipedia in another language; empty: the English one"""
    contact: str = ""
    """e-mail address or URL for the User-Agent, which Wikimedia requires of programs"""


class WebReader(Section):
    allow_private: bool = False
    """also read private, loopback and other non-public addresses, for intranets"""
    embedder: str = ""
    """name in [engines] of an embedding model that ranks the chunks; empty: BM25"""


class Corpus(Section):
    retriever: str = ""
    """address of a retrieval server with Search-R1's protocol, POST /retrieve, which replaces BM25
    over path"""
    path: str = ""
    """.jsonl, .json or .parquet file of passages, for the tool Search"""
    text_key: str = "text"
    """key or column of the passage"""
    index: str = ""
    """folder of the search index, which is built once; empty: path plus .index"""
