"""The plan of a run on several hosts: a TOML file that says which process runs where."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, PositiveInt, ValidationError, field_validator

from flowtrain.config.options import explain
from flowtrain.config.section import Section
from flowtrain.net.serving import TOKEN_VARIABLE
from flowtrain.types import UserError
from flowtrain.utils.errors import user_error

POLICIES = ("planner", "verifier")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
"""A name that Kubernetes takes too."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LOCAL = "local"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Host(Section):
    """A machine, [hosts.NAME]."""

    ssh: str = _LOCAL
    """destination for ssh, such as user@gpu-1, or "local": this machine"""
    address: str = ""
    """name or address at which the other hosts reach this one; empty: that of `ssh`"""
    folder: str = "."
    """working folder, with the config and whatever it names; over SSH seen from the home, without a
    ~"""
    python: str = "python"
    """Python that has flowtrain"""
    env: dict[str, str] = Field(default_factory=dict)
    """environment of the processes there; nothing secret, it is shown"""
    secrets: tuple[str, ...] = ()
    """variables of the launcher's environment that the processes there get too, such as PGPASSWORD
    or the keys of endpoints; never shown"""

    @field_validator("ssh", "address")
    @classmethod
    def _is_one_word(cls, value: str) -> str:
        if value.startswith("-") or any(map(str.isspace, value)):
            raise ValueError("must be the name or address of a machine")
        return value

    @field_validator("env", "secrets")
    @classmethod
    def _has_variables(
        cls, value: dict[str, str] | tuple[str, ...]
    ) -> dict[str, str] | tuple[str, ...]:
        for name in value:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a variable")
            if name == TOKEN_VARIABLE:
                raise ValueError(f"every process gets {name} by itself, from token_env")
        return value

    @field_validator("folder")
    @classmethod
    def _has_no_tilde(cls, value: str) -> str:
        if not value or value.startswith("~"):
            raise ValueError("must be a folder; over SSH one seen from the home, without a ~")
        return value

    @property
    def is_local(self) -> bool:
        return self.ssh == _LOCAL

    @property
    def reached_at(self) -> str:
        """Return the address for the other hosts."""
        return self.address or ("127.0.0.1" if self.is_local else self.ssh.rpartition("@")[2])


class Service(Section):
    """The service of the dataflow, [service]."""

    host: str
    """name of its host"""
    database: str
    """path of an SQLite file, or postgresql://user@host/name, with the password in PGPASSWORD (see
    `secrets`) or in ~/.pgpass"""
    port: int = Field(8400, ge=1, le=65535)
    """port that it listens at"""
    listen: str = ""
    """address that it listens at; empty: the address of its host"""
    options: tuple[str, ...] = ()
    """further words of its command line"""

    @field_validator("database")
    @classmethod
    def _has_no_password(cls, value: str) -> str:
        if "://" in value and urlsplit(value).password is not None:
            raise ValueError("the password belongs into PGPASSWORD or ~/.pgpass, not into a plan")
        return value


class Trainer(Section):
    """The trainer of a policy, [trainers.POLICY]."""

    host: str
    """name of its host"""
    run_dir: str
    """its run.dir"""
    nproc: PositiveInt = 1
    """ranks; more than one run under torchrun"""
    gpus: str = ""
    """its GPUs, such as "0,1" (CUDA_VISIBLE_DEVICES); empty: those that its host shows"""
    weights_port: int = Field(8321, ge=0, le=65535)
    """port of the server of its weights; 0: none, because nodes read run_dir themselves"""
    listen: str = ""
    """address that this server listens at; empty: the address of the host"""
    options: tuple[str, ...] = ()
    """further words of its command line"""


