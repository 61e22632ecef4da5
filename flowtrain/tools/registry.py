"""The tools by name: our own, those of other packages by entry point `flowtrain.tools`, and those
of users' files, `agent.tools = ["my_tool.py:convert"]`.

An entry point names a callable that makes the tool from a `ToolContext`, a file such a class or a
plain function; docs/tools.md shows one of each from end to end.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

from flowtrain.config import Config
from flowtrain.inference.chat import ChatEngine
from flowtrain.inference.chat_engines import TOOL
from flowtrain.records import UserError
from flowtrain.tools.base import Tool
from flowtrain.tools.function_tool import FunctionTool
from flowtrain.utils import plugins
from flowtrain.utils.errors import foreign, user_error
from flowtrain.utils.plugins import OBJECT

if TYPE_CHECKING:
    from flowtrain.tasks.sets import TaskSet
    from flowtrain.tools.mcp.tool import Server

GROUP = "flowtrain.tools"
_EXTRAS = {"bm25s": "search", "trafilatura": "web"}
"""Packages of our own tools, and the extras that have them."""


@dataclass(frozen=True, slots=True)
class ToolContext:
    """The parts that a tool is made from."""

    config: Config
    passages: tuple[str, ...] = ()
    """The texts of the task set, to search in."""
    guesses: tuple[str, ...] = ()
    """Values that the passages state."""
    chat: ChatEngine | None = None
    """The model inside the tool, if it wants one: that of agent.tool_engines, or of roles.tools."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The tool's own table, [plugins.NAME]."""


_MODULES = (
    "search",
    "python_coder",
    "base_generator",
    "web_search",
    "wikipedia_search",
    "web_reader",
)
BUILT_IN = plugins.built_in(
    GROUP, "flowtrain.tools", {module.title(): f"{module}:make" for module in _MODULES}
)
"""The tools of this package by name; they too are imported only when a run uses them."""


def make_tools(
    config: Config,
    tasks: TaskSet | None = None,
    chat: ChatEngine | None = None,
    chats: Mapping[str, ChatEngine] | None = None,
) -> dict[str, Tool]:
    """Make the tools of `agent.tools`, by name and in that order; close them when done. In the
    place of "NAME.*" stand all tools of that MCP server.

    `chat` is the model inside tools that want one; where `chats`, the models by role, have one for
    a tool of its own, it is that. When a tool fails, those made before it are
    closed. Raises UserError for an unknown name.
    """
    context = ToolContext(config, chat=chat)
    if tasks is not None:
        context = replace(context, passages=tasks.passages, guesses=tasks.guesses)
    names = config.agent.tools
    offered = plugins.offered("tool", GROUP, BUILT_IN)
    file_tools = {name: name.rpartition(":")[2] for name in names if plugins.names_object(name)}
    server_tools = [name for name in names if name.partition(".")[0] in config.mcp and "." in name]
    available = {*offered, *file_tools, *server_tools}
    if unknown := [name for name in names if name not in available]:
        choices = [*offered, *(f"{server}.*" for server in config.mcp)]
        raise UserError(
            f"agent.tools: no tool {unknown[0]!r}; there are {', '.join(choices)}, and {OBJECT} "
            "names a custom one"
        )
    with ExitStack() as cleanup:
        tools: dict[str, Tool] = {}
        servers: dict[str, Server] = {}
        for name in names:
            engine = (chats or {}).get(TOOL.format(file_tools.get(name, name)), chat)
            if name in file_tools:
                batch = {
                    file_tools[name]: _load(name, file_tools[name], replace(context, chat=engine))
                }
            elif name in server_tools:
                server = name.partition(".")[0]
                if server not in servers:
                    servers[server] = _server(server, config)
                    cleanup.callback(servers[server].close)
                batch = servers[server].tools(name)
            else:
                batch = {name: _make(name, offered[name], replace(context, chat=engine))}
            for tool in batch.values():
                cleanup.callback(tool.close)
            if repeats := tools.keys() & batch.keys():
                raise UserError(f"agent.tools: {min(repeats)!r} is listed twice, also by {name!r}")
            tools |= batch
        cleanup.pop_all()  # all are made, and are the caller's to close
    return tools


def _server(name: str, config: Config) -> Server:
    with user_error(
        "agent.tools: tools of an MCP server need the package mcp: pip install -e '.[mcp]'",
        ModuleNotFoundError,
    ):
        from flowtrain.tools.mcp.tool import Server
    return Server(name, config.mcp[name])


def _load(name: str, attribute: str, context: ToolContext) -> Tool:
    """Make the tool that FILE.py:NAME names: a function, or a class as entry points name them."""
    origin = f"agent.tools={name!r}"
    factory = plugins.load_object(name, origin)[1]
    if inspect.isfunction(factory):
        return FunctionTool(factory, origin)
    if not isinstance(factory, type):
        raise UserError(f"{origin} is a {type(factory).__name__}, not a function or a class")
    return _checked(factory, attribute, context, origin, foreign(f"{origin} cannot be made"))


def _make(name: str, entry: EntryPoint, context: ToolContext) -> Tool:
    """Raises UserError, which names the package, when a tool of another package cannot be made."""
    origin = f"tool {name!r} of package {plugins.package(entry)}"
    problem = f"{origin} cannot be made"
    with _extra(name), plugins.guard(entry, problem):
        kind = entry.load()
    return _checked(kind, name, context, origin, plugins.guard(entry, problem))


@contextmanager
def _extra(name: str) -> Iterator[None]:
    """Turn a package that is missing into an error that names the extra of ours that has it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (extra := _EXTRAS.get(error.name or "")) is None:
            raise
        raise UserError(
            f"agent.tools={name!r} needs {error.name}: pip install -e '.[{extra}]'"
        ) from error


def _checked(
    kind: Callable[[ToolContext], Tool],
    name: str,
    context: ToolContext,
    origin: str,
    guard: AbstractContextManager[None],
) -> Tool:
    """Make the tool with its own table of options; its card must have its name."""
    with _extra(name), guard:
        tool = kind(replace(context, options=context.config.options_of(name)))
        card_name = tool.card.name
    if card_name != name:
        raise UserError(
            f"{origin} calls itself {card_name!r} on its card; both names must be the same"
        )
    return tool
