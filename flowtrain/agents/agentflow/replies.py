"""Read what language models really write, where the exact form that a prompt asks for fails.

These rules are tried after the exact form, each at a time on what the one before left. A turn keeps
the names of the rules that it took to read it, and metrics count them
(`rescued_share/<module>/<rule>`). No rule guesses: a tool that is mentioned is not one that is
called.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flowtrain.records import Verdict
from flowtrain.tools import ToolCard
from flowtrain.utils.text import boxed, final_answer

_MAX_CHARS = 100_000
"""Characters of a reply, from its end, that the rules look at."""
_MAX_OBJECTS = 64
"""Opening braces, from the last on, at which a JSON object may begin."""
_END_OF_TURN = re.compile(
    r"<\|(?:im_end|im_start|eot_id|eom_id|end|endoftext|end_of_text)\|>|<end_of_turn>|</s>"
)
_MARKS = r"(?:[-*+•>]\s+|\(?\d{1,2}[.):]\s*|#{1,6}\s*)*[*_`\"']{0,3}"
"""List marks, numbers, heads and bold at the start of a line."""
_AFTER_LABEL = r"[*_`\"']{0,3}[ \t]*[:\uff1a][*_`]{0,2}[ \t]*(?:\n\s*)?"


def cut_end_of_turn(text: str) -> str:
    """Drop the tokens that end a turn, and what a model goes on to write after one."""
    return _END_OF_TURN.split(text.strip(), maxsplit=1)[0] if _END_OF_TURN.search(text) else text


def find_object(
    text: str, accepts: Callable[[Mapping[str, Any]], object], at_end: bool = False
) -> dict[str, Any] | None:
    """Find the last JSON object of a text that is accepted, in a fence, after prose or alone;
    `at_end`: only one with which the text ends.
    """
    decoder = json.JSONDecoder()
    starts = [match.start() for match in re.finditer(r"\{", text)]
    best: tuple[int, dict[str, Any]] | None = None
    for start in reversed(starts[-_MAX_OBJECTS:]):
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        # An object around the best one is more of what was meant; one before it is older.
        if at_end and end < len(text):
            continue
        if isinstance(value, dict) and accepts(value) and (best is None or end > best[0]):
            best = end, value
    return None if best is None else best[1]


# ---- the planner


_FIELDS = {
    "justification": "justification",
    "context": "context",
    "subgoal": "sub_goal",
    **dict.fromkeys(("toolname", "tool", "selectedtool"), "tool_name"),
}
_LABEL = r"(justification|context|sub\\?[-_ ]?goal|(?:selected\\?[-_ ])?tool(?:\\?[-_ ]?name)?)"
_LABEL_LINE = re.compile(rf"^[ \t]*{_MARKS}{_LABEL}{_AFTER_LABEL}", re.IGNORECASE | re.MULTILINE)
_HEAD_LINE = re.compile(
    rf"^[ \t]*(?:#{{1,6}}[ \t]*|\*\*){_LABEL}(?:\*\*)?[ \t]*\n\s*", re.IGNORECASE | re.MULTILINE
)


def _object_of_action(text: str) -> str:
    """Return the JSON object in a text whose keys are the fields, in their exact names."""

    def is_action(value: Mapping[str, Any]) -> bool:
        return {"sub_goal", "tool_name"} <= {_field(key) for key in value}

    action = find_object(text, is_action)
    fields = {field: value for key, value in (action or {}).items() if (field := _field(key))}
    return json.dumps(fields) if action else text


def _field(key: str) -> str:
    return _FIELDS.get(re.sub(r"[-_ \\]", "", key.casefold()), "")


def _plain_labels(text: str) -> str:
    """Write labels as the prompt does: without list marks, heads, bold or full-width colons."""

    def label(match: re.Match[str]) -> str:
        field = _field(match[1])
        return {"sub_goal": "Sub-Goal: ", "tool_name": "Tool Name: "}.get(field, f"{field}: ")

    return _HEAD_LINE.sub(label, _LABEL_LINE.sub(label, text))


PLAN_RULES: Mapping[str, Callable[[str], str]] = {
    "end_of_turn": cut_end_of_turn,
    "json": _object_of_action,
    "labels": _plain_labels,
}
"""How the text of an action is rewritten, in the order in which it is tried."""

_QUOTES = " \t*_`\"'\u201c\u201d\u2018\u2019\xab\xbb()[]<>"
_AFTER_NAME = re.compile(
    r"\s+[-\u2013\u2014(:,;]|[(,;:]|\.(?:\s|$)|\s+(?:tool|because|to|for|with|as)\b"
)
"""Text that may follow a tool's name on its line."""


