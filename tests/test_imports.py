"""Who imports whom, in fresh interpreters and in the text; the size of files and functions."""

from __future__ import annotations

import ast
import functools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from processes import run_program

ROOT = Path(__file__).resolve().parents[1]
STDLIB = sys.stdlib_module_names | {"__future__"}
MODULES = {
    ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in (ROOT, ROOT / "kernels")
    for path in sorted(folder.glob("flow*/**/*.py"))
}
"""Every module of flowtrain and flowkernels by its dotted name."""


@dataclass(frozen=True)
class Edge:
    """`importer` names `target` (a module, as exactly as the text tells) on a line."""

    importer: str
    target: str
    line: int
    is_top_level: bool
    """Runs when the module is imported."""

    def __str__(self) -> str:
        place = f"{MODULES[self.importer].relative_to(ROOT)}:{self.line}"
        return f"{place}: {self.importer} -> {self.target}"


def python(code: str) -> list[Any]:
    """The JSON list that a fresh interpreter prints; `-c` puts the current folder on its path."""
    done = run_program([sys.executable, "-c", code], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@functools.cache
def loaded_by(statement: str) -> frozenset[str]:
    """Packages in sys.modules after a statement, but the standard library and the interpreter's."""
    code = (
        f"import sys, json; before = set(sys.modules)\n{statement}\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in set(sys.modules) - before})))"
    )
    return frozenset(
        name for name in python(code) if name not in STDLIB and not name.startswith("_")
    )


# ---- what a fresh interpreter loads


def test_flowkernels_loads_torch_and_triton_and_nothing_else() -> None:
    code = (
        "import torch, importlib.util\n"
        "if importlib.util.find_spec('triton'): import triton.language\n"
        "import sys, json; packages = lambda: {name.partition('.')[0] for name in sys.modules}\n"
        "before = packages()\nimport flowkernels\nprint(json.dumps([*packages() - before]))"
    )
    assert set(python(code)) - STDLIB == {"flowkernels"}


LIGHT = {
    "a server of weights": (
        "import flowtrain.weights.__main__, flowtrain.weights.stores.serve",
        *("numpy", "torch transformers"),
    ),
    "a service of the dataflow": (
        "import flowtrain.rollouts.__main__, flowtrain.rollouts.service, flowtrain.rollouts.ledger",
        *("flowtrain", "torch transformers flowkernels vllm"),
    ),
    "the config": (
        "import flowtrain.config, flowtrain.config.options, flowtrain.config.command",
        "pydantic",
        "torch numpy transformers tokenizers safetensors matplotlib bm25s flowkernels",
    ),
    "what no model needs": (
        "import flowtrain.algorithms, flowtrain.tasks, flowtrain.rewards, flowtrain.logging\n"
        "import flowtrain.agents.agentflow.flow, flowtrain.agents.agentflow.build\n"
        "import flowtrain.agents.collect",
        *("flowtrain", "torch transformers flowkernels vllm"),
    ),
    "parsing and help": (
        "from flowtrain.config.options import help_text, parse\n"
        "parse(['--train.lr', '1e-4']); help_text('x')",
        *("flowtrain", "torch"),
    ),
}
"""Statements, a package that each loads, and those that it does without."""


@pytest.mark.parametrize("name", LIGHT)
def test_what_needs_no_model_loads_none(name: str) -> None:
    statement, package, others = LIGHT[name]
    loaded = loaded_by(statement)
    assert package in loaded and not loaded & set(others.split())


def test_a_service_of_the_dataflow_needs_no_trainer() -> None:
    """Its image is a small one."""
    statement = LIGHT["a service of the dataflow"][0]
    loaded = python(f"{statement}\nimport json, sys; print(json.dumps([*sys.modules]))")
    assert not {"flowtrain.algorithms", "flowtrain.trainer"} & set(loaded)


def test_the_records_load_the_standard_library_alone() -> None:
    assert loaded_by("import flowtrain, flowtrain.records, flowtrain.utils.seeds") == {"flowtrain"}


def test_the_kernels_folder_does_not_pose_as_the_hub_package() -> None:
    """transformers probes for a package called `kernels`."""
    model = (
        "from transformers import Qwen2Config, Qwen2ForCausalLM\n"
        "Qwen2ForCausalLM(Qwen2Config(vocab_size=8, hidden_size=8, intermediate_size=8, "
        "num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1))\n"
    )
    asked = (
        "import json, sys\nfrom transformers.utils import is_kernels_available as ask\n"
        "here = ask()\nsys.path.remove(''), sys.modules.pop('kernels', None), ask.cache_clear()\n"
        "print(json.dumps([here, ask()]))"
    )
    here, elsewhere = python(model + asked)
    assert here == elsewhere
    assert not (ROOT / "kernels" / "__init__.py").exists()


# ---- what the files say


def edges() -> list[Edge]:
    return [edge for name in MODULES for edge in _edges(name)]


def _text(name: str) -> str:
    return MODULES[name].read_text(encoding="utf-8")


@functools.cache
def _nodes(name: str) -> tuple[tuple[ast.AST, bool], ...]:
    """The statements of a module, and what is in them where it may call for a module; and whether
    each runs when the module is imported: neither inside of functions nor under `if TYPE_CHECKING`.
    """
    text = _text(name)
    has_calls = "__import__" in text or "import_module" in text
    found: list[tuple[ast.AST, bool]] = [(ast.parse(text), True)]
    for node, runs in found:  # which grows
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        later = node.body if is_typing else ()
        for child in ast.iter_child_nodes(node):
            if has_calls or not isinstance(child, ast.expr):
                found.append((child, runs and not is_function and child not in later))
    return tuple(found)


@functools.cache
def _edges(name: str) -> tuple[Edge, ...]:
    is_package = MODULES[name].name == "__init__.py"
    return tuple(
        Edge(name, target, node.lineno, runs)
        for node, runs in _nodes(name)
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)
        for target in _targets(node, name, is_package=is_package)
    )


