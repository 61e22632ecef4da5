"""Questions over the corpus, each with the plan that solves it: lookups, arithmetic, two-step
chains and sums.

The wordings keep a contract so that simple rules can act on a question alone: the attribute asked
for is the first "the {attribute} of", an entity is named in full or as "the {kind} with {attribute}
{value}", and arithmetic shows in the words plus, minus and times.

Four splits measure four things. "train" and "texts" share entities and wordings, "texts" holds out
every tenth question by its hash; "entities" asks in the training wordings about entities that no
other split asks about; "forms" asks about the training entities in wordings that no other split
uses.
"""

from __future__ import annotations

import hashlib
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice

from flowtrain.tasks.corpus import Entity, key_facts
from flowtrain.types import PlanStep, SubGoal, Task, UserError

SPLITS = ("train", "texts", "entities", "forms")
KINDS = ("lookup", "arithmetic", "chain", "sum")
DEEP_KINDS = ("sum4", "sum5")
"""Sums of which one part, or both, is about an entity that must be found first: four and five
turns. Only where they are asked for."""
SIGNS = {"plus": "+", "minus": "-", "times": "*"}
HELD_OUT_SHARE = 0.15
"""Share of the entities of each kind that only the split "entities" asks about."""

_LEADS = (
    *(
        "What is {}?",
        "Give {}.",
        "Tell me {}.",
        "Find {}.",
        "I need {}.",
        "Please look up {}.",
        "Show me {}.",
        "Do you know {}?",
    ),
    *(
        "I want {}.",
        "Could you find {}?",
        "Please give me {}.",
        "I am looking for {}.",
        "My question is {}.",
        "Let me know {}.",
    ),
)
_HELD_OUT_LEADS = ("Could you tell me {}?", "Please show me {}.", "I want to know {}.")

_FORMS = {
    "ask": (
        tuple(lead.format("{phrase}") for lead in _LEADS),
        tuple(lead.format("{phrase}") for lead in _HELD_OUT_LEADS),
    ),
    "which": (
        (
            "Which {kind} has {fact}?",
            "Name the {kind} with {fact}.",
            *(lead.format("the {kind} with {fact}") for lead in _LEADS[2:]),
        ),
        (
            "Tell me which {kind} has {fact}.",
            *(lead.format("the {kind} with {fact}") for lead in _HELD_OUT_LEADS),
        ),
    ),
    "compute": (
        (
            *(lead.format("{phrase}") for lead in _LEADS),
            "Calculate {phrase}.",
            "How much is {phrase}?",
        ),
        ("Please calculate {phrase}.", *(lead.format("{phrase}") for lead in _HELD_OUT_LEADS)),
    ),
}
"""Per family the training and the held-out wordings."""

_OPERANDS = {
    "plus": (range(1, 1000), range(1, 1000)),
    "minus": (range(1, 1000), range(1, 1000)),
    "times": (range(2, 100), range(2, 13)),
}


@dataclass(frozen=True, slots=True)
class _Item:
    """What a question is about, before it is worded."""

    words: Mapping[str, str]
    """What fills the blanks of a wording."""
    answer: str
    plan: tuple[PlanStep, ...]
    found: tuple[str, ...] = ()
    """What each step but the last finds out."""

    @property
    def sub_goals(self) -> tuple[SubGoal, ...]:
        """One for each step but the last; what more depends on weighs more."""
        total = sum(range(2, len(self.plan) + 1))
        steps = enumerate(zip(self.plan, self.found, strict=False))
        return tuple(
            SubGoal((name,), (len(self.plan) - i) / total, step.sub_goal)
            for i, (step, name) in steps
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
    kind_weights: Mapping[str, float] | None = None,
) -> list[Task]:
    """`num_tasks` distinct questions of a split, in shuffled order with ids "{split}-{i}", the same
    ones for the same arguments.

    `kind_weights` gives each kind's share of the tasks up to a common factor; kinds left out get
    none, and None means equal shares. The split "entities" leaves out arithmetic, whatever its
    weight. Raises UserError for an unknown split or kind, a bad weight, num_tasks < 1, and a kind
    that has fewer distinct questions than its share.
    """
    counts = _counts(split, num_tasks, kind_weights)
    training, held_out = split_entities(entities)
    pool = held_out if split == "entities" else training
    names = {entity.name for entity in pool}
    sources = _sources(pool, [fact for fact in key_facts(entities) if fact[0].name in names])
    drafts = [
        (kind, *draft)
        for kind, count in counts.items()
        for draft in _draw(kind, sources[kind], split, count, seed)
    ]
    random.Random(f"facts/{split}/{seed}").shuffle(drafts)
    return [
        Task(
            f"{split}-{index}",
            question,
            (item.answer,),
            kind,
            len(item.plan),
            "exact",
            item.plan,
            sub_goals=item.sub_goals,
        )
        for index, (kind, question, item) in enumerate(drafts)
    ]


