"""The benchmark files as AgentFlow keeps them, through loader and scorer."""

from __future__ import annotations

import csv
import json
import os
import random
import re
import string
from pathlib import Path
from typing import Any

import make
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from flowtrain.records import Task, UserError
from flowtrain.rewards import SCORERS, score
from flowtrain.tasks.benchmarks import (
    AGENTFLOW,
    BENCHMARKS,
    BenchmarkFile,
    available,
    load_benchmark,
    parse_benchmarks,
)
from flowtrain.tasks.overlap import benchmark_tasks, overlaps
from flowtrain.utils.text import final_answer

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(
    os.environ.get("FLOWTRAIN_BENCHMARKS", ROOT.parent / "shared" / "data" / "benchmarks")
)
needs_files = pytest.mark.skipif(
    not FOLDER.is_dir(),
    reason=f"no benchmark files in {FOLDER}; name their folder in FLOWTRAIN_BENCHMARKS",
)

COUNTS = {
    "2wiki": (200, 100),
    "aime24": (30, 30),
    "bamboogle": (125, 125),
    "gameof24": (300, 100),
    "hotpotqa": (100, 100),
    "medqa": (300, 100),
}
"""Rows in the file, and rows that the paper ran."""


def rows(name: str) -> list[dict[str, Any]]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def references(name: str) -> list[list[str]]:
    """All the answers that a file gives, by question."""
    return [
        list(map(str, row["answer"] if isinstance(row["answer"], list) else [row["answer"]]))
        for row in rows(name)
    ]


def rewards(tasks: list[Task], answers: list[str]) -> list[float | None]:
    pairs = zip(tasks, answers, strict=True)
    rollouts = (make.rollout(task=task, answer=final_answer(answer)) for task, answer in pairs)
    (group,) = score([make.group(*rollouts)])
    return [trajectory.reward for trajectory in group.trajectories]


@needs_files
@pytest.mark.parametrize("name", COUNTS)
def test_counts_and_formats(name: str) -> None:
    whole = load_benchmark(name, FOLDER)
    run = whole[: BENCHMARKS[name].num_rows]
    assert (len(whole), len(run)) == COUNTS[name] and run == whole[: len(run)]
    assert [task.id for task in whole] == [f"{name}-{index}" for index in range(len(whole))]
    assert {(task.kind, task.scorer) for task in whole} == {(name, BENCHMARKS[name].scorer)}
    assert not any("<answer>" in task.question for task in whole)
    if name in ("bamboogle", "hotpotqa", "aime24"):
        assert all("<answer>" in row["query"] for row in rows(name)), "it was there"
    if name == "medqa":
        assert {len(task.choices) for task in whole} == {4} and not any(
            option[:2] == "A." for task in whole for option in task.choices
        )
    assert {task.rules for task in whole} == {name if name == "gameof24" else ""}
    if name == "gameof24":
        assert {len(task.answers) for task in whole} == {4} and all(
            answer.isdigit() for task in whole for answer in task.answers
        )


@needs_files
@pytest.mark.parametrize("name", COUNTS)
def test_reference_answers_are_right(name: str) -> None:
    tasks = load_benchmark(name, FOLDER)
    pairs = [
        (task, answer)
        for task, found in zip(tasks, references(name), strict=True)
        for answer in found
    ]
    for form in ("{}", "Let me see.\n<answer> {} </answer>", "<answer>{}.</answer>"):
        assert set(
            rewards([task for task, _ in pairs], [form.format(answer) for _, answer in pairs])
        ) == {1.0}


@needs_files
@pytest.mark.parametrize(
    "form",
    ["{letter}", "({letter})", "{letter}. {text}", "The answer is {letter}.", "**{letter}**"],
)
def test_references_of_medqa_by_letter(form: str) -> None:
    tasks = load_benchmark("medqa", FOLDER)
    places = [task.choices.index(task.answers[0].strip()) for task in tasks]
    answers = [
        form.format(letter=string.ascii_uppercase[i], text=task.choices[i])
        for task, i in zip(tasks, places, strict=True)
    ]
    assert set(rewards(tasks, answers)) == {1.0}
    wrong = [(i + 1) % 4 for i in places]
    answers = [
        form.format(letter=string.ascii_uppercase[i], text=task.choices[i])
        for task, i in zip(tasks, wrong, strict=True)
    ]
    assert set(rewards(tasks, answers)) == {0.0}


