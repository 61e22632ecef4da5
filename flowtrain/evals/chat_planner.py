"""A frozen planner behind a chat engine, to set a trained one beside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowtrain.agents.memory import Memory
from flowtrain.agents.planner import Plan, ResponsePrefix, parse_action
from flowtrain.agents.prompts import FullPrompt
from flowtrain.engines.chat import ChatEngine
from flowtrain.types import Call, FinishReason, Task
from flowtrain.utils.seeds import derive_seed

_CHARS_PER_TOKEN = 4


class PlainText:
    """A tokenizer that has no tokens: prompts stay the text of one user message."""

    chat_template: str | None = "plain"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError("a chat engine takes text")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        raise NotImplementedError("a chat engine gives text")

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        return conversation[-1]["content"]


@dataclass(frozen=True, slots=True)
class ChatPlanner:
    """See `Planner`. Its prompt is the full one, whatever `agent.prompt` says: that of the tiny
    planner means nothing to others.
    """

    engine: ChatEngine
    prompt: FullPrompt
    """Made with `PlainText`."""
    tool_names: tuple[str, ...]
    timeout_s: float
    """Seconds per reply."""

    async def plan(
        self, task: Task, memory: Memory, turn: int, seed: int, deadline_s: float
    ) -> Plan:
        """Raises EngineError."""
        prompt = self.prompt.render(task.question, memory)
        text = await self.engine.ask(
            prompt, seed=derive_seed(seed, turn), deadline_s=min(self.timeout_s, deadline_s)
        )
        call = Call((), (), (), (), FinishReason.STOP, text, prompt_text=prompt)
        return Plan(call, parse_action(text, self.tool_names))

    async def resume(self, prefix: ResponsePrefix, turn: int, seed: int, deadline_s: float) -> Plan:
        raise AssertionError("nobody branches in an evaluation")

    def measure(self, memory: Memory) -> int:
        return len(self.prompt.steps(memory)) // _CHARS_PER_TOKEN