def tool_of(field: str, names: Mapping[str, str]) -> str:
    """Return the tool that a field names, with marks around the name or text after it; "" for none.

    Args:
        names: the tools by their canonical spellings and those of their aliases (`canonical`).
    """
    line = next((line for line in field.split("\n") if line.strip(_QUOTES + ".:#-")), "")
    line = line.strip().lstrip("#-").strip()
    for text in (line, *(line[: match.start()] for match in _AFTER_NAME.finditer(line))):
        name = canonical(text.strip(_QUOTES + ".:!,;"))
        for candidate in (name, name.removesuffix("_tool"), f"{name}_tool"):
            if candidate in names:
                return names[candidate]
    return ""


def spellings(cards: Iterable[ToolCard]) -> dict[str, str]:
    """Return tools by the canonical spellings of their names and aliases."""
    return {canonical(name): card.name for card in cards for name in (*card.aliases, card.name)}


def canonical(name: str) -> str:
    r"""Return a tool's name without case, with one underscore for each run of spaces and such, and
    for the \_ of Markdown.
    """
    return re.sub(r"[\s_\-\\]+", "_", name.strip()).casefold()


# ---- the generator


_ESCAPED = re.compile(r"(?:&lt;|\\<|\uff1c)\s*(/?)\s*answer\s*(?:&gt;|\\>|>|\uff1e)", re.IGNORECASE)
_OPEN = re.compile(r"<answer>", re.IGNORECASE)
_HALF_CLOSED = re.compile(r"<(?:/(?:a(?:n(?:s(?:w(?:er?)?)?)?)?)?)?\s*\Z", re.IGNORECASE)
_ANSWER_LINE = re.compile(
    rf"^[ \t]*{_MARKS}(?:final[ \t]+)?answer{_AFTER_LABEL}(.+)$", re.IGNORECASE | re.MULTILINE
)


def find_answer(output: str) -> tuple[str, tuple[str, ...]]:
    """Return the answer that a text holds, and the rule that it took beyond `final_answer`."""
    exact = final_answer(output)
    if exact != output.strip():
        return exact, ()
    text = cut_end_of_turn(output[-_MAX_CHARS:])
    plain = _ESCAPED.sub(r"<\1answer>", text)
    tagged = final_answer(plain)
    *heads, tail = _OPEN.split(plain)
    lines = _ANSWER_LINE.findall(text)
    answers = {
        "escaped_tags": tagged if tagged != plain.strip() else "",
        "unclosed_tag": _HALF_CLOSED.sub("", tail) if heads else "",
        "label": lines[-1].strip().removesuffix("**").strip("`") if lines else "",
        "boxed": boxed(text) or "",
    }
    for rule, answer in answers.items():
        if answer.strip():
            return answer.strip(), (rule,)
    return exact, ()


# ---- the verifier


_MAX_VERDICT_CHARS = 20_000
"""Characters of a verifier's reply, from its end, that are looked at."""
_HEADING = (
    r"(?:so,? |thus,? |therefore,? )?(?:(?:my|the|final|overall) )*"
    r"(?:conclusion|determination|decision|verdict|recommendation|judge?ment|(?:stop )?signal)"
)
_BULLETS = r"(?:[-+\u2022] +|\(?[0-9]{1,2}[.):] *|#{1,6} *)*"
_AFTER_SENTENCE = r"(?:[^\"\u201c\u201d]*\w{4}[.!)] +)?"
_END = r"[\"'\u201d]?[.!]?"
_STATED = re.compile(
    rf"{_AFTER_SENTENCE}(?:{_BULLETS}{_HEADING} ?(?:is ?:?|[:-]) ?[\"'\u201c]?"
    rf"(?P<label>stop|continue)"
    rf"|(?:so,? |thus,? |therefore,? )?(?:I|we) (?:therefore )?conclude (?:with|by|that we "
    rf"(?:should|can|must)) (?-i:(?P<sentence>STOP|CONTINUE))(?: here| now)?"
    rf"|(?<![^\n]){_BULLETS}(?P<word>stop|continue)){_END}(?P<reason>[,;]? (?:because|since) .*)?",
    re.IGNORECASE,
)
_TAKES_BACK = re.compile(
    r"\?|n['\u2019]t\b|\b(?:not?|never|but|however|unless|if|until|although|though|wait|actually|"
    r"stop|continue|more|missing)\b",
    re.IGNORECASE,
)
_QUOTING = re.compile(
    r"\b(?:wrong|incorrect|example|e\.g|told|asked|would|could|if|when|never|not)\b[^.!?]*"
    r"(?::|\b(?:say|be|is|was|with|write|reply|like|to))$",
    re.IGNORECASE,
)
"""A line that the next one is quoted by, or that goes on in it."""
_LABEL_ALONE = re.compile(rf"^({_BULLETS}{_HEADING}) ?:?\n\s*", re.IGNORECASE | re.MULTILINE)
_BOXED = re.compile(r"\\f?boxed ?\{ ?(?:\\text\w* ?\{ ?)?(stop|continue)[ }]*\}", re.IGNORECASE)


