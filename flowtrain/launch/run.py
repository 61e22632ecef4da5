"""A plan under way: start everything in order, wait for the trainers, end the rest."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from flowtrain.launch.plan import Plan
from flowtrain.launch.processes import Process, over, say, secret_lines
from flowtrain.launch.roles import (
    Commands,
    Kind,
    Role,
    command,
    controlled_script,
    exports,
    secrets_of,
)
from flowtrain.net.serving import check_token
from flowtrain.types import UserError
from flowtrain.utils.errors import user_error

_TICK_S = 0.1
_READY_S = 120.0
"""Time for a server to say where it listens."""
_END_S = 60.0
"""Time for nodes and servers to end once they are asked."""
_ECHO_S = 2.0
"""Seconds within which a second signal counts as the first."""
_CHECK_S = 120.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_WHO = "[launch]"


class Launch:
    """The processes of a plan; use with `with`, after which none of them runs here."""

    def __init__(self, plan: Plan) -> None:
        """Raises UserError if a secret is missing."""
        self._plan = plan
        self._running: dict[Kind, list[Process]] = {kind: [] for kind in Kind}
        self._num_signals = 0
        self._signalled_at = 0.0
        self._before: dict[int, Any] = {}
        self._secrets = {
            name: secret_lines(secrets_of(plan, name))
            for name in {host for _, host in plan.places()}
        }
        check_token(os.environ[plan.token_env])

    def __enter__(self) -> Launch:
        self._before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        """End in order what still runs, the servers last."""
        for kind in (Kind.NODE, Kind.TRAINER, Kind.WEIGHTS, Kind.SERVICE):
            self._end(self._running[kind])
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self) -> int:
        """Return the exit code of the trainer: the first that is not 0, of several."""
        roles = Commands(self._plan).roles()
        width = max(len(role.name) for role in roles)
        logs = Path(self._plan.logs)
        with user_error(f"logs={self._plan.logs!r}", OSError):
            logs.mkdir(parents=True, exist_ok=True)
        for kind in Kind:
            for role in roles:
                if role.kind == kind:
                    self._running[kind].append(self._start(role, logs, width))
            if kind.is_server and (code := self._wait_for_servers(kind)):
                return code
        trainers = self._running[Kind.TRAINER]
        while not self._num_signals and any(trainer.code is None for trainer in trainers):
            self._report()
            time.sleep(_TICK_S)
        if self._num_signals:
            self._end([*self._running[Kind.NODE], *trainers])
        self._report()
        return next((trainer.code for trainer in trainers if trainer.code), 0)

    def _start(self, role: Role, logs: Path, width: int) -> Process:
        host = self._plan.hosts[role.host]
        script = controlled_script(host, role, list(secrets_of(self._plan, role.host)))
        first = self._secrets[role.host]
        return Process(role.name, over(host, script), first, logs / f"{role.name}.log", width)

    def _wait_for_servers(self, kind: Kind) -> int:
        """Return 0 once all servers of a kind listen, and another code if there is no hope."""
        servers = self._running[kind]
        deadline = time.monotonic() + _READY_S
        while not all(server.serves for server in servers):
            self._report()
            if self._num_signals:
                return 128 + signal.SIGINT
            for server in servers:
                if server.code is not None:
                    return server.code or 1
            if time.monotonic() > deadline:
                say(_WHO, f"{kind} does not listen after {_READY_S:g} s")
                return 1
            time.sleep(_TICK_S)
        return 0

    def _end(self, processes: Sequence[Process]) -> None:
        """Ask processes to end, and wait. Trainers have all the time that they need to save, until
        a second signal; a third kills.
        """
        num_asked = 0
        deadline = time.monotonic() + _END_S
        while left := [process for process in processes if process.code is None]:
            now = max(1, self._num_signals)
            if num_asked < now:
                for process in left:
                    process.send("TERM" if now < 3 else "KILL")
                num_asked = now
            if time.monotonic() > deadline:
                for process in left:
                    if process not in self._running[Kind.TRAINER]:
                        say(_WHO, f"{process.name} does not end, it is killed")
                        process.send("KILL")
                deadline = time.monotonic() + _END_S
            left[0].wait(_TICK_S)
        for process in processes:
            process.wait(_TICK_S)
        self._report()

    def _report(self) -> None:
        """Say which processes have ended since, with which code."""
        for processes in self._running.values():
            for process in processes:
                if process.code is not None and not process.is_reported:
                    process.wait(_TICK_S)
                    process.is_reported = True
                    how = "as asked, " if process.is_asked else ""
                    text = f"{process.name} ended {how}with code {process.code}; see {process.log}"
                    say(_WHO, text)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if not self._num_signals or time.monotonic() - self._signalled_at > _ECHO_S:
            self._num_signals += 1
            self._signalled_at = time.monotonic()


def check(plan: Plan) -> int:
    """Try every host: its folder, its Python, the config and the options of the run. Returns 0 if
    all are fine, else 1.
    """
    roles = Commands(plan).roles()
    failed = False
    for name in dict.fromkeys(host for _, host in plan.places()):
        secret_lines(secrets_of(plan, name))
        own = [role for role in roles if role.host == name]
        words = over(plan.hosts[name], _check_script(plan, name, own))
        try:
            done = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=_CHECK_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"hosts.{name}.ssh={plan.hosts[name].ssh!r}: {error}") from error
        failed |= done.returncode != 0
        said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
        text = said[-1] if said else f"exit code {done.returncode}"
        say(name, f"{'fine' if done.returncode == 0 else 'failed'}: {text}")
    return int(failed)


def _check_script(plan: Plan, name: str, roles: Sequence[Role]) -> str:
    """Shell commands for a host, the options of its trainers among them."""
    host = plan.hosts[name]
    lines = []
    for role in roles:
        if role.kind == Kind.TRAINER:
            words = (
                *role.words[role.words.index("flowtrain.train") - 1 :],
                "--show_config",
                "true",
            )
            shown = Role(role.name, role.kind, role.host, words, role.env)
            lines += [*exports(host, shown), f"{command(host, shown)} >/dev/null"]
    if any(role.kind == Kind.SERVICE for role in roles):
        lines.append(f"test -r {shlex.quote(plan.config)}")
    version = "import flowtrain; print('flowtrain', flowtrain.__version__)"
    lines.append(f"{shlex.join((host.python, '-c', version))}")
    return " && ".join((f"cd {shlex.quote(host.folder)}", *lines))
