"""A module of the flow that is a policy: tokens in, tokens out, so that it can be trained."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from flowtrain.agents.memory import Memory
from flowtrain.engines.protocol import Engine
from flowtrain.engines.token_chat import ChatTokenizer
from flowtrain.types import Call, Completion, FinishReason, Sampling, Turn, VersionSpan


class PromptTooLong(Exception):
    """The memory has outgrown the model's positions; the rollout ends with what it has."""


class Prompt(Protocol):
    """Renders a prompt; `prefix` is the part of the answer that the prompt contains."""

    prefix: str

    def render(self, question: str, memory: Memory) -> str: ...


@dataclass(frozen=True, slots=True)
class ResponsePrefix:
    """The prompt and the beginning of the response that a branch shares with its parent's turn."""

    prompt_ids: tuple[int, ...]
    response: Completion

    @classmethod
    def of(cls, turn: Turn, num_tokens: int) -> ResponsePrefix:
        """Take the first `num_tokens` tokens of a turn's response."""
        call = turn.calls["planner"]
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
        )


@dataclass(frozen=True, slots=True)
class PolicyModule:
    """Samples from a policy's engine; it reads the question and the memory, no more of the task."""

    engine: Engine
    tokenizer: ChatTokenizer
    prompt: Prompt
    max_new_tokens: int
    temperature: float
    request_timeout_s: float
    top_k: int = 0
    top_p: float = 1.0

    async def sample(
        self,
        prompt_ids: tuple[int, ...],
        seed: int,
        deadline_s: float,
        prefix: ResponsePrefix | None = None,
    ) -> Call:
        """Sample a response, or what follows its `prefix`. Raises PromptTooLong."""
        if len(prompt_ids) + self.max_new_tokens > self.engine.max_tokens:
            raise PromptTooLong(f"{len(prompt_ids)} prompt tokens")
        begun = () if prefix is None else prefix.response.ids
        sampling = Sampling(
            self.max_new_tokens - len(begun),
            self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=seed,
            deadline_s=min(self.request_timeout_s, deadline_s),
        )
        completion = await self.engine.generate(prompt_ids + begun, sampling)
        if prefix is not None:
            completion = prefix.joined(completion)
        text = self.tokenizer.decode(completion.ids, skip_special_tokens=True)
        return Call.of(prompt_ids, completion, text)

    def imitate(self, question: str, memory: Memory, text: str, end_id: int) -> Call:
        """Return the call that answers `text`; its log-probs are 0, because nobody sampled it."""
        ids = (*self.tokenizer.encode(text, add_special_tokens=False), end_id)
        completion = Completion(ids, (0.0,) * len(ids), (), FinishReason.STOP)
        return Call.of(self.encode(question, memory), completion, text)

    def encode(self, question: str, memory: Memory) -> tuple[int, ...]:
        text = self.prompt.render(question, memory)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))
