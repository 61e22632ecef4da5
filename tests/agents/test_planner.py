"""The planner's prompts, its four fields, and every way a model can get them wrong."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from char_tokenizer import ChatChars, says
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from make import Engine
from toy_options import toy

from flowtrain.agents.agentflow.build import make_planner, make_policy
from flowtrain.agents.agentflow.memory import Memory, MemoryEntry
from flowtrain.agents.agentflow.planner import NO_TOOL, ModelPlanner, match_tool, parse_action
from flowtrain.agents.agentflow.prompts import CompactPrompt, FullPrompt, PlannerPrompt
from flowtrain.agents.policy import Moment, Policy, PromptTooLong
from flowtrain.records import Action, PlanStep, Sampling, Task, VersionSpan
from flowtrain.tools.base_generator import GuessGenerator
from flowtrain.tools.search import Search

TOOLS = ("Search", "Python_Coder", "Base_Generator")
FOUR_FIELDS = (
    "Justification: it is stated\nContext: it is Chad\nSub-Goal: area of Chad\nTool Name: Search"
)


def parse(text: str) -> Action | None:
    return parse_action(text, TOOLS)


# ---- the contract of the answer


SEARCH = Action("", "", "area of Chad", "Search")


@pytest.mark.parametrize(
    ("text", "action"),
    [
        # Four labelled fields in order, or the same as JSON.
        (FOUR_FIELDS, replace(SEARCH, justification="it is stated", context="it is Chad")),
        (
            '{"justification": "j", "context": " c ", "sub_goal": "x", "tool_name": "search"}',
            Action("j", "c", "x", "Search"),
        ),
        (
            '{"sub_goal": 12, "tool_name": "Python_Coder", "context": null, "more": 1}',
            Action("", "", "12", "Python_Coder"),
        ),
        # Bold marks, case and spaces around labels do not matter.
        ("**Sub-Goal:** area of Chad\n**Tool Name**: **Search**", SEARCH),
        ("sub-goal : area of Chad\nTOOL NAME\t: Search", SEARCH),
        # The last answer of several counts, and the fields nearest to the last tool name.
        (
            f"{FOUR_FIELDS}\n\nOn second thought:\nSub-Goal: capital\nTool Name: Base_Generator",
            Action("", "", "capital", "Base_Generator"),
        ),
        (
            "Context: old\nSub-Goal: first\nContext: new\nSub-Goal: second\nTool Name: Search",
            Action("", "new", "second", "Search"),
        ),
        ("Sub-Goal: a\nSub-Goal: b\nTool Name: Search", Action("", "", "b", "Search")),
        # A field out of order is not read.
        ("Tool Name: Search\nSub-Goal: area of Chad", None),
        (
            "Context: c\nJustification: j\nSub-Goal: s\nTool Name: Search",
            Action("j", "", "s", "Search"),
        ),
        # Without sub-goal or tool it is malformed.
        *(
            (text, None)
            for text in (
                *("", "I would look the area up.", "Sub-Goal: area of Chad", "Tool Name: Search"),
                *("Sub-Goal:\nTool Name: Search", "Sub-Goal: area of Chad\nTool Name:"),
                *("Sub-Goal: area\nTool Name: \n\nSearch", "Sub-Goal: area of Chad Search"),
                *('{"sub_goal": "", "tool_name": "Search"}', '["sub_goal", "tool_name"]'),
                *('{"sub_goal": "x", "tool_name": null}', '"Search"'),
            )
        ),
    ],
)
def test_the_contract_of_the_answer(text: str, action: Action | None) -> None:
    assert parse(text) == action


@pytest.mark.parametrize(
    "name",
    [
        *("Python_Coder", "python_coder", "PYTHON CODER", "Python   Coder", "Python-Coder"),
        *("python_ _coder", " Python_Coder "),
    ],
)
def test_tool_name_matching_ignores_case_and_spaces(name: str) -> None:
    assert match_tool(name, TOOLS) == "Python_Coder"
    assert parse(f"Sub-Goal: 1 + 1\nTool Name: {name}") == Action("", "", "1 + 1", "Python_Coder")


@pytest.mark.parametrize("name", ["Calculator", "PythonCoder", "Search Base_Generator", "Search."])
def test_a_tool_that_does_not_exist_keeps_the_turn(name: str) -> None:
    found = parse(f"Sub-Goal: 1 + 1\nTool Name: {name}")
    assert found == Action("", "", "1 + 1", f"No matched tool given: {name}")


def test_a_tool_that_is_not_in_this_toolset_is_no_tool() -> None:
    action = parse_action("Sub-Goal: 1 + 1\nTool Name: Python_Coder", ("Search",))
    assert action is not None and action.tool_name == NO_TOOL + "Python_Coder"


@pytest.mark.parametrize(
    "rest", ["\n\nThis will find it.", "\n \t\nSub goals are done.", "\n```\nthe end", "```"]
)
def test_what_follows_the_tool_name_is_ignored(rest: str) -> None:
    assert parse(FOUR_FIELDS + rest) == parse(FOUR_FIELDS)


def test_lone_surrogate_in_json_is_replaced() -> None:
    action = parse('{"sub_goal": "area \\ud800 of Chad", "tool_name": "\\udfff"}')
    (action.sub_goal + action.tool_name).encode()


# ---- any text at all

PIECES = st.sampled_from(
    [
        *("Justification:", "Context:", "Sub-Goal:", "Tool Name:", "tool name :", "**", "\n"),
        *("\n\n", "```", " ", '{"sub_goal":', '"tool_name":', '"x"', '"\\ud800"', "{", "}", "["),
        *("]", ",", "1e999", "null"),
        *("Search", "python coder", "\ud800", "\x00", "\u2028", "\u0130"),
    ]
)
ANY_TEXT = st.one_of(st.lists(PIECES, max_size=30).map("".join), st.text(st.characters()))


def check_action(action: Action | None) -> None:
    if action is not None:
        assert action.sub_goal and action.tool_name
        assert action.tool_name in TOOLS or action.tool_name.startswith(NO_TOOL)
        assert all(
            text == text.strip() for text in (action.justification, action.context, action.sub_goal)
        )


@settings(max_examples=500)
@given(ANY_TEXT)
def test_no_text_raises(text: str) -> None:
    check_action(parse(text))
    check_action(parse(CompactPrompt.prefix + text))


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers()
    | st.text(st.characters())
    | st.just("\udfff"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=10,
)


@settings(max_examples=300)
@given(
    st.dictionaries(
        st.sampled_from(["justification", "context", "sub_goal", "tool_name", "other"]), JSON_VALUES
    )
)
def test_no_json_object_raises(fields: dict[str, object]) -> None:
    action = parse(json.dumps(fields))
    check_action(action)
    if action is not None:
        f"{action.justification}{action.context}{action.sub_goal}{action.tool_name}".encode()


@pytest.mark.parametrize("depths", [range(150, 900, 17), range(900, 1010), [100_000]])
def test_json_nested_to_any_depth_does_not_raise(depths: Sequence[int]) -> None:
    for depth in depths:
        check_action(
            parse('{"tool_name": "Search", "sub_goal": ' + "[" * depth + "]" * depth + "}")
        )
        check_action(parse('{"sub_goal": ' * depth + '"x"' + "}" * depth))


@pytest.mark.clock
@pytest.mark.parametrize(
    "unit",
    [
        *("Tool Name: ", "Sub-Goal: x\n", "Sub-Goal: x Tool Name: y ", "context ", "Context: \t"),
        *("context sub-goal tool name:", "*", "**", "\n", "\n ", " \n\t", "`", "_ ", '"', "\\"),
        *("\\ud800", "9", "[", '{"a":', '{"sub_goal": "x", '),
    ],
)
def test_parsing_takes_linear_time(unit: str) -> None:
    """200 kB of anything are read in well under a second; what is quadratic takes minutes."""
    filler = unit * (200_000 // len(unit))
    for text in (
        filler,
        f"Sub-Goal: x\nTool Name: {filler}",
        filler + "\nSub-Goal: x\nTool Name: Search",
        f'{{"sub_goal": "{filler}',
    ):
        started = time.process_time()
        parse(text)
        assert time.process_time() - started < 5


# ---- writing and reading back

LABEL_WORDS = ("justification", "context", "sub-goal", "tool name", "**", "```")
LINES = (
    st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\u2028\u2029"))
    .map(str.strip)
    .filter(lambda text: not any(word in text.casefold() for word in LABEL_WORDS))
)


@settings(max_examples=200)
@given(LINES, LINES, LINES, st.sampled_from(TOOLS))
def test_what_a_prompt_writes_it_reads_back(
    justification: str, context: str, sub_goal: str, tool_name: str
) -> None:
    assume(sub_goal)
    full = FullPrompt([])
    action = Action(justification, context, sub_goal, tool_name)
    assert parse(full.prefix + full.write(action)) == action
    compact = CompactPrompt()
    assert parse(compact.prefix + compact.write(action)) == Action("", "", sub_goal, tool_name)


# ---- what is read

TASK = Task(
    "t", "What is the area of Chad?", ("secret answer",), plan=(PlanStep("secret plan", "Search"),)
)
ODD = Task("o", "What is {x} of Chad?", ())
STEPS = (
    MemoryEntry(
        "Search",
        "area of Chad",
        'execution = tool.execute(query="area of Chad")',
        "The area of Chad is 1284.",
    ),
    MemoryEntry("None", "None", "No command was run.", "Error: the action was malformed"),
)


def test_the_compact_prompt_ends_with_the_field_that_matters() -> None:
    text = CompactPrompt().render(Moment(TASK, Memory(STEPS)))
    assert text == (
        "Question: What is the area of Chad?\n"
        "1. Search | area of Chad | The area of Chad is 1284.\n"
        "2. None | None | Error: the action was malformed\n"
        "Sub-Goal:"
    )


def test_full_prompt_has_question_tools_rules_and_memory() -> None:
    search, guesses = Search(["Paris lies in France."]), GuessGenerator(["7"])
    text = FullPrompt([search, guesses]).render(Moment(ODD, Memory(STEPS)))
    for part in (
        "Question: What is {x} of Chad?",
        f"- Search: {search.card.description}",
        f"- Base_Generator: {guesses.card.description}",
    ):
        assert part in text
    places = [
        text.index(f"\n{label}: ")
        for label in ("Justification", "Context", "Sub-Goal", "Tool Name")
    ]
    assert places == sorted(places)
    memory = json.loads(text[text.index("Steps so far:\n") + len("Steps so far:\n") :])
    assert memory == Memory(STEPS).as_dict()


@pytest.mark.parametrize("prompt", [CompactPrompt(), FullPrompt([])])
def test_the_prompts_of_a_rollout_share_all_but_the_new_step(prompt: PlannerPrompt) -> None:
    """Prefix caches and prefix trees live on it."""
    first, second = (prompt.render(Moment(TASK, Memory(STEPS[:n]))) for n in (1, 2))
    end = first.index("The area of Chad is 1284.") + len("The area of Chad is 1284.")
    assert second[:end] == first[:end]


# ---- the policy's planner


def policy(engine: Engine, **changes: object) -> ModelPlanner:
    fields = {"max_new_tokens": 40, "temperature": 0.7, "request_timeout_s": 9.0, **changes}
    return ModelPlanner(Policy(engine, ChatChars(), **fields), CompactPrompt(), TOOLS)


def test_policy_sampling_uses_seed_temperature_and_nearer_deadline() -> None:
    engine = says(" area of Chad\nTool Name: Search")
    planner = policy(engine)
    asyncio.run(planner.plan(TASK, Memory(), turn=2, seed=5, deadline_s=4.0))
    asyncio.run(planner.plan(TASK, Memory(), turn=3, seed=5, deadline_s=400.0))
    (_, first), (_, second) = engine.asked
    assert first == Sampling(40, 0.7, seed=5563070869940574692, deadline_s=4.0)
    assert second == Sampling(40, 0.7, seed=7210489393075174917, deadline_s=9.0)


def test_the_policy_is_asked_for_what_the_config_keeps() -> None:
    engine, config = says(""), toy({"rollout": {"top_k": 20, "top_p": 0.8}})
    asyncio.run(
        make_planner(config, make_policy(config, "planner", engine, ChatChars(), 0.7), {}).plan(
            TASK, Memory(), 0, 0, 5.0
        )
    )
    ((_, sampling),) = engine.asked
    expected = (20, 0.8, 0.7, True)
    assert (sampling.top_k, sampling.top_p, sampling.temperature, sampling.is_truncated) == expected


def test_top_p_alone_is_bounded_by_its_cap() -> None:
    rollout = {"top_p": 0.99, "frequency_penalty": 1.2}
    config = toy({"rollout": rollout, "train": {"rescore": True}})
    planner = make_policy(config, "planner", says(""), ChatChars())
    assert (planner.top_k, planner.top_p, planner.frequency_penalty) == (128, 0.99, 1.2)
    verifier = make_policy(config, "verifier", says(""), ChatChars())
    assert (verifier.top_k, verifier.top_p, verifier.frequency_penalty) == (128, 0.99, 1.2)


def test_a_plan_carries_the_very_tokens_and_the_parsed_action() -> None:
    line = " area of Chad\nTool Name: search"
    engine = says(line)
    plan = asyncio.run(policy(engine).plan(TASK, Memory(STEPS), 0, 0, 5.0))
    assert (
        plan.call.prompt_ids
        == tuple(map(ord, engine.asked[0][0]))
        == tuple(map(ord, CompactPrompt().render(Moment(TASK, Memory(STEPS)))))
    )
    assert plan.call.response_ids == tuple(map(ord, line))
    assert plan.call.spans == (VersionSpan(0, len(line), 7),)
    assert (plan.call.text, plan.action) == (line, Action("", "", "area of Chad", "Search"))


def test_the_policy_sees_neither_answers_nor_plan() -> None:
    engine = says("")
    plan = asyncio.run(policy(engine).plan(TASK, Memory(), 0, 0, 5.0))
    assert plan.action is None
    assert "secret" not in engine.asked[0][0]


def test_a_prompt_that_leaves_no_room_for_the_answer_is_too_long() -> None:
    num_prompt = len(CompactPrompt().render(Moment(TASK)))
    fits, too_long = (says("", max_tokens=num_prompt + 40), says("", max_tokens=num_prompt + 39))
    asyncio.run(policy(fits).plan(TASK, Memory(), 0, 0, 5.0))
    with pytest.raises(PromptTooLong):
        asyncio.run(policy(too_long).plan(TASK, Memory(), 0, 0, 5.0))
    assert not too_long.asked


def test_the_order_of_the_full_prompt_decides_what_turns_share() -> None:
    """With the memory last a prompt goes on where the one before it stopped."""
    texts = {}
    for order in ("shared", "paper"):
        prompt = FullPrompt([], order)
        texts[order] = [
            prompt.render(Moment(ODD, Memory(STEPS[:number]))) for number in range(len(STEPS) + 1)
        ]
    for shared, paper in zip(texts["shared"], texts["paper"], strict=True):
        assert sorted(shared) == sorted(paper), "the same parts"
        assert shared.index("Rules:") < shared.index("Steps so far:")
        assert paper.index("Steps so far:") < paper.index("Rules:")
    same = {
        order: [a == b for a, b in zip(*both[-2:], strict=False)] for order, both in texts.items()
    }
    share = {order: found.index(False) / len(found) for order, found in same.items()}
    assert share["shared"] > 0.95 and share["paper"] < 0.6, share
