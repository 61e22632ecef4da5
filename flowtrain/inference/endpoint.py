"""A chat model behind an endpoint that speaks OpenAI's chat completions.

The client is httpx2, which OpenAI's own package is built on. OpenAI's package retries a failed
request but not a truncated reply, has no deadline over all attempts, and reads bodies of any size.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2

from flowtrain.config import Chat
from flowtrain.inference.chat import Meter
from flowtrain.inference.protocol import EngineError
from flowtrain.inference.special_tokens import broken_up
from flowtrain.records import UserError
from flowtrain.utils.event_loop import run_to_end
from flowtrain.utils.net.bodies import ACCEPT_ENCODING, BadBody, no_cookies, read_body, shown
from flowtrain.utils.net.retries import GaveUp, Transient, may_pass, retried, retry_after_s
from flowtrain.utils.text import encodable

T = TypeVar("T")
_MAX_BYTES = 8 * 2**20
"""Longest reply in bytes, after decompression, unless a request expects more."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_CLOSE_S = 5.0
_REFUSED = (401, 403, 404)
"""HTTP status for a wrong key, model or address."""
_MOST_TOKENS = 1 << 40
"""Largest plausible number of tokens of a request; other claims of an endpoint are ignored."""


class _Dead(Transient):
    """No server took the connection."""


class Endpoint:
    """A chat model behind an endpoint; implements `ChatEngine`."""

    def __init__(self, label: str, options: Chat) -> None:
        """`label` is its name in [engines]. Raises UserError for a missing key or model, and for a
        malformed address.
        """
        self._label = label
        self._options = options
        self._url = options.base_url.rstrip("/")
        self.name = (
            f"{options.model} at {options.base_url}, temperature {options.temperature:g}, "
            f"max_tokens {options.max_tokens}"
        )
        self.meter = Meter(options.price_in, options.price_out)
        self._has_answered = self._has_warned = False
        self.max_concurrency = options.max_concurrency
        self._free = asyncio.Semaphore(self.max_concurrency)
        self._client = httpx2.AsyncClient(
            headers=_headers(label, options),
            limits=httpx2.Limits(
                max_connections=None, max_keepalive_connections=options.max_concurrency
            ),
            cookies=no_cookies(),
            timeout=None,
        )

    async def ask(self, prompt: str, *, seed: int = 0, deadline_s: float = 60.0) -> str:
        """Raises EngineError, or UserError if the endpoint has rejected the key, model or address,
        or has not responded, ever since the start.
        """
        return await self.post("chat/completions", self._body(prompt, seed), _parse, deadline_s)

    async def post(
        self,
        path: str,
        body: dict[str, object],
        parse: Callable[[bytes], tuple[T, int, int]],
        deadline_s: float,
        max_bytes: int = 0,
    ) -> T:
        """Send a request to a path below the endpoint's address; raises as `ask` does.

        `parse` returns the content of a reply and its numbers of prompt and reply tokens, or raises
        EngineError.
        """
        self.meter.requests += 1
        deadline = time.monotonic() + deadline_s

        async def attempt() -> T:
            async with self._free:
                content = await self._attempt(f"{self._url}/{path}", body, max_bytes or _MAX_BYTES)
            result, prompt_tokens, reply_tokens = parse(content)
            self._has_answered = True
            self.meter.count(prompt_tokens, reply_tokens)
            return result

        try:
            return await self._reply(attempt, deadline)
        except EngineError as error:
            self.meter.failures += 1
            raise EngineError(f"engines.{self._label}: {error}") from error

    def close(self) -> None:
        with suppress(TimeoutError):
            run_to_end(self._client.aclose(), _CLOSE_S)

    def _body(self, prompt: str, seed: int) -> dict[str, object]:
        options = self._options
        # OpenAI's newest models know one name only, most other servers the other.
        is_openai = urlsplit(self._url).hostname == "api.openai.com"
        return {
            "model": options.model,
            # Pages, tools and the trained policy have a say in it.
            "messages": [{"role": "user", "content": broken_up(prompt)}],
            "temperature": options.temperature,
            "seed": seed % 2**31,
            "max_completion_tokens" if is_openai else "max_tokens": options.max_tokens,
        }

    async def _reply(self, attempt: Callable[[], Awaitable[T]], deadline: float) -> T:
        """Retry until success, a permanent failure, or the deadline."""
        try:
            return await retried(
                attempt,
                deadline,
                (_FIRST_PAUSE_S, _LONGEST_PAUSE_S),
                max_retries=self._options.max_retries,
                on_retry=self._note_retry,
                silence="the endpoint is silent, or other requests used up the time",
            )
        except GaveUp as end:
            if isinstance(end.failure, _Dead) and not self._has_answered:
                raise UserError(
                    f"engines.{self._label}.base_url={self._options.base_url!r}: no server "
                    f"responds: {end}"
                ) from None
            raise EngineError(str(end)) from None

    def _note_retry(self, _num_failures: int, failure: Transient) -> None:
        """Count a retry, and report once that no server has ever responded."""
        self.meter.retries += 1
        if isinstance(failure, _Dead) and not self._has_answered and not self._has_warned:
            self._has_warned = True
            address = f"engines.{self._label} at {self._options.base_url}"
            print(f"waiting for {address}: {failure}", file=sys.stderr, flush=True)

    async def _attempt(self, url: str, body: dict[str, object], max_bytes: int) -> bytes:
        if self._client.is_closed:
            raise EngineError("it is closed")
        timeout_s = self._options.timeout_s
        try:
            async with (
                asyncio.timeout(timeout_s),  # of the whole reply, which a socket's timeout is not
                self._client.stream("POST", url, json=body) as response,
            ):
                content = await read_body(
                    response.aiter_raw(), response.headers.get("content-encoding", ""), max_bytes
                )
        except TimeoutError:
            raise Transient(f"no reply within timeout_s={timeout_s:g}") from None
        except httpx2.TransportError as error:
            kind = _Dead if isinstance(error, httpx2.ConnectError) else Transient
            raise kind(f"{type(error).__name__}: {str(error)[:200]}") from error
        except BadBody as error:
            raise EngineError(f"it sent {error}") from None
        status = response.status_code
        problem = f"HTTP {status}: {shown(content)}"
        if may_pass(status):
            raise Transient(problem, retry_after_s(response.headers.get("retry-after", "")))
        if status in _REFUSED and not self._has_answered:
            raise UserError(
                f"engines.{self._label}: {url} answers with HTTP {status} for model "
                f"{self._options.model!r}: {shown(content)}"
            )
        if status != 200:
            raise EngineError(problem)
        return content


