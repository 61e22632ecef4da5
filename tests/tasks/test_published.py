"""Rows as GSM8K, MATH, verl and conversations are published, and what is taken from them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from flowtrain.records import Task, UserError
from flowtrain.rewards import SCORERS
from flowtrain.rewards.references import check_source
from flowtrain.tasks.files import TaskSource, load_source, load_tasks
from flowtrain.tasks.layouts import PRESETS, recognise
from flowtrain.utils.text import boxed, marked_answer

Rows = list[dict[str, Any]]

GSM8K: Rows = [
    {
        "question": "Natalia sold clips to 48 of her friends in April, and then she sold half as "
        "many clips in May. How many clips did Natalia sell altogether in April and May?",
        "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n"
        "Natalia sold 48+24 = <<48+24=72>>72 clips altogether in April and May.\n#### 72",
    },
    {
        "question": "What is the salary?",
        "answer": "#### Months\nIt is 3*400=<<3*400=1200>>1200.\n#### Sum\n#### 1,200",
    },
    {"question": "How much colder?", "answer": "0-5=<<0-5=-5>>-5\r\n#### -5\r\n"},
]
MATH: Rows = [
    {
        "problem": "What is $\\frac12 + \\frac14$?",
        "level": "Level 2",
        "type": "Prealgebra",
        "solution": "We first get $\\boxed{1}$, no: it is $\\boxed{\\frac{3}{4}}$.",
    },
    {
        "problem": "Solve $x^2 = 4$.",
        "level": "Level 5",
        "type": "Algebra",
        "solution": "So $x \\in \\fbox{\\{-2, 2\\}}$.",
    },
    {
        "problem": "How many?",
        "level": "Level ?",
        "type": "Geometry",
        "solution": "There are $\\boxed 2$.",
    },
]
MATH500: Rows = [
    {
        "problem": "Convert the point.",
        "solution": "Hence $\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}.$",
        "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
        "subject": "Precalculus",
        "level": 2,
        "unique_id": "test/precalculus/807.json",
    }
]


def verl(source: str, truth: Any, *messages: tuple[str, str]) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [{"role": role, "content": content} for role, content in messages],
        "ability": "math",
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {"index": 0, "split": "train"},
    }


SYSTEM = ("system", "You think aloud.")
VERL: Rows = [
    verl("openai/gsm8k", "72", ("user", "How many?")),
    verl("lighteval/MATH", "\\frac12", SYSTEM, ("user", "Half of one?")),
    verl("mine", "blue", ("user", "Which?"), ("assistant", "This?"), ("user", "No, which colour?")),
]


def chat(*messages: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in messages], **more}


CHAT: Rows = [
    chat(SYSTEM, ("user", "Hello"), ("assistant", "Hi!"), ("user", "Sky?"), ("assistant", "Blue")),
    chat(("user", "1 + 1?"), ("assistant", "Two ones: \\boxed{2}"), ("user", "Thanks!")),
    chat(("user", "Capital?"), ("assistant", "<think>So.</think> <answer>Oslo</answer>")),
]


def write(folder: Path, name: str, rows: Rows) -> Path:
    path = folder / name
    match path.suffix:
        case ".parquet":
            parquet.write_table(pa.Table.from_pylist(rows), path)
        case ".jsonl":  # with a byte order mark and the line ends of Windows
            lines = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
            path.write_bytes(f"\ufeff{lines}\r\n".encode())
        case _:
            path.write_text(json.dumps(rows))
    return path


def taken(tasks: Sequence[Task]) -> list[tuple[str, tuple[str, ...], str, str]]:
    return [(task.question, task.answers, task.kind, task.scorer) for task in tasks]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("preset", ["auto", "named"])
@pytest.mark.parametrize(
    ("name", "rows", "expected"),
    [
        (
            "gsm8k",
            GSM8K,
            [
                (GSM8K[0]["question"], ("72",), "", "math"),
                ("What is the salary?", ("1200",), "", "math"),
                ("How much colder?", ("-5",), "", "math"),
            ],
        ),
        (
            "math",
            MATH,
            [
                ("What is $\\frac12 + \\frac14$?", ("\\frac{3}{4}",), "Prealgebra", "math"),
                ("Solve $x^2 = 4$.", ("\\{-2, 2\\}",), "Algebra", "math"),
                ("How many?", ("2",), "Geometry", "math"),
            ],
        ),
        (
            "math",
            MATH500,
            [
                (
                    "Convert the point.",
                    ("\\left( 3, \\frac{\\pi}{2} \\right)",),
                    "Precalculus",
                    "math",
                )
            ],
        ),
        (
            "verl",
            VERL,
            [
                ("How many?", ("72",), "openai/gsm8k", "math"),
                ("Half of one?", ("\\frac12",), "lighteval/MATH", "math"),
                ("No, which colour?", ("blue",), "mine", "exact"),
            ],
        ),
        (
            "chat",
            CHAT,
            [
                ("Sky?", ("Blue",), "", "exact"),
                ("1 + 1?", ("2",), "", "exact"),
                ("Capital?", ("Oslo",), "", "exact"),
            ],
        ),
        (
            "chat",
            [chat(("user", "Sum?"), ("assistant", "It is 4."), final_answer="4", answer="5")],
            [("Sum?", ("4",), "", "exact")],
        ),
    ],
)
def test_rows_as_published(
    tmp_path: Path, suffix: str, preset: str, name: str, rows: Rows, expected: list[Any]
) -> None:
    path = write(tmp_path, f"rows.{suffix}", rows)
    source = load_source(path, name if preset == "named" else "auto")
    assert source.preset == name and taken(source.tasks) == expected
    check_source(source)


def test_other_shapes_of_verl(tmp_path: Path) -> None:
    """Search-R1's, with and without its question; numbers; an object that no rule reads."""
    target = {"target": ["Ann Lee", "A. Lee"]}
    row = verl("searchR1_nq", target, SYSTEM, ("user", "Answer: who?"))
    source = load_source(write(tmp_path, "verl.parquet", [row]))
    assert (source.preset, source.num_system) == ("verl", 1)
    assert taken(source.tasks) == [("Answer: who?", ("Ann Lee", "A. Lee"), "searchR1_nq", "qa")]
    for more in ({}, {"golden_answers": ["Ann Lee", "A. Lee"]}):
        source = load_source(
            write(tmp_path, "own.json", [{**row, "data_source": "nq", "question": "who?", **more}])
        )
        assert source.preset == "search-r1"
        assert taken(source.tasks) == [("who?", ("Ann Lee", "A. Lee"), "nq", "qa")]
    row = verl("countdown", 24, ("user", "How many?"))
    assert load_tasks(write(tmp_path, "number.json", [row]))[0].answers == ("24",)
    row = verl("countdown", {"target": 24, "numbers": [4, 6]}, ("user", "Make 24."))
    with pytest.raises(UserError, match=r"entry 1 \(.*reward_model.*got `object` - at `\$.answer`"):
        load_tasks(write(tmp_path, "object.json", [row]))


