"""An agent of one turn: the policy reads the question and writes the answer.

It has neither tools nor roles, so Flow-GRPO on it is GRPO. The answer is the content of the last
`<answer>...</answer>` of the response, else the whole response.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from flowtrain.agents.base import BranchStart
from flowtrain.agents.deadlines import Cutoff, TurnsEnded
from flowtrain.agents.hints import Hints
from flowtrain.agents.memory import Memory
from flowtrain.agents.policy import PolicyModule, PromptTooLong, ResponsePrefix
from flowtrain.engines.token_chat import ChatTokenizer, chat_text
from flowtrain.types import Call, FinishReason, Task, ToolResult, Trajectory, Turn, Verdict
from flowtrain.utils.seeds import derive_seed
from flowtrain.utils.text import final_answer


class QuestionPrompt:
    """The question and, after an empty line, the instructions, as one message to the policy."""

    prefix = ""

    def __init__(self, instructions: str, tokenizer: ChatTokenizer | None) -> None:
        """Use the chat template of `tokenizer`; without one a label opens the answer."""
        self._instructions = instructions
        self._tokenizer = tokenizer

    def render(self, question: str, memory: Memory) -> str:
        message = "\n\n".join(filter(None, [question, self._instructions]))
        if self._tokenizer is None:
            return f"Question: {message}\nAnswer:"
        return chat_text(self._tokenizer, message)


@dataclass(frozen=True, slots=True)
class SingleTurn:
    """See `Agent`."""

    policy: PolicyModule
    timeout_s: float
    """Seconds for the response."""

    async def run(
        self, task: Task, seed: int, cutoff: Cutoff | None = None, start: BranchStart | None = None
    ) -> Trajectory:
        started = time.monotonic()
        call, truncated = None, ""
        try:
            async with (cutoff or Cutoff())():
                call = await self._respond(task, seed, start)
        except PromptTooLong:
            truncated = "prompt"
        except TurnsEnded:
            truncated = "straggler"
        seconds = time.monotonic() - started
        if call is not None and call.finish_reason is FinishReason.DEADLINE:
            truncated = "time"
        return Trajectory(
            task=task,
            turns=() if call is None else (_turn(call, seconds),),
            answer="" if call is None else final_answer(call.text),
            seconds=seconds,
            seed=seed,
            truncated=truncated,
            branch=None if start is None else start.point,
        )

    def with_hints(self, hints: Hints | None) -> SingleTurn:
        assert hints is None, "there is no second turn to read a hint"
        return self

    async def _respond(self, task: Task, seed: int, start: BranchStart | None) -> Call:
        prefix = None
        prompt_ids = self.policy.encode(task.question, Memory())
        if start is not None:
            prefix = ResponsePrefix.of(start.parent.turns[0], start.point.token)
            prompt_ids = prefix.prompt_ids
        return await self.policy.sample(
            prompt_ids, derive_seed(seed, 0), self.timeout_s, prefix=prefix
        )


def _turn(call: Call, seconds: float) -> Turn:
    return Turn(
        calls={"planner": call},
        action=None,
        command="",
        result=ToolResult(),
        verdict=Verdict.STOP,
        seconds=seconds,
        plan_s=seconds,
    )
