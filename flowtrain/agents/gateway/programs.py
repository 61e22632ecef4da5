"""The programs that solve tasks through the gateway: commands, and functions of this process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from flowtrain.agents.gateway.plain import PREFIX
from flowtrain.agents.gateway.rollout import Outcome, Rollout
from flowtrain.config.gateway import Gateway as Options
from flowtrain.records import Task, UserError
from flowtrain.tools import BlockingPool
from flowtrain.utils import plugins
from flowtrain.utils.errors import user_error
from flowtrain.utils.text import final_answer
from flowtrain.utils.threads import LoopThread

MAX_OUTPUT = 256 << 10
"""Bytes of a command's output that are kept, the last ones."""
MAX_OUTCOME = 4 << 20
"""Characters of what a command writes as its outcome."""
_MAX_ERROR = 200
_LAST_OUTPUT_S = 1.0
"""Seconds for what a command has printed to arrive once it has ended."""


_loop = LoopThread("gateway programs")
"""Event loop of async functions: on the sampler's loop a blocking one would deadlock."""


class ProgramFailed(Exception):
    """The program gave no answer."""


class Program(Protocol):
    """Solves one task through the gateway."""

    is_bounded: bool
    """So many of it run at a time as `gateway.max_programs` says."""

    async def solve(self, rollout: Rollout, base_url: str) -> Outcome:
        """Return the outcome; when it is cancelled, nothing of the program goes on."""

    def close(self) -> None: ...


def _outcome(value: object) -> Outcome:
    try:
        return Outcome.of(value)
    except ValueError as error:
        raise ProgramFailed(str(error)) from None


def task_record(task: Task, columns: tuple[str, ...]) -> dict[str, Any]:
    """Return a task as programs see it. Raises UserError for a column that its row lacks."""
    record: dict[str, Any] = {"id": task.id, "question": task.question}
    if task.choices:
        record["choices"] = list(task.choices)
    extra = task.extra if columns else {}
    for name in columns:
        if name != "answers" and name not in extra:
            raise UserError(
                f"gateway.columns={list(columns)}: task {task.id!r} has no column {name!r}"
            )
        record[name] = list(task.answers) if name == "answers" else extra[name]
    return record


# ---- commands


class Command:
    """A command as a child process in a new folder, with few environment variables."""

    is_bounded = True

    def __init__(self, options: Options) -> None:
        """Raises UserError for a program that is not there."""
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        # Links stay: an environment's python is one, and where it lies tells what it can import.
        words = [
            # A prompt may be too long for a path, which `Path.is_file` raises.
            str(Path(word).absolute()) if os.path.isfile(word) else word  # noqa: PTH113
            for word in options.command
        ]
        if shutil.which(words[0], path=path) is None:
            raise UserError(
                f"gateway.command={list(options.command)}: there is no program {words[0]!r}"
            )
        self._words = words
        self._columns = options.columns
        self._environment = {"PATH": path, "LANG": os.environ.get("LANG", "C.UTF-8")}
        for name in options.environment:
            if name not in os.environ:
                raise UserError(
                    f"gateway.environment: {name!r} is not set in the environment of this process"
                )
            self._environment[name] = os.environ[name]

    async def solve(self, rollout: Rollout, base_url: str) -> Outcome:
        folder = tempfile.mkdtemp(prefix="flowtrain-gateway-")
        try:
            return await self._solve_in(folder, rollout, base_url)
        finally:
            # In a thread: a command may have cloned a repository into it.
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _solve_in(self, folder: str, rollout: Rollout, base_url: str) -> Outcome:
        task_path, outcome_path = Path(folder) / "task.json", Path(folder) / "outcome.json"
        task_path.write_text(json.dumps(task_record(rollout.task, self._columns)), encoding="utf-8")
        environment = {
            **self._environment,
            "HOME": folder,
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": rollout.key,
            "ANTHROPIC_BASE_URL": base_url.removesuffix(PREFIX),
            "ANTHROPIC_API_KEY": rollout.key,
            "FLOWTRAIN_TASK": str(task_path),
            "FLOWTRAIN_OUTCOME": str(outcome_path),
        }
        code, output, errors = await self._run(folder, environment)
        if code:
            status = f"signal {-code}" if code < 0 else f"exit code {code}"
            line = _last_line(errors)[:_MAX_ERROR]
            raise ProgramFailed(f"{self._words[0]}: {status}" + (f": {line}" if line else ""))
        if outcome_path.is_file():
            return _read_outcome(outcome_path)
        answer = final_answer(output)
        return Outcome(answer if answer != output.strip() else _last_line(output))

    async def _run(self, folder: str, environment: Mapping[str, str]) -> tuple[int, str, str]:
        """Run the command; return its exit code and the ends of its output and its errors."""
        async with _pipe() as (output, output_end), _pipe() as (errors, errors_end):
            try:
                child = await asyncio.create_subprocess_exec(
                    *self._words,
                    cwd=folder,
                    env=environment,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output_end,
                    stderr=errors_end,
                    start_new_session=True,
                )
            finally:
                os.close(output_end)
                os.close(errors_end)
            tails = (_Tail(output), _Tail(errors))
            reading = asyncio.gather(*(tail.read() for tail in tails))
            try:
                code = await child.wait()
                # What the command has left running may hold the pipes open: that of its group is
                # killed, that of another session, such as a daemon, is not waited for.
                _kill_group(child.pid)
                await asyncio.wait([reading], timeout=_LAST_OUTPUT_S)
                output_text, errors_text = (tail.text for tail in tails)
                return code, output_text, errors_text
            finally:
                _kill_group(child.pid)
                reading.cancel()
                await child.wait()

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


