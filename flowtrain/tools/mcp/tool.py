"""The tools of MCP servers as tools of agents."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from flowtrain.config import McpServer
from flowtrain.records import UserError
from flowtrain.tools.base import Tool, ToolCard, ToolError, one_line
from flowtrain.tools.mcp.connection import Connection
from flowtrain.tools.web.api import key_from_env
from flowtrain.utils.errors import on_failure
from flowtrain.utils.text import printable

MAX_DESCRIPTION = 2000
"""Characters of a description that prompts show."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class McpTool(Tool):
    """A tool of an MCP server. Safe to share."""

    def __init__(self, connection: Connection, card: ToolCard, name: str) -> None:
        """`name` is the server's for it."""
        self._connection = connection
        self._card = card
        self._name = name

    @property
    def card(self) -> ToolCard:
        return self._card

    async def execute(self, /, **arguments: object) -> str:
        """Return the text of the result. Raises ToolError where the server says that it failed,
        and where it has no text.
        """
        result = await self._connection.call(self._name, arguments)
        text, kinds = _content(result)
        if result.is_error:
            raise ToolError(text or "the tool failed and did not say why")
        if kinds and not text:
            raise ToolError(f"{self._card.name} returned {', '.join(kinds)}, and no text")
        return "\n".join([text, *(f"[{kind} is left out]" for kind in kinds)])

    def close(self) -> None:
        """Close the server, whose tools end together."""
        self._connection.close()


class Server:
    """A server that has been asked for its tools."""

    def __init__(self, name: str, options: McpServer) -> None:
        """Connect. Raises UserError for a server that cannot be reached, or lacks a variable."""
        key = f"mcp.{name}"
        if not options.command and not options.url:
            raise UserError(f"{key}: set {key}.command or {key}.url")
        token = ""
        if options.token_env:
            token = key_from_env(options.token_env, f"{key}.token_env", options.url)
        if missing := [variable for variable in options.env if variable not in os.environ]:
            raise UserError(f"{key}.env: the environment variable {missing[0]!r} is not set")
        environment = {variable: os.environ[variable] for variable in options.env}
        self.connection = Connection(name, options, token, environment)
        with on_failure(self.connection.close):
            self._offered = {tool.name: tool for tool in self.connection.open()}

    def close(self) -> None:
        self.connection.close()

    def tools(self, pattern: str) -> dict[str, Tool]:
        """Return the tools "NAME.tool", or all for "NAME.*". Raises UserError if there is none."""
        server, _, name = pattern.partition(".")
        names = list(self._offered) if name == "*" else [name]
        if not names or names[0] not in self._offered:
            offered = ", ".join(f"{server}.{tool}" for tool in self._offered) or "none"
            raise UserError(
                f"agent.tools: no tool {pattern!r}; the tools of mcp.{server} are "
                f"{printable(offered, keep='')[:1000]}"
            )
        cards = {tool: card_of(server, self._offered[tool]) for tool in names}
        return {card.name: McpTool(self.connection, card, name) for name, card in cards.items()}


def card_of(server: str, tool: Any) -> ToolCard:
    """Make the card of a server's tool. Raises UserError for one that no prompt can show."""
    key = f"mcp.{server}: its tool '{printable(tool.name[:100], keep='')}'"
    if not _NAME.fullmatch(tool.name):
        raise UserError(f"{key} has a name that is not 1 to 64 letters, digits, '_', '-' and '.'")
    hints = tool.annotations
    return ToolCard(
        name=f"{server}.{tool.name}",
        description=one_line(tool.description or tool.title or tool.name)[:MAX_DESCRIPTION],
        schema=tool.input_schema,
        is_stateful=not (hints is not None and hints.read_only_hint),
        keeps_time=True,
    )


def _content(result: Any) -> tuple[str, list[str]]:
    """Return the text of a result, and what else is in it by name."""
    texts: list[str] = []
    kinds: list[str] = []
    for block in result.content:
        match block.type:
            case "text":
                texts.append(block.text)
            case "resource" if hasattr(block.resource, "text"):
                texts.append(block.resource.text)
            case "image" | "audio":
                kinds.append(f"{block.type} ({one_line(str(block.mime_type))[:100]})")
            case kind:
                kinds.append(one_line(str(kind).replace("_", " ")))
    if not result.content and result.structured_content is not None:
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(texts), kinds
