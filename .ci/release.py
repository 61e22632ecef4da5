"""A release of both distributions, step by step (docs/release.md):

python .ci/release.py prepare 0.2.0     write the version where it stands, and date the CHANGELOG
python .ci/release.py check             say what keeps this commit from being one
make dist try-dist                      build both, check them, use them in new environments
python .ci/release.py upload [--index URL]    upload dist/, flowkernels first, then tag the commit
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SEMANTIC = r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(rc[1-9]\d*)?"
VERSIONS = {
    "flowtrain/__init__.py": r'^__version__ = "(.+)"$',
    "kernels/flowkernels/__init__.py": r'^__version__ = "(.+)"$',
    "pyproject.toml": r'^    "flowkernels~=(.+)",',
}
"""Where the version stands."""
HEADING = r"^## (\S+) \((unreleased|\d{4}-\d\d-\d\d)\)$"


def versions(root: Path) -> dict[str, str]:
    """Return the version of each file that has it."""
    return {name: found(pattern, root / name)[1] for name, pattern in VERSIONS.items()}


def found(pattern: str, path: Path) -> re.Match[str]:
    match = re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)
    assert match is not None, f"{path} has no line {pattern}"
    return match


def prepare(root: Path, version: str, today: str) -> None:
    """Write a version into the files and the date into the newest section of the CHANGELOG."""
    if not re.fullmatch(SEMANTIC, version):
        sys.exit(f"{version} is no version: MAJOR.MINOR.PATCH, with rcN behind it before a release")
    for name, pattern in VERSIONS.items():
        replace(root / name, found(pattern, root / name).span(1), version)
    changelog = root / "CHANGELOG.md"
    replace(changelog, found(HEADING, changelog).span(), f"## {version} ({today})")


def replace(path: Path, span: tuple[int, int], text: str) -> None:
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole[: span[0]] + text + whole[span[1] :], encoding="utf-8")


def missing(root: Path) -> list[str]:
    """Say what keeps the commit at HEAD from being a release."""
    found_versions = versions(root)
    version = found_versions["flowtrain/__init__.py"]
    heading = found(HEADING, root / "CHANGELOG.md")
    problems = [
        f"{name} says {other}, flowtrain/__init__.py {version}"
        for name, other in found_versions.items()
        if other != version
    ]
    if heading[1] != version or heading[2] == "unreleased":
        problems.append(f"CHANGELOG.md begins with {heading[0]!r}, not with {version} and its date")
    if git(root, "status", "--porcelain"):
        problems.append("there are changes that are not committed")
    if git(root, "tag", "--list", f"v{version}"):
        problems.append(f"the tag v{version} is there already")
    return problems


def upload(root: Path, index: str | None) -> None:
    """Upload dist/ with twine and tag the commit. flowtrain depends on flowkernels, so that goes
    first: nobody meets a flowtrain that cannot be installed.
    """
    if problems := missing(root):
        sys.exit("\n".join(problems))
    version = versions(root)["flowtrain/__init__.py"]
    files = sorted(map(str, (root / "dist").glob(f"flow*-{version}[-.]*")))
    if not {"flowkernels", "flowtrain"} <= {Path(name).name.partition("-")[0] for name in files}:
        sys.exit(f"dist/ has not both distributions of {version}: make dist")
    where = ["--repository-url", index] if index else []
    twine = [str(root / ".venv/release/bin/twine"), "upload", "--non-interactive", *where]
    subprocess.run([*twine, *files], check=True)  # sorted: flowkernels first
    git(root, "tag", "--annotate", f"v{version}", "--message", f"flowtrain {version}")
    print(f"v{version} is tagged; git push origin v{version}")


def git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = parser.add_subparsers(dest="step", required=True)
    steps.add_parser("prepare").add_argument("version")
    steps.add_parser("check")
    steps.add_parser("upload").add_argument("--index", help="URL of a package index; default PyPI")
    arguments = parser.parse_args()
    if arguments.step == "prepare":
        prepare(ROOT, arguments.version, f"{datetime.now(UTC):%Y-%m-%d}")
    elif arguments.step == "upload":
        upload(ROOT, arguments.index)
    elif problems := missing(ROOT):
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
