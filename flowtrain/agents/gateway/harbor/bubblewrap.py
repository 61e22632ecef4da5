"""An environment of Harbor on bubblewrap, where there is no Docker: the programs of this machine,
read-only, over a folder of the trial's own.

A task's commands see /usr and the like of this machine, no network, no process but their own, and
the trial's folder as the root of all else, which lasts from command to command; processes do not.
Images are not loaded: `FROM` is this machine, and RUN, COPY, ENV, ARG and WORKDIR of the Dockerfile
are carried out in the folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shlex
import shutil
import tarfile
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

from dockerfile_parse import DockerfileParser
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.environments.tar_transfer import extract_dir_from_bytes, pack_dir_to_bytes

NOBODY = 65534
MAX_PROCESSES = 256
MAX_OUTPUT_BYTES = 1 << 20
"""Kept of what a command prints to stdout, and as much to stderr."""
MAX_DOWNLOAD_BYTES = 64 << 20
_SHOWN = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_OF_ETC = ("alternatives", "ld.so.cache", "ssl/certs", "nsswitch.conf")
_USERS = "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n"
_GROUPS = "root:x:0:\nnogroup:x:65534:\n"
_IGNORED = ("FROM", "LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "USER", "COMMENT", "HEALTHCHECK")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Bubblewrap(BaseEnvironment):
    """An environment of Harbor, by its import path."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises RuntimeError for a task that needs an image, and where bubblewrap is missing."""
        self._env = {"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8"}
        self._workdir = "/app"
        self._folder: Path | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "bubblewrap"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        # There is never a network, so that each phase has the policy that it asks for, or less.
        return EnvironmentCapabilities(disable_internet=True, dynamic_network_policy=True)

    async def _apply_network_policy(self, network_policy: Any) -> None:
        """Change nothing: there is no network."""

    def _validate_definition(self) -> None:
        if shutil.which("bwrap") is None:
            raise RuntimeError("bubblewrap (the program bwrap) is not installed")
        dockerfile = self.environment_dir / "Dockerfile"
        if self.task_env_config.docker_image or not dockerfile.is_file():
            raise RuntimeError(
                f"the task {self.environment_name!r} needs an image; bubblewrap has a Dockerfile's "
                "RUN, COPY, ENV and WORKDIR, and this machine's programs"
            )

    async def start(self, force_build: bool) -> None:
        """Make the folder and carry the Dockerfile out in it."""
        self._folder = Path(tempfile.mkdtemp(dir=self.trial_paths.trial_dir, prefix="sandbox-"))
        root, etc = self._folder / "root", self._folder / "etc"
        for name in _OF_ETC:
            _copy(Path("/etc", name), etc / name)
        etc.mkdir(exist_ok=True)
        (etc / "passwd").write_text(_USERS)
        (etc / "group").write_text(_GROUPS)
        for name in ("tmp", "root", "tests", "solution", *self._mount_targets()):
            (root / name.lstrip("/")).mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            # Commands run as nobody, so that root's exemption from limits is not theirs.
            for path in (self._folder, root, *root.rglob("*")):
                os.chown(path, NOBODY, NOBODY)
        parsed = DockerfileParser(path=str(self.environment_dir / "Dockerfile"), cache_content=True)
        for step in parsed.structure:
            await self._build(step["instruction"], step["value"])
        if self.task_env_config.workdir:
            self._workdir = self.task_env_config.workdir
        await self._checked(f"mkdir -p {shlex.quote(self._workdir)}", cwd="/")

    async def stop(self, delete: bool) -> None:
        """Delete the folder; processes have ended with their commands."""
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command, whoever the user is, as the root of namespaces of its own. Raises
        RuntimeError at the time limit.
        """
        argv = ["/bin/bash", "-c", self._limits() + command]
        try:
            async with asyncio.timeout(timeout_sec or None):
                code, out, err = await self._run(argv, cwd, env, b"", MAX_OUTPUT_BYTES)
        except TimeoutError:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds") from None
        return ExecResult(
            stdout=out.decode(errors="replace"),
            stderr=err.decode(errors="replace"),
            return_code=code,
        )

    # Files go in and out as archives that tar reads and writes inside, where a link that hostile
    # code has laid leads to nothing of this machine.

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        packed = pack_dir_to_bytes(source_dir, include_root=False)
        await self._unpack(packed.getvalue(), target_dir)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        target, packed = PurePosixPath(target_path), io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            tar.add(source_path, arcname=target.name)
        await self._unpack(packed.getvalue(), str(target.parent))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        extract_dir_from_bytes(await self._packed(source_dir, "."), target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        source = PurePosixPath(source_path)
        packed = await self._packed(str(source.parent), source.name)
        with tempfile.TemporaryDirectory() as folder:
            extract_dir_from_bytes(packed, folder)
            found = Path(folder, source.name)
            if found.is_symlink() or not found.is_file():
                raise FileNotFoundError(f"{source_path} is no file")
            shutil.copyfile(found, target_path)

    async def _unpack(self, archive: bytes, target: str) -> None:
        command = f"mkdir -p {shlex.quote(target)} && tar -xf - --no-same-owner -C "
        argv = ["/bin/bash", "-c", command + shlex.quote(target)]
        code, _, err = await self._run(argv, "/", None, archive, MAX_OUTPUT_BYTES)
        if code:
            raise RuntimeError(f"cannot write to {target}: {err.decode(errors='replace')}")

    async def _packed(self, folder: str, name: str) -> bytes:
        argv = ["/usr/bin/tar", "-cf", "-", "-C", folder, "--", name]
        code, archive, err = await self._run(argv, "/", None, b"", MAX_DOWNLOAD_BYTES + 1)
        if code:
            raise RuntimeError(f"cannot read {folder}: {err.decode(errors='replace')}")
        if len(archive) > MAX_DOWNLOAD_BYTES:
            raise RuntimeError(f"{folder} holds more than {MAX_DOWNLOAD_BYTES >> 20} MiB")
        return archive

    async def _build(self, instruction: str, value: str) -> None:
        """Carry out one instruction of the Dockerfile."""
        match instruction:
            case "WORKDIR":
                self._workdir = str(PurePosixPath(self._workdir, value))
                await self._checked(f"mkdir -p {shlex.quote(self._workdir)}", cwd="/")
            case "ENV" | "ARG":
                pairs = [word for word in shlex.split(value) if "=" in word]
                self._env |= dict(word.split("=", 1) for word in pairs)
            case "RUN":
                await self._checked(value)
            case "COPY" | "ADD":
                *sources, target = shlex.split(value)
                if any(word.startswith("--") or "://" in word for word in sources):
                    raise RuntimeError(f"Dockerfile: {instruction} {value}: only files beside it")
                for source in sources:
                    await self._copy_in(source, target, len(sources) > 1)
            case _ if instruction not in _IGNORED:
                raise RuntimeError(f"Dockerfile: {instruction} is not for bubblewrap")

    async def _copy_in(self, source: str, target: str, is_one_of_several: bool) -> None:
        base = self.environment_dir.resolve()
        path = (base / source.lstrip("/")).resolve()
        if not path.is_relative_to(base):
            raise RuntimeError(f"Dockerfile: COPY {source}: outside of the environment's folder")
        to = PurePosixPath(self._workdir, target)
        if path.is_dir():
            await self.upload_dir(path, str(to))
        else:
            is_folder = is_one_of_several or target.endswith(("/", "."))
            await self.upload_file(path, str(to / path.name if is_folder else to))

    async def _checked(self, command: str, cwd: str | None = None) -> None:
        ran = await self.exec(command, cwd)
        if ran.return_code:
            raise RuntimeError(f"Dockerfile: {command!r} failed here: {ran.stderr or ran.stdout}")

    def _limits(self) -> str:
        """Return what bounds each process of a command, and their number."""
        limits = [f"ulimit -c 0 -u {MAX_PROCESSES}"]
        if self._effective_memory_mb:
            limits.append(f"ulimit -v {self._effective_memory_mb << 10}")
        if self._effective_storage_mb:
            limits.append(f"ulimit -f {self._effective_storage_mb << 10}")
        return "; ".join(limits) + "\n"

    async def _run(
        self,
        argv: list[str],
        cwd: str | None,
        env: dict[str, str] | None,
        given: bytes,
        max_bytes: int,
    ) -> tuple[int, bytes, bytes]:
        """Return (exit code, the beginning of stdout, of stderr)."""
        as_nobody: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": ()}
        options = self._options(cwd or self._workdir, self._env | (self._merge_env(env) or {}))
        # In a file in memory: a key on the command line is there for every user to read.
        with os.fdopen(os.memfd_create("bwrap"), "w+b", buffering=0) as file:
            file.write(b"\0".join(map(os.fsencode, options)))
            file.seek(0)
            process = await asyncio.create_subprocess_exec(
                *(shutil.which("bwrap") or "bwrap", "--args", str(file.fileno()), "--", *argv),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd="/",
                env={},
                pass_fds=(file.fileno(),),
                **(as_nobody if os.geteuid() == 0 else {}),
            )
        assert process.stdin and process.stdout and process.stderr
        try:
            out, err, *_ = await asyncio.gather(
                _beginning(process.stdout, max_bytes),
                _beginning(process.stderr, MAX_OUTPUT_BYTES),
                _feed(process.stdin, given),
            )
            return await process.wait(), out, err
        finally:
            if process.returncode is None:
                process.kill()  # all that it has started ends with it
                await process.wait()

    def _options(self, cwd: str, env: dict[str, str]) -> list[str]:
        """Return bubblewrap's."""
        assert self._folder is not None, "it has not been started"
        options = ["--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
        options += ["--uid", "0", "--gid", "0", "--hostname", "sandbox", "--chdir", cwd]
        root, etc = f"{self._folder}/root", f"{self._folder}/etc"
        options += ["--bind", root, "/", "--ro-bind", etc, "/etc"]
        # All of them lie at the top, where hostile code can put no link in their place.
        for folder in _SHOWN:
            options += ["--ro-bind-try", folder, folder]
        options += ["--proc", "/proc", "--dev", "/dev"]
        return options + [word for pair in env.items() for word in ("--setenv", *pair)]


async def _beginning(stream: asyncio.StreamReader, max_bytes: int) -> bytes:
    """Read to the end, and keep the beginning."""
    kept = bytearray()
    while piece := await stream.read(1 << 16):
        kept += piece[: max_bytes - len(kept)]
    return bytes(kept)


async def _feed(stream: asyncio.StreamWriter, given: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it reads no more
        stream.write(given)
        await stream.drain()
        stream.close()
        await stream.wait_closed()


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    elif source.is_file():
        shutil.copyfile(source, target)
