"""A retriever elsewhere, by the protocol of Search-R1's server, which most others speak too:

POST /retrieve  {"queries": ["..."], "topk": 5, "return_scores": true}
->  {"result": [[{"document": {"id": "7", "contents": "\\"Mali\\"\\nMali is ..."}, "score": 0.8}]]}
"""

from __future__ import annotations

from typing import Any

from flowtrain.config.search import Corpus as Options
from flowtrain.records import UserError
from flowtrain.tools.base import ToolError
from flowtrain.tools.retrieval.passages import Passage, Searchable
from flowtrain.tools.web.api import Api, Request
from flowtrain.utils.errors import user_error
from flowtrain.utils.event_loop import run_to_end

_START_S = 30.0
"""Seconds for the first answer."""
_MAX_CONNECTIONS = 256


class Retriever(Searchable):
    """Safe to share between tasks."""

    def __init__(self, options: Options) -> None:
        """Raises UserError where the server does not answer a query."""
        if not options.retriever.startswith(("http://", "https://")):
            raise UserError(
                f"corpus.retriever={options.retriever!r} must be the address of a server, such as "
                "http://127.0.0.1:8000"
            )
        self._options = options
        self._url = options.retriever.rstrip("/").removesuffix("/retrieve") + "/retrieve"
        self._api = Api(_MAX_CONNECTIONS)
        with user_error(f"corpus.retriever={options.retriever!r}", ToolError):
            run_to_end(self.search("Mali", 1, _START_S))

    async def search(self, query: str, k: int, deadline_s: float) -> list[Passage]:
        body = {"queries": [query], "topk": k, "return_scores": True}
        answer = await self._api.ask(Request(self._url, body=body), deadline_s)
        try:
            (documents,) = answer["result"]
            return [self._passage(document) for document in documents][:k]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ToolError(
                f"the retriever answered in another form: {str(answer)[:200]}"
            ) from None

    def _passage(self, hit: dict[str, Any]) -> Passage:
        """Read a document, with its score or without; a title may be its first line, in quotes."""
        document = hit.get("document", hit)
        options = self._options
        text = document.get(options.text_key) or document["contents"]
        title = str(document.get("title") or "")
        first, _, body = text.partition("\n")
        if not title and body and first.startswith('"') and first.endswith('"'):
            title, text = first.strip('"'), body
        return Passage(text, title)