def test_the_file_is_described_in_a_line(tmp_path: Path) -> None:
    assert load_source(write(tmp_path, "gsm8k.jsonl", GSM8K)).text() == (
        'tasks: gsm8k.jsonl, 3 rows, preset gsm8k: question "Natalia sold clips to 48 of her '
        'friends..." -> "72" (math)'
    )
    assert load_source(write(tmp_path, "v.json", VERL * 1000)).text() == (
        'tasks: v.json, 3,000 rows, preset verl, 1,000 system messages left out: question "How '
        'many?" -> "72" (math)'
    )
    row = {"question": "a\n\x1b b", "answer": ["x", "y"]}
    assert load_source(write(tmp_path, "own.json", [row])).text() == (
        'tasks: own.json, 1 rows, preset own: question "a \x1b b" -> "x | y" (exact)'
    )


def test_the_layout_is_told_by_the_rows() -> None:
    assert set(PRESETS) == {
        *("own", "search-r1", "deepmath", "agentflow", "gsm8k", "math", "verl", "chat"),
        *("triviaqa", "popqa", "browsecomp-plus"),
    }
    assert recognise([]) == "own"
    assert recognise([{"question": "q", "answer": "see #### 3"}]) == "own", "not on its own line"
    assert recognise([{"question": "q", "answer": 3}, GSM8K[0]]) == "gsm8k"
    assert recognise([{"question": "q", "answer": "3\n####4"}]) == "gsm8k"
    assert recognise([{"question": "q", "answer": "x", "final_answer": "1"}]) == "deepmath"
    assert recognise([{"problem": "p", "solution": "no box"}]) == "own"
    assert recognise([{"problem": "p", "answer": "3"}]) == "math"
    assert recognise([{"prompt": "a text", "reward_model": {"ground_truth": "1"}}]) == "own"
    assert recognise([chat(("user", "q"))]) == "own", "there is no reply"
    assert recognise([chat(("user", "q"), answer="x")]) == "chat"
    assert recognise([chat(("assistant", "q"))]) == "own", "there is no question"


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize(
    ("rows", "wrong", "names", "field"),
    [
        (GSM8K, {"question": "q", "answer": None}, "#### of answer", "answer"),
        (GSM8K, {"question": "q", "answer": "It is 3."}, "#### of answer", "answer"),
        (GSM8K, {"question": "q", "answer": "It is\n####\n"}, "#### of answer", "answer"),
        (MATH, {"problem": "p", "solution": "Nothing.", "type": "x"}, "box of solution", "answer"),
        (MATH, {"problem": "p", "solution": "\\boxed{1"}, "box of solution", "answer"),
        (MATH, {"problem": "p", "solution": None}, "box of solution", "answer"),
        (MATH, {"solution": "\\boxed{1}"}, "question: problem", "question"),
        (VERL, verl("x", None, ("user", "q")), "ground_truth of reward_model", "answer"),
        (VERL, verl("x", "1", SYSTEM), "question: last user message", "question"),
        (CHAT, chat(("user", "q")), "answer of the last assistant message", "answer"),
        (CHAT, chat(SYSTEM, ("assistant", "Hi")), "question: last user message", "question"),
    ],
)
def test_a_row_without_an_answer_is_named(
    tmp_path: Path, suffix: str, rows: Rows, wrong: dict[str, Any], names: str, field: str
) -> None:
    path = write(tmp_path, f"set.{suffix}", [*rows, wrong])
    with pytest.raises(UserError, match=f"Object missing required field `{field}`") as refused:
        load_tasks(path)
    place = {"jsonl": "line 4", "json": "entry 4", "parquet": "row 4"}[suffix]
    text = str(refused.value)
    assert text.startswith(f"{path}, {place} (question: ") and names in text and "\n" not in text


