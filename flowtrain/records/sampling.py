"""Records of sampling: the request of one response, and the call with its tokens."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Int32s = array[int]
    Float32s = array[float]
else:
    # Python 3.11 has no array[int] at run time, where decoders read the annotations of records
    Int32s = Float32s = array


class FinishReason(enum.StrEnum):
    """Reason for the end of a response."""

    STOP = "stop"
    """The response ended with an end-of-sequence token or a stop string."""
    LENGTH = "length"
    """The response reached `max_new_tokens`."""
    DEADLINE = "deadline"
    """The request ran out of time; the response holds the tokens sampled so far."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The parameters of sampling one response."""

    max_new_tokens: int
    temperature: float = 1.0
    """Sampling temperature; 0 means greedy, with log-probs at temperature 1."""
    top_k: int = 0
    """Sample from this many most likely tokens, with log-probs renormalised over them; 0 and greedy
    sampling use all tokens."""
    top_p: float = 1.0
    """Sample from the smallest set of these tokens whose probabilities sum to this value; a value
    below 1 requires top_k."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each earlier occurrence in the response, as in OpenAI's
    API; log-probs include the penalty."""
    stop_strings: tuple[str, ...] = ()
    """Sampling ends after the first of these strings, which stays in the response."""
    ignore_end: bool = False
    """Continue after an end-of-sequence token, for measurements of a fixed length."""
    seed: int = 0
    """Seed of this request; other requests in its batch change the result by rounding at most."""
    deadline_s: float = 60.0
    """Seconds from the call until the engine must answer."""

    @property
    def is_truncated(self) -> bool:
        """Whether top-k or top-p exclude some tokens."""
        return self.top_k > 0 and self.temperature > 0


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """A span of a response: weights `version` sampled the tokens [start, end)."""

    start: int
    end: int
    version: int


@dataclass(frozen=True, slots=True)
class SamplingMask:
    """The ids that top-k and top-p kept, for each token of a response."""

    ids: Int32s
    """int32; the ids of one token are distinct."""
    counts: Int32s
    """int32, number of ids for each token of the response."""

    @classmethod
    def of(cls, sets: Iterable[Sequence[int]]) -> SamplingMask:
        """Join sets: SamplingMask.of([(5, 9), (2,)]) has the ids 5, 9, 2 and the counts 2, 1."""
        ids, counts = array("i"), array("i")
        for token_ids in sets:
            ids.extend(token_ids)
            counts.append(len(token_ids))
        return cls(ids, counts)

    def first(self, num_tokens: int) -> SamplingMask:
        """Return the mask of the first tokens."""
        counts = self.counts[:num_tokens]
        return SamplingMask(self.ids[: sum(counts)], counts)

    def __add__(self, later: SamplingMask) -> SamplingMask:
        return SamplingMask(self.ids + later.ids, self.counts + later.counts)


@dataclass(frozen=True, slots=True)
class Likeliest:
    """A teacher's K likeliest tokens in the place of each token of a response."""

    ids: Int32s
    """int32 [tokens, K]; those of one place differ from each other."""
    logprobs: Float32s
    """float32 [tokens, K], at temperature 1, among all tokens."""


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts chosen by the routers of a mixture of experts for each input token: prompt and
    response without the last token, which is only a target.
    """

    experts: bytes
    """[tokens, layers, chosen], uint8, or little-endian uint16 where `is_wide`; only layers with a
    router, in the order of the decoder."""
    num_layers: int
    """Number of layers with a router."""
    num_chosen: int
    """Number of experts per token and layer."""
    is_wide: bool = False
    """Whether a layer has more than 256 experts."""

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.num_chosen * (1 + self.is_wide)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of one module in one turn: a prompt and the response that an engine sampled."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    """Sampled ids, end-of-sequence included, which are trained; () for a module that is no policy,
    and if the deadline passed before the first token."""
    logprobs: tuple[float, ...]
    """The sampler's log-prob per response token in nats, at its temperature, within the mask."""
    spans: tuple[VersionSpan, ...]
    """Weight versions of this policy by the tokens that they sampled; they cover the response."""
    finish_reason: FinishReason
    text: str = ""
    """The decoded response, for readers; engines leave it empty, and training ignores it."""
    sampling_mask: SamplingMask | None = None
    """The ids that each response id was sampled from, including itself; None: all ids."""
    entropies: tuple[float, ...] = ()
    """Entropy per response token, in nats, over the full vocabulary; () if the engine does not
    record entropies, and for the turn in which a branch starts."""
    prompt_text: str = ""
    """The prompt text of a module without token ids; "" otherwise."""
    routes: Routes | None = None
    """Expert choices for prompt and response without the last token; None for a dense model,
    without a response, or if the engine does not record them."""