def _targets(node: ast.AST, importer: str, is_package: bool) -> Iterator[str]:
    match node:
        case ast.Import(names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module, names, level):
            here = importer.split(".")
            base = ".".join(here[: len(here) - level + is_package]) if level else ""
            package = ".".join(filter(None, (base, module)))
            # `from package import name` means the submodule of that name where there is one.
            yield from {
                f"{package}.{alias.name}" if f"{package}.{alias.name}" in MODULES else package
                for alias in names
            }
        case ast.Call(
            ast.Name("__import__") | ast.Attribute(attr="import_module"),
            [ast.Constant(str(target)), *_],
        ):
            yield target


def is_in(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def is_stdlib(module: str) -> bool:
    return module.partition(".")[0] in STDLIB


def offenders(edges: list[Edge]) -> str:
    return "\n" + "\n".join(map(str, edges))


ALLOWED = {
    "flowkernels": ("torch", "triton", "flowkernels"),
    "flowtrain.records": ("flowtrain.records",),
    "flowtrain.utils.seeds": (),
    "flowtrain.config": (
        "pydantic",
        "tomli_w",
        "flowtrain.records",
        "flowtrain.utils",
        "flowtrain.config",
    ),
}
"""Packages that a package may import besides the standard library."""

ORDER = (
    ("records",),
    ("utils",),
    ("config",),
    ("weights",),
    ("trainer",),
    ("inference",),
    ("tasks",),
    ("tools",),
    ("agents",),
    ("rewards", "algorithms"),
    ("logging",),
    ("rollouts",),
    ("trainer.setup",),
    ("evaluation",),
    ("trainer.run", "rollouts.node", "replay"),
    ("train", "rft"),
    ("torchrun",),
)
"""The rooms of the house: each imports itself and rooms above it, never its neighbours or below.
Two have a part that puts together what other rooms make."""

_HEAVY = ("torch", "transformers", "tokenizers", "safetensors", "flowkernels")
_MODELS = ("flowtrain.trainer", "flowtrain.weights")
FORBIDDEN = {
    "flowtrain.agents": (*_HEAVY, *_MODELS),
    "flowtrain.tools": (*_HEAVY, *_MODELS),
    "flowtrain.tasks": (*_HEAVY, *_MODELS, "flowtrain.inference"),
    "flowtrain.rewards": (*_HEAVY, *_MODELS, "flowtrain.agents"),
    **{
        f"flowtrain.rollouts.{part}": (*_HEAVY, *_MODELS, "flowtrain.agents")
        for part in ("ledger", "rules", "service", "client", "node_client", "codec")
    },
    "flowtrain.weights": ("flowtrain.config",),
    "flowtrain.algorithms": ("flowtrain.weights",),
    "flowtrain.logging": ("flowtrain.weights",),
}
"""Imports that the order would allow and a package still does without."""
WITHIN_A_FUNCTION = {("flowtrain.tools.function_tool", "transformers.utils")}
"""Those that only who calls a function pays for."""
VLLM = "flowtrain.inference.vllm"
"""The package that may import vLLM."""


def test_packages_form_a_strict_order() -> None:
    rooms = {name: tier for tier, names in enumerate(ORDER) for name in names}

    def room(module: str) -> str:
        """The part of a room that a module is in, else its room."""
        _, *parts = module.split(".") if module.startswith("flowtrain.") else ["", ""]
        part = ".".join(parts[:2])
        return part if part in rooms else parts[0]

    found = {room(name) for name in MODULES if name.startswith("flowtrain.")}
    assert found - {"_delta", "__main__"} == set(rooms), "a room is new, or gone"

    bad = [
        edge
        for edge in edges()
        if (here := room(edge.importer)) in rooms
        and (there := room(edge.target)) in rooms
        and here != there
        and rooms[there] >= rooms[here]
    ]
    assert not bad, offenders(bad)


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_at_most(package: str) -> None:
    outside = [e for e in edges() if is_in(e.importer, package) and not is_stdlib(e.target)]
    bad = [e for e in outside if not is_in(e.target, *ALLOWED[package])]
    assert not bad, offenders(bad)


@pytest.mark.parametrize("package", FORBIDDEN)
def test_never_imports(package: str) -> None:
    assert any(is_in(name, package) for name in MODULES), f"{package} is gone: rename it here too"
    bad = [
        e
        for e in edges()
        if is_in(e.importer, package)
        and is_in(e.target, *FORBIDDEN[package])
        and (e.is_top_level or (e.importer, e.target) not in WITHIN_A_FUNCTION)
    ]
    assert not bad, offenders(bad)


def test_vllm_is_imported_in_its_package_only() -> None:
    bad = [e for e in edges() if is_in(e.target, "vllm") and not is_in(e.importer, VLLM)]
    assert not bad, offenders(bad)


def test_no_import_cycle() -> None:
    graph: dict[str, dict[str, Edge]] = {name: {} for name in MODULES}
    for edge in edges():
        for target in _loaded_modules(edge.target):
            # A module's own packages are being imported already when its text runs.
            if edge.is_top_level and target in MODULES and not is_in(edge.importer, target):
                graph[edge.importer].setdefault(target, edge)
    cycle = _cycle(graph)
    assert not cycle, offenders(cycle)


def _loaded_modules(target: str) -> list[str]:
    """a.b.c loads a, a.b and a.b.c."""
    parts = target.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _cycle(graph: dict[str, dict[str, Edge]]) -> list[Edge]:
    """The edges of one cycle, or none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[Edge]:
        if name in path:
            loop = [*path[path.index(name) :], name]
            return [graph[a][b] for a, b in pairwise(loop)]
        if name not in done:
            for target in graph[name]:
                if found := visit(target, [*path, name]):
                    return found
            done.add(name)
        return []

    return next((found for name in graph if (found := visit(name, []))), [])


def test_the_cycle_finder_finds_a_cycle() -> None:
    def cycle(**graph: str) -> list[Edge]:
        return _cycle({a: {b: Edge(a, b, 1, True) for b in there} for a, there in graph.items()})

    assert cycle(a="b", b="c", c="b") == [Edge("b", "c", 1, True), Edge("c", "b", 1, True)]
    assert cycle(a="bc", b="c", c="") == []


# ---- size


def test_files_have_at_most_400_lines() -> None:
    assert not [(name, size) for name in MODULES if (size := len(_text(name).splitlines())) > 400]


def test_functions_have_at_most_100_lines() -> None:
    """And Triton bodies 150."""
    too_long = []
    for name in MODULES:
        for node, _ in _nodes(name):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                is_kernel = any("triton" in ast.unparse(each) for each in node.decorator_list)
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > (150 if is_kernel else 100):
                    too_long.append(f"{name}.{node.name}: {size}")
    assert not too_long


def test_the_walk_sees_the_house() -> None:
    """The rules above hold for nothing when nothing is found."""
    seen = "flowtrain.records flowtrain.agents flowtrain.tools.base flowkernels.policy_loss"
    assert set(seen.split()) <= set(MODULES)
    found = {(e.importer, e.target) for e in edges()}
    assert ("flowtrain.trainer.run.run_logger", "flowtrain.logging.page.curves") in found
    assert ("flowtrain.tools.registry", "flowtrain.tasks.sets") in found, "under TYPE_CHECKING"
    assert ("flowtrain.inference.torch_engine", "torch") in found
    assert os.path.commonpath([*MODULES.values()]) == str(ROOT)
