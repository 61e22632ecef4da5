"""Options of the endpoint behind which programs of others are trained."""

from __future__ import annotations

from pydantic import PositiveInt, model_validator

from flowtrain.config.section import Section


class Gateway(Section):
    command: tuple[str, ...] = ()
    """agent.name = "gateway": the words of a command that solves one task, ["python",
    "my_program.py"], run in a new folder for every rollout; words that name a file keep naming it
    """
    function: str = ""
    """a function of this process instead, my_program.py:solve, called as solve(task, base_url=...,
    api_key=...)"""
    max_programs: PositiveInt = 64
    """commands or plain functions that run at a time, per rank; other rollouts wait, at no cost of
    their time"""
    environment: tuple[str, ...] = ()
    """environment variables that a command gets besides PATH, HOME, LANG and those of the rollout
    """
    columns: tuple[str, ...] = ()
    """columns of a task's row that commands get besides id, question and choices;
    "answers" gives the accepted answers, which the policy may then come to see"""

    @model_validator(mode="after")
    def _one_program(self) -> Gateway:
        if self.command and self.function:
            raise ValueError(
                f"gateway.command={list(self.command)} and gateway.function={self.function!r}: "
                "one program is trained at a time"
            )
        return self
