"""Made-up countries and elements to warm a planner up with.

A model that learns on a few hundred real names remembers them and writes one of them when it is
asked about a new name. Names that hardly ever repeat teach it to copy, also on the real corpus, of
which it has then seen nothing.
"""

from __future__ import annotations

import random
import string
from collections.abc import Collection
from itertools import product

from flowtrain.tasks.corpus import Entity

_STARTS = [*"bcdfghjklmnpqrstvwxz", "ch", "sh", "th", "br", "gr", "tr", "st", "", "", ""]
_VOWELS = [*"aaeeiioouuy", "ia"]
_ENDS = [*[""] * 10, *"nnrrslmtdk"]
_CONTINENTS = ("Africa", "Asia", "Europe", "North America", "South America", "Oceania")


def fictional_entities(
    num_countries: int, num_elements: int, seed: int, real_names: Collection[str] = ()
) -> tuple[Entity, ...]:
    """Make entities like those of the shipped corpus, with made-up names and values.

    None has a name of `real_names`. Codes and symbols are unique, which bounds both numbers by 676.
    """
    rng = random.Random(f"fiction/{seed}")
    names = set(real_names)
    codes = [pair.upper() for pair in _letter_pairs(rng)]
    symbols = [pair.title() for pair in _letter_pairs(rng)]
    countries = [
        _country(_new_name(rng, names), _new_name(rng, names), codes[i], rng)
        for i in range(num_countries)
    ]
    elements = [
        Entity(
            _new_name(rng, names),
            "element",
            {
                "symbol": symbols[i],
                "atomic number": rng.randint(1, 130),
                "mass": rng.randint(1, 300),
            },
        )
        for i in range(num_elements)
    ]
    return (*countries, *elements)


def _country(name: str, capital: str, code: str, rng: random.Random) -> Entity:
    facts: dict[str, str | int] = {
        "capital": capital,
        "continent": rng.choice(_CONTINENTS),
        "area": round(10 ** rng.uniform(0, 4.2)),
        "calling code": rng.randint(1, 999),
        "ISO code": code,
    }
    return Entity(name, "country", facts)


def _letter_pairs(rng: random.Random) -> list[str]:
    pairs = ["".join(pair) for pair in product(string.ascii_lowercase, repeat=2)]
    rng.shuffle(pairs)
    return pairs


def _new_name(rng: random.Random, names: set[str]) -> str:
    """Return a new name of one word or, at times, two."""
    while True:
        words = [_word(rng) for _ in range(rng.choice((1, 1, 1, 1, 1, 2)))]
        name = " ".join(words)
        if name not in names:
            names.add(name)
            return name


def _word(rng: random.Random) -> str:
    syllables = rng.choice((2, 3, 3, 4))
    word = "".join(
        rng.choice(_STARTS) + rng.choice(_VOWELS) + rng.choice(_ENDS) for _ in range(syllables)
    )
    return word.capitalize()
