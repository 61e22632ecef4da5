"""A small agent for Harbor's tasks: the policy writes commands, whose output it sees.

It runs beside Harbor and only its commands run in the environment, which therefore needs no
network and none of the agent's own packages.
"""

from __future__ import annotations

import re
from typing import Any

from harbor.agents.base import BaseAgent
from openai import APIStatusError, AsyncOpenAI

SYSTEM = """You have a shell. Write one command, or several, between ```bash and ``` and you will \
see what they print. Reply without ```bash when the task is done."""
_COMMAND = re.compile(r"```(?:bash|sh)\n(.*?)```", re.DOTALL)
_ENDED = (400, 410)
"""What the gateway answers when the prompt is too long, and when the rollout has ended."""


class Shell(BaseAgent):
    """An agent of Harbor, by its import path."""

    def __init__(
        self,
        *args: Any,
        system: str = SYSTEM,
        command_timeout_s: int = 60,
        max_chars: int = 8000,
        **kwargs: Any,
    ) -> None:
        """Set what Harbor's `agent.kwargs` may change.

        Args:
            system: the system message.
            command_timeout_s: time limit of one reply's commands.
            max_chars: of a command's output; more loses its middle.
        """
        super().__init__(*args, **kwargs)
        self._system, self._timeout_s, self._max_chars = system, command_timeout_s, max_chars

    @staticmethod
    def name() -> str:
        return "flowtrain-shell"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None:
        """Install nothing."""

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        """Talk until a reply has no command, or the rollout has come to a limit."""
        messages: list[Any] = [
            {"role": "system", "content": self._system},
            {"role": "user", "content": instruction},
        ]
        async with AsyncOpenAI(max_retries=0) as client:  # URL and key of this process
            while True:
                try:
                    reply = await client.chat.completions.create(model="policy", messages=messages)
                except APIStatusError as error:
                    if error.status_code in _ENDED:
                        return  # what it did until now is graded
                    raise
                text = reply.choices[0].message.content or ""
                command = _COMMAND.search(text)
                if command is None:
                    return
                seen = await self._seen(environment, command[1])
                messages += [
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": seen},
                ]

    async def _seen(self, environment: Any, command: str) -> str:
        try:
            ran = await environment.exec(command, timeout_sec=self._timeout_s)
        except RuntimeError as error:  # Harbor's word for a command that took too long
            return str(error)
        printed = f"{ran.stdout or ''}{ran.stderr or ''}".strip()
        if len(printed) > self._max_chars:
            half = self._max_chars // 2
            printed = f"{printed[:half]}\n...\n{printed[-half:]}"
        code = f"[exit code {ran.return_code}]" * (ran.return_code != 0)
        return "\n".join(filter(None, (printed, code))) or "[no output]"