def split_entities(entities: Sequence[Entity]) -> tuple[list[Entity], list[Entity]]:
    """(training, held out) entities, both in corpus order; held out are those with the lowest hash
    of the name, 15 % of each kind.
    """
    held_out: set[str] = set()
    for kind in {entity.kind for entity in entities}:
        names = sorted((entity.name for entity in entities if entity.kind == kind), key=_hash)
        held_out.update(names[: round(HELD_OUT_SHARE * len(names))])
    return [e for e in entities if e.name not in held_out], [
        e for e in entities if e.name in held_out
    ]


def _counts(split: str, num_tasks: int, kind_weights: Mapping[str, float] | None) -> dict[str, int]:
    """Tasks per kind: each kind's share rounded down, and what is then missing to those with the
    largest remainders.
    """
    if split not in SPLITS:
        raise UserError(f"split {split!r} is unknown; known: {', '.join(SPLITS)}")
    if num_tasks < 1:
        raise UserError(f"num_tasks: must be at least 1, not {num_tasks}")
    weights = _weights(split, dict.fromkeys(KINDS, 1.0) if kind_weights is None else kind_weights)
    total = math.fsum(weights.values())
    shares = {kind: num_tasks * (weight / total) for kind, weight in weights.items()}
    counts = {kind: math.floor(share) for kind, share in shares.items()}
    by_remainder = sorted(weights, key=lambda kind: counts[kind] - shares[kind])
    for kind in by_remainder[: num_tasks - sum(counts.values())]:
        counts[kind] += 1
    return counts


def _weights(split: str, kind_weights: Mapping[str, float]) -> dict[str, float]:
    """The positive weights of the kinds that the split has, relative to the largest, in the order
    of KINDS.
    """
    for kind, weight in kind_weights.items():
        if kind not in (*KINDS, *DEEP_KINDS):
            raise UserError(
                f"kind_weights: kind {kind!r} is unknown; known: {', '.join((*KINDS, *DEEP_KINDS))}"
            )
        if not 0 <= weight < math.inf:
            raise UserError(
                f"kind_weights: the weight of {kind!r} must be a finite number of 0 or more, not "
                f"{weight}"
            )
    allowed = [
        kind for kind in (*KINDS, *DEEP_KINDS) if not (split == "entities" and kind == "arithmetic")
    ]
    weights = {kind: kind_weights[kind] for kind in allowed if kind_weights.get(kind, 0) > 0}
    if not weights:
        raise UserError(
            f"kind_weights: split {split!r} needs a weight above 0 for at least one of "
            f"{', '.join(allowed)}"
        )
    return {kind: weight / max(weights.values()) for kind, weight in weights.items()}


def _draw(
    kind: str, sources: Sequence[_Source], split: str, count: int, seed: int
) -> list[tuple[str, _Item]]:
    """`count` worded items of a kind, in equal parts from its sources as long as these last."""
    rngs = [
        random.Random(f"facts/{split}/{kind}/{number}/{seed}") for number in range(len(sources))
    ]
    found = list(
        islice(
            _in_turn(
                [_questions(source, split, rng) for source, rng in zip(sources, rngs, strict=True)]
            ),
            count,
        )
    )
    if len(found) < count:
        raise UserError(
            f"num_tasks: split {split!r} has {len(found)} distinct questions of kind {kind!r}, "
            f"{count} are asked for; "
            f"lower num_tasks or the weight of {kind!r}"
        )
    return found


