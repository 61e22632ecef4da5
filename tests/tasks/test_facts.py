"""The built-in questions: plans solve them, simple rules understand them, splits do not leak."""

from __future__ import annotations

import hashlib
import operator
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import pytest

from flowtrain.records import PlanStep, Task, UserError
from flowtrain.tasks.corpus import Entity, load_corpus, passage_value, passages
from flowtrain.tasks.facts import KINDS, SPLITS, facts_tasks, split_entities

CORPUS = load_corpus()
PASSAGES = passages(CORPUS)
NUM_TURNS = {"lookup": 1, "arithmetic": 1, "chain": 2, "sum": 3}
SIGNS = {"plus": "+", "minus": "-", "times": "*"}
EVALUATE = {"+": operator.add, "-": operator.sub, "*": operator.mul}
TASKS = {split: facts_tasks(CORPUS, split, 800, seed=3) for split in SPLITS}

STATED = {text[len("The ") :].rpartition(" is ")[0]: passage_value(text) for text in PASSAGES}
"""Map each sub-goal to the value that a perfect search finds."""


def hashed(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


def python_step(expression: str) -> str:
    x, sign, y = expression.split()
    return str(EVALUATE[sign](int(x), int(y)))


def run_step(step: PlanStep) -> str:
    if step.tool_name == "Python_Coder":
        return python_step(step.sub_goal)
    assert step.tool_name == "Search"
    value = STATED[step.sub_goal]
    assert value is not None
    return value


def plan_by_rules(question: str) -> list[PlanStep]:
    """An independent planner that sees the question alone."""
    computed = re.search(r"(\d+) (plus|minus|times) (\d+)[.?]$", question)
    if computed:
        return [PlanStep(f"{computed[1]} {SIGNS[computed[2]]} {computed[3]}", "Python_Coder")]
    asked = re.search(r"the ([A-Za-z ]+?) of (.+)[.?]$", question)
    if asked is None:
        found = re.search(r"(?:the|Which|which) (\w+) (?:with|has) (.+)[.?]$", question)
        assert found is not None
        return [PlanStep(f"{found[1]} with {found[2]}", "Search")]
    attribute, rest = asked.groups()
    if rest.startswith("the "):
        find = PlanStep(rest.removeprefix("the "), "Search")
        return [find, PlanStep(f"{attribute} of {run_step(find)}", "Search")]
    total = re.fullmatch(rf"(.+) (plus|minus) the {attribute} of (.+)", rest)
    if total is None:
        return [PlanStep(f"{attribute} of {rest}", "Search")]
    searches = [PlanStep(f"{attribute} of {name}", "Search") for name in (total[1], total[3])]
    x, y = map(run_step, searches)
    return [*searches, PlanStep(f"{x} {SIGNS[total[2]]} {y}", "Python_Coder")]


@pytest.mark.parametrize("split", SPLITS)
def test_plans_solve_their_tasks(split: str) -> None:
    for task in TASKS[split]:
        found = [run_step(step) for step in task.plan]
        assert (found[-1],) == task.answers
        assert task.num_turns == len(task.plan) == NUM_TURNS[task.kind]
        assert (task.scorer, task.rules) == ("exact", "facts")
        if task.kind == "sum":
            assert [found[0], found[1]] == re.split(r" [-+] ", task.plan[2].sub_goal)


@pytest.mark.parametrize("split", SPLITS)
def test_simple_rules_find_the_same_plan(split: str) -> None:
    for task in TASKS[split]:
        assert tuple(plan_by_rules(task.question)) == task.plan, task.question


@pytest.mark.parametrize("split", SPLITS)
def test_questions_and_ids_are_distinct(split: str) -> None:
    tasks = TASKS[split]
    assert len({task.question for task in tasks}) == len({task.id for task in tasks}) == 800
    assert [task.id for task in tasks] == [f"{split}-{index}" for index in range(800)]


@pytest.mark.parametrize("split", SPLITS)
def test_kinds_are_equally_likely(split: str) -> None:
    kinds = [kind for kind in KINDS if split != "entities" or kind != "arithmetic"]
    counts = Counter(task.kind for task in TASKS[split])
    assert set(counts) == set(kinds) and max(counts.values()) - min(counts.values()) <= 1


def test_questions_look_right() -> None:
    questions = "\n".join(task.question for task in TASKS["train"])
    for kind_of_question in (
        r"What is the capital of \w+\?",
        r"Which element has symbol \w+\?",
        r"Calculate \d+ minus \d+\.",
        r"How much is \d+ times \d+\?",
        r"Tell me the continent of the country with capital [\w' -]+\.",
        r"What is the area of [\w -]+ plus the area of [\w -]+\?",
    ):
        assert re.search(f"^{kind_of_question}$", questions, re.MULTILINE), kind_of_question


def test_chains_ask_for_another_attribute_than_they_give() -> None:
    for task in TASKS["train"]:
        if task.kind == "chain":
            find, look_up = task.plan
            assert f"with {look_up.sub_goal.split(' of ')[0]} " not in find.sub_goal


def names_in(task: Task) -> set[str]:
    """The entities that the plan of a task touches."""
    searches = [step.sub_goal for step in task.plan if step.tool_name == "Search"]
    return {goal.split(" of ", 1)[1] if " of " in goal else str(STATED[goal]) for goal in searches}


def test_held_out_entities_are_15_percent_of_each_kind() -> None:
    training, held_out = split_entities(CORPUS)
    assert Counter(entity.kind for entity in held_out) == {"country": 22, "element": 15}
    assert {e.name for e in training} | {e.name for e in held_out} == {
        e.name for e in CORPUS
    } and len(training) == 244 - 37
    for kind in ("country", "element"):
        lowest, others = (
            [hashed(entity.name) for entity in part if entity.kind == kind]
            for part in (held_out, training)
        )
        assert max(lowest) < min(others)
    assert [entity.name for entity in split_entities(CORPUS[::-1])[1]][::-1] == [
        entity.name for entity in held_out
    ]


def test_entities_split_alone_uses_held_out_entities() -> None:
    held_out = {entity.name for entity in split_entities(CORPUS)[1]}
    assert all(names_in(task) <= held_out for task in TASKS["entities"])
    for split in ("train", "texts", "forms"):
        assert not set().union(*map(names_in, TASKS[split])) & held_out


def test_texts_are_the_tenth_of_questions_by_hash() -> None:
    for split in ("train", "texts"):
        for task in TASKS[split]:
            assert (hashed(task.question) % 10 == 0) == (split == "texts")


def test_forms_split_alone_uses_held_out_wordings() -> None:
    held_out = re.compile(
        "Could you tell me |Please show me |I want to know |Tell me which |Please calculate "
    )
    assert all(held_out.match(task.question) for task in TASKS["forms"])
    assert not any(held_out.match(task.question) for split in SPLITS[:3] for task in TASKS[split])


def test_splits_share_no_question() -> None:
    counts = Counter(task.question for tasks in TASKS.values() for task in tasks)
    assert set(counts.values()) == {1}


def test_same_arguments_give_the_same_tasks() -> None:
    assert facts_tasks(CORPUS, "train", 50, 3) == facts_tasks(CORPUS, "train", 50, 3)
    assert facts_tasks(CORPUS, "train", 50, 3) != facts_tasks(CORPUS, "train", 50, 4)


def test_tasks_do_not_depend_on_the_hash_seed() -> None:
    code = (
        "from flowtrain.tasks.corpus import load_corpus; from flowtrain.tasks.facts import *; "
        "print([t.question for t in facts_tasks(load_corpus(), 'entities', 20, 1)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in "12"
    }
    assert len(outputs) == 1


TOWNS = [
    Entity(f"Town{number}", "town", {"capital": f"C{number}", "size": number})
    for number in range(4)
]


def test_every_question_of_a_small_corpus_can_be_drawn() -> None:
    # Three of four towns are for training: 3 * 2 facts in 3 held-out wordings, 3 keys in 4.
    tasks = facts_tasks(TOWNS, "forms", 30, 0, ["lookup"])
    assert len({task.question for task in tasks}) == 30
    with pytest.raises(
        UserError,
        match="split 'forms' has 30 distinct questions of kind 'lookup', 31 are asked for; lower "
        "num_tasks",
    ):
        facts_tasks(TOWNS, "forms", 31, 0, ["lookup"])


def test_train_and_texts_cover_every_question_once() -> None:
    drawn = []
    for split in ("train", "texts"):
        with pytest.raises(UserError, match="distinct questions of kind 'sum'") as refused:
            facts_tasks(TOWNS, split, 1000, 0, ["sum"])
        possible = int(re.search(r"has (\d+) distinct", str(refused.value))[1])  # type: ignore[index]
        drawn += facts_tasks(TOWNS, split, possible, 0, ["sum"])
    # 3 * 2 ordered pairs, plus and minus, 16 wordings.
    assert len({task.question for task in drawn}) == len(drawn) == 192


def test_a_kind_without_material_is_refused() -> None:
    with pytest.raises(UserError, match="split 'entities' has 0 distinct questions of kind 'sum'"):
        facts_tasks(TOWNS, "entities", 4, 0)


@pytest.mark.parametrize(
    ("split", "num_tasks", "kinds", "expected"),
    [
        ("train", 7, KINDS, {"lookup": 2, "arithmetic": 2, "chain": 2, "sum": 1}),
        ("train", 1, KINDS, {"lookup": 1}),
        ("train", 9, ("sum", "lookup", "chain"), {"lookup": 3, "chain": 3, "sum": 3}),
        ("entities", 6, ("arithmetic", "chain"), {"chain": 6}),
    ],
)
def test_kinds_have_equal_parts(
    split: str, num_tasks: int, kinds: Sequence[str], expected: dict[str, int]
) -> None:
    assert (
        Counter(task.kind for task in facts_tasks(CORPUS, split, num_tasks, 0, kinds)) == expected
    )


def test_a_split_without_a_kind_is_refused() -> None:
    with pytest.raises(UserError, match="split 'entities' needs another kind"):
        facts_tasks(CORPUS, "entities", 5, 0, ["arithmetic"])
