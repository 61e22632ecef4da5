"""The files of deploy/, taken apart for the tests: command lines, ports, variables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from flowtrain.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose" / "docker-compose.yml").read_text())
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SCRIPT, POOL_SCRIPT = (DEPLOY / "slurm" / f"{name}.sbatch" for name in ("train", "pool"))
SKYPILOT = DEPLOY / "skypilot" / "pool.yaml"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def manifests() -> list[dict[str, Any]]:
    """Everything that the Kubernetes files hold, but the kustomization."""
    files = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    named = [file for file in files if file.name != "kustomization.yaml"]
    return [item for file in named for item in yaml.safe_load_all(file.read_text())]


def containers() -> Iterator[dict[str, Any]]:
    """The containers of all pods, sidecars among them."""
    for item in manifests():
        if "template" in item.get("spec", {}):
            pod = item["spec"]["template"]["spec"]
            yield from (*pod.get("initContainers", ()), *pod["containers"])


def settings(unit: Path, key: str) -> list[str]:
    """The values of a key of a unit file, in order."""
    return re.findall(rf"^{key}=(.*)$", unit.read_text(), re.MULTILINE)


def commands() -> dict[str, str]:
    """Every command line of flowtrain in the files as `python -m ...`, by where it stands."""
    found = {
        f"compose {name}": _as_module(each["command"])
        for name, each in COMPOSE["services"].items()
        if "command" in each
    }
    for each in containers():
        found[f"kubernetes {each['name']}"] = _as_module(each["args"])
    for unit in UNITS:
        [found[unit.name]] = settings(unit, "ExecStart")
    joined = re.sub(r" *\\\n\s*", " ", SCRIPT.read_text())
    [found[SCRIPT.name]] = re.findall(r"^srun .*?(python .*) &$", joined, re.MULTILINE)
    for task in list(yaml.safe_load_all(SKYPILOT.read_text()))[1:]:
        for line in _lines(task["run"]):
            found[f"skypilot {line.split()[2]}"] = line.rstrip("& ")
    options = '--config "$CONFIG" --run.dir "$RUN_DIR"'
    for line in _lines(POOL_SCRIPT.read_text().replace('"${run[@]}"', options)):
        if (at := line.find("python -m")) >= 0 and not line.startswith("#"):
            found[f"slurm {line[at:].split()[2]}"] = re.split(' "\\$@"\'|&', line[at:])[0]
    return found


def _lines(text: str) -> list[str]:
    """The lines of a shell script, those that a backslash continues in one."""
    return re.sub(r" *\\\n\s*", " ", text).splitlines()


def _as_module(words: list[str]) -> str:
    """Spell out what the image's entry point, `flowtrain`, makes of `flowtrain node ...`."""
    return f"python -m {COMMANDS[words[0]][0]} {shlex.join(words[1:])}"