def _questions(source: _Source, split: str, rng: random.Random) -> Iterator[tuple[str, _Item]]:
    """Every question of a source that belongs to the split, in random order."""
    forms = _FORMS[source.family][split == "forms"]
    for index in _shuffled(source.size * len(forms), rng):
        item_index, form_index = divmod(index, len(forms))
        item = source.item(item_index)
        question = forms[form_index].format(**item.words)
        if split not in ("train", "texts") or (_hash(question) % 10 == 0) == (split == "texts"):
            yield question, item


def _shuffled(size: int, rng: random.Random) -> Iterator[int]:
    """A random permutation of range(size) that costs time and memory only for what is taken of it."""
    moved: dict[int, int] = {}
    for last in range(size - 1, -1, -1):
        pick = rng.randint(0, last)
        yield moved.get(pick, pick)
        moved[pick] = moved.pop(last, last)


def _in_turn(streams: Sequence[Iterator[tuple[str, _Item]]]) -> Iterator[tuple[str, _Item]]:
    """One of each stream in turn, until all have ended."""
    live = list(streams)
    while live:
        for stream in tuple(live):
            found = next(stream, None)
            if found is None:
                live.remove(stream)
            else:
                yield found


def _sources(
    pool: Sequence[Entity], keys: Sequence[tuple[Entity, str, str]]
) -> dict[str, list[_Source]]:
    """Where the questions of each kind come from, for a pool of entities and their key facts."""
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
        "sum4": [
            _Source("compute", len(deep), partial(_deep_sum_at, word, deep, keyed, False))
            for word in ("plus", "minus")
        ],
        "sum5": [
            _Source("compute", len(deep), partial(_deep_sum_at, word, deep, keyed, True))
            for word in ("plus", "minus")
        ],
    }


class _Pairs:
    """(attribute, one entity, another of its kind) for every attribute that is a number for both,
    in a fixed order.

    Looked up by index, because a thousand entities make a million pairs.
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
        place = bisect_right(self._ends, index)
        attribute, group = self._groups[place]
        one, other = divmod(index - (self._ends[place - 1] if place else 0), len(group) - 1)
        return attribute, group[one], group[other + (other >= one)]


def _lookup(entity: Entity, attribute: str) -> _Item:
    sub_goal = f"{attribute} of {entity.name}"
    return _Item(
        {"phrase": f"the {sub_goal}"}, str(entity.facts[attribute]), (PlanStep(sub_goal, "Search"),)
    )


def _reverse_lookup(entity: Entity, key: str, value: str) -> _Item:
    fact = f"{key} {value}"
    return _Item(
        {"kind": entity.kind, "fact": fact},
        entity.name,
        (PlanStep(f"{entity.kind} with {fact}", "Search"),),
    )


def _chain(entity: Entity, key: str, value: str, attribute: str) -> _Item:
    (find,) = _reverse_lookup(entity, key, value).plan
    last = _lookup(entity, attribute)
    return _Item(
        {"phrase": f"the {attribute} of the {find.sub_goal}"},
        last.answer,
        (find, *last.plan),
        (entity.name,),
    )


def _sum_at(word: str, pairs: _Pairs, index: int) -> _Item:
    attribute, one, other = pairs[index]
    return _sum(word, _lookup(one, attribute), _lookup(other, attribute))


def _deep_sum_at(
    word: str, pairs: _Pairs, keys: Mapping[str, tuple[str, str]], hides_both: bool, index: int
) -> _Item:
    """A sum that names one entity, or both, by a key fact alone."""
    attribute, one, other = pairs[index]
    y = _chain(other, *keys[other.name], attribute) if hides_both else _lookup(other, attribute)
    return _sum(word, _chain(one, *keys[one.name], attribute), y)


def _sum(word: str, x: _Item, y: _Item) -> _Item:
    total = _calculation(word, int(x.answer), int(y.answer))
    plan, found = (*x.plan, *y.plan, *total.plan), (*x.found, x.answer, *y.found, y.answer)
    return _Item(
        {"phrase": f"{x.words['phrase']} {word} {y.words['phrase']}"}, total.answer, plan, found
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
    return _Item(
        {"phrase": f"{x} {word} {y}"},
        str(value),
        (PlanStep(f"{x} {SIGNS[word]} {y}", "Python_Coder"),),
    )


def _hash(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)
