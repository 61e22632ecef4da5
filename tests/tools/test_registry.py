"""Tools by name: those of the package, and those of packages made up here by their metadata."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from toy_options import toy

from flowtrain.config import Config
from flowtrain.config.search import WebSearch
from flowtrain.inference.chat_engines import make_chat_engines
from flowtrain.records import UserError
from flowtrain.tasks.corpus import load_corpus
from flowtrain.tasks.sets import TaskSet
from flowtrain.tools import registry
from flowtrain.tools.registry import make_tools
from tests.packages import lay_out

TASKS = TaskSet((), {}, ("The area of Chad is 1284.", "The area of Mali is 1240."))

SHOUT = """
from flowtrain.tools import ToolCard, ToolError

closed = []

class Shout:
    card = ToolCard("Shout", "Says it louder.")

    def __init__(self, context):
        self.context = context

    async def execute(self, query):
        return query.upper()

    def close(self):
        closed.append(self)

class Failing(Shout):
    def __init__(self, context):
        raise KeyError("SHOUT_KEY")
"""


def install(folder: Path, package: str, entries: dict[str, str], source: str) -> None:
    lay_out(folder, package, registry.GROUP, entries, source)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("shouting", "other"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def config(*tools: str, **plugins: dict[str, object]) -> Config:
    return Config.model_validate({"agent": {"tools": tools}, "plugins": plugins})


def test_every_built_in_tool_is_made_under_its_own_name() -> None:
    names = tuple(registry.BUILT_IN)
    assert {*Config().agent.tools} < {*names}
    asked = config(*reversed(names)).model_copy(
        update={"web_search": WebSearch(provider="searxng", base_url="http://localhost:8080")}
    )
    tools = make_tools(asked, TASKS)
    assert [tool.card.name for tool in tools.values()] == list(tools) == list(reversed(names))
    for tool in tools.values():
        assert tool.card.description and "\n" not in tool.card.description
        tool.close()
        tool.close()


def test_an_installed_tool_gets_the_context_and_its_own_options(site: Path) -> None:
    install(site, "shouting", {"Shout": "shouting:Shout"}, SHOUT)
    asked = config("Shout", "Base_Generator", Shout={"volume": 11}, Base_Generator={"x": 1})
    tool = make_tools(asked, TASKS)["Shout"]
    context = tool.context
    found = (context.config, context.passages, context.guesses, context.chat)
    assert found == (asked, TASKS.passages, ("1284", "1240"), None)
    assert context.options == {"volume": 11}
    assert make_tools(config("Shout"), TASKS)["Shout"].context.options == {}


def test_options_of_what_nothing_names_are_refused() -> None:
    told = r"plugins\.Serch: no plugin .* by the config; it uses Search, "
    with pytest.raises(ValueError, match=told):
        config("Search", Serch={"volume": 11})


def test_an_unknown_tool_is_refused_with_those_that_there_are(site: Path) -> None:
    install(site, "shouting", {"Shout": "shouting:Shout"}, SHOUT)
    told = r"^agent\.tools: no tool 'Serch'; there are Search, .*, Web_Reader, Shout, and FILE"
    with pytest.raises(UserError, match=told):
        make_tools(config("Search", "Serch"), TASKS)


@pytest.mark.parametrize(
    ("value", "source", "reason"),
    [
        (
            "shouting:Shout",
            "import no_such_module",
            "ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("shouting:Shut", SHOUT, "AttributeError: module 'shouting' has no attribute 'Shut'"),
        ("shouting:Failing", SHOUT, "KeyError: 'SHOUT_KEY'"),
        ("shouting:GROUP", "GROUP = 3", "TypeError: 'int' object is not callable"),
        (
            "shouting:Bare",
            "class Bare:\n  def __init__(self, context): pass",
            "AttributeError: 'Bare' object has no attribute 'card'",
        ),
    ],
)
def test_a_package_whose_tool_cannot_be_made_is_named(
    site: Path, value: str, source: str, reason: str
) -> None:
    install(site, "shouting", {"Shout": value}, source)
    with pytest.raises(UserError) as raised:
        make_tools(config("Shout"), TASKS)
    assert str(raised.value) == f"tool 'Shout' of package shouting 1.2 cannot be made: {reason}"


def test_the_tools_made_before_one_that_fails_are_closed(site: Path) -> None:
    install(site, "shouting", {"Shout": "shouting:Shout", "Failing": "shouting:Failing"}, SHOUT)
    with pytest.raises(UserError, match="tool 'Failing'"):
        make_tools(config("Shout", "Failing"), TASKS)
    assert len(sys.modules["shouting"].closed) == 1


def test_broken_package_affects_only_runs_that_use_it(site: Path) -> None:
    install(site, "shouting", {"Shout": "shouting:Shout"}, "import no_such_module")
    assert list(make_tools(config("Base_Generator"), TASKS)) == ["Base_Generator"]


def test_card_name_must_equal_entry_point_name(site: Path) -> None:
    install(site, "shouting", {"Shouting": "shouting:Shout"}, SHOUT)
    told = r"tool 'Shouting' of package shouting 1\.2 calls itself 'Shout' on its card"
    with pytest.raises(UserError, match=told):
        make_tools(config("Shouting"), TASKS)


@pytest.mark.parametrize(
    ("name", "first"), [("Shout", "other 1.2"), ("Search", "flowtrain itself")]
)
def test_a_name_that_two_packages_offer_is_refused(site: Path, name: str, first: str) -> None:
    install(site, "other", {"Shout": "other:Shout"}, SHOUT)
    install(site, "shouting", {name: "shouting:Shout"}, SHOUT)
    told = rf"^tool '{name}' is defined by both {first} and shouting 1\.2; uninstall one of them$"
    with pytest.raises(UserError, match=told):
        make_tools(config("Base_Generator"), TASKS)


def test_a_server_without_the_package_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    for name in [name for name in sys.modules if name.startswith("flowtrain.tools.mcp.")]:
        monkeypatch.delitem(sys.modules, name)
    asked = Config.model_validate(
        {"agent": {"tools": ["files.read"]}, "mcp": {"files": {"command": ["x"]}}}
    )
    with pytest.raises(UserError, match=r"pip install -e '\.\[mcp\]'"):
        make_tools(asked, TASKS)


OWN = {"name": "file", "path": "mine.jsonl"}


@pytest.mark.parametrize(
    ("tasks", "agent", "parts"),
    [
        (OWN, {"tools": ["Search"]}, ("['Search']", "tasks.name='file'", "Web_Search")),
        (OWN, {"tools": ["Base_Generator"]}, ("roles.tools='none'", "tasks.name='file'", "policy")),
        (
            {**OWN, "corpus": "shipped"},
            {"tools": ["Base_Generator"], "prompt": "full"},
            ("roles.tools='none'", "agent.prompt='compact'"),
        ),
    ],
)
def test_questions_of_the_user_do_not_meet_toys(
    tasks: dict[str, str], agent: dict[str, object], parts: tuple[str, ...]
) -> None:
    config = Config.model_validate({"tasks": tasks, "agent": agent})
    with pytest.raises(UserError) as caught:
        make_tools(config, TASKS)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_toys_may_be_asked_for() -> None:
    tools = ["Search", "Base_Generator"]
    for corpus in ("shipped", "mine.json"):
        values = {"tasks": {**OWN, "corpus": corpus}, "agent": {"tools": tools}}
        assert list(make_tools(toy(values), TASKS)) == tools
    values = {"tasks": {**OWN, "corpus": "mine.json"}, "agent": {"tools": ["Search"]}}
    values["agent"]["prompt"] = "full"
    assert list(make_tools(toy(values), TASKS)) == ["Search"]
    assert list(make_tools(toy({"agent": {"tools": tools}}), TASKS)) == tools
    assert load_corpus("shipped") == load_corpus()


def test_a_tool_may_have_a_model_of_its_own() -> None:
    tools = ["Python_Coder", "Base_Generator"]
    values = {
        "agent": {"tools": tools, "tool_engines": {"Python_Coder": "coder"}},
        "roles": {"tools": "helper"},
        "engines": {
            name: {"model": name, "base_url": "http://127.0.0.1:9/v1", "api_key_env": ""}
            for name in ("coder", "helper")
        },
    }
    config = toy(values)
    chats = make_chat_engines(config, None, torch.device("cpu"))
    made = make_tools(config, TASKS, chats.roles["tools"], chats.roles)
    try:
        assert made["Python_Coder"].chat is chats.started["coder"]
        assert made["Base_Generator"].chat is chats.started["helper"]
    finally:
        for tool in made.values():
            tool.close()
        chats.close()


@pytest.mark.parametrize(
    ("engines", "reason"),
    [
        ({"Python_Coder": "coder"}, "must be a name in [engines]"),
        ({"Serch": "x"}, "does not include"),
    ],
)
def test_models_of_tools_are_checked(engines: dict[str, str], reason: str) -> None:
    config = Config.model_validate({"agent": {"tool_engines": engines}})
    with pytest.raises(UserError) as caught:
        make_chat_engines(config, None, torch.device("cpu"))
    assert reason in str(caught.value) and "agent.tool_engines." in str(caught.value)
