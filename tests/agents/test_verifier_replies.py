"""What verifiers really write, and what is read as their verdict; and what is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.agents.agentflow.replies import read_verdict
from flowtrain.records import Verdict

REPLIES = [
    (found["reply"], found["read"])
    for line in Path(__file__).with_name("replies.jsonl").read_text("utf-8").splitlines()
    if (found := json.loads(line))["role"] == "verifier"
]
"""What verifiers write, and the verdict that it states; None where it speaks of one."""


@pytest.mark.parametrize(("reply", "verdict"), REPLIES)
def test_a_verdict_is_read_where_one_is_stated(reply: str, verdict: str | None) -> None:
    assert read_verdict(reply)[0] == verdict
    if verdict:
        swapped = reply.replace("STOP", "@").replace("CONTINUE", "STOP").replace("@", "CONTINUE")
        swapped = swapped.replace("stop.", "continue.").replace('_signal": true', '_signal": false')
        assert read_verdict(swapped)[0] is Verdict.CONTINUE


def test_the_very_words_take_no_rule() -> None:
    assert read_verdict("Do not stop early.\nConclusion: STOP\n") == (Verdict.STOP, ())
    assert read_verdict("**Conclusion:** STOP") == (Verdict.STOP, ("label",))
    assert read_verdict("Conclusion: STOP</s>") == (Verdict.STOP, ("end_of_turn",))


@given(
    st.text(max_size=60)
    | st.lists(
        st.sampled_from([*(reply for reply, _ in REPLIES), "\n", "{", "Conclusion:", "\ud800"])
    ).map("".join),
    st.sampled_from(Verdict),
)
def test_the_last_line_counts_whatever_came_before(reasons: str, verdict: Verdict) -> None:
    assert read_verdict(reasons)[0] in (*Verdict, None)
    if "stop" not in reasons.casefold():
        assert read_verdict(reasons)[0] is not Verdict.STOP
    if "<" not in reasons:  # an end of turn
        assert read_verdict(f"{reasons}\nSo:\nConclusion: {verdict.value}")[0] is verdict
