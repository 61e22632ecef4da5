"""The planner, pi_theta(a^t | q, K, M^t), decides the next step."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from flowtrain.agents.agentflow import replies
from flowtrain.agents.agentflow.commands import json_object
from flowtrain.agents.agentflow.memory import Memory
from flowtrain.agents.agentflow.prompts import PlannerPrompt
from flowtrain.agents.agentflow.voices import Voice
from flowtrain.agents.policy import Moment, Policy
from flowtrain.records import Action, Call, Task
from flowtrain.utils.seeds import derive_seed

NO_TOOL = "No matched tool given: "


@dataclass(frozen=True, slots=True)
class Plan:
    """A planner's decision and the call that it was read from."""

    call: Call
    action: Action | None
    """None when the text was malformed."""
    rescued: tuple[str, ...] = ()
    """Lenient rules that it took to read it."""


class Planner(Protocol):
    """Decides the next step within `deadline_s` seconds; `turn` is from 0, `seed` the rollout's."""

    async def plan(
        self, task: Task, memory: Memory, turn: int, seed: int, deadline_s: float
    ) -> Plan: ...

    def measure(self, memory: Memory) -> int:
        """Return the number of tokens that the steps of the memory take in the prompt."""

    async def resume(self, prefix: Call, turn: int, seed: int, deadline_s: float) -> Plan:
        """Complete the response at which a branch leaves its parent."""
        raise AssertionError("nobody branches from this planner")


@dataclass(frozen=True, slots=True)
class ModelPlanner(Planner):
    """The planner that a voice speaks for."""

    voice: Voice
    prompt: PlannerPrompt
    tool_names: tuple[str, ...] = ()
    spellings: Mapping[str, str] = field(default_factory=dict)
    """As for `read_action`."""

    async def plan(
        self, task: Task, memory: Memory, turn: int, seed: int, deadline_s: float
    ) -> Plan:
        """Raises PromptTooLong and EngineError."""
        moment = Moment(task, memory)
        return self._read(
            await self.voice.reply(
                self.prompt, moment, seed=derive_seed(seed, turn), deadline_s=deadline_s
            )
        )

    async def resume(self, prefix: Call, turn: int, seed: int, deadline_s: float) -> Plan:
        assert isinstance(self.voice, Policy), "nobody branches from another"
        return self._read(
            await self.voice.sample(
                prefix.prompt_ids,
                seed=derive_seed(seed, turn),
                deadline_s=deadline_s,
                prefix=prefix,
            )
        )

    def measure(self, memory: Memory) -> int:
        return self.voice.measure(self.prompt.steps(memory))

    def _read(self, call: Call) -> Plan:
        text = self.prompt.prefix + call.text
        return Plan(call, *read_action(text, self.tool_names, self.spellings))


def parse_action(text: str, tool_names: Collection[str]) -> Action | None:
    """Read the four fields; return None when there is no sub-goal or no tool name.

    The text is JSON with the keys justification, context, sub_goal and tool_name, or else labelled
    lines, of which the last "Tool Name:" and the nearest fields before it count. A tool that is not
    in the toolset keeps the turn: its name becomes "No matched tool given: ...".
    """
    fields = _json_fields(text) or _labelled_fields(text)
    sub_goal = fields.get("sub-goal", "")
    tool_name = fields.get("tool name", "")
    if not sub_goal or not tool_name:
        return None
    return Action(
        justification=fields.get("justification", ""),
        context=fields.get("context", ""),
        sub_goal=sub_goal,
        tool_name=match_tool(tool_name, tool_names),
    )


def read_action(
    text: str, tool_names: Collection[str], spellings: Mapping[str, str]
) -> tuple[Action | None, tuple[str, ...]]:
    """Read the four fields as `parse_action` does, and where that fails by the lenient rules.

    Args:
        spellings: tools by canonical spelling, aliases included (`replies.spellings`).

    Returns the action, and the names of the rules that it took.
    """
    action, rules = parse_action(text, tool_names), []
    for rule, rewrite in replies.PLAN_RULES.items():
        # An action with a known tool is not replaced by a JSON object within its text.
        if rule == "json" and _is_found(action):
            continue
        text = rewrite(text)
        rewritten = parse_action(text, tool_names)
        if rewritten is not None and rewritten != action:
            action = rewritten
            rules.append(rule)
    if action is not None and not _is_found(action):
        tool = replies.tool_of(action.tool_name.removeprefix(NO_TOOL), spellings)
        if tool:
            action, rules = replace(action, tool_name=tool), [*rules, "tool_name"]
    return action, tuple(rules) if action is not None else ()


def _is_found(action: Action | None) -> bool:
    return action is not None and not action.tool_name.startswith(NO_TOOL)


def match_tool(name: str, tool_names: Collection[str]) -> str:
    """Return the tool's own spelling; case, hyphens and runs of spaces do not matter."""
    key = replies.canonical(name)
    return next((tool for tool in tool_names if replies.canonical(tool) == key), NO_TOOL + name)


def _json_fields(text: str) -> dict[str, str]:
    value = json_object(text) or {}
    keys = dict(zip(("justification", "context", "sub_goal", "tool_name"), _LABELS, strict=True))
    return {
        label: str(value[key]).strip() for key, label in keys.items() if value.get(key) is not None
    }


_LABELS = ("justification", "context", "sub-goal", "tool name")
_LABEL = re.compile(rf"(?:\*\*)?({'|'.join(_LABELS)})(?:\*\*)?[ \t]*:(?:\*\*)?", re.IGNORECASE)


def _labelled_fields(text: str) -> dict[str, str]:
    """Walk the labels backwards from the last tool name until one breaks the order."""
    labels = list(_LABEL.finditer(text))
    names = [label.group(1).casefold() for label in labels]
    if "tool name" not in names:
        return {}
    last = len(names) - 1 - names[::-1].index("tool name")
    # A tool name ends with its paragraph or a closing fence.
    tool_name = re.split(r"\n\s*\n|```", text[labels[last].end() :], maxsplit=1)[0]
    fields = {"tool name": _plain(tool_name)}
    first = "tool name"
    for index in range(last - 1, -1, -1):
        if _LABELS.index(names[index]) >= _LABELS.index(first):
            break
        first = names[index]
        fields[first] = _plain(text[labels[index].end() : labels[index + 1].start()])
    return fields


def _plain(value: str) -> str:
    """Strip bold marks around the value; those inside may be Python's power."""
    return value.strip().removeprefix("**").removesuffix("**").strip()
