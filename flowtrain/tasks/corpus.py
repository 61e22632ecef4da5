"""Facts behind the built-in questions, and the passages that a search tool indexes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from flowtrain.tasks.rows import parse_json, read_text
from flowtrain.types import UserError

KEY_ATTRIBUTES = ("capital", "ISO code", "symbol")
"""Attributes that name an entity, so that questions may ask for "the country with capital Oslo"."""

_ENTRY_KEYS = {"name", "kind", "facts"}


@dataclass(frozen=True, slots=True)
class Entity:
    """One thing with known facts."""

    name: str
    """Unique in the corpus, also without case."""
    kind: str
    """"country" or "element" in the shipped corpus."""
    facts: Mapping[str, str | int]
    """Attribute to value, e.g. "capital" to "Oslo"; areas in thousand square km, masses in atomic
    mass units."""


def load_corpus(path: Path | None = None) -> tuple[Entity, ...]:
    """Load the entities of a JSON file, in file order; of the shipped corpus when `path` is None.

    The file is a list of {"name": str, "kind": str, "facts": {attribute: string or integer}}.
    Raises UserError, which names the file, the entry and the wrong key.
    """
    if path is None:
        where = "corpus.json"
        text = resources.files("flowtrain").joinpath("tasks/data/corpus.json").read_text("utf-8")
    else:
        where = str(path)
        text = read_text(path)
    entries = parse_json(text, where)
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{where}: must be a list of at least one entity")
    entities = tuple(
        _entity(entry, f"{where}, entry {number}") for number, entry in enumerate(entries, start=1)
    )
    seen: dict[str, int] = {}
    for number, entity in enumerate(entities, start=1):
        first = seen.setdefault(entity.name.casefold(), number)
        if first != number:
            raise UserError(
                f"{where}, entry {number}: key 'name' repeats {entity.name!r} of entry {first}; "
                "names must be unique"
            )
    return entities


def key_facts(entities: Sequence[Entity]) -> list[tuple[Entity, str, str]]:
    """Return (entity, attribute, value) for key attributes whose value is unique in the kind.

    Values that differ only in case count as equal.
    """
    found = [
        (e, attribute, str(e.facts[attribute]))
        for e in entities
        for attribute in KEY_ATTRIBUTES
        if attribute in e.facts
    ]
    uses = Counter((entity.kind, attribute, value.casefold()) for entity, attribute, value in found)
    return [
        (e, attribute, value)
        for e, attribute, value in found
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
    _, found, rest = text.rpartition(" is ")
    value, period, _ = rest.rpartition(".")
    return (value.strip() or None) if found and period else None


def _entity(entry: Any, where: str) -> Entity:
    if not isinstance(entry, dict) or set(entry) != _ENTRY_KEYS:
        raise UserError(f"{where}: must be an object with exactly the keys name, kind and facts")
    facts = entry["facts"]
    if not isinstance(facts, dict) or not facts:
        raise UserError(f"{where}: key 'facts' must be an object with at least one attribute")
    return Entity(
        _phrase(entry["name"], "key 'name'", where),
        _phrase(entry["kind"], "key 'kind'", where),
        {_attribute(key, where): _value(value, key, where) for key, value in facts.items()},
    )


def _attribute(attribute: str, where: str) -> str:
    if " of " in f" {attribute} ":
        raise UserError(
            f"{where}: attribute {attribute!r} of key 'facts' may not hold the word \"of\""
        )
    return _phrase(attribute, f"attribute {attribute!r} of key 'facts'", where)


def _value(value: Any, attribute: str, where: str) -> str | int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return _phrase(value, f"attribute {attribute!r} of key 'facts'", where, "an integer or ")


def _phrase(value: Any, key: str, where: str, also: str = "") -> str:
    """Check that a value is a string that `passage_value` can read back from a passage."""
    is_single_spaced = isinstance(value, str) and value and value == " ".join(value.split())
    if is_single_spaced and " is " not in f" {value} ":
        return str(value)
    raise UserError(
        f'{where}: {key} must be {also}a non-empty single-spaced string without the word "is", not '
        f"{value!r}"
    )
