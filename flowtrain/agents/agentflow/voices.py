"""The voices of modules: a module is a prompt, a reader of replies, and a voice that replies.

The voice is a policy (`Policy`), a frozen model behind a chat engine (`ChatVoice`), a script
(scripts.py) or a teacher (teacher.py). The last two write in the tokens of the policy that learns
from them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

from flowtrain.agents.policy import Moment, Prompt
from flowtrain.inference.chat import ChatEngine
from flowtrain.records import Call, FinishReason

_CHARS_PER_TOKEN = 4


class Voice(Protocol):
    """Replies for a module."""

    is_frozen: ClassVar[bool]
    """The voice is not trained, and its calls have no tokens."""

    async def reply(self, prompt: Prompt, moment: Moment, *, seed: int, deadline_s: float) -> Call:
        """Reply within `deadline_s` seconds; `seed` is this turn's. Raises EngineError."""

    def measure(self, text: str) -> int:
        """Return the number of tokens of a text."""


@dataclass(frozen=True, slots=True)
class ChatVoice:
    """Any language model behind a chat engine."""

    is_frozen: ClassVar[bool] = True

    engine: ChatEngine
    timeout_s: float = math.inf
    """Seconds per reply."""

    async def reply(self, prompt: Prompt, moment: Moment, *, seed: int, deadline_s: float) -> Call:
        text = prompt.render(moment)
        timeout_s = min(self.timeout_s, deadline_s)
        reply = await self.engine.ask(text, seed=seed, deadline_s=timeout_s)
        return Call((), (), (), (), FinishReason.STOP, reply, prompt_text=text)

    def measure(self, text: str) -> int:
        return len(text) // _CHARS_PER_TOKEN