@needs_files
@pytest.mark.parametrize("name", COUNTS)
def test_answers_of_other_questions_are_wrong(name: str) -> None:
    """Each question gets the answer of one with another answer: 2wiki has two in five "yes" or
    "no", which a shuffle deals back.
    """
    tasks, given = load_benchmark(name, FOLDER), references(name)
    rng = random.Random(0)
    answers = [
        rng.choice([other[0] for other in given if not set(other) & set(own)]) for own in given
    ]
    assert set(rewards(tasks, answers)) == {0.0}


@needs_files
def test_shuffled_answers_score_below_five_percent() -> None:
    tasks = [
        task
        for name in COUNTS
        for task in load_benchmark(name, FOLDER)[: BENCHMARKS[name].num_rows]
    ]
    answers = [
        found[0] for name, (_, num_run) in COUNTS.items() for found in references(name)[:num_run]
    ]
    random.Random(0).shuffle(answers)
    assert sum(rewards(tasks, answers)) / len(tasks) < 0.05


@needs_files
def test_a_benchmark_overlaps_with_itself_and_hardly_with_others() -> None:
    tasks = [task for task in benchmark_tasks(FOLDER) if task.scorer in ("qa", "math")]
    pairs = overlaps(tasks, tasks)
    assert {one.id for one, other in pairs if one is other} == {task.id for task in tasks}
    others = {frozenset((one.id, other.id)) for one, other in pairs if one is not other}
    assert len(others) < 12, (
        "one thing asked about twice, such as the father and the mother of somebody"
    )


# ---- without the files


def test_every_benchmark_has_a_rule() -> None:
    assert list(BENCHMARKS) == [
        *("bamboogle", "2wiki", "hotpotqa", "musique", "gaia", "aime24", "amc23", "gameof24"),
        *("gpqa", "medqa", "nq", "triviaqa", "popqa", "browsecomp-plus"),
    ]
    assert list(BENCHMARKS)[:10] == list(AGENTFLOW)
    assert {benchmark.scorer for benchmark in BENCHMARKS.values()} <= set(SCORERS)


def test_gpqa_as_its_file_comes(tmp_path: Path) -> None:
    row = {
        "pid": 0,
        "query": "Which?",
        "choices": ["1 eV", "2 eV", "3 eV"],
        "answer_idx": 1,
        "answer": "B. 2 eV",
    }
    (tmp_path / "gpqa").mkdir()
    (tmp_path / "gpqa" / "data").mkdir()
    (tmp_path / "gpqa" / "data" / "data.json").write_text(json.dumps([row] * 150))
    tasks = load_benchmark("gpqa", tmp_path)
    assert len(tasks) == 150 and tasks[0] == Task(
        "gpqa-0", "Which?", ("B. 2 eV",), "gpqa", 0, "choice", choices=("1 eV", "2 eV", "3 eV")
    )
    assert rewards(tasks[:3], ["B", "2 eV", "C"]) == [1.0, 1.0, 0.0] and available(tmp_path) == [
        "gpqa"
    ]


def test_what_is_not_there_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"benchmark 'gaia': there is neither .*gaia\.json nor .*; copy "
        r"test/gaia/data/data\.json of",
    ):
        load_benchmark("gaia", tmp_path)
    with pytest.raises(UserError, match="benchmark 'gai' is unknown; known: bamboogle, 2wiki"):
        load_benchmark("gai", tmp_path)
    (tmp_path / "gaia.json").write_text('[{"query": "q"}]')
    with pytest.raises(UserError, match=r"gaia\.json, entry 1 .*missing required field `answer`"):
        load_benchmark("gaia", tmp_path)
    (tmp_path / "gaia.json").write_text("[]")
    with pytest.raises(UserError, match=r"gaia\.json: holds no tasks"):
        load_benchmark("gaia", tmp_path)


# ---- rows as their authors publish them

