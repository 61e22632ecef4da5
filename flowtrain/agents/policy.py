"""Trainable policies, and the prompts that modules of the flow write for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol

from flowtrain.agents.agentflow.memory import Memory
from flowtrain.config import Config
from flowtrain.inference.protocol import Engine
from flowtrain.inference.special_tokens import encode_plain, encode_prompt
from flowtrain.inference.token_chat import ChatTokenizer, chat_text, check_template, reply_end
from flowtrain.records import Call, FinishReason, PolicyName, Sampling, Task, VersionSpan


class PromptTooLong(Exception):
    """A prompt exceeds the model's positions; the rollout ends with its finished turns."""


class Moment(NamedTuple):
    """The question and the memory that a module reads and, for the refiner, the search results."""

    task: Task
    memory: Memory = Memory()
    sub_goal: str = ""
    passages: str = ""


class Prompt(Protocol):
    """Renders the prompt of a module, and writes replies to the prompt for imitation."""

    prefix: str
    """The part of the reply that the prompt contains."""
    is_message: bool
    """The text is a user's message, which goes through a policy's chat template."""

    def render(self, moment: Moment) -> str: ...

    def write(self, content: Any) -> str:
        """Return the reply, without the prefix, that the module parses as `content`; used by
        experts that play the policy.
        """


def opening(call: Call, num_tokens: int) -> Call:
    """Return a call with the first tokens of its response, which a branch continues."""
    spans = (replace(s, end=min(s.end, num_tokens)) for s in call.spans if s.start < num_tokens)
    mask = call.sampling_mask
    return Call(
        call.prompt_ids,
        call.response_ids[:num_tokens],
        call.logprobs[:num_tokens],
        tuple(spans),
        FinishReason.LENGTH,
        sampling_mask=None if mask is None else mask.first(num_tokens),
    )


def joined(beginning: Call, later: Call) -> Call:
    """Return the whole call from its beginning and its continuation `later`."""
    shift = len(beginning.response_ids)
    spans = (VersionSpan(s.start + shift, s.end + shift, s.version) for s in later.spans)
    first_mask, later_mask = beginning.sampling_mask, later.sampling_mask
    return replace(
        later,  # whose routes are of all that it read, the beginning too
        prompt_ids=beginning.prompt_ids,
        response_ids=beginning.response_ids + later.response_ids,
        logprobs=beginning.logprobs + later.logprobs,
        spans=(*beginning.spans, *spans),
        sampling_mask=None if first_mask is None or later_mask is None else first_mask + later_mask,
        entropies=(),
    )


@dataclass(frozen=True, slots=True)
class Policy:
    """A trainable policy: token ids in, token ids out. Implements `Voice` for its module."""

    is_frozen: ClassVar[bool] = False

    engine: Engine
    tokenizer: ChatTokenizer
    max_new_tokens: int
    temperature: float
    request_timeout_s: float
    top_k: int = 0
    top_p: float = 1.0
    frequency_penalty: float = 0.0
    name: PolicyName = ""
    sampled: Counter[PolicyName] = field(default_factory=Counter)
    """Tokens returned by engines, by policy name. Includes turns that were discarded later, but no
    tokens of abandoned requests."""

    @property
    def max_tokens(self) -> int:
        """Return the largest total number of prompt and response tokens."""
        return self.engine.max_tokens

    async def sample(
        self,
        prompt_ids: tuple[int, ...],
        *,
        seed: int,
        deadline_s: float,
        prefix: Call | None = None,
        max_new_tokens: int | None = None,
        stop_strings: tuple[str, ...] = (),
    ) -> Call:
        """Sample a response, or the continuation of `prefix`, and return the call. Raises
        PromptTooLong if prompt and response limit exceed the model's positions.

        Args:
            max_new_tokens: a limit below the policy's own.
            stop_strings: sampling stops after the first of these strings, which stays in the
                response.
        """
        limit = min(self.max_new_tokens, max_new_tokens or self.max_new_tokens)
        if len(prompt_ids) + limit > self.max_tokens:
            raise PromptTooLong(f"{len(prompt_ids)} prompt tokens")
        prefix_ids = () if prefix is None else prefix.response_ids
        sampling = Sampling(
            limit - len(prefix_ids),
            self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            frequency_penalty=self.frequency_penalty,
            stop_strings=stop_strings,
            seed=seed,
            deadline_s=min(self.request_timeout_s, deadline_s),
        )
        call = await self.engine.generate(prompt_ids + prefix_ids, sampling)
        self.sampled[self.name] += len(call.response_ids)
        if prefix is not None:
            call = joined(prefix, call)
        return replace(call, text=self.decode(call.response_ids))

    async def reply(self, prompt: Prompt, moment: Moment, *, seed: int, deadline_s: float) -> Call:
        """See `Voice`. Raises PromptTooLong."""
        return await self.sample(self.read(prompt, moment), seed=seed, deadline_s=deadline_s)

    def measure(self, text: str) -> int:
        return len(self.encode(text))

    def read(self, prompt: Prompt, moment: Moment) -> tuple[int, ...]:
        """Return the ids of a prompt."""
        text = prompt.render(moment)
        text = chat_text(self.tokenizer, text) if prompt.is_message else text
        return self.encode_prompt(text)

    def imitate(self, prompt_ids: tuple[int, ...], text: str, is_message: bool) -> Call:
        """Return a call with `text` as its response. The log-probs are 0, because no policy sampled
        the response.

        `is_message`: the chat template wrote the prompt, so the template's end token closes the
        response.
        """
        end = reply_end(self.tokenizer) if is_message else self.tokenizer.eos_token_id
        ids = (*self.encode(text), end)
        return Call(prompt_ids, ids, (0.0,) * len(ids), (), FinishReason.STOP, text)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text, in which only a chat template's special tokens are special."""
        return tuple(encode_plain(self.tokenizer, text))

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Return the ids of the beginning of a prompt, including the tokenizer's initial tokens
        such as <bos> unless a chat template wrote the text.
        """
        return tuple(encode_prompt(self.tokenizer, text))

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def check_own_template(config: Config, policy: PolicyName, tokenizer: ChatTokenizer) -> None:
    """Raise UserError if the prompt needs a chat template and the tokenizer has none."""
    need = "which agent.prompt='full' needs (agent.prompt='compact' does not)"
    check_template(tokenizer, *config.path_of(policy), need)


def check_prompt(config: Config, tokenizer: ChatTokenizer) -> None:
    """Check that the first policy's tokenizer has a chat template, if `agent.prompt` needs one."""
    if config.agent.prompt == "full":
        check_own_template(config, config.first_policy, tokenizer)
