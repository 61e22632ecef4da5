"""Options of the tools that search and read: the web, Wikipedia, and passages of a corpus."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from flowtrain.config.section import Section


class WebSearch(Section):
    provider: Literal["serper", "searxng"] = "serper"
    """serper: Google by serper.dev; searxng: an instance of yours"""
    base_url: str = ""
    """address of the service; empty: the provider's own (an instance of SearXNG has to be named)"""
    api_key_env: str = "SERPER_API_KEY"
    """provider = "serper": environment variable that holds the key"""
    num_results: int = Field(10, ge=1, le=10)
    """hits per query"""
    summarise: bool = True
    """have the model inside the tool (roles.tools, agent.tool_engines) answer from the hits, with
    their addresses; where there is none, and with false, the hits are listed"""


class Wikipedia(Section):
    language: str = Field("en", pattern="^[a-z][a-z0-9-]*$")
    """language of Wikipedia: en, de, ..."""
    base_url: str = ""
    """api.php of another wiki; empty: Wikipedia's in that language"""
    contact: str = ""
    """e-mail address or URL in the User-Agent, as Wikimedia asks of programs"""
    num_pages: int = Field(10, ge=1, le=20)
    """pages per query; at most 3 of them with their text"""


class WebReader(Section):
    max_bytes: PositiveInt = 5_000_000
    """a longer page is refused; counted after decompression"""
    allow_private: bool = False
    """read private, loopback and other addresses that are not on the public internet too; for
    intranets"""
    chunk_words: PositiveInt = 200
    """words per chunk of a page, a tenth of them shared with the chunk before (AgentFlow: 200)"""
    num_chunks: PositiveInt = 10
    """chunks that are kept, the best for the query (AgentFlow: 10)"""
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
    title_key: str = "title"
    """key or column of its title, where there is one"""
    index: str = ""
    """folder of the search index, which is built once; empty: path with .index behind it"""
