"""Prompts of the planner.

The parts that are constant for a question come first and the memory last, so each prompt of a
rollout extends the one before.

"compact" is for the tiny planner of the quickstart, whose budget is some 100 tokens: it has no
instructions and no tool descriptions, and it opens the answer with the field that matters. "full"
states the task, the tools, the analysis and all four fields and goes through the model's chat
template. The other modules have their prompts in their own files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Protocol

from flowtrain.agents.agentflow.commands import write_command
from flowtrain.agents.agentflow.memory import Memory
from flowtrain.agents.policy import Moment, Prompt
from flowtrain.records import Action
from flowtrain.tools import Tool, ToolCard

CHAT_TEMPLATE = """\
{% if tools %}
Tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}

{% endif %}
{% for message in messages %}
{{ message.role + ':' + message.content }}
{%- if message.role == 'assistant' %}
{%- for call in message.tool_calls or [] %}
<tool name="{{ call.function.name }}">{{ call.function.arguments | tojson }}</tool>
{%- endfor %}
{{- eos_token }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}assistant:{% endif %}"""
"""The chat template of tiny models, which have some 200 positions: of tools it tells the names."""


class PlannerPrompt(Prompt, Protocol):
    """Renders the prompt of the planner."""

    def steps(self, memory: Memory) -> str:
        """Render the part of the prompt that grows with each turn, and that the budget bounds."""


class CompactPrompt:
    """A prompt such as this one:

    Question: What is the area of Chad plus the area of Mali?
    1. Search | area of Chad | The area of Chad is 1284.
    Sub-Goal:
    """

    prefix, is_message = "Sub-Goal:", False

    def render(self, moment: Moment) -> str:
        lines = [f"Question: {moment.task.prompt}", self.steps(moment.memory), self.prefix]
        return "\n".join(filter(None, lines))

    def steps(self, memory: Memory) -> str:
        return "\n".join([*compact_steps(memory), *hint_lines(memory)])

    def write(self, action: Action) -> str:
        return f" {action.sub_goal}\nTool Name: {action.tool_name}"


class FullPrompt:
    """AgentFlow's contract in our words, for models that follow instructions."""

    prefix, is_message = "", True

    def __init__(self, tools: Iterable[Tool], order: str = "shared") -> None:
        """Use the template of `order`, a value of `agent.prompt_order`."""
        self._template = TEMPLATES[order]
        self._tools = tools_text(tools)

    def render(self, moment: Moment) -> str:
        return self._template.format(
            question=moment.task.prompt,
            analysis=analysis_text(moment.memory),
            tools=self._tools,
            memory=self.steps(moment.memory),
        )

    def steps(self, memory: Memory) -> str:
        return "\n".join([memory_json(memory), *hint_lines(memory)])

    def write(self, action: Action) -> str:
        return (
            f"Justification: {action.justification}\nContext: {action.context}\n"
            f"Sub-Goal: {action.sub_goal}\nTool Name: {action.tool_name}"
        )


def compact_steps(memory: Memory) -> list[str]:
    return [
        f"{n}. {e.tool_name} | {e.sub_goal} | {e.result}" for n, e in enumerate(memory.entries, 1)
    ]


def hint_lines(memory: Memory) -> list[str]:
    return [f"Hint: {memory.hint}"] if memory.hint else []


def memory_json(memory: Memory) -> str:
    """Render the steps in AgentFlow's form."""
    return json.dumps(memory.as_dict(), indent=1, ensure_ascii=False)


def analysis_text(memory: Memory) -> str:
    """Render the analysis as a paragraph with its heading, or nothing."""
    return f"\nAnalysis of the question:\n{memory.analysis}\n" if memory.analysis else ""


def tools_text(tools: Iterable[Tool]) -> str:
    """Render all cards, as prompts show the toolset."""
    return "\n".join(tool_text(tool.card) for tool in tools)


def tool_text(card: ToolCard) -> str:
    """Render a card, for a model to choose the tool and to call it."""
    inputs = "; ".join(
        f"{p.name} ({p.kind.__name__}{'' if p.is_required else ', optional'}): {p.meaning}"
        for p in card.parameters
    )
    notes = {"Input": inputs, "Output": card.output, "Limits": card.limits, "Advice": card.advice}
    lines = [f"  {label}: {text}" for label, text in notes.items() if text]
    examples = [f"  Example: {write_command(arguments)}" for arguments in card.examples]
    return "\n".join([f"- {card.name}: {card.description}", *lines, *examples])


_TASK = """You are the planner of a team that answers a question step by step. Decide on the one \
next step: a sub-goal and its tool.

Question: {question}
{analysis}
Tools:
{tools}"""

_RULES = """Rules:
- One sub-goal and one tool per step. The tool sees nothing but the sub-goal and the context: put \
every name and number that it needs there.
- Use what the steps so far have found; do not repeat a step that has worked.
- The tool name must be one of the list.

Answer with these four fields, in this order, and nothing after them:
Justification: why this step and this tool
Context: what the tool must know from the steps so far
Sub-Goal: what the tool is to do
Tool Name: name of the tool"""

_MEMORY = """Steps so far:
{memory}"""

TEMPLATES = {
    "shared": "\n\n".join([_TASK, _RULES, _MEMORY]),
    "paper": "\n\n".join([_TASK, _MEMORY, _RULES]),
}
"""Templates by `agent.prompt_order`: "shared" puts the memory last, so that the turns of a rollout
share all text before it; "paper" puts the rules last."""
