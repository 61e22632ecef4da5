"""Questions over the corpus with their plans: lookups, arithmetic, two-step chains and sums.

The wordings keep a contract so that simple rules can act on a question alone: the attribute asked
for is the first "the {attribute} of", an entity is named in full or as "the {kind} with {attribute}
{value}", and arithmetic shows in the words plus, minus and times.

Four splits measure four things. "train" and "texts" share entities and wordings, and "texts" holds
out every tenth question by its hash; "entities" asks in the training wordings about entities of its
own; "forms" asks about the training entities in wordings of its own.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, islice, zip_longest

from flowtrain.records import PlanStep, SubGoal, Task, UserError
from flowtrain.tasks.corpus import Entity, key_facts

SPLITS = ("train", "texts", "entities", "forms")
KINDS = ("lookup", "arithmetic", "chain", "sum")
DEEP_KINDS = ("sum4", "sum5")
"""Sums of four and five turns: one entity, or both, must be found first. Only on request."""
SIGNS = {"plus": "+", "minus": "-", "times": "*"}
HELD_OUT_SHARE = 0.15
"""Share of the entities of each kind that only the split "entities" asks about."""

_LEADS = [
    *("What is {}?", "Give {}.", "Tell me {}.", "Find {}.", "I need {}.", "Please look up {}."),
    *("Show me {}.", "Do you know {}?", "I want {}.", "Could you find {}?", "Please give me {}."),
    *("I am looking for {}.", "My question is {}.", "Let me know {}."),
]
_HELD_OUT_LEADS = ("Could you tell me {}?", "Please show me {}.", "I want to know {}.")


def _with(phrase: str, leads: Sequence[str]) -> list[str]:
    return [lead.format(phrase) for lead in leads]


_FORMS = {
    "ask": (_with("{phrase}", _LEADS), _with("{phrase}", _HELD_OUT_LEADS)),
    "which": (
        [
            "Which {kind} has {fact}?",
            "Name the {kind} with {fact}.",
            *_with("the {kind} with {fact}", _LEADS[2:]),
        ],
        ["Tell me which {kind} has {fact}.", *_with("the {kind} with {fact}", _HELD_OUT_LEADS)],
    ),
    "compute": (
        [*_with("{phrase}", _LEADS), "Calculate {phrase}.", "How much is {phrase}?"],
        ["Please calculate {phrase}.", *_with("{phrase}", _HELD_OUT_LEADS)],
    ),
}
"""The training and the held-out wordings by family."""

_OPERANDS = {
    "plus": (range(1, 1000), range(1, 1000)),
    "minus": (range(1, 1000), range(1, 1000)),
    "times": (range(2, 100), range(2, 13)),
}


@dataclass(frozen=True, slots=True)
class _Item:
    """A question without its wording."""

    words: Mapping[str, str]
    """Values of the blanks in a wording."""
    answer: str
    plan: tuple[PlanStep, ...]
    found: tuple[str, ...] = ()
    """The finding of each step but the last."""

    @property
    def sub_goals(self) -> tuple[SubGoal, ...]:
        """Return one per step but the last; earlier ones weigh more: more depends on them."""
        num_steps = len(self.plan)
        total = sum(range(2, num_steps + 1))
        return tuple(
            SubGoal((name,), (num_steps - i) / total, step.sub_goal)
            for i, (step, name) in enumerate(zip(self.plan, self.found, strict=False))
        )


@dataclass(frozen=True, slots=True)
class _Source:
    """`size` items of one family of wordings, made on demand because there may be millions."""

    family: str
    size: int
    item: Callable[[int], _Item]


def facts_tasks(
    entities: Sequence[Entity],
    split: str,
    num_tasks: int,
    seed: int,
    kinds: Collection[str] = KINDS,
) -> list[Task]:
    """Return `num_tasks` distinct questions of a split, shuffled, with ids "{split}-{i}".

    The same arguments give the same questions, in equal parts of each kind. The split "entities"
    has no arithmetic. Raises UserError when no kind is left, and for a kind that has fewer distinct
    questions than its share.
    """
    all_kinds = [kind for kind in (*KINDS, *DEEP_KINDS) if kind in kinds]
    split_kinds = [kind for kind in all_kinds if not (split == "entities" and kind == "arithmetic")]
    if not split_kinds:
        raise UserError(f"tasks.kinds={all_kinds}: split {split!r} needs another kind")
    share, remainder = divmod(num_tasks, len(split_kinds))
    training, held_out = split_entities(entities)
    pool = held_out if split == "entities" else training
    names = {entity.name for entity in pool}
    sources = _sources(pool, [fact for fact in key_facts(entities) if fact[0].name in names])
    drafts = [
        (kind, *draft)
        for number, kind in enumerate(split_kinds)
        for draft in _draw(kind, sources[kind], split, share + (number < remainder), seed)
    ]
    random.Random(f"facts/{split}/{seed}").shuffle(drafts)
    return [
        Task(
            f"{split}-{index}",
            question,
            answers=(item.answer,),
            kind=kind,
            num_turns=len(item.plan),
            scorer="exact",
            rules="facts",
            plan=item.plan,
            sub_goals=item.sub_goals,
        )
        for index, (kind, question, item) in enumerate(drafts)
    ]


def split_entities(entities: Sequence[Entity]) -> tuple[list[Entity], list[Entity]]:
    """Return (training, held out) entities, both in corpus order.

    Held out are 15 % of each kind: those with the lowest hash of the name.
    """
    held_out: set[str] = set()
    for kind in {entity.kind for entity in entities}:
        names = sorted((entity.name for entity in entities if entity.kind == kind), key=_hash)
        held_out.update(names[: round(HELD_OUT_SHARE * len(names))])
    training = [entity for entity in entities if entity.name not in held_out]
    return training, [entity for entity in entities if entity.name in held_out]


def _draw(
    kind: str, sources: Sequence[_Source], split: str, count: int, seed: int
) -> list[tuple[str, _Item]]:
    """Return `count` worded items of a kind, in equal parts from its sources while they last."""
    streams = [
        _questions(source, split, random.Random(f"facts/{split}/{kind}/{number}/{seed}"))
        for number, source in enumerate(sources)
    ]
    in_turn = filter(None, chain.from_iterable(zip_longest(*streams)))
    items = list(islice(in_turn, count))
    if len(items) < count:
        raise UserError(
            f"num_tasks: split {split!r} has {len(items)} distinct questions of kind {kind!r}, "
            f"{count} are asked for; lower num_tasks or leave {kind!r} out"
        )
    return items


def _questions(source: _Source, split: str, rng: random.Random) -> Iterator[tuple[str, _Item]]:
    """Yield every question of a source that belongs to the split, in random order."""
    forms = _FORMS[source.family][split == "forms"]
    for index in _shuffled(source.size * len(forms), rng):
        item_index, form_index = divmod(index, len(forms))
        item = source.item(item_index)
        question = forms[form_index].format(**item.words)
        if split not in ("train", "texts") or (_hash(question) % 10 == 0) == (split == "texts"):
            yield question, item


def _shuffled(size: int, rng: random.Random) -> Iterator[int]:
    """Yield a random permutation of range(size), at a cost only for the numbers that are taken."""
    moved: dict[int, int] = {}
    for last in range(size - 1, -1, -1):
        pick = rng.randint(0, last)
        yield moved.get(pick, pick)
        moved[pick] = moved.pop(last, last)


def _sources(
    pool: Sequence[Entity], keys: Sequence[tuple[Entity, str, str]]
) -> dict[str, list[_Source]]:
    """Return the sources of each kind of question, for a pool of entities and their key facts."""
    facts = [(entity, attribute) for entity in pool for attribute in entity.facts]
    chains = [
        (entity, key, value, attribute)
        for entity, key, value in keys
        for attribute in entity.facts
        if attribute != key
    ]
    pairs = _Pairs(pool)
    keyed = {entity.name: (key, value) for entity, key, value in reversed(keys)}
    deep = _Pairs([entity for entity in pool if entity.name in keyed])

    def deep_sums(hides_both: bool) -> list[_Source]:
        return [
            _Source("compute", len(deep), partial(_deep_sum_at, word, deep, keyed, hides_both))
            for word in ("plus", "minus")
        ]

    return {
        "lookup": [
            _Source("ask", len(facts), lambda index: _lookup(*facts[index])),
            _Source("which", len(keys), lambda index: _reverse_lookup(*keys[index])),
        ],
        "arithmetic": [_arithmetic_source(word) for word in SIGNS],
        "chain": [_Source("ask", len(chains), lambda index: _chain(*chains[index]))],
        "sum": [
            _Source("compute", len(pairs), partial(_sum_at, word, pairs))
            for word in ("plus", "minus")
        ],
        "sum4": deep_sums(hides_both=False),
        "sum5": deep_sums(hides_both=True),
    }


class _Pairs:
    """All (attribute, one entity, another of its kind) in which both values are numbers.

    Made by index, in a fixed order, because a thousand entities make a million pairs.
    """

    def __init__(self, pool: Sequence[Entity]) -> None:
        groups: dict[tuple[str, str], list[Entity]] = {}
        for entity in pool:
            for attribute, value in entity.facts.items():
                if isinstance(value, int):
                    groups.setdefault((entity.kind, attribute), []).append(entity)
        self._groups = [(attribute, group) for (_, attribute), group in groups.items()]
        self._ends = list(accumulate(len(group) * (len(group) - 1) for _, group in self._groups))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> tuple[str, Entity, Entity]:
        number = bisect_right(self._ends, index)
        attribute, group = self._groups[number]
        first, second = divmod(index - (self._ends[number - 1] if number else 0), len(group) - 1)
        return attribute, group[first], group[second + (second >= first)]


def _lookup(entity: Entity, attribute: str) -> _Item:
    sub_goal = f"{attribute} of {entity.name}"
    plan = (PlanStep(sub_goal, "Search"),)
    return _Item({"phrase": f"the {sub_goal}"}, str(entity.facts[attribute]), plan)


def _reverse_lookup(entity: Entity, key: str, value: str) -> _Item:
    fact = f"{key} {value}"
    plan = (PlanStep(f"{entity.kind} with {fact}", "Search"),)
    return _Item({"kind": entity.kind, "fact": fact}, entity.name, plan)


def _chain(entity: Entity, key: str, value: str, attribute: str) -> _Item:
    (find,) = _reverse_lookup(entity, key, value).plan
    last = _lookup(entity, attribute)
    phrase = f"the {attribute} of the {find.sub_goal}"
    return _Item({"phrase": phrase}, last.answer, plan=(find, *last.plan), found=(entity.name,))


def _sum_at(word: str, pairs: _Pairs, index: int) -> _Item:
    attribute, first, second = pairs[index]
    return _sum(word, _lookup(first, attribute), _lookup(second, attribute))


def _deep_sum_at(
    word: str, pairs: _Pairs, keys: Mapping[str, tuple[str, str]], hides_both: bool, index: int
) -> _Item:
    """Make a sum that names one entity, or both, by a key fact alone."""
    attribute, first, second = pairs[index]
    y = _chain(second, *keys[second.name], attribute) if hides_both else _lookup(second, attribute)
    return _sum(word, _chain(first, *keys[first.name], attribute), y)


def _sum(word: str, x: _Item, y: _Item) -> _Item:
    total = _calculation(word, int(x.answer), int(y.answer))
    return _Item(
        {"phrase": f"{x.words['phrase']} {word} {y.words['phrase']}"},
        total.answer,
        plan=(*x.plan, *y.plan, *total.plan),
        found=(*x.found, x.answer, *y.found, y.answer),
    )


def _arithmetic_source(word: str) -> _Source:
    left, right = _OPERANDS[word]
    return _Source(
        "compute",
        len(left) * len(right),
        lambda index: _calculation(word, left[index // len(right)], right[index % len(right)]),
    )


def _calculation(word: str, x: int, y: int) -> _Item:
    value = {"plus": x + y, "minus": x - y, "times": x * y}[word]
    plan = (PlanStep(f"{x} {SIGNS[word]} {y}", "Python_Coder"),)
    return _Item({"phrase": f"{x} {word} {y}"}, str(value), plan)


def _hash(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)