def test_named_columns_come_before_those_of_a_preset(tmp_path: Path) -> None:
    path = write(tmp_path, "set.json", [{**MATH[0], "gold": "3/4", "ask": "Sum?"}])
    (task,) = load_tasks(path, question_key="ask", answer_key="gold")
    assert taken([task]) == [("Sum?", ("3/4",), "Prealgebra", "math")]
    (task,) = load_tasks(path, scorer="exact")
    assert task.scorer == "exact"
    (task,) = load_tasks(write(tmp_path, "verl.json", VERL[:1]), scorer="exact")
    assert task.scorer == "exact", "also where the data source names another"


# ---- what a solution marks

PLAIN = st.text(st.sampled_from("ab12 +=.,\\frac^_$"), max_size=12).filter(
    lambda text: not re.search(r"\\$|boxed|fbox", text)
)
BALANCED = st.recursive(
    PLAIN, lambda inner: st.tuples(PLAIN, inner, PLAIN).map("{0[0]}{{{0[1]}}}{0[2]}".format)
)


@settings(max_examples=200)
@given(BALANCED, BALANCED, PLAIN, st.sampled_from(["boxed", "fbox"]))
def test_the_last_box_is_found(before: str, content: str, after: str, command: str) -> None:
    text = f"{before} \\boxed{{{before}}} \\{command}{{{content}}} {after}"
    assert boxed(text) == marked_answer(text) == content.strip()
    assert boxed(f"\\boxed{{{text}}}") == content.strip(), "the innermost of nested boxes"
    assert boxed(f"{text} \\boxed{{{before}") == content.strip(), "a box without an end is none"
    assert boxed(before) is None and boxed(f"{{{before}}} {after}") is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{a} and \\fbox{b}", "b"),
        ("\\fbox{a} and \\boxed{b}", "b"),
        ("\\boxed {x}", "x"),
        ("\\boxed{\\{1\\}}", "\\{1\\}"),
        ("\\boxed{\\left\\{ 1 \\right.}", "\\left\\{ 1 \\right."),
        ("\\\\boxed{over-escaped}", "over-escaped"),
        ("\\\\{\\boxed{a}\\\\}", "a"),
        ("$\\boxed 2$.", "2"),
        ("\\boxed -1/2 or so", "-1/2"),
        ("\\boxed{}", ""),
        ("write \\boxed answers\n#### 3", "3"),
        ("\\boxed{", None),
        ("}{", None),
        ("", None),
        ("a\n#### 1,234 \n", "1,234"),
        ("#### 7", "7"),
        ("a\r\n#### 7\r\n", "7"),
        ("#### 7\nor not", None),
        ("see #### 7", None),
        ("##### 7", None),
        ("### 7", None),
        ("a\n####", None),
        ("\\boxed{1}\n#### 2", "1"),
    ],
)
def test_what_a_solution_marks(text: str, answer: str | None) -> None:
    assert marked_answer(text) == answer


