"""The code of the pages: Python imports what is there, TOML is a config, commands exist."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import sys
import tomllib
from functools import cache
from itertools import zip_longest
from pathlib import Path

import pytest
from doc_pages import PAGES, ROOT, Block, blocks, commands, name_of, spans
from processes import run_program
from pydantic import ValidationError
from torch.distributed.run import get_args_parser

from flowtrain.config import Config
from flowtrain.config.options import NAMED, _value, all_options, explain, parse

PYTHON = [block for page in PAGES for block in blocks(page, "python")]
TOML = [block for page in PAGES for block in blocks(page, "toml")]
TODAY = [page for page in PAGES if "CHANGE" not in page.name]
"""The changelog has commands and options of before."""
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
OPTIONS = {option.name for option in all_options()}
GROUPS = {
    f"flowtrain.{kind}s"
    for kind in ("agent", "algorithm", "tool", "prompt_filter", "group_filter", "selector")
}
"""Groups of entry points."""
NAMES = r"vllm\.general_plugins|\w+\.(py|toml|jsonl?)"
"""Other names with a dot whose first part is called like a section of the config."""
OWN_FLAGS = {"--help", "--config", "--show_config", "--resume"}
"""Options of every command that reads a config, beside those of the config."""


def code_problems(text: str) -> list[str]:
    """The imports of a Python text that fail. Raises SyntaxError."""
    found = []
    for node in ast.walk(compile(text, "page", "exec", ast.PyCF_ONLY_AST)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if not _imports(alias.name)]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [alias.name for alias in node.names]
            found += [name for name in names if not _imports(node.module, name)]
    return found


def _imports(module: str, name: str = "") -> bool:
    try:
        return not name or hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.name)
def test_python_imports_what_is_there(block: Block) -> None:
    assert code_problems(block.text) == []


@cache
def undefined(text: str) -> bool:
    """Whether a Python text uses names that it does not define."""
    ruff = Path(sys.executable).with_name("ruff")
    found = run_program(
        [ruff, "check", "--isolated", "--quiet", "--select", "F821", "-"], input=text
    )
    return found.returncode != 0


WHOLE = [block for block in PYTHON if not undefined(block.text) and "runs/" not in block.text]


@pytest.mark.parametrize("block", WHOLE, ids=lambda block: block.name)
def test_python_that_is_whole_runs(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, block.name, "exec"), {"__name__": "page"})


@pytest.mark.parametrize("block", TOML, ids=lambda block: block.name)
def test_toml_is_a_config(block: Block, tmp_path: Path) -> None:
    values = tomllib.loads(block.text)
    if "project" in values:
        [group] = values["project"]["entry-points"]
        assert group in GROUPS
    elif not block.text.startswith("# plan.toml"):  # test_docs_machines.py reads that
        path = tmp_path / "run.toml"
        path.write_text(block.text.replace('include = "', f'include = "{ROOT}/configs/'))
        assert parse(["--config", str(path)]) is not None


def problem(command: str) -> str:
    """What is wrong with a command of a page, or ""."""
    try:
        words = shlex.split(re.sub(r"<[^>]*>", "X", command))
    except ValueError as error:
        return f"{command}: {error}"
    program = words[0].rpartition("/")[2]
    if program == "make":
        named = [word for word in words[1:] if re.fullmatch(r"[a-z][\w-]*", word)]
        wrong = [word for word in named if word not in TARGETS]
        return f"make has no target {wrong}" if wrong else ""
    if "-m" in words[:-1]:
        place = words.index("-m") + 1
        module, rest = words[place], words[place + 1 :]
        if module.partition(".")[0] not in ("flowtrain", "bench", "examples"):
            return ""
        if module == "flowtrain.torchrun" and "-m" in rest:
            return _torchrun_problem(rest)
        return _module_problem(module, rest)
    script = next((word for word in words[1:] if word.endswith(".py")), "")
    if script.startswith("examples/") and not (ROOT / script).exists():
        return f"{script} does not exist"
    return ""


def _torchrun_problem(words: list[str]) -> str:
    """The options of torchrun, then the command that it starts."""
    place = words.index("-m")
    known = get_args_parser()._option_string_actions
    given = [word.partition("=")[0] for word in words[:place] if word.startswith("--")]
    wrong = [flag for flag in given if flag not in known]
    return (
        f"torchrun has no option {wrong}"
        if wrong
        else problem(shlex.join(["python", *words[place:]]))
    )


def _module_problem(module: str, words: list[str]) -> str:
    path = ROOT.joinpath(*module.split("."))
    source = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    if not source.exists():
        return f"there is no module {module}"
    known = flags(source) | {"--help"}
    given = [word.partition("=")[0] for word in words if re.match(r"--[a-zA-Z]", word)]
    for flag in given:
        if (
            flag not in known
            and "--{" not in known
            and not (_in_config(flag[2:]) and "--config" in known)
        ):
            return f"{module} has no option {flag}"
    return _value_problem(module, words) if module in ("flowtrain.train", "flowtrain.rft") else ""


def _in_config(key: str) -> bool:
    section, _, rest = key.partition(".")
    tables = 2 if section in NAMED else 1
    general = f"{section}.NAME.{rest.partition('.')[2]}"
    is_table = section in Config.model_fields and key.count(".") < tables
    return key in OPTIONS or general in OPTIONS or section == "plugins" or is_table


def _value_problem(module: str, words: list[str]) -> str:
    """Which option of a run has a value that is none for it alone, or ""."""
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        flag, given, value = word.partition("=")
        key, text = flag.removeprefix("--"), value if given else following
        if flag == key or key not in OPTIONS or text.startswith(("$", "...", "-")):
            continue
        section, _, name = key.partition(".")
        try:
            Config.model_validate({section: {name: _value(key, text)}})
        except ValidationError as error:
            if len(error.errors()[0]["loc"]) > 1:
                return f"{module}: {explain(error, {})}"
    return ""


@cache
def flags(source: Path) -> frozenset[str]:
    """Options that a file and our files it imports define; "--{" where it makes names."""
    found = set(re.findall(r"[\"'](--(?:\{|[\w-]+))", source.read_text(encoding="utf-8")))
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                if name in ("flowtrain.config.command", "flowtrain.config.options"):
                    found |= OWN_FLAGS
                path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
                if name.startswith(("bench.", "flowtrain.utils.")) and path.exists():
                    found |= set(re.findall(r"[\"'](--[\w-]+)", path.read_text(encoding="utf-8")))
    return frozenset(found)


@pytest.mark.parametrize("page", TODAY, ids=name_of)
def test_commands_and_options_in_the_text_exist(page: Path) -> None:
    assert [said for command in commands(page) if (said := problem(command))] == []
    sections = "|".join(Config.model_fields)
    named = [
        found[1]
        for span in spans(page.read_text(encoding="utf-8"))
        if (found := re.fullmatch(rf"(?:--)?((?:{sections})\.[a-z]\w*)(?: ?=.*| .*)?", span))
    ]
    assert [key for key in named if not _in_config(key) and not re.fullmatch(NAMES, key)] == []


def test_mistakes_would_be_found() -> None:
    assert problem("python -m flowtrain.trian")
    assert problem("python -m flowtrain.train --train.lrr 1")
    assert problem("python -m flowtrain.train --train.lr fast")
    assert problem("python -m flowtrain.rollouts serve --databse a")
    assert problem("python -m bench.step --repeat 1")
    assert problem("make quickstrat")
    assert problem("python -m flowtrain.torchrun --nnode 2 -m flowtrain.train")
    assert problem("python -m flowtrain.torchrun --nnodes 2 -m flowtrain.train --train.lrr 1")
    assert problem("torchrun --nproc_per_node 8 -m flowtrain.train --rollout.enigne vllm")
    assert not problem("torchrun --nproc_per_node 8 -m flowtrain.train --rollout.engine vllm")
    assert code_problems("from flowkernels import LossSpec, policy_los") == ["policy_los"]
