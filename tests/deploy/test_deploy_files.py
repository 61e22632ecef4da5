"""The files of deploy/ parse, run commands that exist, and agree with the code."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from deploy_files import (
    COMPOSE,
    DEPLOY,
    DOCKERFILE,
    POOL_SCRIPT,
    ROOT,
    SCRIPT,
    SKYPILOT,
    UNITS,
    commands,
    containers,
    manifests,
    settings,
)
from processes import run_program

from flowtrain import __version__
from flowtrain.config.command import INTERRUPTED
from flowtrain.config.options import parse
from flowtrain.rollouts.__main__ import _parser as dataflow_parser
from flowtrain.utils.net.serving import TOKEN_VARIABLE
from flowtrain.weights.__main__ import _parser as weights_parser

sys.path.append(str(ROOT / "tests" / "docs"))  # where commands of pages are checked
problem = importlib.import_module("test_docs_code").problem
SERVERS = {
    "dataflow": dataflow_parser().parse_known_args(["serve", "--database", "d"])[0].port,
    "weights": weights_parser().parse_args(["serve", "store"]).port,
}
"""The port of each server by default."""
FLOWTRAIN = {name: each for name, each in COMPOSE["services"].items() if name != "postgres"}


def test_commands_name_modules_and_options_that_exist() -> None:
    found = commands()
    assert len(found) == 20
    assert {name: said for name, each in found.items() if (said := problem(each))} == {}
    modules = {re.findall(r"-m flowtrain\.([\w.]+)", each)[-1] for each in found.values()}
    assert modules == {"rollouts", "weights", "train", "rollouts.node"}


def test_all_trainers_resume_and_none_is_on_the_open_network() -> None:
    for name, command in commands().items():
        if "flowtrain.train" in command:
            assert re.search(r"--run.resume[= ]auto\b", command), name
        if name in {unit.name for unit in UNITS} and " serve " in command:
            assert "--host 127.0.0.1" in command
    for each in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in each.get("ports", ()))


def test_ports_are_the_defaults_of_the_servers() -> None:
    for name, command in commands().items():
        for module, port in SERVERS.items():
            if f"flowtrain.{module} serve" in command:
                assert re.findall(r"--port[= ](\d+)", command) == [str(port)], name
        for option, module in (("url", "dataflow"), ("store", "weights")):
            url = re.findall(rf"--dataflow\.{option}[= ]http://[\w.-]+:(\d+)", command)
            assert url in ([], [str(SERVERS[module])]), name
        for port in re.findall(r" --dataflow[= ]http://[\w.-]+:(\d+)", command):
            assert port == str(SERVERS["dataflow"]), name
    ports = {f"127.0.0.1:{port}:{port}" for port in SERVERS.values()}
    assert {port for each in FLOWTRAIN.values() for port in each.get("ports", ())} == ports
    found = {each["ports"][0]["containerPort"] for each in containers() if "ports" in each}
    assert found == set(SERVERS.values())
    services = [item for item in manifests() if item["kind"] == "Service"]
    assert {item["spec"]["ports"][0]["port"] for item in services} == set(SERVERS.values())


def test_addresses_are_names_that_the_files_give() -> None:
    given = {"compose": set(COMPOSE["services"]), "kubernetes": {"flowtrain-db"}}
    given["skypilot"] = {"service-0", "trainer-0"}  # the first machine of each task
    given["kubernetes"] |= {i["metadata"]["name"] for i in manifests() if i["kind"] == "Service"}
    for name, command in commands().items():
        hosts = re.findall(r"(?:http://|postgresql://flow@)([a-z][\w-]*)", command)
        assert set(hosts) <= given.get(name.split()[0], set()), name


def test_servers_are_asked_for_their_health() -> None:
    for name, module in (("service", "dataflow"), ("weights", "weights")):
        text = FLOWTRAIN[name]["healthcheck"]["test"][-1]
        assert f"http://127.0.0.1:{SERVERS[module]}/health" in text
        compile(text, name, "exec")
    for each in containers():
        probes = [each.get(f"{kind}Probe") for kind in ("startup", "readiness", "liveness")]
        asked = {probe["httpGet"]["path"] for probe in probes if probe}
        assert asked == ({"/health"} if "ports" in each else set())


def test_every_process_has_the_token_and_no_file_has_a_secret() -> None:
    for each in containers():
        assert each["env"][0] == {
            "name": TOKEN_VARIABLE,
            "valueFrom": {"secretKeyRef": {"name": "flowtrain", "key": "token"}},
        }
    for service in FLOWTRAIN.values():
        assert "token.env" in service["env_file"] and "environment" not in service
    for unit in UNITS:
        assert "/etc/flowtrain/token.env" in settings(unit, "EnvironmentFile")
    page = (ROOT / "docs" / "deployment.md").read_text()
    assert f"{TOKEN_VARIABLE}=" in page
    text = "".join(path.read_text() for path in DEPLOY.rglob("*") if path.is_file())
    assert not re.search(r"(?:TOKEN|PASSWORD)=\w|://\w+:[^/@\s]+@", text)


def test_nobody_is_root() -> None:
    for item in manifests():
        if "template" in item.get("spec", {}):
            context = item["spec"]["template"]["spec"]["securityContext"]
            assert context["runAsNonRoot"] and context["runAsUser"] == 1000
    for each in containers():
        context = each["securityContext"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["allowPrivilegeEscalation"] is False
    for service in FLOWTRAIN.values():
        assert service["cap_drop"] == ["ALL"]
    for unit in UNITS:
        assert settings(unit, "User") == ["flowtrain"]
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    for target in ("cpu", "gpu"):
        [stage] = [each for each in stages if f" AS {target}\n" in each]
        assert re.findall(r"^[A-Z]+ .*", stage, re.MULTILINE)[-1] == "USER 1000:1000"
    assert "useradd --uid 1000" in DOCKERFILE


def test_trainers_have_time_to_save() -> None:
    for unit in UNITS:
        if "flowtrain.train" in settings(unit, "ExecStart")[0]:
            assert settings(unit, "TimeoutStopSec") == ["15min"]
            assert settings(unit, "KillMode") == ["mixed"]
            assert settings(unit, "SuccessExitStatus") == [str(INTERRUPTED)]
    assert COMPOSE["services"]["trainer"]["stop_grace_period"] == "15m"
    [job] = [item for item in manifests() if item["kind"] == "Job"]
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 900
    assert "#SBATCH --signal=B:USR1@900" in SCRIPT.read_text()


def test_the_image_is_of_this_version_and_its_python_is_new_enough() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest = re.fullmatch(r">=3\.(\d+)", project["requires-python"])
    [minor] = re.findall(r"^ARG BASE=\S+/python:3\.(\d+)-", DOCKERFILE, re.MULTILINE)
    assert lowest and int(minor) >= int(lowest[1])
    makefile = (ROOT / "Makefile").read_text()
    [torch] = re.findall(r"^TORCH \?= (\S+)$", makefile, re.MULTILINE)
    assert f"ARG TORCH={torch}+cpu\n" in DOCKERFILE
    extras = {
        word for each in re.findall(r"\)\[([\w,]+)\]", DOCKERFILE) for word in each.split(",")
    }
    assert extras <= set(project["optional-dependencies"])
    found = {each["image"] for each in FLOWTRAIN.values()}
    assert found == {f"${{FLOWTRAIN_IMAGE:-flowtrain:{__version__}-cpu}}"}
    kustomization = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())
    assert kustomization["images"][0]["newTag"] == __version__


def test_what_the_image_copies_gets_to_the_builder() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    copied = re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE)
    assert {word for words in copied for word in words.split()} == sent
    assert all((ROOT / name).exists() for name in sent)
    assert "*" in ignored and "**/*.env" in ignored


def test_the_example_is_a_config() -> None:
    assert parse(["--config", str(DEPLOY / "run.toml")]) is not None


@pytest.mark.parametrize("script", [SCRIPT, POOL_SCRIPT], ids=lambda path: path.name)
def test_the_slurm_scripts_are_bash(script: Path) -> None:
    done = run_program(["bash", "-n", script])
    assert (done.returncode, done.stderr) == (0, "")


def test_a_job_group_has_its_tasks() -> None:
    header, *tasks = yaml.safe_load_all(SKYPILOT.read_text())
    assert header["execution"] == "parallel" and header["primary_tasks"] == ["trainer"]
    assert [task["name"] for task in tasks] == ["service", "trainer", "node"]
    assert all(task["secrets"][TOKEN_VARIABLE] is None for task in tasks), "told at the start"


@pytest.mark.skipif(not shutil.which("kubectl"), reason="needs kubectl")
def test_kustomize_renders_with_the_config_and_the_image() -> None:
    words = ("kubectl", "kustomize", "--load-restrictor=LoadRestrictionsNone")
    done = run_program([*words, DEPLOY / "kubernetes"])
    assert done.returncode == 0, done.stderr
    items = list(yaml.safe_load_all(done.stdout))
    [config] = [item for item in items if item["kind"] == "ConfigMap"]
    assert config["data"]["run.toml"] == (DEPLOY / "run.toml").read_text()
    assert done.stdout.count(f"image: registry.example/flowtrain:{__version__}") == 4
    assert all(i["metadata"].get("namespace", "flowtrain") == "flowtrain" for i in items)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_takes_the_units(unit: Path, tmp_path: Path) -> None:
    copy = tmp_path / unit.name
    # It asks for the program as well.
    copy.write_text(unit.read_text().replace("/opt/flowtrain/bin/python", sys.executable))
    words = ("systemd-analyze", "verify", "--man=no", "--recursive-errors=no")
    done = run_program([*words, copy])
    assert (done.returncode, done.stderr) == (0, "")


def test_units_expand_their_variables() -> None:
    for unit in UNITS:
        set_here = {word.partition("=")[0] for word in settings(unit, "Environment")}
        [command] = settings(unit, "ExecStart")
        assert set(re.findall(r"\$\{(\w+)\}", command)) <= set_here
        assert shlex.split(command)[0] == "/opt/flowtrain/bin/python"