def read_verdict(reply: str) -> tuple[Verdict | None, tuple[str, ...]]:
    """Read the verdict with which a reply ends, and the rules that it took; () for a last line that
    is exactly as the prompt asks.

    Else it ends with a JSON object that has "stop_signal" or a conclusion, or with a line of a
    known form that holds nothing beside the verdict but a reason: "**Final Determination:** STOP".
    A "stop" in any other sentence is none, nor are both verdicts one under the other. (AgentFlow's
    parser stops at any "stop" in the text, "do not stop yet" included.)
    """
    text = cut_end_of_turn(reply[-_MAX_VERDICT_CHARS:]).strip()
    rules = ("end_of_turn",) if text != reply[-_MAX_VERDICT_CHARS:].strip() else ()
    if value := find_object(text.rstrip("`\n. "), _signal, at_end=True):
        return _signal(value), (*rules, "json")
    lines = _plain_lines(text)
    while lines and _is_reason(lines[-1]):
        lines.pop()
    statements = [_verdict_in(line) for line in lines[-2:]]
    if not statements or statements[-1] is None:
        return None, ()
    verdict, rule = statements[-1]
    previous_line = lines[-2] if len(lines) > 1 else "."
    is_other = statements[0] is not None and statements[0][0] is not verdict
    # A sentence may end on a line of its own: "It is too early to\nstop."
    if (
        is_other
        or previous_line == "or"
        or _QUOTING.search(previous_line)
        or (rule == "word" and not re.search(r"[.!#]$", previous_line))
    ):
        return None, ()
    is_exact = text.rpartition("\n")[2].strip() == f"Conclusion: {verdict.value}"
    return verdict, rules if is_exact else (*rules, rule)


def _plain_lines(text: str) -> list[str]:
    """Return the lines that hold words, without bold, fences and boxes; a label with what it is
    the label of.
    """
    text = re.sub(r"[*_`]", "", text.replace("\uff1a", ":").replace("\u2014", "-"))
    text = _LABEL_ALONE.sub(r"\1: ", _BOXED.sub(r"verdict: \1", text))
    text = re.sub(r"(: ?)verdict: ", r"\1", text)
    lines = (re.sub(r"\s+", " ", line).strip() for line in text.split("\n"))
    return [line for line in lines if re.search(r"\w|\.\.", line)]


def _verdict_in(line: str) -> tuple[Verdict, str] | None:
    """Return the verdict that a line states, and the rule."""
    match = _STATED.fullmatch(line)
    if match is None or _TAKES_BACK.search(match["reason"] or ""):
        return None
    rule = next(rule for rule in ("label", "sentence", "word") if match[rule])
    return Verdict(match[rule].upper()), rule


def _is_reason(line: str) -> bool:
    """Return whether a line gives a reason and takes nothing back."""
    is_one = re.match(r"(?:because|since|reason(?:ing)?:|explanation:)", line, re.IGNORECASE)
    return bool(is_one) and not _TAKES_BACK.search(line)


def _signal(value: Mapping[str, Any]) -> Verdict | None:
    """Read the field of a JSON object that holds the verdict; None for none, or for two."""
    votes = set()
    for key, signal in value.items():
        name = re.sub(r"[-_ ]", "", key.casefold())
        if name in ("stopsignal", "stop") and isinstance(signal, bool):
            votes.add(Verdict.STOP if signal else Verdict.CONTINUE)
        if name in ("conclusion", "verdict", "decision", "determination", "finaldetermination"):
            votes |= {verdict for verdict in Verdict if verdict == str(signal).strip(" *.").upper()}
    return votes.pop() if len(votes) == 1 else None


RULES = (
    *(f"planner/{rule}" for rule in (*PLAN_RULES, "tool_name")),
    *(f"executor/{rule}" for rule in ("values", "quotes", "json", "arguments")),
    *(f"verifier/{rule}" for rule in ("end_of_turn", "json", "label", "sentence", "word")),
    *(f"generator/{rule}" for rule in ("escaped_tags", "unclosed_tag", "label", "boxed")),
)
"""All rules, as turns and rollouts keep them."""
