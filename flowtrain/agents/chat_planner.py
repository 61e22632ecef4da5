"""A frozen planner behind a chat engine: to set a trained one beside, or to teach it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flowtrain.agents.memory import Memory
from flowtrain.agents.planner import Plan, Planner, read_action
from flowtrain.agents.prompts import FullPrompt
from flowtrain.engines.chat import ChatEngine
from flowtrain.types import Call, FinishReason, Task
from flowtrain.utils.seeds import derive_seed

_CHARS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class ChatPlanner(Planner):
    """See `Planner`. Its prompt is the full one, whatever `agent.prompt` says: that of the tiny
    planner means nothing to others.
    """

    engine: ChatEngine
    prompt: FullPrompt
    """Made without a tokenizer."""
    tool_names: tuple[str, ...]
    timeout_s: float
    """Seconds per reply."""
    spellings: Mapping[str, str] = field(default_factory=dict)
    """As for `read_action`."""

    async def plan(
        self, task: Task, memory: Memory, turn: int, seed: int, deadline_s: float
    ) -> Plan:
        """Raises EngineError."""
        prompt = self.prompt.render(task.prompt, memory)
        text = await self.engine.ask(
            prompt, seed=derive_seed(seed, turn), deadline_s=min(self.timeout_s, deadline_s)
        )
        call = Call((), (), (), (), FinishReason.STOP, text, prompt_text=prompt)
        return Plan(call, *read_action(text, self.tool_names, self.spellings))

    def measure(self, memory: Memory) -> int:
        return len(self.prompt.steps(memory)) // _CHARS_PER_TOKEN
