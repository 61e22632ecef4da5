"""Environments behind servers of the package `openenv` (docs/agents/environments.md)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from openenv.core import GenericEnvClient

from flowtrain.agents.chat.environment import EnvironmentTool
from flowtrain.records import Task
from flowtrain.tools import Tool, ToolCard, ToolError
from flowtrain.tools.web.api import Api, Request, key_from_env
from flowtrain.utils.seeds import derive_seed
from flowtrain.utils.text import encodable, printable

_REFUSALS = ("VALIDATION_ERROR)", "EXECUTION_ERROR)", "CAPACITY_REACHED)")
_api = Api()


class _Client(GenericEnvClient):
    async def _ensure_connected(self) -> None:
        """Do not connect again unasked: a new session would be another world."""


@dataclass
class OpenEnv:
    """One episode in a session of its own; its options are in docs/agents/environments.md."""

    task: Task
    url: str
    action: str = ""
    observation: str = ""
    reset: Sequence[str] = ()
    timeout_s: float = 60.0
    token_env: str = ""

    def __post_init__(self) -> None:
        """Raises UserError where the token is missing."""
        option = "plugins.OpenEnv.token_env"
        token = key_from_env(self.token_env, option, self.url) if self.token_env else ""
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = _Client(
            self.url,
            message_timeout_s=self.timeout_s,
            mode="simulation",
            headers=self._headers,
        )
        self._one_at_a_time = asyncio.Lock()
        self._lost, self.over = "", False
        self.rewards: list[float] = []
        self.tools: dict[str, Tool] = {}

    def text_of(self, seen: Mapping[str, Any]) -> str:
        """Return what the policy reads. Raises ToolError for what a failed tool gives."""
        shown: Any = {name: value for name, value in seen.items() if name != "metadata"}
        if "tool_name" in seen:
            if seen.get("error"):
                raise ToolError(seen["error"]["message"])
            shown = seen["result"]
            shown = shown.get("data", shown) if isinstance(shown, dict) else shown
        elif len(shown) < 2:
            shown = next(iter(shown.values()), "")
        shown = seen.get(self.observation, shown)
        return encodable(shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False))

    async def open(self) -> Sequence[dict[str, Any]]:
        row = self.task.extra
        # Some generators of random numbers take no more than 32 bits.
        seed = row.get("seed", derive_seed(self.task.id) % 2**31)
        columns = {"seed": seed} | {name: row[name] for name in self.reset}
        while True:
            await self._ask(self._client.connect)
            try:
                begun = await self._ask(partial(self._client.reset, **columns))
                break
            except ToolError as refused:
                if "CAPACITY_REACHED" not in str(refused):
                    raise
            await asyncio.sleep(0.5)  # until the server has a session free
        if not self.action:
            await self._find_tools()
        parts = filter(None, [self.task.prompt, self.text_of(begun.observation)])
        return [{"role": "user", "content": "\n\n".join(parts)}]

    async def reply(self, text: str) -> str | None:
        if not self.action:
            return None
        try:
            seen = await self._step(**{self.action: text})
        except ToolError as refused:
            seen = f"Error: {refused}"
        return None if self.over else seen

    async def reward(self) -> float:
        if self._lost or (self.over and not self.rewards):
            raise ConnectionError(self._lost or f"{self.url}: the episode ended without a reward")
        return sum(self.rewards)

    async def close(self) -> None:
        await self._client.close()

    async def _find_tools(self) -> None:
        """Take the environment's tools, or one tool `step` of an action's fields."""
        request = Request(f"{self.url.rstrip('/')}/schema", headers=self._headers)
        schema = (await self._ask(lambda: _api.ask(request, self.timeout_s)))["action"]
        schema["properties"].pop("metadata", None)
        about = schema.get("description", "")
        found = [{"name": "step", "description": about, "input_schema": schema}]
        if not schema["properties"] or "tool_name" in schema["properties"]:
            listed = await self._ask(partial(self._client.step, {"type": "list_tools"}))
            found = listed.observation["tools"]
        for tool in found:
            line = printable(" ".join(tool["description"].split()), keep="")[:2000]
            card = ToolCard(tool["name"], line, tool["input_schema"], keeps_time=True)
            self.tools[card.name] = EnvironmentTool(card, partial(self._step, card.name))

    async def _step(self, tool: str = "step", /, **arguments: object) -> str:
        # openenv lets no tool have that name, and `metadata` is not the policy's to fill.
        called = {"type": "call_tool", "tool_name": tool, "arguments": arguments}
        action: Any = {**arguments, "metadata": {}} if tool == "step" else called
        async with self._one_at_a_time:  # a response may hold several calls
            if self.over:
                raise ToolError("the episode is over")
            result = await self._ask(partial(self._client.step, action))
            self.over = bool(result.done)
            self.rewards += [] if result.reward is None else [float(result.reward)]
            return self.text_of(result.observation)

    async def _ask(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Raise ToolError where the server refuses, ConnectionError where the episode is lost."""
        self._lost = f"{self.url}: it was cut off amid a request"
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await ask()
        # The client, the network and what the server sent may raise anything.
        except Exception as error:  # noqa: BLE001
            words = str(error) or f"no answer within {self.timeout_s:g} s"
            self.over = not words.endswith(_REFUSALS)
            self._lost = f"{self.url}: {type(error).__name__}: {words}" if self.over else ""
            raise ConnectionError(self._lost) if self.over else ToolError(words) from None
        self._lost = ""
        return answer