class Nodes(Section):
    """Rollout nodes of one kind on one host, [nodes.NAME]."""

    host: str
    """name of their host"""
    count: PositiveInt | None = None
    """how many; unset: one for each entry of `gpus`, or one"""
    gpus: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each node, such as [0, 1] or ["0,1", "2,3"]"""
    dataflow: str = ""
    """address of the service as these nodes see it, where a tunnel or proxy is between"""
    options: tuple[str, ...] = ()
    """further words of their command lines, such as --rollout.engine vllm"""

    @property
    def size(self) -> int:
        return self.count or len(self.gpus) or 1


class Slurm(Section):
    """Options that `--print slurm` adds, [slurm]."""

    options: tuple[str, ...] = ()
    """options of sbatch, such as "--time=24:00:00", each a line of the script"""


class Kubernetes(Section):
    """Options that `--print kubernetes` needs, [kubernetes]."""

    image: str = ""
    """image that has flowtrain"""
    claim: str = ""
    """PersistentVolumeClaim for the working folder of all pods; empty: a folder that goes with its
    pod"""
    secret: str = "flowtrain"
    """Secret whose key `token` is the token, and whose keys of the same names are the `secrets`"""


class Plan(Section):
    """Everything that runs."""

    config: str
    """TOML file of the run, in the folders of the hosts of service and trainers"""
    token_env: str = TOKEN_VARIABLE
    """variable of the launcher's environment that holds the token"""
    logs: str = "logs"
    """folder for the output of each process, on this machine"""
    options: tuple[str, ...] = ()
    """options over the config, for service and trainers alike"""
    hosts: dict[str, Host]
    service: Service
    trainers: dict[str, Trainer]
    nodes: dict[str, Nodes] = Field(default_factory=dict)
    slurm: Slurm = Slurm()
    kubernetes: Kubernetes = Kubernetes()

    def places(self) -> Iterator[tuple[str, str]]:
        """Key and value of every option that names a host."""
        yield "service.host", self.service.host
        for section, tables in (("trainers", self.trainers), ("nodes", self.nodes)):
            for name, table in tables.items():
                yield f"{section}.{name}.host", table.host


def read_plan(path: Path) -> Plan:
    """Read and check a plan. Raises UserError with the key and its value."""
    with user_error(f"{path}", OSError), user_error(f"{path}: not TOML", ValueError):
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    try:
        plan = Plan.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{path}: {explain(error, {})}") from None
    for problem in _problems(plan):
        raise UserError(f"{path}: {problem}")
    return plan


def _problems(plan: Plan) -> Iterator[str]:
    """List what does not fit together, each in a line with a key and its value."""
    hosts = plan.hosts
    for section, names in (("hosts", hosts), ("nodes", plan.nodes)):
        for name in names:
            if not _NAME.fullmatch(name):
                yield f"{section}.{name}: a name has at most 40 of a-z, 0-9 and -"
    for key, host in plan.places():
        if host not in hosts:
            yield f"{key}={host!r}: [hosts] has {', '.join(hosts) or 'nothing'}"
    if not plan.trainers:
        yield "trainers={}: there must be one, [trainers.planner]"
    for policy in plan.trainers:
        if policy not in POLICIES:
            yield f"trainers.{policy}: a policy is one of {', '.join(POLICIES)}"
    for name, nodes in plan.nodes.items():
        if nodes.count is not None and nodes.gpus and nodes.count != len(nodes.gpus):
            yield f"nodes.{name}.count={nodes.count}: `gpus` has {len(nodes.gpus)} entries"
    if not _VARIABLE.fullmatch(plan.token_env):
        yield f"token_env={plan.token_env!r} must be the name of a variable, never the token"
    yield from _address_problems(plan)


def _address_problems(plan: Plan) -> Iterator[str]:
    taken: dict[tuple[str, int], str] = {}
    servers = [("service.port", plan.service.host, plan.service.port)]
    for policy, trainer in plan.trainers.items():
        servers.append((f"trainers.{policy}.weights_port", trainer.host, trainer.weights_port))
    users = {trainer.host for trainer in plan.trainers.values()}
    users |= {nodes.host for nodes in plan.nodes.values() if not nodes.dataflow}
    far = sorted(user for user in users if plan.hosts[user].reached_at not in _LOOPBACK)
    for key, name, port in servers:
        if port and (name, port) in taken:
            yield f"{key}={port}: {taken[name, port]} has this port of {name!r} already"
        taken[name, port] = key
        if port and far and (address := plan.hosts[name].reached_at) in _LOOPBACK:
            yield f"hosts.{name}.address={address!r}: {', '.join(far)} cannot reach it there"
