"""An SQLite file, or a database of a PostgreSQL server of the tests; a service before a ledger."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_servers import running

from flowtrain.rollouts.client import Client
from flowtrain.rollouts.service import Service
from flowtrain.rollouts.wire import METHODS

_INSTALLED = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


class PostgresServer:
    """On a Unix socket; without fsync, as the tests kill processes, not machines."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder = folder
        self._programs = programs
        # The server refuses to run as root; where the tests do, it runs as the user that its
        # package made.
        self._user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        if self._user:
            shutil.chown(folder, "postgres")
        self._run(
            "initdb",
            "--pgdata",
            self._data,
            "--auth",
            "trust",
            "--username",
            "flowtrain",
            "--no-sync",
            "--encoding",
            "UTF8",
        )
        self._start("start")

    @property
    def _data(self) -> str:
        return str(self.folder / "data")

    def _start(self, *how: str) -> None:
        options = (
            f"-k {self.folder} -c listen_addresses='' -c fsync=off -c max_connections=50 -c "
            "shared_buffers=16MB"
        )
        self._run(
            "pg_ctl",
            "--pgdata",
            self._data,
            "--wait",
            "--log",
            str(self.folder / "log"),
            "--options",
            options,
            *how,
        )

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [*self._user, str(self._programs / program), *arguments],
            cwd="/",
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{program}: {done.stdout}{done.stderr}"

    def restart(self) -> None:
        """As after a crash: connections break, transactions in progress are undone."""
        self._start("restart", "--mode", "immediate")

    def stop(self) -> None:
        self._run("pg_ctl", "--pgdata", self._data, "--wait", "stop", "--mode", "immediate")

    def url(self, name: str) -> str:
        return f"postgresql://flowtrain@/{name}?host={self.folder}"

    def execute(self, statement: str) -> None:
        import psycopg

        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(statement)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    if not _INSTALLED:
        pytest.skip("no PostgreSQL server is installed (apt-get install postgresql)")
    # Not pytest's folder: the user of the server could not enter it, and paths of sockets are
    # short.
    with tempfile.TemporaryDirectory(prefix="flowtrain-pg-") as folder:
        server = PostgresServer(Path(folder), _INSTALLED[-1].parent)
        yield server
        server.stop()


@pytest.fixture
def postgres_database(
    postgres_server: PostgresServer, request: pytest.FixtureRequest
) -> Iterator[str]:
    """URL of an empty database, for tests that change its settings."""
    name = f"test_{abs(hash(request.node.nodeid)) % 10**9}"
    postgres_server.execute(f"CREATE DATABASE {name}")
    yield postgres_server.url(name)
    postgres_server.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def postgres(postgres_server: PostgresServer, request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of an empty schema, which takes a hundredth of the time that a database does."""
    name = f"test_{abs(hash(request.node.nodeid)) % 10**9}"
    postgres_server.execute(f"CREATE SCHEMA {name}")
    yield postgres_server.url("postgres") + f"&options=-csearch_path%3D{name}"
    postgres_server.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type ="
        " 'client backend' AND pid != pg_backend_pid()"
    )
    postgres_server.execute(f"DROP SCHEMA {name} CASCADE")


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Path or URL of an empty database."""
    return (
        str(tmp_path / "ledger.db")
        if request.param == "sqlite"
        else request.getfixturevalue("postgres")
    )


class Front:
    """A service over HTTP for one ledger after the other."""

    def __init__(self) -> None:
        self._service: Service | None = None
        self.client: Client | None = None

    async def __call__(self, *arguments: Any) -> None:
        await self._service(*arguments)

    def serve(self, ledger: Any) -> Any:
        """Is asked through HTTP what the contract has, and by itself the rest."""
        self._service = Service(ledger, ledger.run, "token")
        return _Served(self.client, ledger)


class _Served:
    def __init__(self, client: Any, ledger: Any) -> None:
        self._client, self._ledger = client, ledger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client if name in METHODS else self._ledger, name)


@pytest.fixture(scope="session")
def front() -> Iterator[Front]:
    front = Front()
    with running(front) as url, Client(url, "token", wait_s=20.0) as front.client:
        yield front
