"""Rollouts on a history that grows, and tokens that count how often they are compared."""

from __future__ import annotations

import random
from typing import ClassVar

Ids = tuple[int, ...]


class Token(int):
    """An id that equals another one only by a comparison, which is counted for all of them."""

    num_compared: ClassVar[int] = 0

    def __eq__(self, other: object) -> bool:
        Token.num_compared += 1
        return isinstance(other, int) and int(self) == int(other)

    __hash__ = int.__hash__


def history(num_turns: int, num_new: int) -> list[tuple[Ids, Ids]]:
    """The prompt and the response of each turn: a turn says `num_new` tokens, and reads as many
    besides all that was said.
    """
    rng, said, pairs = random.Random(0), list[int](), list[tuple[Ids, Ids]]()
    for _ in range(num_turns):
        said += (rng.randrange(30_000) for _ in range(num_new))
        response = tuple(rng.randrange(30_000) for _ in range(num_new))
        pairs.append((tuple(said), response))
        said += response
    return pairs


def counted(pairs: list[tuple[Ids, Ids]]) -> list[tuple[Ids, Ids]]:
    """The same with tokens of which no two are one object."""
    return [(tuple(map(Token, prompt)), tuple(map(Token, said))) for prompt, said in pairs]