def _headers(label: str, options: Chat) -> dict[str, str]:
    address = urlsplit(options.base_url)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise UserError(
            f"engines.{label}.base_url={options.base_url!r} must be like http://127.0.0.1:8000/v1"
        )
    if not options.model:
        raise UserError(f"engines.{label}.model must name the model at {options.base_url}")
    variable = options.api_key_env
    key = os.environ.get(variable, "").strip() if variable else ""
    if variable and not (key and key.isascii() and key.isprintable()):
        raise UserError(
            f"engines.{label}.api_key_env={variable!r}: this environment variable is not set; set "
            "it to the API key, or set api_key_env = '' if the endpoint needs none"
        )
    return {"Accept-Encoding": ACCEPT_ENCODING} | (
        {"Authorization": f"Bearer {key}"} if key else {}
    )


def _parse(content: bytes) -> tuple[str, int, int]:
    """Return the reply and the number of tokens of prompt and reply (0 if unknown)."""
    reply = parse_json(content)
    match reply:
        case {"choices": [{"message": {"content": str(text)}}, *_]}:
            # JSON can spell half a surrogate pair, which no tokenizer takes.
            text = encodable(text)
        case _:
            raise EngineError(f"a reply without choices[0].message.content: {shown(content)}")
    return text, *usage(reply)


def parse_json(content: bytes) -> Any:
    """Parse a reply's body. Raises EngineError."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise EngineError(f"a reply that is not JSON: {shown(content)}") from None


def usage(reply: Any) -> tuple[int, int]:
    """Return the number of tokens of prompt and reply, 0 where the reply does not say."""
    match reply:
        case {"usage": {"prompt_tokens": int(prompt), "completion_tokens": int(completion)}}:
            if all(0 <= num_tokens <= _MOST_TOKENS for num_tokens in (prompt, completion)):
                return prompt, completion
    return 0, 0
