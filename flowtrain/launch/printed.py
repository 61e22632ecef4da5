"""A plan as a shell script, a Slurm script, or Kubernetes manifests, without its secrets."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from flowtrain.config.options import parse, to_toml
from flowtrain.launch.plan import Plan
from flowtrain.launch.roles import Commands, Kind, Role, plain_script, secrets_of
from flowtrain.net.serving import TOKEN_VARIABLE
from flowtrain.types import UserError

_FOLDER, _CONFIG = "/srv/flowtrain", "/plan/run.toml"
"""Where the containers have their working folder, and the config."""
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9./_-]{2,}")
"""A text that YAML may hold without quotes, unless PyYAML knows better."""


# ---- shell


def shell(plan: Plan) -> str:
    """Write a bash script that runs the processes of the host that it is given."""
    roles = Commands(plan).roles()
    cases: list[str] = []
    for name in dict.fromkeys(role.host for role in roles):
        own = [role for role in roles if role.host == name]
        cases += [f"{name})", *_needs(plan, name), *_starts(plan, own), "  ;;"]
    hosts = " or ".join(dict.fromkeys(role.host for role in roles))
    return "\n".join(
        (
            "#!/usr/bin/env bash",
            f"# Run it on every host, with the host's name: {hosts}.",
            "set -eu",
            *_prologue(plan),
            "start() {  # ROLE SCRIPT",
            '  sh -c "$2" </dev/null >"$logs/$1.log" 2>&1 &',
            "}",
            'case "${1:-}" in',
            *cases,
            f'*) echo "usage: $0 HOST, which is {hosts}" >&2; exit 2;;',
            "esac",
            *_epilogue(),
        )
    )


def _prologue(plan: Plan) -> list[str]:
    return [
        f"mkdir -p {shlex.quote(plan.logs)}",
        f"logs=$(cd {shlex.quote(plan.logs)} && pwd)",
        "trainers= nodes=",
        "finish() {  # nodes give their leases back while the service is there",
        '  for pids in "$nodes $trainers" "$(jobs -p)"; do',
        '    for pid in $pids; do kill "$pid" 2>/dev/null || true; done',
        '    for pid in $pids; do wait "$pid" 2>/dev/null || true; done',
        "  done",
        "}",
        "trap finish EXIT",
        "trap 'exit 130' INT TERM",
    ]


def _epilogue() -> list[str]:
    """Wait for what is here: trainers, or else nodes, or else servers; the rest ends then."""
    return [
        "code=0",
        'for pid in ${trainers:-${nodes:-$(jobs -p)}}; do wait "$pid" || code=$?; done',
        'exit "$code"',
        "",
    ]


def _needs(plan: Plan, host: str) -> Iterator[str]:
    """Lines that take the secrets of a host from the environment."""
    for name, source in secrets_of(plan, host).items():
        yield f'  : "${{{source}:?export it first}}"'
        yield f'  export {name}="${source}"'


def _starts(plan: Plan, roles: list[Role], before: str = "start") -> Iterator[str]:
    for role in roles:
        script = shlex.quote(plain_script(plan.hosts[role.host], role))
        yield f"  {before} {role.name} {script}"
        if role.kind in (Kind.TRAINER, Kind.NODE):
            yield f'  {role.kind}s="${role.kind}s $!"'


# ---- Slurm


def slurm(plan: Plan) -> str:
    """Write a script for sbatch: each host of the plan is a machine of the job."""
    names = list(dict.fromkeys(host for _, host in plan.places()))
    variables = {name: f"at_{number}" for number, name in enumerate(names)}
    marks = {name: f"ADDRESS-OF-{name}." for name in names}
    roles = Commands(plan, lambda _server, name: marks[name]).roles()
    options = [f"--nodes={len(names)}", "--ntasks-per-node=1", "--job-name=flowtrain"]
    if num_gpus := max(sum(_num_gpus(role) for role in roles if role.host == n) for n in names):
        options.append(f"--gpus-per-node={num_gpus}")
    starts: list[str] = []
    for role in roles:
        # The address is a variable that the script of the process expands.
        starts += _starts(plan, [role], f'start "${variables[role.host]}"')
    text = "\n".join(
        (
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in (*options, *plan.slurm.options)),
            "# sbatch passes the environment on, and with it the secrets.",
            "set -eu",
            *(line.strip() for name in names for line in _needs(plan, name)),
            'machines=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))',
            *(
                f"export {variable}=${{machines[{number}]}}  # {name}"
                for number, (name, variable) in enumerate(variables.items())
            ),
            *_prologue(plan),
            "start() {  # MACHINE ROLE SCRIPT",
            '  srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" --output="$logs/$2.log" \\',
            '    sh -c "$3" &',
            "}",
            *(line.strip() for line in starts),
            *_epilogue(),
        )
    )
    for name, mark in marks.items():
        text = text.replace(mark, f"${variables[name]}")
    return text


def _num_gpus(role: Role) -> int:
    gpus = role.env.get("CUDA_VISIBLE_DEVICES", "")
    return len(gpus.split(",")) if gpus else 0


# ---- Kubernetes


def kubernetes(plan: Plan) -> str:
    """Manifests for kubectl: a Deployment for the service, a Job for each trainer, with the server
    of its weights beside it, and for the nodes of each name.

    Raises UserError if the plan has no image, or the config is not here.
    """
    if not plan.kubernetes.image:
        raise UserError("kubernetes.image='': an image that has flowtrain is needed")
    config = parse(("--config", plan.config))
    assert config is not None, "nobody asked for help"
    inside = plan.model_copy(update={"config": _CONFIG})
    roles = Commands(inside, lambda server, _host: f"flowtrain-{server}", "0.0.0.0").roles()
    items: list[Any] = [
        _item("ConfigMap", "v1", "flowtrain-config", data={"run.toml": to_toml(config)})
    ]
    for role in roles:
        if role.kind == Kind.SERVICE:
            items += _server_items(inside, role)
        elif role.kind == Kind.TRAINER:
            servers = [each for each in roles if each.kind == Kind.WEIGHTS and each.of == role.of]
            items += _trainer_items(inside, role, servers)
    for name, nodes in inside.nodes.items():
        own = [role for role in roles if role.kind == Kind.NODE and role.of == name]
        job = _job(inside, f"flowtrain-nodes-{name}", [_container(inside, own[0])], num=nodes.size)
        items.append(job)
    return yaml.dump_all(items, Dumper=_Dumper, sort_keys=False, width=math.inf)


def _server_items(plan: Plan, role: Role) -> list[Any]:
    """The service: one pod, since SQLite has one writer, and a name for it."""
    name, port = f"flowtrain-{role.name}", plan.service.port
    template = _template(plan, name, [_container(plan, role)], restart="Always")
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": {"app": name}},
        "template": template,
    }
    return [_item("Deployment", "apps/v1", name, spec=spec), _named(name, name, port)]


def _trainer_items(plan: Plan, role: Role, servers: list[Role]) -> list[Any]:
    """A trainer; the server of its weights is a sidecar, which ends with it."""
    name = f"flowtrain-{role.name}"
    sidecars = [{**_container(plan, server), "restartPolicy": "Always"} for server in servers]
    job = _job(plan, name, [_container(plan, role)], sidecars=sidecars)
    port = plan.trainers[role.of].weights_port
    return [job, *(_named(f"flowtrain-{server.name}", name, port) for server in servers)]


def _job(
    plan: Plan, name: str, containers: list[Any], *, sidecars: list[Any] | None = None, num: int = 1
) -> dict[str, Any]:
    """A Job of `num` pods, each of which has to end well once; one that failed starts again."""
    template = _template(plan, name, containers, restart="OnFailure", sidecars=sidecars or [])
    spec = {"parallelism": num, "completions": num, "template": template}
    return _item("Job", "batch/v1", name, spec=spec)


def _template(
    plan: Plan, name: str, containers: list[Any], *, restart: str, sidecars: list[Any] | None = None
) -> dict[str, Any]:
    claim = {"persistentVolumeClaim": {"claimName": plan.kubernetes.claim}}
    volumes = [
        {"name": "work", **(claim if plan.kubernetes.claim else {"emptyDir": {}})},
        {"name": "plan", "configMap": {"name": "flowtrain-config"}},
    ]
    spec: dict[str, Any] = {"restartPolicy": restart, "volumes": volumes, "containers": containers}
    if sidecars:
        spec["initContainers"] = sidecars
    return {"metadata": {"labels": {"app": name}}, "spec": spec}


def _container(plan: Plan, role: Role) -> dict[str, Any]:
    env: list[Any] = [
        {
            "name": name,
            "valueFrom": {
                "secretKeyRef": {
                    "name": plan.kubernetes.secret,
                    "key": "token" if name == TOKEN_VARIABLE else name,
                }
            },
        }
        for name in secrets_of(plan, role.host)
    ]
    own = {"PYTHONUNBUFFERED": "1", **plan.hosts[role.host].env}
    env += [{"name": name, "value": _literal(value)} for name, value in own.items()]
    mounts = [{"name": "work", "mountPath": _FOLDER}, {"name": "plan", "mountPath": "/plan"}]
    container: dict[str, Any] = {
        "name": role.name,
        "image": plan.kubernetes.image,
        "workingDir": _FOLDER,
        "command": ["python"],
        "args": [_literal(word) for word in _without_name(role)],
        "env": env,
        "volumeMounts": mounts,
    }
    if num_gpus := _num_gpus(role):
        container["resources"] = {"limits": {"nvidia.com/gpu": num_gpus}}
    return container


def _without_name(role: Role) -> tuple[str, ...]:
    """The words of a role; the pods of a Job share them, and a node is named after its pod then."""
    if role.kind != Kind.NODE:
        return role.words
    start = role.words.index("--name")
    return (*role.words[:start], *role.words[start + 2 :])


def _literal(text: str) -> str:
    """Kubernetes expands $(NAME)."""
    return text.replace("$(", "$$(")


def _named(name: str, app: str, port: int) -> dict[str, Any]:
    spec = {"selector": {"app": app}, "ports": [{"port": port, "targetPort": port}]}
    return _item("Service", "v1", name, spec=spec)


def _item(kind: str, version: str, name: str, **rest: Any) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **rest}


class _Dumper(yaml.SafeDumper):
    """Writes texts so that every reader takes them for texts, several lines as a block."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _text(dumper: _Dumper, text: str) -> yaml.Node:
    # PyYAML, of YAML 1.1, leaves 1e-5 and 0o14 bare, which kubectl reads as numbers.
    style = "|" if "\n" in text else None if _WORD.fullmatch(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


PRINTERS: dict[str, Callable[[Plan], str]] = {
    "shell": shell,
    "slurm": slurm,
    "kubernetes": kubernetes,
}
"""By the value of --print."""
