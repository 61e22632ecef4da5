"""Options of the endpoint behind which programs of others are trained."""

from __future__ import annotations

from pydantic import PositiveInt, model_validator

from flowtrain.config.section import Section


class Gateway(Section):
    command: tuple[str, ...] = ()
    """agent.name = "gateway": command that solves one task, as a list of words, ["python",
    "my_program.py"]; it runs in a new folder per rollout, and words that name a file become
    absolute paths"""
    function: str = ""
    """function in this process, instead of a command: my_program.py:solve, called as solve(task,
    base_url=..., api_key=...)"""
    max_programs: PositiveInt = 64
    """largest number of concurrent commands or plain functions per rank; the wait of further
    rollouts does not count against their time"""
    environment: tuple[str, ...] = ()
    """environment variables for a command besides PATH, HOME, LANG and the rollout's own"""
    columns: tuple[str, ...] = ()
    """columns of a task's row passed to commands besides id, question and choices; "answers" passes
    the accepted answers, which the program could reveal to the policy"""

    @model_validator(mode="after")
    def _one_program(self) -> Gateway:
        if self.command and self.function:
            raise ValueError(
                f"gateway.command={list(self.command)} and gateway.function={self.function!r}: "
                "set only one of them"
            )
        return self
