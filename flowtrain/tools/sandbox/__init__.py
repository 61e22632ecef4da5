"""Sandboxes for code that a model wrote; docs/tools.md has a table of their guarantees."""

from __future__ import annotations

import os

from flowtrain.config import Agent
from flowtrain.records import UserError
from flowtrain.tools.sandbox import bubblewrap, limits, seccomp
from flowtrain.tools.sandbox.host import ProcessSandbox
from flowtrain.tools.sandbox.server import Backend

_of_checkers = {"sandbox": "auto"}
"""The `agent.sandbox` of this process, for checkers of answers and readers of pages."""
CODE_MEMORY_MB = 512
"""MiB of address space that the policy's code may use."""


def make_sandbox(
    agent: Agent,
    max_output_chars: int = 4000,
    *,
    memory_mb: int = CODE_MEMORY_MB,
    only_parses: bool = False,
) -> ProcessSandbox:
    """Make the sandbox of `agent.sandbox`, with a worker per core and 32 at most.

    Raises UserError where it does not work here; with `only_parses` "auto" is limits there.
    """
    return ProcessSandbox(
        _backend(agent, only_parses),
        num_workers=min(32, os.cpu_count() or 1),
        timeout_s=min(agent.code_timeout_s, agent.tool_timeout_s),
        memory_mb=memory_mb,
        max_output_chars=max_output_chars,
    )


def confine_checkers(agent: Agent) -> None:
    """Let the checkers of answers follow `agent.sandbox`; they need packages, so seccomp alone does
    not do for them and bubblewrap takes its place.
    """
    _of_checkers["sandbox"] = "auto" if agent.sandbox == "seccomp" else agent.sandbox


def make_checker_sandbox(
    package: str, time_limit_s: float, memory_mb: int, max_output_chars: int = 4000
) -> ProcessSandbox:
    """Make the sandbox for a package that checks answers, or reads pages, on which hostile ones may
    hang. None of them runs as code, so "auto" falls back to limits.
    """
    agent = Agent(
        sandbox=_of_checkers["sandbox"],
        python_packages=(package,),
        tool_timeout_s=time_limit_s,
        code_timeout_s=time_limit_s,
    )
    return make_sandbox(agent, max_output_chars, memory_mb=memory_mb, only_parses=True)


def _backend(agent: Agent, only_parses: bool) -> Backend:
    """Choose the backend; "auto" is the strictest that serves the config."""
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
    if agent.sandbox == "auto" and only_parses:
        return limits.backend(packages)
    raise UserError(
        f"agent.sandbox={agent.sandbox!r}: {reason}. Install it (apt-get install bubblewrap) and "
        "allow namespaces; or, if the machine holds nothing confidential, set agent.sandbox = "
        "'limits', which protects no files (docs/tools.md)"
    )
