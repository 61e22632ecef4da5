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
    """Why a response ended."""

    STOP = "stop"
    """An end-of-sequence token or a stop string."""
    LENGTH = "length"
    """`max_new_tokens` was reached."""
    DEADLINE = "deadline"
    """The request ran out of time; what was sampled so far is returned."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The parameters of sampling one response."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 means greedy; the log-probabilities are then those at temperature 1."""
    top_k: int = 0
    """Sample from so many most likely tokens, log-probs among them; 0, and greedy: from all."""
    top_p: float = 1.0
    """Sample from the fewest of those that sum to this; below 1 it needs a top_k."""
    frequency_penalty: float = 0.0
    """A token's logit loses this for each time that the response has it already, as in OpenAI's
    API; log-probs are taken behind it."""
    stop_strings: tuple[str, ...] = ()
    """Sampling ends once the decoded response contains one; its tokens are kept."""
    ignore_end: bool = False
    """Go on after an end-of-sequence token, for measurements of a fixed length."""
    seed: int = 0
    """The seed of this request alone: what shares its batch changes no more than roundings."""
    deadline_s: float = 60.0
    """Seconds from the call until the engine must answer."""

    @property
    def is_truncated(self) -> bool:
        """Some tokens cannot be sampled."""
        return self.top_k > 0 and self.temperature > 0


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of a response were sampled by weights `version`."""

    start: int
    end: int
    version: int


@dataclass(frozen=True, slots=True)
class SamplingMask:
    """The ids that top-k and top-p left to choose from, token after token of a response."""

    ids: Int32s
    """int32; those of one token differ from each other."""
    counts: Int32s
    """int32, how many of the ids belong to each token of the response."""

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
    """The experts that the routers of a mixture chose for each token that it read: all tokens of a
    prompt and its response but the last, which is a target alone.
    """

    experts: bytes
    """[tokens, layers, chosen], uint8, or little-endian uint16 where `is_wide`; only layers with a
    router, in the order of the decoder."""
    num_layers: int
    """Layers with a router."""
    num_chosen: int
    """Experts per token and layer."""
    is_wide: bool = False
    """A layer has more than 256 experts."""

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.num_chosen * (1 + self.is_wide)


@dataclass(frozen=True, slots=True)
class Call:
    """Tokens that one module read and sampled in one turn: the answer of an engine to a prompt."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    """Sampled and trained, end-of-sequence included; () for a module that is no policy, and where
    no token came in time."""
    logprobs: tuple[float, ...]
    """The sampler's, one per response token, at its temperature and within the sampling mask."""
    spans: tuple[VersionSpan, ...]
    """Versions of this policy by the tokens that they sampled; they cover the response."""
    finish_reason: FinishReason
    text: str = ""
    """The response decoded for people, which engines leave out; training never reads it."""
    sampling_mask: SamplingMask | None = None
    """The ids that each id was sampled from, itself included; None: all ids."""
    entropies: tuple[float, ...] = ()
    """One per response token, in nats, over all tokens; () where the engine does not tell, and a
    branch has none of the turn that it leaves."""
    prompt_text: str = ""
    """The prompt of a module without tokens of its own, whose ids are empty; "" otherwise."""
    routes: Routes | None = None
    """Of prompt and response but the last token; None for a dense model, where there is no
    response, and where the engine does not tell."""
