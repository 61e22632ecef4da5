"""Tests of the shipped facts, of errors about malformed files, and of passages."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flowtrain.records import UserError
from flowtrain.tasks.corpus import Entity, key_facts, load_corpus, passage_value, passages

COUNTRY_FACTS = {
    "capital": str,
    "continent": str,
    "area": int,
    "calling code": int,
    "ISO code": str,
}
ELEMENT_FACTS = {"symbol": str, "atomic number": int, "mass": int}
CONTINENTS = {"Africa", "Asia", "Europe", "North America", "South America", "Oceania"}
SHIPPED = load_corpus()


def test_counts() -> None:
    assert Counter(entity.kind for entity in SHIPPED) == {"country": 145, "element": 99}
    assert len(passages(SHIPPED)) == 145 * 5 + 99 * 3 + 145 * 2 + 99


def test_every_entity_has_all_facts_of_its_kind() -> None:
    for entity in SHIPPED:
        expected = COUNTRY_FACTS if entity.kind == "country" else ELEMENT_FACTS
        assert {attribute: type(value) for attribute, value in entity.facts.items()} == expected, (
            entity.name
        )


def test_texts_are_plain_ascii_and_numbers_positive() -> None:
    for entity in SHIPPED:
        for value in (entity.name, *entity.facts.values()):
            assert (
                (value >= 1)
                if isinstance(value, int)
                else re.fullmatch(r"[A-Z][A-Za-z' -]*", value)
            ), entity.name


def test_country_values_are_in_range() -> None:
    facts = [entity.facts for entity in SHIPPED if entity.kind == "country"]
    assert {fact["continent"] for fact in facts} == CONTINENTS
    assert all(re.fullmatch("[A-Z]{2}", str(fact["ISO code"])) for fact in facts)
    assert all(int(fact["area"]) <= 17098 and int(fact["calling code"]) <= 998 for fact in facts)
    # The land of the Earth is 145 million square km; Antarctica, Greenland and the countries left
    # out are the rest.
    assert 110_000 < sum(int(fact["area"]) for fact in facts) < 140_000


def test_element_values_are_consistent() -> None:
    facts = [entity.facts for entity in SHIPPED if entity.kind == "element"]
    numbers = [int(fact["atomic number"]) for fact in facts]
    assert numbers == sorted(set(numbers)) and set(range(1, 102)) - set(numbers) == {43, 66}
    assert all(re.fullmatch("[A-Z][a-z]?", str(fact["symbol"])) for fact in facts)
    assert all(
        int(fact["mass"]) >= 2 * number for fact, number in zip(facts[1:], numbers[1:], strict=True)
    )
    assert all(
        int(fact["mass"]) <= 2.6 * number
        for fact, number in zip(facts[1:], numbers[1:], strict=True)
    )


@pytest.mark.parametrize("attribute", ["capital", "ISO code", "symbol", "atomic number"])
def test_naming_attributes_are_unique(attribute: str) -> None:
    values = Counter(
        str(entity.facts[attribute]).casefold() for entity in SHIPPED if attribute in entity.facts
    )
    assert set(values.values()) == {1}


def test_no_name_hides_in_another() -> None:
    names = [entity.name for entity in SHIPPED]
    assert [
        (one, other)
        for one in names
        for other in names
        if one != other and re.search(rf"\b{one}\b", other)
    ] == []
    capitals = {entity.facts.get("capital") for entity in SHIPPED}
    assert not capitals & set(names)


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [
        ("Norway", "capital", "Oslo"),
        ("Norway", "area", 385),
        ("Burundi", "capital", "Gitega"),
        ("Australia", "capital", "Canberra"),
        ("Turkey", "calling code", 90),
        ("Switzerland", "ISO code", "CH"),
        ("Iron", "mass", 56),
        ("Tungsten", "symbol", "W"),
        ("Gold", "atomic number", 79),
    ],
)
def test_known_facts(name: str, attribute: str, value: str | int) -> None:
    assert next(entity for entity in SHIPPED if entity.name == name).facts[attribute] == value


def test_passages_are_distinct_and_read_back() -> None:
    texts = passages(SHIPPED)
    assert len(set(texts)) == len(texts)
    assert "The capital of Norway is Oslo." in texts
    assert passage_value("The capital of Norway is Oslo.") == "Oslo"
    assert "The country with ISO code NO is Norway." in texts
    assert passage_value("The country with ISO code NO is Norway.") == "Norway"
    assert all(passage_value(text) for text in texts)


def test_the_last_statement_counts() -> None:
    assert passage_value("What is it? The capital of Norway is Oslo.") == "Oslo"
    assert passage_value("The capital is St. John.") == "St. John"


def test_a_shared_key_value_has_no_reverse_passage() -> None:
    twins = [
        Entity("A", "town", {"capital": "X"}),
        Entity("B", "town", {"capital": "x"}),
        Entity("C", "city", {"capital": "X"}),
    ]
    assert [entity.name for entity, _, _ in key_facts(twins)] == ["C"]
    assert passages(twins)[3:] == ("The city with capital X is C.",)


WORDS = st.text(st.characters(blacklist_categories=["Cs", "Cc", "Z"]), min_size=1, max_size=8)
PHRASES = st.lists(WORDS, min_size=1, max_size=3).map(" ".join)


@settings(max_examples=60)
@given(PHRASES, st.one_of(PHRASES, st.integers()))
def test_any_accepted_value_reads_back(
    tmp_path_factory: pytest.TempPathFactory, name: str, value: str | int
) -> None:
    assume("is" not in name.split() and "is" not in str(value).split())
    path = tmp_path_factory.mktemp("corpus") / "corpus.json"
    path.write_text(
        json.dumps([{"name": name, "kind": "thing", "facts": {"worth": value}}]), encoding="utf-8"
    )
    (text,) = passages(load_corpus(path))
    assert passage_value(text) == str(value)


@pytest.mark.parametrize(
    "text", ["", "Oslo", "The capital of Norway is Oslo", "The capital is .", "Oslo.", "This is."]
)
def test_no_value_in(text: str) -> None:
    assert passage_value(text) is None


GOOD: dict[str, Any] = {"name": "A", "kind": "town", "facts": {"size": 1}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "cannot be read as JSON"),
        ("{}", "Expected `array`, got `object`"),
        (["A"], "Expected `object`, got `str` - at `$[0]`"),
        ([GOOD, {"name": "B", "kind": "town"}], "missing required field `facts` - at `$[1]`"),
        ([GOOD, GOOD | {"name": "a"}], "name 'A' is not unique"),
        ([GOOD | {"name": 3}], "Expected `str`, got `int` - at `$[0].name`"),
        ([GOOD | {"name": " A"}], "' A' must be a non-empty single-spaced string"),
        ([GOOD | {"kind": ""}], "'' must be a non-empty single-spaced string"),
        ([GOOD | {"facts": []}], "Expected `object`, got `array` - at `$[0].facts`"),
        ([GOOD | {"facts": {"size": 1.5}}], "Expected `int | str`, got `float`"),
        ([GOOD | {"facts": {"size": True}}], "Expected `int | str`, got `bool`"),
        ([GOOD | {"facts": {"motto": "it is big"}}], "'it is big' must be"),
        ([GOOD | {"facts": {"size of it": 1}}], "attribute 'size of it' may not hold"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "corpus.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        load_corpus(path)
    assert str(refused.value).startswith(str(path)) and "\n" not in str(refused.value)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.json: cannot be read"):
        load_corpus(tmp_path / "absent.json")