def test_the_time_is_linear() -> None:
    """A hundred thousand marks would take minutes in quadratic time."""
    for text in ("\\boxed{", "{", "}", "\\boxed ", "\\", "#### ", "\\boxed 1", "\n####"):
        marked_answer(text * 100_000)


def test_the_scorer_reads_solutions_as_published() -> None:
    for rows, key in ((GSM8K, "answer"), (MATH, "solution"), (MATH500, "solution")):
        for row in rows:
            right = marked_answer(row[key])
            assert right is not None
            task = Task("t", "q", (right,))
            assert SCORERS["math"](task, row[key]) == 1
            assert SCORERS["math"](task, row[key].replace(right, "1789")) == 0


def test_a_marked_answer_is_the_only_one_that_counts() -> None:
    task = Task("t", "q", ("72",))
    assert SCORERS["math"](task, "The answer is 71.\n#### 72") == 1
    assert SCORERS["math"](task, "The answer is 72.\n#### 71") == 0
    assert SCORERS["math"](task, "\\boxed{71}\n#### 72") == 0


# ---- a source whose own solutions are wrong


def refusal(source: TaskSource) -> str:
    with pytest.raises(UserError) as refused:
        check_source(source)
    text = str(refused.value)
    assert "\n" not in text and len(text) < len(source.path) + 420
    return text


def test_whole_solutions_as_accepted_answers_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "gsm8k.jsonl", GSM8K)
    text = refusal(load_source(path, "own"))
    assert text.startswith(
        f"tasks.path={str(path)!r}: the scorer 'exact' rejects the solutions of 3 of 3 rows: "
        "'72' is not the accepted 'Natalia sold 48/2 = <<48/2=24>>24 clips...' of gsm8k-1"
    )
    assert all(key in text for key in ("tasks.answer_key", "tasks.scorer", "tasks.preset"))
    check_source(load_source(path, scorer="exact"))
    # The rule for short answers reads the box of an accepted solution, too.
    check_source(load_source(write(tmp_path, "m.json", MATH), answer_key="solution", scorer="qa"))


