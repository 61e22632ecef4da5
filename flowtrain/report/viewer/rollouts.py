"""One logged rollout as the page shows it. Logs of earlier versions lack some of its fields; what
is missing is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from flowtrain.agents.planner import NO_TOOL
from flowtrain.report.viewer.detokenize import pieces, text_of
from flowtrain.report.viewer.log import Place, is_right

LONGEST_TEXT = 20_000
"""Characters of a result or an answer; more are cut and counted."""
_CUT_OFF = ("length", "deadline")


def rollout_record(
    place: Place, record: Mapping[str, Any], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """A line of the log, with text for token ids and with what the page filters by."""
    group = f"{place.split}.{place.step}.{place.group_index}"
    logged: list[dict[str, Any]] = record.get("turns") or []
    return {
        "id": f"{group}.{place.member}",
        "group": group,
        "split": place.split,
        "step": place.step,
        "task": record.get("task_id"),
        "kind": record.get("kind") or "",
        "question": record.get("question"),
        "answers": record.get("answers") or [],
        "scorer": record.get("scorer"),
        "answer": _cut(record.get("answer")),
        "reward": place.reward,
        "scored_by": record.get("scored_by"),
        "analysis": _cut(record.get("analysis")),
        "error": _cut(record.get("error")),
        "truncated": record.get("truncated") or "",
        "branch": record.get("branch"),
        "seconds": record.get("seconds"),
        "seed": str(record.get("seed")),  # 64 bits, of which a number in JavaScript holds 53
        "outcomes": _outcomes(place, record.get("truncated"), logged),
        "turns": _turn_records(logged, tokenizer),
    }


def _outcomes(place: Place, truncated: str | None, turns: list[dict[str, Any]]) -> list[str]:
    """ "right" or "wrong" first; then what went wrong on the way."""
    malformed = [
        turn.get("action") is None or turn["action"]["tool_name"].startswith(NO_TOOL)
        for turn in turns
    ]
    found = {
        "unscored": place.reward is None,
        "right": is_right(place.reward),
        "wrong": place.reward is not None and not is_right(place.reward),
        "malformed": any(malformed),
        "tool error": any(
            turn.get("is_error") and not bad for turn, bad in zip(turns, malformed, strict=True)
        ),
        "truncated": bool(truncated)
        or any(turn.get("finish_reason") in _CUT_OFF for turn in turns),
    }
    return [name for name, holds in found.items() if holds]


def _turn_records(turns: list[dict[str, Any]], tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    records = []
    prompt_ids: list[int] = []
    for turn in turns:
        num_shared = turn.get("prompt_shared", 0)
        prompt_ids = [*prompt_ids[:num_shared], *turn.get("prompt_ids", ())]
        prompt = text_of(tokenizer, prompt_ids) if tokenizer is not None and prompt_ids else None
        kept = (
            _common_start(prompt, text_of(tokenizer, prompt_ids[:num_shared]))
            if tokenizer is not None and prompt
            else ""
        )
        records.append(
            _turn_record(turn, tokenizer)
            | {"prompt_kept": _num_utf16(kept), "prompt": prompt and prompt[len(kept) :]}
        )
    return records


def _turn_record(turn: Mapping[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    ids = turn.get("response_ids") or []
    return {
        "num_prompt_tokens": turn.get("num_prompt_tokens"),
        "num_new_tokens": len(turn["prompt_ids"]) if "prompt_ids" in turn else None,
        "response": turn.get("response_text"),
        "action": turn.get("action"),
        "command": _cut(turn.get("command")),
        "result": _cut(turn.get("result")),
        "is_error": bool(turn.get("is_error")),
        "verdict": turn.get("verdict"),
        "verdict_text": _cut(turn.get("verdict_text")),
        "finish": turn.get("finish_reason"),
        "spans": turn.get("spans") or [],
        "ids": ids,
        "texts": None if tokenizer is None else pieces(tokenizer, ids),
        "logprobs": turn.get("response_logprobs") or [],
        "training": turn.get("training"),
        "seconds": turn.get("seconds"),
        "plan_s": turn.get("plan_s"),
        "tool_s": turn.get("tool_s"),
    }


def _common_start(text: str, start: str) -> str:
    """`start`, less what at its end is no character yet: a token may hold the first byte of one."""
    start = start.rstrip("\ufffd")
    while not text.startswith(start):
        start = start[:-1]
    return start


def _cut(text: str | None) -> str | None:
    if text is None or len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:LONGEST_TEXT]} … ({len(text) - LONGEST_TEXT} more characters)"


def _num_utf16(text: str) -> int:
    """Length as JavaScript counts it."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2
