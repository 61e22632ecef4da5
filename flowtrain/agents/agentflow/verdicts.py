"""Prompts of the verifier, and the reader of its replies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from flowtrain.agents.agentflow.lenient import cut_end_of_turn, find_object
from flowtrain.agents.agentflow.prompts import analysis_text, compact_steps, memory_json, tools_text
from flowtrain.agents.policy import Moment
from flowtrain.records import Verdict
from flowtrain.tools import Tool

_MAX_CHARS = 20_000
"""Characters of a reply, from its end, that are looked at."""


class CompactVerdictPrompt:
    """A prompt for a tiny verifier:

    Question: What is the area of Chad plus the area of Mali?
    1. Search | area of Chad | The area of Chad is 1284.
    Conclusion:
    """

    prefix, is_message = "Conclusion:", False

    def render(self, moment: Moment) -> str:
        steps = compact_steps(moment.memory)
        return "\n".join([f"Question: {moment.task.prompt}", *steps, self.prefix])

    def write(self, verdict: Verdict) -> str:
        return f" {verdict.value}"


class FullVerdictPrompt:
    """The prompt of a language model as verifier."""

    prefix, is_message = "", True

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._tools = tools_text(tools)

    def render(self, moment: Moment) -> str:
        return PROMPT.format(
            question=moment.task.prompt,
            analysis=analysis_text(moment.memory),
            tools=self._tools,
            memory=memory_json(moment.memory),
        )

    def write(self, verdict: Verdict) -> str:
        return f"Conclusion: {verdict.value}"


_LABEL = (
    r"(?:so,? |thus,? |therefore,? )?(?:(?:my|the|final|overall) )*"
    r"(?:conclusion|determination|decision|verdict|recommendation|judge?ment|(?:stop )?signal)"
)
_MARKS = r"(?:[-+\u2022] +|\(?[0-9]{1,2}[.):] *|#{1,6} *)*"
_AFTER_SENTENCE = r"(?:[^\"\u201c\u201d]*\w{4}[.!)] +)?"
_END = r"[\"'\u201d]?[.!]?"
_STATED = re.compile(
    rf"{_AFTER_SENTENCE}(?:{_MARKS}{_LABEL} ?(?:is ?:?|[:-]) ?[\"'\u201c]?(?P<label>stop|continue)"
    rf"|(?:so,? |thus,? |therefore,? )?(?:I|we) (?:therefore )?conclude (?:with|by|that we "
    rf"(?:should|can|must)) (?-i:(?P<sentence>STOP|CONTINUE))(?: here| now)?"
    rf"|(?<![^\n]){_MARKS}(?P<word>stop|continue)){_END}(?P<reason>[,;]? (?:because|since) .*)?",
    re.IGNORECASE,
)
_TAKES_BACK = re.compile(
    r"\?|n['\u2019]t\b|\b(?:not?|never|but|however|unless|if|until|although|though|wait|actually|"
    r"stop|continue|more|missing)\b",
    re.IGNORECASE,
)
_QUOTES = re.compile(
    r"\b(?:wrong|incorrect|example|e\.g|told|asked|would|could|if|when|never|not)\b[^.!?]*"
    r"(?::|\b(?:say|be|is|was|with|write|reply|like|to))$",
    re.IGNORECASE,
)
"""A line that the next one is quoted by, or that goes on in it."""
_LABEL_ALONE = re.compile(rf"^({_MARKS}{_LABEL}) ?:?\n\s*", re.IGNORECASE | re.MULTILINE)
_BOXED = re.compile(r"\\f?boxed ?\{ ?(?:\\text\w* ?\{ ?)?(stop|continue)[ }]*\}", re.IGNORECASE)


def read_verdict(reply: str) -> tuple[Verdict | None, tuple[str, ...]]:
    """Read the verdict with which a reply ends, and the rules that it took; () for a last line that
    is exactly as the prompt asks.

    Else it ends with a JSON object that has "stop_signal" or a conclusion, or with a line of a
    known form that holds nothing beside the verdict but a reason: "**Final Determination:** STOP".
    A "stop" in any other sentence is none, nor are both verdicts one under the other. (AgentFlow's
    parser stops at any "stop" in the text, "do not stop yet" included.)
    """
    text = cut_end_of_turn(reply[-_MAX_CHARS:]).strip()
    rules = ("end_of_turn",) if text != reply[-_MAX_CHARS:].strip() else ()
    if found := find_object(text.rstrip("`\n. "), _signal, at_end=True):
        return _signal(found), (*rules, "json")
    lines = _plain_lines(text)
    while lines and _is_reason(lines[-1]):
        lines.pop()
    stated = [_stated(line) for line in lines[-2:]]
    if not stated or stated[-1] is None:
        return None, ()
    verdict, rule = stated[-1]
    before = lines[-2] if len(lines) > 1 else "."
    is_other = stated[0] is not None and stated[0][0] is not verdict
    # A sentence may end on a line of its own: "It is too early to\nstop."
    if (
        is_other
        or before == "or"
        or _QUOTES.search(before)
        or (rule == "word" and not re.search(r"[.!#]$", before))
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


def _stated(line: str) -> tuple[Verdict, str] | None:
    """Return the verdict that a line states, and the rule."""
    found = _STATED.fullmatch(line)
    if found is None or _TAKES_BACK.search(found["reason"] or ""):
        return None
    rule = next(rule for rule in ("label", "sentence", "word") if found[rule])
    return Verdict(found[rule].upper()), rule


def _is_reason(line: str) -> bool:
    """Return whether a line gives a reason and takes nothing back."""
    is_one = re.match(r"(?:because|since|reason(?:ing)?:|explanation:)", line, re.IGNORECASE)
    return bool(is_one) and not _TAKES_BACK.search(line)


def _signal(value: Mapping[str, Any]) -> Verdict | None:
    """Read the field of a JSON object that holds the verdict; None for none, or for two."""
    found = set()
    for key, signal in value.items():
        name = re.sub(r"[-_ ]", "", key.casefold())
        if name in ("stopsignal", "stop") and isinstance(signal, bool):
            found.add(Verdict.STOP if signal else Verdict.CONTINUE)
        if name in ("conclusion", "verdict", "decision", "determination", "finaldetermination"):
            found |= {verdict for verdict in Verdict if verdict == str(signal).strip(" *.").upper()}
    return found.pop() if len(found) == 1 else None


PROMPT = """You check whether a question can be answered with what a team has found so far.

Question: {question}
{analysis}
Tools that the team could still use:
{tools}

Steps so far:
{memory}

Judge what the results say, not what they were meant to say. Check in this order:
1. Completeness: is every part of the question covered by a result?
2. Consistency: do the results contradict each other or the question?
3. Verification: is a result an error, a guess, or in need of a check by another tool?
4. Ambiguity: is anything left open that one more step could settle?

Give your reasons briefly. Then end with exactly one of these two lines:
Conclusion: STOP
Conclusion: CONTINUE

STOP when the answer can be written now; CONTINUE when another step is needed."""