NQ_ROW = {
    "question": "when was the last time anyone was on the moon",
    "answer": ["14 December 1972 UTC", "December 1972"],
}
TRIVIA_ROW = {
    "question": "Which American-born Sinclair won the Nobel Prize for Literature in 1930?",
    "question_id": "tc_1",
    "question_source": "http://www.triviacountry.com/",
    "entity_pages": {"doc_source": [], "filename": [], "title": [], "wiki_context": []},
    "search_results": {"description": [], "filename": [], "rank": [], "title": [], "url": []},
    "answer": {
        "aliases": ["(Harry) Sinclair Lewis", "Sinclair Lewis"],
        "matched_wiki_entity_name": "",
        "normalized_aliases": ["sinclair lewis", "harry sinclair lewis"],
        "normalized_matched_wiki_entity_name": "",
        "normalized_value": "sinclair lewis",
        "type": "WikipediaEntity",
        "value": "Sinclair Lewis",
    },
}
POPQA_ROW = {
    "id": "4222362",
    "subj": "George Rankin",
    "prop": "occupation",
    "obj": "politician",
    "subj_id": "1850297",
    "prop_id": "22",
    "obj_id": "2834605",
    "s_aliases": '["George James Rankin"]',
    "o_aliases": '["political leader","political figure"]',
    "s_uri": "http://www.wikidata.org/entity/Q5543720",
    "o_uri": "http://www.wikidata.org/entity/Q82955",
    "s_wiki_title": "George Rankin",
    "o_wiki_title": "Politician",
    "s_pop": "142",
    "o_pop": "25692",
    "question": "What is George Rankin's occupation?",
    "possible_answers": '["politician", "political leader", "political figure", "pol\\u00edtico"]',
}
BROWSECOMP_ROW = {
    "query_id": "769",
    "query": "Which author wrote about a city, and two other things?",
    "answer": "Ann Lee",
    "gold_docs": [{"docid": "6", "text": "...", "url": "https://example.org"}],
    "evidence_docs": [{"docid": "6", "text": "...", "url": "https://example.org"}],
    "negative_docs": [{"docid": "7", "text": "...", "url": "https://example.org"}],
}
FLASHRAG_ROW = {"id": "test_0", "question": "who?", "golden_answers": ["Ann Lee", "A. Lee"]}
ACCEPTED = {
    "nq": (NQ_ROW, ("14 December 1972 UTC", "December 1972")),
    "triviaqa": (
        TRIVIA_ROW,
        ("Sinclair Lewis", "(Harry) Sinclair Lewis", "sinclair lewis", "harry sinclair lewis"),
    ),
    "popqa": (POPQA_ROW, ("politician", "political leader", "political figure", "pol\u00edtico")),
    "browsecomp-plus": (BROWSECOMP_ROW, ("Ann Lee",)),
}


def write(path: Path, row: dict[str, Any]) -> Path:
    """One row, in the format that the suffix says."""
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist([row]), path)
    elif path.suffix == ".tsv":
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, row, delimiter="\t", lineterminator="\n")
            table.writeheader()
            table.writerow(row)
    else:
        path.write_text(json.dumps([row] if path.suffix == ".json" else row))
    return path


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("popqa", ".tsv"),
        *((name, suffix) for name in ACCEPTED for suffix in (".jsonl", ".json", ".parquet")),
    ],
)
def test_rows_as_published(tmp_path: Path, name: str, suffix: str) -> None:
    row, accepted = ACCEPTED[name]
    write(tmp_path / f"{name}{suffix}", row)
    (task,) = load_benchmark(name, tmp_path)
    question = row.get("question") or row["query"]
    assert task == Task(f"{name}-0", str(question), accepted, name, 0, "qa")
    assert rewards([task] * 2, [accepted[-1], "nobody"]) == [1.0, 0.0]
    assert available(tmp_path) == [name]


