"""Made-up entities are as well-formed as the shipped ones, and nothing real is among them."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from flowtrain import config
from flowtrain.tasks.corpus import load_corpus
from flowtrain.tasks.fiction import fictional_entities
from flowtrain.tasks.sets import task_set

REAL = load_corpus()
FICTION = fictional_entities(600, 400, 0, {entity.name for entity in REAL})


def test_every_name_and_code_is_new_and_unique() -> None:
    names = [entity.name for entity in FICTION] + [
        str(e.facts["capital"]) for e in FICTION if e.kind == "country"
    ]
    assert len(set(names)) == len(names) == 1600
    assert not {entity.name for entity in REAL} & set(names)
    for key in ("ISO code", "symbol"):
        codes = [entity.facts[key] for entity in FICTION if key in entity.facts]
        assert len(set(codes)) == len(codes)


def test_shaped_like_the_shipped_corpus() -> None:
    shape = {
        entity.kind: {name: type(value) for name, value in entity.facts.items()} for entity in REAL
    }
    assert all(
        {name: type(value) for name, value in entity.facts.items()} == shape[entity.kind]
        for entity in FICTION
    )
    assert all(re.fullmatch(r"[A-Z][a-z]+( [A-Z][a-z]+)?", entity.name) for entity in FICTION)


def test_the_seed_decides() -> None:
    assert fictional_entities(20, 10, 1) == fictional_entities(20, 10, 1)
    assert fictional_entities(20, 10, 1) != fictional_entities(20, 10, 2)


@pytest.mark.parametrize("is_fictional", [False, True])
def test_a_fictional_task_set_asks_about_nothing_real(is_fictional: bool) -> None:
    tasks = task_set(config.Config(tasks=config.Tasks(num_train=200)), fictional=is_fictional)
    words = Counter(word for task in tasks.train for word in task.question.rstrip("?.").split())
    # Norway stands for the names that no made-up word happens to contain.
    assert any("Norway" in text for text in tasks.passages) != is_fictional
    assert words["of"] > 50
