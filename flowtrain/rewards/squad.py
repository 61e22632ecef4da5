"""Exact match and token F1 of short answers, after SQuAD (Rajpurkar et al. 2016): the rules that
reward, which correct its mistakes, and the metrics as papers publish them.
"""

from __future__ import annotations

import re
import string
from collections import Counter

from flowtrain.records import Task
from flowtrain.rewards.normal import normalise
from flowtrain.rewards.short_answer import plain, same

ANSWER_SCORERS = ("exact", "qa", "f1")
"""Scorers of short answers, which the metrics are for."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(task: Task, answer: str) -> float:
    """Return 1.0 when the answer says what an accepted one says, else 0.0.

    "Yes, both were." counts as yes.
    """
    return float(any(same(answer, accepted) for accepted in task.answers))


def token_f1(task: Task, answer: str) -> float:
    """Return the best F1 between the tokens of the answer and those of an accepted one.

    F1 with yes or no is 0 unless the two are equal.
    """
    text = normalise(plain(answer))
    return max((_f1(text, normalise(plain(accepted))) for accepted in task.answers), default=0.0)


def published_metrics(task: Task, answer: str) -> dict[str, float]:
    """Compute exact match ("em") and token F1 ("f1") by SQuAD's own normalisation, which drops
    case, ASCII punctuation and articles: 10.8 is 108, and "Yes, both" is not yes.

    The best over the accepted answers counts. As in HotpotQA's script, F1 is 0 beside a yes or no
    that differs. An answer of which nothing is left gets 0. Returns {} for tasks whose answers are
    not short texts.
    """
    if task.scorer not in ANSWER_SCORERS:
        return {}
    text = _published(answer)
    if not text:
        return {"em": 0.0, "f1": 0.0}
    accepted = [_published(reference) for reference in task.answers]
    return {
        "em": float(text in accepted),
        "f1": max((_f1(text, reference) for reference in accepted), default=0.0),
    }


def _published(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def _f1(answer: str, accepted: str) -> float:
    if answer == accepted:
        return 1.0
    if {answer, accepted} & {"yes", "no"}:
        return 0.0
    words = Counter(answer.split())
    gold_words = Counter(accepted.split())
    num_same = (words & gold_words).total()
    return 2 * num_same / (words.total() + gold_words.total())
