"""Questions as records, and the error for what a user got wrong."""

from __future__ import annotations

import json
import re
import string
from dataclasses import dataclass
from typing import Any


class UserError(ValueError):
    """A user's mistake. The command line prints its one line and exits with code 2."""


class Outage(UserError):
    """Something is away and may come back, so the same command may succeed later: the command line
    exits with code 75, on which supervisors start it again.
    """


class Unmet(UserError):
    """The ranks of a run cannot meet, so each says so by itself."""


@dataclass(frozen=True, slots=True)
class PlanStep:
    """A turn of a perfect planner."""

    sub_goal: str
    """The goal of the turn, e.g. "capital of Chad", or the expression to compute."""
    tool_name: str
    """Canonical name of the tool that finds it."""


@dataclass(frozen=True, slots=True)
class SubGoal:
    """A finding on the way, e.g. SubGoal(("Chad",), 0.5, "country of N'Djamena")."""

    names: tuple[str, ...]
    """Its accepted names."""
    weight: float
    """Importance; the weights of a task's sub-goals sum to 1."""
    query: str = ""
    """Query that finds it, for a hint; "" without one."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Task:
    """A question, e.g. Task("t-1", "Capital of Chad?", ("N'Djamena",), "lookup", 1)."""

    id: str
    """Unique within a run; trajectories, seeds and resume refer to it."""
    question: str
    """The text of the question; agents read `prompt`."""
    answers: tuple[str, ...]
    """Accepted answers; for "gameof24" the four numbers, because any right expression counts."""
    kind: str = ""
    """A label to group results by ("lookup", "chain", "sum", ...)."""
    num_turns: int = 1
    """Number of turns that a perfect planner needs; 0 if unknown."""
    scorer: str = "exact"
    """Name of the rule in `flowtrain.rewards` that scores an answer."""
    rules: str = ""
    """The rules in place of a flow's verifier and generator, "facts" or "gameof24"; "": generic
    rules."""
    plan: tuple[PlanStep, ...] = ()
    """Steps of a perfect planner, for the scripted expert; the policy never sees them."""
    choices: tuple[str, ...] = ()
    """Options of a multiple-choice question, A first; () for a free answer."""
    sub_goals: tuple[SubGoal, ...] = ()
    """Rewarded findings (InfoFlow), in the order of need; the policy never sees them."""
    columns: str = ""
    """The row's other columns as JSON, for reward functions only."""

    @property
    def prompt(self) -> str:
        """The question with its lettered options, unless it already includes them."""
        options = list(zip(string.ascii_uppercase, self.choices, strict=False))
        end = 0
        # Each option is looked for behind the one before it.
        for letter, option in options:
            match = re.compile(rf"\b{letter}\b\W*{re.escape(option)}", re.IGNORECASE).search(
                self.question, end
            )
            if match is None:
                return "\n".join([self.question, *(f"{a}. {choice}" for a, choice in options)])
            end = match.end()
        return self.question

    @property
    def extra(self) -> dict[str, Any]:
        """The row's other columns by name; parsed at every call."""
        return dict(json.loads(self.columns)) if self.columns else {}
