"""Facts behind the built-in questions, and the passages that a search tool indexes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import msgspec

from flowtrain.records import UserError
from flowtrain.tasks.rows import parse_json, read_text
from flowtrain.utils.errors import user_error

SHIPPED = "shipped"
"""Value of tasks.corpus that asks for the shipped corpus where it would not be taken by itself."""
KEY_ATTRIBUTES = ("capital", "ISO code", "symbol")
"""Attributes that name an entity, so that questions may ask for "the country with capital Oslo"."""


@dataclass(frozen=True, slots=True)
class Entity:
    """An entity with known facts."""

    name: str
    """Unique in the corpus, also without case."""
    kind: str
    """"country" or "element" in the shipped corpus."""
    facts: Mapping[str, str | int]
    """Attribute to value, e.g. "capital" to "Oslo"; areas in thousand square km, masses in atomic
    mass units."""


def load_corpus(path: str | Path = "") -> tuple[Entity, ...]:
    """Load the entities of a JSON file, in file order; the shipped corpus for "" and "shipped".

    The file is a list of {"name": str, "kind": str, "facts": {attribute: string or integer}}.
    Raises UserError, which names the file and what is wrong.
    """
    path = "" if path == SHIPPED else path
    where = str(path or resources.files("flowtrain").joinpath("tasks/data/corpus.json"))
    with user_error(where, msgspec.ValidationError):
        entities = msgspec.convert(parse_json(read_text(Path(where)), where), tuple[Entity, ...])
    names = Counter(entity.name.casefold() for entity in entities)
    for entity in entities:
        phrases = (entity.name, entity.kind, *entity.facts, *map(str, entity.facts.values()))
        if wrong := [phrase for phrase in phrases if not _reads_back(phrase)]:
            raise UserError(
                f'{where}: {wrong[0]!r} must be a non-empty single-spaced string without "is"'
            )
        if wrong := [attribute for attribute in entity.facts if " of " in f" {attribute} "]:
            raise UserError(f'{where}: attribute {wrong[0]!r} may not hold the word "of"')
        if names[entity.name.casefold()] > 1:
            raise UserError(f"{where}: name {entity.name!r} is not unique")
    return entities


def key_facts(entities: Sequence[Entity]) -> list[tuple[Entity, str, str]]:
    """Return (entity, attribute, value) for key attributes whose value is unique in the kind.

    Values that differ only in case count as equal.
    """
    facts = [
        (e, attribute, str(e.facts[attribute]))
        for e in entities
        for attribute in KEY_ATTRIBUTES
        if attribute in e.facts
    ]
    uses = Counter((entity.kind, attribute, value.casefold()) for entity, attribute, value in facts)
    return [
        (e, attribute, value)
        for e, attribute, value in facts
        if uses[e.kind, attribute, value.casefold()] == 1
    ]


def passages(entities: Sequence[Entity]) -> tuple[str, ...]:
    """Return a sentence per fact, then one per key fact.

    "The capital of Norway is Oslo." and "The country with capital Oslo is Norway."
    """
    forward = [
        f"The {attribute} of {entity.name} is {value}."
        for entity in entities
        for attribute, value in entity.facts.items()
    ]
    reverse = [
        f"The {entity.kind} with {attribute} {value} is {entity.name}."
        for entity, attribute, value in key_facts(entities)
    ]
    return (*forward, *reverse)


def passage_value(text: str) -> str | None:
    """Return the value of a passage, between the last " is " and the final ".", or None."""
    _, verb, tail = text.rpartition(" is ")
    value, period, _ = tail.rpartition(".")
    return (value.strip() or None) if verb and period else None


def _reads_back(phrase: str) -> bool:
    """Return whether `passage_value` can read the phrase from a passage."""
    return bool(phrase) and phrase == " ".join(phrase.split()) and " is " not in f" {phrase} "
