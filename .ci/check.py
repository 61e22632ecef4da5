"""The tests that a change touches:  python .ci/check.py [BASE]

The change is what differs from where this branch left BASE (default: main), with files that are not
committed; on main itself, what is not committed, or else the last commit. For a module, those tests
of its package run that import it, or that import what imports it; where a package has no folder of
tests, those of all folders. Slow tests are left to `make test-all`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

SOURCES = ("flowtrain/", "kernels/flowkernels/", "bench/", "tests/", "examples/")
ALWAYS = (
    "tests/docs/test_docs_links.py",
    "tests/test_contributing.py",
    "tests/test_imports.py",
)
"""Rules of the whole tree, which take next to no time."""
MAX_FILES = 12


def main() -> None:
    changed = changed_files(*sys.argv[1:2] or ["main"])
    chosen, too_many = choose(changed)
    print(f"{len(changed)} changed files; {len(chosen)} test files:", *chosen, sep="\n  ")
    if too_many:
        print("Too many tests use these files for a quick check:", *too_many, sep="\n  ")
    sys.stdout.flush()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow and not clock and not vllm",
        *chosen,
    ]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    raise SystemExit(0 if code == 5 else code)  # 5: all that was chosen is slow


def changed_files(base: str) -> list[str]:
    head = git("rev-parse", "HEAD")
    start = git("merge-base", "HEAD", base, check=False)
    tracked = git("diff", "--name-only", *([start] if start and start != head else ["HEAD"]))
    files = [*tracked.splitlines(), *git("ls-files", "-o", "--exclude-standard").splitlines()]
    return sorted(files or git("diff", "--name-only", "HEAD~1").splitlines())


def git(*words: str, check: bool = True) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, check=check, capture_output=True, text=True)
    return done.stdout.strip()


def choose(changed: Iterable[str]) -> tuple[list[str], list[str]]:
    """(test files for changed files, changed files that too many tests use), as paths from ROOT."""
    tests = {path: imports(path) for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    sources = [path for path in changed if path.endswith(".py") and path.startswith(SOURCES)]
    chosen = {path for path in (*ALWAYS, *sources) if Path(path).name.startswith("test_")}
    too_many = []
    for source in sources:
        folder = tests_of(source)
        near = {test: used for test, used in tests.items() if test.is_relative_to(ROOT / folder)}
        users = users_of(module_of(source), near)
        if folder == "tests" and len(users) > MAX_FILES:
            too_many.append(source)
        else:
            chosen |= {str(path.relative_to(ROOT)) for path in users}
    return sorted(path for path in chosen if (ROOT / path).exists()), too_many


def tests_of(path: str) -> str:
    """The folder with the tests of a source file: flowtrain/tools/base.py has tests/tools."""
    first, second, *_ = Path(path).parts
    folder = Path("tests") / {"kernels": "kernels", "flowtrain": second}.get(first, "")
    return str(Path(path).parent if first == "tests" else folder if folder.is_dir() else "tests")


def module_of(path: str) -> str:
    """The name by which tests import a file; a helper's is its stem."""
    parts = Path(path).with_suffix("").parts
    if parts[0] == "tests":
        return parts[-1]
    return ".".join(parts[parts[0] == "kernels" :]).removesuffix(".__init__")


def users_of(module: str, tests: Mapping[Path, set[str]]) -> list[Path]:
    """The tests that import a module; where that is one at most, also those of its importers."""
    modules = {module}
    while True:
        users = [path for path, used in tests.items() if used & modules]
        importers = {importer for importer, targets in EDGES.items() if targets & modules} - modules
        if len(users) > 1 or not importers:
            return users
        modules |= importers


def imports(path: Path) -> set[str]:
    """Modules that a test names in its imports; a name that a package hands on is its module's."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {node.module} | names | {ORIGIN.get(name, "") for name in names}
    return found


def targets(module: str) -> set[str]:
    """What a module of ours imports, within functions too; a submodule by its own name."""
    parts = module.split(".")
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            depth = len(parts) - node.level + (MODULES[module].name == "__init__.py")
            base = parts[:depth] if node.level else []
            package = ".".join([*base, *([node.module] if node.module else [])])
            names = {f"{package}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else package for name in names}
    return found


MODULES = {
    ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__"): path
    for base in (ROOT, ROOT / "kernels")
    for path in sorted(base.glob("flow*/**/*.py"))
}
"""The files of flowtrain and flowkernels by their dotted names."""
EDGES = {module: targets(module) for module in MODULES}
ORIGIN = {
    f"{package}.{alias.asname or alias.name}": node.module
    for package, path in MODULES.items()
    if path.name == "__init__.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom) and node.module
    for alias in node.names
}
"""The module behind every name that a package takes from it, as in flowtrain.agents.Flow."""


if __name__ == "__main__":
    main()
