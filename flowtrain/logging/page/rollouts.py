"""A logged rollout as shown on the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from flowtrain.logging.page.log import Place, is_right

LONGEST_TEXT = 20_000
"""Characters of a result or an answer; more are cut and counted."""
_UNSHOWN = ("prompt_ids", "verifier", "refiner")
"""Fields of a turn that the page has no room for."""
_LONGEST_OPEN, _CONTEXT = 32, 8
"""Tokens that are decoded together while their end is no character, and those of them that are kept
then: twice as many as a character has bytes."""
_CUT_OFF = ("length", "deadline")


def rollout_record(
    place: Place, record: Mapping[str, Any], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return a line of the log, with text for token ids and with what the page filters by."""
    group = f"{place.split}.{place.step}.{place.group_index}"
    turns: list[dict[str, Any]] = record["turns"]
    return _cut(record) | {
        "id": f"{group}.{place.member}",
        "group": group,
        "split": place.split,
        "seed": str(record["seed"]),  # 64 bits, of which a number in JavaScript holds 53
        "outcomes": _outcomes(place, record["truncated"], turns),
        "turns": [_turn_record(turn, tokenizer) for turn in turns],
    }


def _outcomes(place: Place, truncated: str, turns: list[dict[str, Any]]) -> list[str]:
    """List "right" or "wrong" first, then what went wrong on the way."""
    outcomes = {
        "unscored": place.reward is None,
        "right": is_right(place.reward),
        "wrong": place.reward is not None and not is_right(place.reward),
        "malformed": any(turn.get("problem") for turn in turns),
        "tool error": any(
            tool_call["is_error"] for turn in turns for tool_call in _tool_calls(turn)
        ),
        "truncated": bool(truncated) or any(turn["finish_reason"] in _CUT_OFF for turn in turns),
    }
    return [name for name, holds in outcomes.items() if holds]


def _tool_calls(turn: Mapping[str, Any]) -> list[dict[str, Any]]:
    return turn.get("tool_calls", [])  # logs of an early version have no such list


def _turn_record(turn: Mapping[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    fields = {key: value for key, value in turn.items() if key not in _UNSHOWN}
    fields["tool_calls"] = [_cut(tool_call) for tool_call in _tool_calls(turn)]
    texts = prompt = None
    if tokenizer is not None:
        texts = pieces(tokenizer, turn["response_ids"])
        prompt = text_of(tokenizer, turn["prompt_ids"]) if turn["num_prompt_tokens"] else None
    return _cut(fields) | {
        "num_new_tokens": len(turn["prompt_ids"]),
        "prompt": prompt,
        "texts": texts,
    }


def _cut(record: Mapping[str, Any]) -> dict[str, Any]:
    """Cut the texts of a record that are too long to show."""
    return {
        key: f"{value[:LONGEST_TEXT]} … ({len(value) - LONGEST_TEXT} more characters)"
        if isinstance(value, str) and len(value) > LONGEST_TEXT
        else value
        for key, value in record.items()
    }


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Decode ids, special tokens included."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds; "" for one that holds a part of a character, which the
    token that completes it shows.
    """
    texts: list[str] = []
    # Ids from `start` are decoded together, for what is before a token matters; all before `read`
    # are whole.
    start = read = num_shown = 0
    for index in range(len(ids)):
        text = text_of(tokenizer, ids[start : index + 1])
        # Only the last character may still change: the bytes that are there may be the start of
        # one.
        is_open = text.endswith("\ufffd") and index + 1 < len(ids)
        settled = text[:-1] if is_open else text
        texts.append(settled[num_shown:])
        num_shown = len(settled)
        if not is_open:
            start, read = max(start, read), index + 1
            num_shown = len(text_of(tokenizer, ids[start:read]))
        elif index - start > _LONGEST_OPEN:  # no character is as long: these bytes are no text
            start = index + 1 - _CONTEXT
            num_shown = max(0, len(text_of(tokenizer, ids[start : index + 1])) - 1)
    return texts
