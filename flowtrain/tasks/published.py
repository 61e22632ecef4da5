"""Columns that published rows hide in others: a final number, a box, a message, aliases."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from flowtrain.records import UserError
from flowtrain.tasks.rows import Row, parse_json, without_nulls
from flowtrain.utils.text import boxed, final_answer, marked_answer

Unpack = Callable[[Row], Row]
"""Returns a row with more columns; one that cannot be made is left out."""

HASHES = "#### of answer"
BOX = "box of solution"
SUBJECT = "type or subject"
TRUTH = "ground_truth of reward_model"
QUESTION = "last user message"
REPLY = "last assistant message"
REPLY_ANSWER = "answer of the last assistant message"
SYSTEM = "system messages"
ALIASES = "value and aliases of answer"
POSSIBLE = "list in possible_answers"
QUERY = "decrypted query"
"""Names of the columns that are made; without dots, which would look into an object."""

VERL_SCORERS = {
    **dict.fromkeys(
        ("openai/gsm8k", "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval"), "math"
    ),
    **dict.fromkeys(("HuggingFaceH4/MATH-500", "math", "math_dapo", "math_dapo_reasoning"), "math"),
    **dict.fromkeys(("aime", "aime2024", "aime2025", "aime_2024", "aime_2025"), "math"),
    **dict.fromkeys(("numina_aops_forum", "numina_synthetic_math", "numina_amc_aime"), "math"),
    **dict.fromkeys(("numina_synthetic_amc", "numina_cn_k12", "numina_olympiads"), "math"),
    **dict.fromkeys(("searchR1_nq", "searchR1_triviaqa", "searchR1_popqa"), "qa"),
    **dict.fromkeys(("searchR1_hotpotqa", "searchR1_2wikimultihopqa"), "qa"),
    **dict.fromkeys(("searchR1_musique", "searchR1_bamboogle"), "qa"),
}
"""Scorers by `data_source`, for those that verl itself scores by such rules."""

_HASHES = re.compile(r"\n####[ \t]*(\S[^\r\n]*)")
_ENCRYPTED = re.compile(r"[A-Za-z0-9+/]{40,}={0,2}")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")


def as_is(row: Row) -> Row:
    """Return a row whose columns are what they say."""
    return row


def gsm8k(row: Row) -> Row:
    """Find the number after the last "####" of the answer, without thousands commas."""
    numbers = _HASHES.findall(_text(row.get("answer")))
    return {**row, HASHES: _THOUSANDS.sub("", numbers[-1].strip())} if numbers else row


def math(row: Row) -> Row:
    """Find the last box of the solution, and the subject, which has two names."""
    columns = {BOX: boxed(_text(row.get("solution"))), SUBJECT: row.get("type", row.get("subject"))}
    return row | {name: value for name, value in columns.items() if value}


def verl(row: Row) -> Row:
    """Find the question among the messages of `prompt`, and the ground truth.

    Search-R1's is {"target": [...]}; other objects are not supported.
    """
    messages = _messages(row.get("prompt"))
    model = row.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, dict) else None
    if isinstance(truth, dict) and without_nulls(truth).keys() == {"target"}:
        truth = truth["target"]
    columns = {} if truth is None else {TRUTH: truth}
    return row | columns | _question(messages) | _system(messages)


def chat(row: Row) -> Row:
    """Find the last reply among `messages`, the question before it, and the reply's answer."""
    messages = _messages(row.get("messages"))
    replies = [
        (place, text)
        for place, (role, text) in enumerate(messages)
        if role == "assistant" and text is not None
    ]
    if not replies:
        return row | _question(messages) | _system(messages)
    place, reply = replies[-1]
    columns = {REPLY: reply, REPLY_ANSWER: _answer_of(reply)}
    return row | columns | _question(messages[:place]) | _system(messages)


def triviaqa(row: Row) -> Row:
    """Collect what TriviaQA accepts: the value, its aliases, and both in lower case."""
    answer = row.get("answer")
    if not isinstance(answer, dict):
        return row
    values = [answer.get("value"), *as_list(answer.get("aliases"))]
    values += as_list(answer.get("normalized_aliases"))
    texts = [text for text in values if isinstance(text, str) and text.strip()]
    return {**row, ALIASES: list(dict.fromkeys(texts))} if texts else row


def popqa(row: Row) -> Row:
    """Parse the list of PopQA's answers, which is JSON in a text."""
    possible = row.get("possible_answers")
    if isinstance(possible, str):
        try:
            possible = parse_json(possible, "possible_answers")
        except UserError:
            return row
    return {**row, POSSIBLE: possible} if isinstance(possible, list) else row


def browsecomp_plus(row: Row) -> Row:
    """Take the question of a row of BrowseComp-Plus as its authors' script decrypts it.

    Raises UserError for a row that is still encrypted.
    """
    query = row.get("query")
    if "query_id" not in row or not isinstance(query, str):
        return row
    if _ENCRYPTED.fullmatch(query):
        raise UserError(
            f"query {row['query_id']} is encrypted: decrypt the data set by the script of "
            "https://github.com/texttron/BrowseComp-Plus"
        )
    return {**row, QUERY: query}


def _answer_of(reply: str) -> str:
    answer = final_answer(reply)
    marked = marked_answer(answer)
    return answer if marked is None else marked


def _question(messages: list[tuple[str, str | None]]) -> Row:
    """Return the last question; no earlier one takes the place of one without a text."""
    questions = [text for role, text in messages if role == "user"]
    return {QUESTION: questions[-1]} if questions and questions[-1] is not None else {}


def _system(messages: list[tuple[str, str | None]]) -> Row:
    texts = [text for role, text in messages if role == "system" and text is not None]
    return {SYSTEM: texts} if texts else {}


def _messages(value: Any) -> list[tuple[str, str | None]]:
    """Return (role, text) of each message; None where its content is none."""
    entries = [entry for entry in as_list(value) if isinstance(entry, dict)]
    return [(str(entry.get("role")), _content(entry.get("content"))) for entry in entries]


def _content(value: Any) -> str | None:
    """Return the text of a message, whose parts are lines."""
    if not isinstance(value, list):
        return value if isinstance(value, str) else None
    parts = [part.get("text") if isinstance(part, dict) else part for part in value]
    texts = [text for text in parts if isinstance(text, str)]
    return "\n".join(texts) if texts and len(texts) == len(parts) else None


def as_list(value: Any) -> list[Any]:
    """Return a list as it is, and of anything else an empty one."""
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