def test_another_column_than_the_answer_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "math.json", MATH * 20)
    refusal(load_source(path, answer_key="level"))
    replies = [
        chat(("user", "Sum?"), ("assistant", "It makes four."), answer=text, topic="Sums")
        for text in ("four", "FOUR")
    ]
    path = write(tmp_path, "chat.json", replies)
    check_source(load_source(path))
    refusal(load_source(path, answer_key="topic"))


@pytest.mark.parametrize(("num_wrong", "is_refused"), [(0, False), (2, False), (3, True)])
def test_half_of_the_rows_may_be_wrong(tmp_path: Path, num_wrong: int, is_refused: bool) -> None:
    rows = [{**MATH500[0], "answer": "7"}] * num_wrong + MATH500 * (4 - num_wrong)
    source = load_source(write(tmp_path, "set.json", rows))
    if is_refused:
        assert "rejects the solutions of 3 of 4 rows" in refusal(source)
    else:
        check_source(source)


def test_only_the_first_rows_are_checked(tmp_path: Path) -> None:
    source = load_source(
        write(tmp_path, "set.json", MATH500 * 50 + [{**MATH500[0], "answer": "7"}] * 99)
    )
    assert len(source.solutions) == 50
    check_source(source)


def test_a_task_without_an_answer_left_is_wrong(tmp_path: Path) -> None:
    rows = [{"question": "q", "result": "; ", "source": "nq"}]
    refusal(load_source(write(tmp_path, "set.json", rows), "agentflow"))


def test_the_rules_that_compare_are_checked(tmp_path: Path) -> None:
    row = {"question": "q", "answer": "It is B.\n#### B"}
    for scorer in ("exact", "qa", "f1"):
        refusal(load_source(write(tmp_path, "set.json", [row]), "own", scorer=scorer))
    for scorer in ("math", "gameof24"):
        check_source(load_source(write(tmp_path, "set.json", [row]), "own", scorer=scorer))


def test_puzzles_have_no_answer_to_check(tmp_path: Path) -> None:
    row = {"question": "Make 24.", "answer": [4, 6, 1, 1], "scorer": "gameof24"}
    check_source(load_source(write(tmp_path, "set.json", [row])))


def test_a_reward_function_reads_published_rows_as_they_are(tmp_path: Path) -> None:
    """Without the columns that the layout adds, and with those that it reads in part."""
    row = {"question": "Half of 48?", "answer": "48/2 = 24\n#### 24", "level": 1}
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (task,) = load_tasks(path, keeps_columns=True)
    assert (task.answers, task.scorer) == (("24",), "math")
    assert task.extra == {"answer": row["answer"], "level": 1}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("preset", ["verl", "chat"])
@pytest.mark.parametrize(
    ("content", "question"),
    [
        (parts("What is", "1 + 1?"), "What is\n1 + 1?"),
        (["What is 1 + 1?"], "What is 1 + 1?"),
        ("What is 1 + 1?", "What is 1 + 1?"),
        (None, None),
        ([], None),
        ([{"type": "text"}], None),
    ],
)
def test_a_message_in_parts_is_no_other_message(
    tmp_path: Path, preset: str, content: object, question: str | None
) -> None:
    first = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Ask me."}]
    asked = [*first, {"role": "user", "content": content}]
    row = {"data_source": "mine", "prompt": asked, "reward_model": {"ground_truth": "2"}}
    if preset == "chat":
        row = {
            "messages": [*asked, {"role": "assistant", "content": parts("It is", "2")}],
            "answer": "2",
        }
    path = write(tmp_path, "set.json", [row])
    if question is None:
        with pytest.raises(UserError, match="question"):
            load_source(path, preset)
    else:
        assert load_source(path, preset).tasks[0].question == question