@pytest.mark.parametrize("name", ["nq", "triviaqa", "popqa"])
def test_flashrag_s_files_of_the_same_sets(tmp_path: Path, name: str) -> None:
    write(tmp_path / f"{name}.jsonl", FLASHRAG_ROW)
    (task,) = load_benchmark(name, tmp_path)
    assert (task.question, task.answers) == ("who?", ("Ann Lee", "A. Lee"))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("nq", {"answer": []}, "`$.answer`"),
        ("nq", {"answer": {"a": 1}}, "got `object` - at `$.answer`"),
        ("triviaqa", {"answer": "Sinclair Lewis"}, "missing required field `answer`"),
        ("triviaqa", {"answer": {"aliases": [" "], "value": None}}, "missing required field"),
        ("popqa", {"possible_answers": "politician"}, "missing required field `answer`"),
        ("popqa", {"possible_answers": '{"a": 1}'}, "missing required field `answer`"),
        ("popqa", {"possible_answers": "[" * 10_000}, "missing required field `answer`"),
        ("popqa", {"possible_answers": '["\\ud800"]'}, "missing required field `answer`"),
        ("popqa", {"possible_answers": "[{}]"}, "got `object` - at `$.answer[0]`"),
        ("browsecomp-plus", {"query": "QUJD" * 20 + "QQ=="}, "query 769 is encrypted: decrypt"),
        ("browsecomp-plus", {"query": 3}, "missing required field `question`"),
    ],
)
def test_what_is_not_as_published_is_refused(
    tmp_path: Path, name: str, change: dict[str, Any], said: str
) -> None:
    write(tmp_path / f"{name}.jsonl", {**ACCEPTED[name][0], **change})
    with pytest.raises(UserError, match=re.escape(said)):
        load_benchmark(name, tmp_path)


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=5))
def test_popqa_s_list_is_read_as_it_was_written(answers: list[str]) -> None:
    layout = BENCHMARKS["popqa"].layout
    row = layout.unpack({"question": "q", "possible_answers": json.dumps(answers)})
    assert row[layout.answers[0]] == answers
    found = layout.unpack({"question": "q", "possible_answers": answers})
    assert found == {**row, "possible_answers": answers}


def test_two_files_of_a_benchmark_are_refused(tmp_path: Path) -> None:
    for suffix in (".json", ".jsonl"):
        write(tmp_path / f"nq{suffix}", NQ_ROW)
    with pytest.raises(UserError, match=r"'nq' has several files: .*nq\.json, .*nq\.jsonl"):
        load_benchmark("nq", tmp_path)
    with pytest.raises(UserError, match=r"copy test\.tsv of .*PopQA to .*popqa\.tsv"):
        load_benchmark("popqa", tmp_path)


# ---- files of one's own


def test_a_file_of_one_s_own_keeps_its_ids_and_scorers(tmp_path: Path) -> None:
    rows = [
        {"id": "x", "question": "1 + 1?", "answer": 2, "scorer": "math", "kind": "sum"},
        {"question": "Who?", "answer": ["Ann Lee"]},
    ]
    path = tmp_path / "set.json"
    path.write_text(json.dumps(rows))
    first, second = load_benchmark(f"mine={path}:qa", "")
    assert (first.id, first.scorer, first.kind) == ("mine-x", "math", "sum")
    assert (second.id, second.scorer, second.kind) == ("mine-set-2", "qa", "mine")
    assert load_benchmark(f"mine={path}", "")[1].scorer == "exact"
    trivia = write(tmp_path / "trivia.jsonl", TRIVIA_ROW)
    (task,) = load_benchmark(f"other={trivia}", "")
    assert (task.scorer, task.answers[0]) == ("qa", "Sinclair Lewis"), "its layout is recognised"
    moved = write(tmp_path / "dev.jsonl", NQ_ROW)
    (task,) = load_benchmark(f"nq={moved}", "")
    assert (task.id, task.scorer) == ("nq-0", "qa")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mine=", "must be NAME, NAME=FILE or NAME=FILE:SCORER"),
        ("=x.json", "must be NAME, NAME=FILE or NAME=FILE:SCORER"),
        ("a b=x.json", "must be NAME, NAME=FILE or NAME=FILE:SCORER"),
        ("../a=x.json", "must be NAME, NAME=FILE or NAME=FILE:SCORER"),
        ("nq=x.json:math", "nq is scored by 'qa'"),
        ("mine=nowhere.json", "there is no such file"),
        ("mine=nowhere.json:maths", "after a ':' a scorer may follow, one of exact, qa, f1, math"),
        ("mmlu", "use NAME=FILE for a custom file"),
    ],
)
def test_a_benchmark_that_cannot_be_read_is_refused(text: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        load_benchmark(text, "")


def test_a_name_stands_for_one_file() -> None:
    found = parse_benchmarks(["nq", "a=x.json:qa", "nq"])
    assert found == (BenchmarkFile("nq"), BenchmarkFile("a", "x.json", "qa"))
    with pytest.raises(UserError, match="'a' is named twice"):
        parse_benchmarks(["a=x.json", "a=y.json"])
