"""Sandboxes for code that a model wrote; docs/tools.md has a table of their guarantees."""

from __future__ import annotations

import os

from flowtrain.config import Agent
from flowtrain.tools.sandbox import bubblewrap, limits, seccomp
from flowtrain.tools.sandbox.host import ProcessSandbox
from flowtrain.tools.sandbox.server import Backend
from flowtrain.tools.sandbox.sessions import SessionSandbox
from flowtrain.types import UserError


def make_sandbox(agent: Agent) -> ProcessSandbox:
    """Make the sandbox of `agent.sandbox`, with a worker per core and 32 at most."""
    return ProcessSandbox(
        _backend(agent),
        num_workers=min(32, os.cpu_count() or 1),
        timeout_s=min(agent.code_timeout_s, agent.tool_timeout_s),
        memory_mb=agent.code_memory_mb,
    )


def make_session_sandbox(agent: Agent) -> SessionSandbox:
    """Make the sandbox of `agent.python_session`. Raises UserError where it does not work."""
    sandbox = SessionSandbox(
        _backend(agent),
        num_workers=min(32, os.cpu_count() or 1),
        timeout_s=min(agent.code_timeout_s, agent.tool_timeout_s),
        memory_mb=agent.code_memory_mb,
    )
    sandbox.check()
    return sandbox


def make_checker_sandbox(package: str, time_limit_s: float, memory_mb: int) -> ProcessSandbox:
    """Make the sandbox for a package that checks answers, on which hostile ones may hang."""
    return make_sandbox(
        Agent(
            python_packages=(package,),
            tool_timeout_s=time_limit_s,
            code_timeout_s=time_limit_s,
            code_memory_mb=memory_mb,
        )
    )


def _backend(agent: Agent) -> Backend:
    """Choose the backend; "auto" is the strictest that serves the config and works here."""
    packages = agent.python_packages
    if agent.sandbox == "seccomp" or (
        agent.sandbox == "auto" and not packages and seccomp.is_offered()
    ):
        return seccomp.backend()
    if agent.sandbox == "limits":
        return limits.backend(packages)
    wrapped = bubblewrap.backend(packages)
    reason = bubblewrap.why_not(wrapped)
    if not reason:
        return wrapped
    if agent.sandbox == "auto":
        return limits.backend(packages)
    raise UserError(f"agent.sandbox='bubblewrap': {reason}")