def _read_outcome(path: Path) -> Outcome:
    """Read the outcome that a command has written. Raises ProgramFailed."""
    try:
        with path.open(encoding="utf-8") as file:
            return _outcome(json.loads(file.read(MAX_OUTCOME)))
    except (OSError, ValueError, RecursionError) as error:
        raise ProgramFailed(f"FLOWTRAIN_OUTCOME: {error}") from None


@contextlib.asynccontextmanager
async def _pipe() -> AsyncIterator[tuple[asyncio.StreamReader, int]]:
    """Open a pipe, whose end for the child is to be closed here. With pipes of asyncio's own the
    end of a child waits for all that it has left running.
    """
    read_end, write_end = os.pipe()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: protocol, os.fdopen(read_end, "rb", buffering=0)
    )
    try:
        yield reader, write_end
    finally:
        transport.close()


class _Tail:
    """The end of what a stream has brought so far."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream = stream
        self._kept = b""

    async def read(self) -> None:
        while part := await self._stream.read(MAX_OUTPUT):
            self._kept = (self._kept + part)[-MAX_OUTPUT:]

    @property
    def text(self) -> str:
        return self._kept.decode(errors="replace")


def _kill_group(pid: int) -> None:
    """Kill the child with all that it has started, but for what has left its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


# ---- functions


class Function:
    """A function of this process: an async one on an event loop that all such calls share; a plain
    one in a thread, which is lost where it does not return.
    """

    def __init__(self, options: Options) -> None:
        """Import the function. Raises UserError if missing, or for other arguments."""
        origin = f"gateway.function={options.function!r}"
        name, call = plugins.load_object(options.function, origin)
        if not callable(call):
            raise UserError(f"{origin}: {name!r} is a {type(call).__name__}, not a function")
        with user_error(f"{origin} must take (task, base_url, api_key)", TypeError, ValueError):
            inspect.signature(call).bind(None, base_url="", api_key="")
        self._call: Callable[..., Any] = call
        self._threads = BlockingPool(options.max_programs, "gateway program")
        self.is_bounded = not (
            inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)
        )

    async def solve(self, rollout: Rollout, base_url: str) -> Outcome:
        call = functools.partial(self._call, rollout.task, base_url=base_url, api_key=rollout.key)
        if self.is_bounded:
            return _outcome(await self._threads.run(functools.partial(_guarded, call)))
        return _outcome(await asyncio.wrap_future(_loop.start(_guarded_async(call))))

    def close(self) -> None:
        self._threads.close()


def _guarded(call: Callable[[], Any]) -> Any:
    """Call a program, which may not end this process."""
    try:
        return call()
    except SystemExit as error:
        raise ProgramFailed(f"it has called exit({error.code})") from error


async def _guarded_async(call: Callable[[], Any]) -> Any:
    try:
        return await call()
    except SystemExit as error:
        raise ProgramFailed(f"it has called exit({error.code})") from error
