"""Chat over a token engine: with the policy, without training its tokens, and with frozen models in
this process or in vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol

from jinja2 import TemplateError

from flowtrain.config import Chat
from flowtrain.inference.chat import Meter
from flowtrain.inference.protocol import Engine, EngineError
from flowtrain.inference.special_tokens import Rendered, encode_plain, special_tokens
from flowtrain.records import FinishReason, Sampling, UserError
from flowtrain.utils.errors import one_line

TEMPLATE_ERRORS = (
    *(TemplateError, TypeError, ValueError, LookupError),
    *(ArithmeticError, AttributeError, RecursionError),
)
"""Errors that a chat template raises for messages that it rejects."""


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts and parsing need."""

    chat_template: str | None
    eos_token_id: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...


def pass_to_template(tokenizer: ChatTokenizer, options: Mapping[str, Any]) -> None:
    """Make a tokenizer pass these options to its chat template."""
    if options:
        render = partial(type(tokenizer).apply_chat_template, tokenizer, **options)
        tokenizer.apply_chat_template = render  # type: ignore[method-assign]


def render_template(
    source: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    tokens: Mapping[str, str],
    reply: bool = False,
) -> str:
    """Render messages by a chat template, without a tokenizer but with its special tokens by name;
    with `reply` up to where the reply begins.

    Raises any error of the template, which is third-party code.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    names = {"bos_token": "", "eos_token": "", "unk_token": "", "pad_token": "", **tokens}
    texts, _ = render_jinja_template(
        [messages], tools=tools, chat_template=source, add_generation_prompt=reply, **names
    )
    return str(texts[0])


def chat_text(tokenizer: ChatTokenizer, message: str) -> Rendered:
    """Render one user message up to the start of the reply, with marked special tokens."""
    content = special_tokens(tokenizer).marked(message)
    return Rendered(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
    )


def encode_chat(tokenizer: ChatTokenizer, message: str) -> list[int]:
    """Return the ids of one user message up to the start of the reply; no token in it is
    special.
    """
    return encode_plain(tokenizer, chat_text(tokenizer, message))


def check_template(tokenizer: ChatTokenizer, key: str, path: str, need: str) -> None:
    """Raise UserError unless the tokenizer has a chat template that renders a user message.

    Args:
        key: the option that names the path.
        need: the purpose of the template: "which agent.prompt='full' needs".
    """
    if not tokenizer.chat_template:
        raise UserError(f"{key}={path!r} has no chat template, {need}")
    message = "73519"
    try:
        is_shown = message in chat_text(tokenizer, message)
    except TEMPLATE_ERRORS as error:
        reason = one_line(error)
        raise UserError(f"the chat template of {key}={path!r}, {need}, fails: {reason}") from error
    if not is_shown:
        raise UserError(f"the chat template of {key}={path!r}, {need}, does not render the message")


def message_end(tokenizer: Any) -> int | None:
    """Return the special token with which a chat template ends a reply, e.g. <|im_end|>; None
    without a template or such a token.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    reply = "pQ7xZ"  # mixed case, so that a template that changes the case of replies is found out
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": reply}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
    except TEMPLATE_ERRORS:
        return None
    _, has_reply, closing = text.rpartition(reply)
    ids = tokenizer.encode(closing, add_special_tokens=False) if has_reply and closing else []
    is_special = ids and not tokenizer.decode(ids[:1], skip_special_tokens=True)
    return int(ids[0]) if is_special else None


def reply_end(tokenizer: Any) -> Any:
    """Return the token that ends a reply, from the chat template or else the tokenizer."""
    template_end = _cached_end(tokenizer, tokenizer.chat_template)
    return getattr(tokenizer, "eos_token_id", None) if template_end is None else template_end


@lru_cache(maxsize=16)
def _cached_end(tokenizer: ChatTokenizer, _source: str | None) -> int | None:
    """Return the end of a reply, rendering the template only once."""
    return message_end(tokenizer)


class TokenChat:
    """A chat over a token engine; implements `ChatEngine`."""

    def __init__(
        self, label: str, options: Chat, tokenizer: ChatTokenizer, engine: Engine | None = None
    ) -> None:
        """`options`: only the sampling options count. The policy's engine may be set later, because
        tools exist before it.
        """
        self._label = label
        self._options = options
        self._tokenizer = tokenizer
        self.engine = engine
        self.meter = Meter(options.price_in, options.price_out)

    @property
    def name(self) -> str:
        version = 0 if self.engine is None else self.engine.version
        options = self._options
        settings = f"temperature {options.temperature:g}, max_tokens {options.max_tokens}"
        return f"{options.model} version {version}, {settings}"

    async def ask(self, prompt: str, *, seed: int = 0, deadline_s: float = 60.0) -> str:
        """Return the reply, shortened to the positions that the prompt leaves. Raises EngineError
        if it leaves none.
        """
        self.meter.requests += 1
        try:
            return await self._reply(prompt, seed, min(deadline_s, self._options.timeout_s))
        except EngineError:
            self.meter.failures += 1
            raise

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()

    async def _reply(self, prompt: str, seed: int, deadline_s: float) -> str:
        engine, options = self.engine, self._options
        assert engine is not None, f"{self._label} has no engine yet: it is still starting"
        prompt_ids = encode_chat(self._tokenizer, prompt)
        max_new_tokens = engine.max_tokens - len(prompt_ids)
        if max_new_tokens < 1:
            raise EngineError(
                f"{self._label}: a prompt of {len(prompt_ids)} tokens does not fit into "
                f"{engine.max_tokens}"
            )
        sampling = Sampling(
            min(options.max_tokens, max_new_tokens),
            options.temperature,
            seed=seed,
            deadline_s=deadline_s,
        )
        call = await engine.generate(prompt_ids, sampling)
        self.meter.count(len(prompt_ids), len(call.response_ids))
        if call.finish_reason is FinishReason.DEADLINE:
            raise EngineError(f"{self._label}: no complete reply within {deadline_s:g} s")
        return self._tokenizer.decode(call.response_ids, skip_special_tokens=True)
