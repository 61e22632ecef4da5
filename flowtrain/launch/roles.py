"""The processes of a plan: their command lines, and the shell scripts that run them on a host."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from flowtrain.launch.plan import Host, Nodes, Plan, Service, Trainer
from flowtrain.net.serving import TOKEN_VARIABLE

_UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
_GPUS = "CUDA_VISIBLE_DEVICES"


class Kind(StrEnum):
    """Kinds of processes, in the order in which they start."""

    SERVICE = "service"
    WEIGHTS = "weights"
    TRAINER = "trainer"
    NODE = "node"

    @property
    def is_server(self) -> bool:
        """Tell whether it says where it listens, and others need that."""
        return self in (Kind.SERVICE, Kind.WEIGHTS)


@dataclass(frozen=True, slots=True)
class Role:
    """A process of the plan."""

    name: str
    """Name in the output and of its log file."""
    kind: Kind
    host: str
    words: tuple[str, ...]
    """Its command line behind `python`."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Its environment, beside that of its host."""
    of: str = ""
    """The policy or the nodes of the plan that it belongs to."""


class Commands:
    """The command lines of a plan."""

    def __init__(
        self,
        plan: Plan,
        address: Callable[[str, str], str] | None = None,
        listen: str = "",
    ) -> None:
        """`address` gives the address of a server, from the name of its role and of its host;
        default: the host's in the plan. `listen`: where servers listen that the plan says nothing
        about; empty: at that address.
        """
        self._plan = plan
        self._address = address or (lambda _server, name: plan.hosts[name].reached_at)
        self._listen = listen

    def roles(self) -> list[Role]:
        """Return all processes, in the order in which they start."""
        plan = self._plan
        return [
            self._service(plan.service),
            *(self._weights(*each) for each in plan.trainers.items() if each[1].weights_port),
            *(self._trainer(*each) for each in plan.trainers.items()),
            *(role for each in plan.nodes.items() for role in self._nodes(*each)),
        ]

    def _service(self, service: Service) -> Role:
        words = (
            *("-m", "flowtrain.dataflow", "serve", "--database", service.database),
            *self._listens("service", service.host, service.listen, service.port),
            *self._run_options(),
            *service.options,
        )
        return Role("service", Kind.SERVICE, service.host, words)

    def _weights(self, policy: str, trainer: Trainer) -> Role:
        name = f"weights-{policy}"
        words = (
            *("-m", "flowtrain.weights", "serve", f"{trainer.run_dir}/weights"),
            *self._listens(name, trainer.host, trainer.listen, trainer.weights_port),
        )
        return Role(name, Kind.WEIGHTS, trainer.host, words, of=policy)

    def _trainer(self, policy: str, trainer: Trainer) -> Role:
        ranks = ("-m", "flowtrain.torchrun", "--standalone", "--nproc_per_node")
        words = (
            *((*ranks, str(trainer.nproc)) if trainer.nproc > 1 else ()),
            *("-m", "flowtrain.train", *self._run_options()),
            *("--run.dir", trainer.run_dir, "--run.resume", "auto", "--train.policy", policy),
            *("--dataflow.url", self._service_url()),
            *self._store(policy, trainer),
            *trainer.options,
        )
        env = {_GPUS: trainer.gpus} if trainer.gpus else {}
        return Role(f"trainer-{policy}", Kind.TRAINER, trainer.host, words, env, of=policy)

    def _nodes(self, name: str, nodes: Nodes) -> list[Role]:
        url = nodes.dataflow or self._service_url()
        start = ("-m", "flowtrain.node", "--dataflow", url, "--name")
        return [
            Role(
                f"{name}-{number}",
                Kind.NODE,
                nodes.host,
                (*start, f"{name}-{number}", *nodes.options),
                {_GPUS: nodes.gpus[number]} if nodes.gpus else {},
                of=name,
            )
            for number in range(nodes.size)
        ]

    def _run_options(self) -> tuple[str, ...]:
        return ("--config", self._plan.config, *self._plan.options)

    def _service_url(self) -> str:
        return self._url("service", self._plan.service.host, self._plan.service.port)

    def _store(self, policy: str, trainer: Trainer) -> tuple[str, ...]:
        if not trainer.weights_port:
            return ()
        url = self._url(f"weights-{policy}", trainer.host, trainer.weights_port)
        return ("--dataflow.store", url)

    def _listens(self, server: str, host: str, listen: str, port: int) -> tuple[str, ...]:
        place = listen or self._listen or self._address(server, host)
        return ("--host", place, "--port", str(port))

    def _url(self, server: str, host: str, port: int) -> str:
        address = self._address(server, host)
        return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def secrets_of(plan: Plan, host: str) -> dict[str, str]:
    """Return the variables that processes of a host get in secret, with the launcher's names."""
    return {TOKEN_VARIABLE: plan.token_env, **{name: name for name in plan.hosts[host].secrets}}


def command(host: Host, role: Role) -> str:
    """Return the command of a role for a shell that has its secrets."""
    return shlex.join((host.python, *role.words))


def exports(host: Host, role: Role) -> list[str]:
    """Return a shell command for each variable of a role."""
    env = {**_UNBUFFERED, **host.env, **role.env}
    return [f"export {name}={shlex.quote(value)}" for name, value in env.items()]


def plain_script(host: Host, role: Role) -> str:
    """Return a shell script that becomes the process; the secrets are in its environment."""
    lines = [f"cd {shlex.quote(host.folder)}", *exports(host, role), f"exec {command(host, role)}"]
    return " && ".join(lines)


def controlled_script(host: Host, role: Role, secrets: Sequence[str]) -> str:
    """Return a shell script that runs the process and is controlled by its standard input.

    It reads a line for each of `secrets`, then names of signals for the process: KILL goes to its
    whole group, others to itself. When the input ends, because the connection or the launcher is
    gone, the process is asked to end. The exit code is that of the process.
    """
    return "\n".join(
        (
            f"cd {shlex.quote(host.folder)} || exit 2",
            *(f"IFS= read -r {name} && export {name} || exit 2" for name in secrets),
            *exports(host, role),
            "exec 3<&0 </dev/null",
            f"setsid {command(host, role)} 3<&- &",
            "child=$!",
            "{ while IFS= read -r signal; do",
            '  if [ "$signal" = KILL ]; then kill -s KILL -- "-$child"',
            '  else kill -s "$signal" "$child"; fi',
            'done; kill "$child"; } <&3 >/dev/null 2>&1 &',
            "watcher=$!",
            "exec 3<&-",
            'wait "$child"; code=$?',
            'kill "$watcher" 2>/dev/null',
            'exit "$code"',
        )
    )
