"""Policies, and what modules of the flow give them to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol

from flowtrain.agents.agentflow.memory import Memory
from flowtrain.config import Config
from flowtrain.inference.protocol import Engine
from flowtrain.inference.special_tokens import encode_plain, encode_prompt
from flowtrain.inference.token_chat import ChatTokenizer, chat_text, check_template, reply_end
from flowtrain.records import (
    Call,
    Completion,
    FinishReason,
    PolicyName,
    Sampling,
    Task,
    Turn,
    VersionSpan,
)


class PromptTooLong(Exception):
    """The memory has outgrown the model's positions; the rollout ends with what it has."""


class Moment(NamedTuple):
    """The question and the memory that a module reads; the refiner what was found, too."""

    task: Task
    memory: Memory = Memory()
    sub_goal: str = ""
    passages: str = ""


class Prompt(Protocol):
    """Renders the prompt of a module, and writes the replies that answer it."""

    prefix: str
    """The part of the reply that the prompt contains."""
    is_message: bool
    """The text is a user's message, which goes through a policy's chat template."""

    def render(self, moment: Moment) -> str: ...

    def write(self, said: Any) -> str:
        """Write the reply that the module reads as `said`, without the prefix, for those who play
        the policy.
        """


@dataclass(frozen=True, slots=True)
class ResponsePrefix:
    """The prompt and the beginning of the response that a branch shares with its parent's turn."""

    prompt_ids: tuple[int, ...]
    response: Completion

    @classmethod
    def of(cls, turn: Turn, num_tokens: int) -> ResponsePrefix:
        """Take the first `num_tokens` tokens of a turn's response."""
        call = turn.call
        spans = tuple(
            replace(span, end=min(span.end, num_tokens))
            for span in call.spans
            if span.start < num_tokens
        )
        ids = call.response_ids[:num_tokens]
        logprobs = call.logprobs[:num_tokens]
        mask = None if call.sampling_mask is None else call.sampling_mask.first(num_tokens)
        return cls(call.prompt_ids, Completion(ids, logprobs, spans, FinishReason.LENGTH, mask))

    def joined(self, rest: Completion) -> Completion:
        """Return the whole response, of which `rest` was sampled now."""
        shift = len(self.response.ids)
        spans = (
            *self.response.spans,
            *(VersionSpan(s.start + shift, s.end + shift, s.version) for s in rest.spans),
        )
        ours = self.response.sampling_mask
        theirs = rest.sampling_mask
        return Completion(
            self.response.ids + rest.ids,
            self.response.logprobs + rest.logprobs,
            spans,
            rest.finish_reason,
            sampling_mask=None if ours is None or theirs is None else ours + theirs,
            routes=rest.routes,  # of all that it read, the beginning too
        )


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy as agents see it: token ids in, token ids out, so that it can be trained. It is the
    voice of its module (`Voice`).
    """

    is_frozen: ClassVar[bool] = False

    engine: Engine
    tokenizer: ChatTokenizer
    max_new_tokens: int
    temperature: float
    request_timeout_s: float
    top_k: int = 0
    top_p: float = 1.0
    frequency_penalty: float = 0.0

    @property
    def max_tokens(self) -> int:
        """Longest prompt and response together."""
        return self.engine.max_tokens

    async def sample(
        self,
        prompt_ids: tuple[int, ...],
        *,
        seed: int,
        deadline_s: float,
        prefix: ResponsePrefix | None = None,
        max_new_tokens: int | None = None,
        stop_strings: tuple[str, ...] = (),
    ) -> Call:
        """Sample a response, or what follows its `prefix`. Raises PromptTooLong.

        Args:
            max_new_tokens: fewer tokens than the policy's own.
            stop_strings: the response ends with the first of these, which it contains.
        """
        most = min(self.max_new_tokens, max_new_tokens or self.max_new_tokens)
        if len(prompt_ids) + most > self.max_tokens:
            raise PromptTooLong(f"{len(prompt_ids)} prompt tokens")
        begun = () if prefix is None else prefix.response.ids
        sampling = Sampling(
            most - len(begun),
            self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            frequency_penalty=self.frequency_penalty,
            stop_strings=stop_strings,
            seed=seed,
            deadline_s=min(self.request_timeout_s, deadline_s),
        )
        completion = await self.engine.generate(prompt_ids + begun, sampling)
        if prefix is not None:
            completion = prefix.joined(completion)
        return Call.of(prompt_ids, completion, self.decode(completion.ids))

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
        """Return the call that answers `text`; its log-probs are 0, because nobody sampled it.

        `is_message`: the chat template wrote the prompt, and its token ends the answer.
        """
        end = reply_end(self.tokenizer) if is_message else self.tokenizer.eos_token_id
        ids = (*self.encode(text), end)
        completion = Completion(ids, (0.0,) * len(ids), (), FinishReason.STOP)
        return Call.of(prompt_ids, completion, text)

    def encode(self, text: str) -> tuple[int, ...]:
        """Encode a text in which only what a chat template wrote is special."""
        return tuple(encode_plain(self.tokenizer, text))

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Encode the beginning of a prompt: where no chat template wrote it, behind what the
        tokenizer begins a text with, such as <bos>.
        """
        return tuple(encode_prompt(self.tokenizer, text))

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def check_own_template(config: Config, policy: PolicyName, tokenizer: ChatTokenizer) -> None:
    """Raise UserError for a tokenizer without the chat template that the prompt needs."""
    need = "which agent.prompt='full' needs (agent.prompt='compact' does not)"
    check_template(tokenizer, *config.path_of(policy), need)


def check_prompt(config: Config, tokenizer: ChatTokenizer) -> None:
    """Check the first policy's tokenizer, where `agent.prompt` asks for its chat template."""
    if config.agent.prompt == "full":
        check_own_template(config, config.first_policy, tokenizer)
