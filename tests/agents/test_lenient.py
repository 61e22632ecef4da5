"""What models really write, and what it is read as; and what means nothing."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.agents.agentflow.planner import NO_TOOL, parse_action, read_action
from flowtrain.agents.agentflow.replies import canonical, find_answer, read_verdict, tool_of
from flowtrain.records import Action

TOOLS = ("Search", "Python_Coder", "Base_Generator", "Web_Search")
NAMES = {canonical(name): name for name in TOOLS} | {
    canonical("Generalist_Solution_Generator"): "Base_Generator",
    canonical("Ground_Google_Search_Tool"): "Web_Search",
}
WANTED = Action("", "", "area of Chad", "Python_Coder")


def read(text: str) -> Action | None:
    return read_action(text, TOOLS, NAMES)[0]


# ---- the planner

PLANS = {
    "list marks and bold": "3.  **Sub-Goal:** area of Chad\n4.  **Tool Name:** Python_Coder",
    "dashes": "- Sub-Goal: area of Chad\n- Tool Name: Python_Coder",
    "bullets": "• Sub-Goal: area of Chad\n• Tool Name: Python_Coder",
    "numbers in brackets": "(3) Sub-Goal: area of Chad\n(4) Tool Name: Python_Coder",
    "heads": "### Sub-Goal: area of Chad\n### Tool Name: Python_Coder",
    "heads on lines of their own": "### Sub-Goal\narea of Chad\n\n### Tool Name\nPython_Coder",
    "heads with a colon": "### Sub-Goal:\narea of Chad\n\n### Tool Name:\nPython_Coder",
    "bold lines": "**Sub-Goal**\narea of Chad\n**Tool Name**\nPython_Coder",
    "a blank line after labels": "Sub-Goal:\n\narea of Chad\n\nTool Name:\n\nPython_Coder",
    "backticks": "Sub-Goal: area of Chad\nTool Name: `Python_Coder`",
    "bold backticks": "Sub-Goal: area of Chad\n**Tool Name:** **`Python_Coder`**",
    "quotes": 'Sub-Goal: area of Chad\nTool Name: "Python_Coder"',
    "brackets": "Sub-Goal: area of Chad\nTool Name: [Python_Coder]",
    "a period": "Sub-Goal: area of Chad\nTool Name: Python_Coder.",
    "a reason": "Sub-Goal: area of Chad\nTool Name: Python_Coder - it computes",
    "a reason in brackets": "Sub-Goal: area of Chad\nTool Name: Python_Coder (it computes)",
    "a sentence": "Sub-Goal: area of Chad\nTool Name: Python_Coder. It computes.",
    "because": "Sub-Goal: area of Chad\nTool Name: Python_Coder because it computes",
    "a next line": "Sub-Goal: area of Chad\nTool Name: Python_Coder\nIt computes.",
    "the word tool": "Sub-Goal: area of Chad\nTool Name: Python_Coder tool",
    "a suffix": "Sub-Goal: area of Chad\nTool Name: Python_Coder_Tool",
    "escapes": "Sub\\_Goal: area of Chad\nTool\\_Name: Python\\_Coder",
    "a space": "Sub Goal: area of Chad\nTool Name: Python_Coder",
    "one word": "Subgoal: area of Chad\nToolName: Python_Coder",
    "underscores": "Sub_Goal: area of Chad\nTool_Name: Python_Coder",
    "the label Tool": "Sub-Goal: area of Chad\nTool: Python_Coder",
    "full-width colons": "Sub-Goal\uff1aarea of Chad\nTool Name\uff1aPython_Coder",
    "an end of turn": "Sub-Goal: area of Chad\nTool Name: Python_Coder<|im_end|>",
    "another turn": "Sub-Goal: area of Chad\nTool Name: Python_Coder</s>\n\nTool Name: Search",
    "json in a fence": '```json\n{"sub_goal": "area of Chad", "tool_name": "Python_Coder"}\n```',
    "json after prose": 'So: {"sub_goal": "area of Chad", "tool_name": "Python_Coder"} it is.',
    "keys as labels": '{"Sub-Goal": "area of Chad", "Tool Name": "Python_Coder"}',
    "keys in one word": '{"subGoal": "area of Chad", "toolName": "Python_Coder"}',
    "a json of another kind before": '{"a": 1}{"sub_goal": "area of Chad", "tool": "Python_Coder"}',
    "a quote": "> Sub-Goal: area of Chad\n> Tool Name: Python_Coder",
}


@pytest.mark.parametrize("text", PLANS.values(), ids=PLANS)
def test_an_action_in_another_form_is_read(text: str) -> None:
    assert read(text) == WANTED
    assert read_action(text, TOOLS, NAMES)[1]


def test_fields_keep_their_text() -> None:
    text = (
        "1. **Justification:** it is *stated*\n2. **Context:** a: 1\n   b: 2\n"
        "3. **Sub-Goal:** x: y\n4. **Tool Name:** Search"
    )
    action = read(text)
    assert (action.justification, action.sub_goal) == ("it is *stated*", "x: y")
    assert action.context.split() == ["a:", "1", "b:", "2"]


@pytest.mark.parametrize(
    ("name", "tool"),
    [
        ("Generalist_Solution_Generator_Tool", "Base_Generator"),
        ("Ground_Google_Search_Tool", "Web_Search"),
        ("Ground Google Search", "Web_Search"),
    ],
)
def test_names_of_agentflow_are_known(name: str, tool: str) -> None:
    assert tool_of(name, NAMES) == tool


@pytest.mark.parametrize(
    "text",
    [
        *("I would use the Python_Coder tool.", "Sub-Goal: area of Chad"),
        *("Sub-Goal: area of Chad\nTool Name:", "Sub-Goal:\nTool Name: Search"),
        *("Tool Name: Search\nSub-Goal: area of Chad", '{"sub_goal": "area of Chad"}'),
        *("Use a tool: Search", ""),
    ],
)
def test_what_names_no_action_stays_malformed(text: str) -> None:
    assert read(text) is None


@pytest.mark.parametrize("name", ["None", "not Search", "Searching", "Calculator", "Search_Engine"])
def test_a_tool_that_is_none_stays_none(name: str) -> None:
    action = read(f"Sub-Goal: area of Chad\nTool Name: {name}")
    assert action is not None and action.tool_name == NO_TOOL + name


def test_the_exact_form_takes_no_rule() -> None:
    for text in (
        "Sub-Goal: area of Chad\nTool Name: Python_Coder",
        '{"sub_goal": "area of Chad", "tool_name": "Python_Coder"}',
    ):
        assert read_action(text, TOOLS, NAMES) == (WANTED, ())


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from([*PLANS.values(), "\n", "Sub-Goal: ", "**", "{", "Tool Name: Search"]))
    | st.lists(st.text(max_size=30))
)
def test_what_is_accepted_reads_the_same_when_it_is_written(pieces: list[str]) -> None:
    action = read("".join(pieces))
    if action is None:
        return
    assert "\n\n" in action.tool_name or action.sub_goal.strip()
    fields = {"justification": action.justification, "context": action.context}
    fields |= {"sub_goal": action.sub_goal, "tool_name": action.tool_name.removeprefix(NO_TOOL)}
    assert parse_action(json.dumps(fields), TOOLS) == action


# ---- the generator

ANSWERS = {
    "<answer>27</answer>": ("27", ()),
    "<answer>27": ("27", ("unclosed_tag",)),
    "So <answer> 27 </answe": ("27", ("unclosed_tag",)),
    "<answer>27<|im_end|>": ("27", ("unclosed_tag",)),
    "&lt;answer&gt;27&lt;/answer&gt;": ("27", ("escaped_tags",)),
    "\\<answer\\>27\\</answer\\>": ("27", ("escaped_tags",)),
    "1. Summary: two steps.\n2. **Answer:** 27": ("27", ("label",)),
    "**Answer:** 27 without tags": ("27 without tags", ("label",)),
    "Summary.\n### Final Answer\n\n27": ("Summary.\n### Final Answer\n\n27", ()),
    "Final Answer:\n27": ("27", ("label",)),
    "It is \\boxed{27}.": ("27", ("boxed",)),
    "It is 27.": ("It is 27.", ()),
    "The answer: it depends. No label at the start.": (
        "The answer: it depends. No label at the start.",
        (),
    ),
}


@pytest.mark.parametrize("output", ANSWERS)
def test_an_answer_in_another_form_is_read(output: str) -> None:
    assert find_answer(output) == ANSWERS[output]


@settings(max_examples=300)
@given(st.text(max_size=60) | st.lists(st.sampled_from(list(ANSWERS))).map("".join))
def test_an_answer_reads_the_same_in_its_tags(output: str) -> None:
    answer, _ = find_answer(output)
    if "answer" not in answer.casefold():
        assert find_answer(f"<answer>{answer}</answer>") == (answer.strip(), ())


@pytest.mark.clock
@pytest.mark.parametrize(
    "text",
    ["{" * 50_000, "**Sub-Goal:" * 5_000, "- " * 50_000, "\\boxed{" * 10_000, "(" * 100_000,
     "Conclusion" + " \\text" * 20_000, "<answer>" * 10_000, "&lt;answer" * 10_000, "\n" * 100_000,
     '{"sub_goal": ' * 10_000, "1. " * 40_000, "> " * 40_000 + "Tool Name"],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_hostile_texts_take_no_time(text: str) -> None:
    started = time.process_time()
    for parse in (read, read_verdict, find_answer):
        parse(text)
    assert time.process_time() - started < 3.0
