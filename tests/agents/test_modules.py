"""The rule-based modules around the planner: verifier rules, generators, the scripted expert."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from char_tokenizer import CharTokenizer, says
from toy_options import toy

from flowtrain.agents.agentflow.build import make_flow, make_planner, make_policy
from flowtrain.agents.agentflow.generator import Answer, Generator, last_expression
from flowtrain.agents.agentflow.memory import Memory, MemoryEntry
from flowtrain.agents.agentflow.planner import ModelPlanner, parse_action
from flowtrain.agents.agentflow.prompts import CompactPrompt, FullPrompt
from flowtrain.agents.agentflow.scripts import next_step, plan_script, with_script
from flowtrain.agents.agentflow.verifier import RuleVerifier, facts_enough, gameof24_enough
from flowtrain.agents.policy import Moment, Policy
from flowtrain.records import FinishReason, PlanStep, Task, UserError, Verdict
from flowtrain.tasks.sets import TaskSet
from flowtrain.tools.registry import make_tools


def memory(*entries: tuple[str, str] | tuple[str, str, str]) -> Memory:
    """Make a memory of (tool, result) or (tool, sub-goal, result)."""
    return Memory(
        tuple(
            MemoryEntry(
                *(entry[0], entry[1] if len(entry) == 3 else "x", "command", entry[-1]),
                is_error=entry[-1].startswith("Error: "),
            )
            for entry in entries
        )
    )


# ---- verifier


AREA = "What is the area of Chad?"
OSLO = "What is the area of the country with capital Oslo?"
NORWAY = ("Search", "The country with capital Oslo is Norway.")
SPAIN = "What is the area of the country with capital Port of Spain?"


@pytest.mark.parametrize(
    ("question", "entry", "enough"),
    [
        (AREA, ("Search", "The area of Chad is 1284."), True),
        # The wrong entity is the planner's mistake.
        (AREA, ("Search", "The area of Mali is 1240."), True),
        (AREA, ("Search", "The capital of Chad is N'Djamena."), False),
        (AREA, ("Base_Generator", "7"), True),
        (AREA, ("Python_Coder", "7"), False),
        ("Which country has capital Oslo?", NORWAY, True),
        (OSLO, NORWAY, False),
        (OSLO, ("Search", "The area of Norway is 385."), True),
        ("What is the ISO code of Chad?", ("Search", "The ISO code of Chad is TD."), True),
        (SPAIN, ("Search", "The area of Trinidad is 5."), True),
        ("What is 3 plus 4?", ("Python_Coder", "7"), True),
        ("What is 3 plus 4?", ("Search", "The area of Chad is 1284."), False),
        ("What is 3 plus 4?", ("Base_Generator", "7"), True),
        (
            "What is the area of Chad plus that of Mali?",
            ("Search", "The area of Chad is 1."),
            False,
        ),
        ("What is the area of Chad minus the area of Mali?", ("Python_Coder", "44"), True),
        ("How much is 2 times 3?", ("Python_Coder", "6"), True),
        # "plus" counts as a word only.
        ("Tell me the capital of Surplus.", ("Search", "The capital of Surplus is X."), True),
    ],
)
def test_facts_are_enough(question: str, entry: tuple[str, str], enough: bool) -> None:
    assert facts_enough(question, memory(("Search", "The area of Chad is 1284."), entry)) is enough


@pytest.mark.parametrize(
    ("entry", "enough"),
    [
        (("Python_Coder", "24"), True),
        (("Python_Coder", "24.0"), True),
        (("Python_Coder", "23.9999999999"), True),
        (("Python_Coder", " 24\n"), True),
        (("Python_Coder", "23.99"), False),
        (("Python_Coder", "24 apples"), False),
        (("Python_Coder", "nan"), False),
        (("Python_Coder", ""), False),
        (("Base_Generator", "24"), False),
        (("Search", "24"), False),
    ],
)
def test_24_is_enough(entry: tuple[str, str], enough: bool) -> None:
    found = gameof24_enough("Use the numbers 1, 2, 3 and 4", memory(("Python_Coder", "24"), entry))
    assert found is enough


@pytest.mark.parametrize(
    ("expression", "enough"),
    [
        ("(1 + 1 + 1) * 12", True),
        ("12 * (1 + 1 / 1)", True),
        ("(1 + 1) * 12", False),
        ("1 + 1 + 1 * 24", False),
        ("12 + 12", False),
    ],
)
def test_24_from_other_numbers_is_not_enough(expression: str, enough: bool) -> None:
    question = (
        "Using the numbers [1, 1, 1, 12], create an expression that equals 24. Example: for [1, 2, "
        "3, 4], one is (1+2+3)*4."
    )
    assert gameof24_enough(question, memory(("Python_Coder", expression, "24"))) is enough


def test_an_error_is_never_enough_and_a_result_may_be() -> None:
    async def verdict(result: str) -> Verdict:
        done = await RuleVerifier().verify(
            SUM, memory(("Search", "fine"), ("Search", result)), 0, 1.0
        )
        assert (done.text, done.call) == ("", None), "a rule gives no reasons"
        return done.verdict

    assert asyncio.run(verdict("Error: no passage matches")) is Verdict.CONTINUE
    assert asyncio.run(verdict("Errors: none")) is Verdict.STOP


# ---- generators


@pytest.mark.parametrize(
    ("entries", "answer"),
    [
        ([], ""),
        ([("Search", "Error: nothing")], ""),
        ([("Search", "The area of Chad is 1284.")], "1284"),
        ([("Python_Coder", "7")], "7"),
        ([("Search", "The area of Chad is 1284."), ("Python_Coder", "1291")], "1291"),
        ([("Search", "The area of Chad is 1."), ("None", "Error: malformed")], "1"),
        ([("Search", "The area of Chad is 1."), ("Python_Coder", "Error: SyntaxError")], "1"),
        ([("Search", "The mass of C is 12.011.")], "12.011"),
        ([("Search", "no passage form")], "no passage form"),
    ],
)
def test_the_last_result_is_the_answer(entries: list[tuple[str, str]], answer: str) -> None:
    found = asyncio.run(Generator().answer(SUM, memory(*entries), 0, 1.0))
    assert found == Answer(answer)


def test_the_last_expression_that_was_computed_is_the_answer() -> None:
    failed, searched = ("Python_Coder", "(", "Error: SyntaxError"), ("Search", "s", "t")
    tried = memory(
        ("Python_Coder", "1 + 1", "2"), ("Python_Coder", "6 * 4", "24"), failed, searched
    )
    assert last_expression(tried) == "6 * 4"
    assert last_expression(memory(searched)) == last_expression(Memory()) == ""


# ---- the scripted expert

PLAN = (
    PlanStep("area of Chad", "Search"),
    PlanStep("area of Mali", "Search"),
    PlanStep("1284 + 1240", "Python_Coder"),
)
SUM = Task(
    "sum-1", "What is the area of Chad plus the area of Mali?", ("2524",), "sum", 3, plan=PLAN
)


def done(*steps: int) -> list[tuple[str, str, str]]:
    return [(PLAN[i].tool_name, PLAN[i].sub_goal, "result") for i in steps]


@pytest.mark.parametrize(
    ("entries", "step"),
    [
        ([], 0),
        (done(0), 1),
        (done(0, 1), 2),
        (done(0, 1, 2), 2),
        (done(1), 0),
        (done(0, 0), 1),
        ([("Base_Generator", "area of Chad", "7")], 0),
        ([("None", "None", "Error: malformed"), *done(0)], 1),
        ([*done(0), ("Base_Generator", "area of Mali", "7")], 1),
        ([*done(0), ("Search", "area of Peru", "1285"), *done(1)], 2),
    ],
)
def test_the_expert_goes_on_where_the_memory_has_got_to(
    entries: list[tuple[str, str, str]], step: int
) -> None:
    assert next_step(SUM, memory(*entries)) == PLAN[step]


POLICY = Policy(says(max_tokens=100), CharTokenizer(), 10, 1.0, 1.0)


def expert(error: float) -> ModelPlanner:
    tools = ("Base_Generator", "Python_Coder", "Search")
    return with_script(ModelPlanner(POLICY, CompactPrompt(), tools), plan_script(error))


def test_expert_uses_tokenizer_of_its_learner() -> None:
    plan = asyncio.run(expert(0.0).plan(SUM, memory(*done(0)), 1, 5, 1.0))
    call = plan.call
    prompt = CompactPrompt().render(Moment(SUM, memory(*done(0))))
    assert call.prompt_ids == tuple(map(ord, prompt))
    assert call.text == " area of Mali\nTool Name: Search"
    assert call.response_ids == (*map(ord, call.text), 0)
    assert (call.logprobs, call.spans) == ((0.0,) * len(call.response_ids), ())
    assert call.finish_reason is FinishReason.STOP
    assert plan.action == parse_action(CompactPrompt.prefix + call.text, ("Search",))


def test_expert_error_rate_is_deterministic() -> None:
    def tools(error: float, seed: int) -> list[str]:
        plans = [
            asyncio.run(expert(error).plan(SUM, Memory(), turn, seed, 1.0)) for turn in range(50)
        ]
        assert all(
            plan.action is not None and plan.action.sub_goal == "area of Chad" for plan in plans
        )
        return [plan.action.tool_name for plan in plans if plan.action is not None]

    assert set(tools(0.0, 1)) == {"Search"}
    assert set(tools(1.0, 1)) == {"Base_Generator"}
    some = tools(0.6, 1)
    assert 20 <= some.count("Base_Generator") <= 40
    assert some == tools(0.6, 1) != tools(0.6, 2)


def test_expert_errs_with_random_expression_in_game_of_24() -> None:
    puzzle = Task(
        "24",
        "?",
        ("1", "2", "3", "4"),
        scorer="gameof24",
        plan=(PlanStep("(1 + 2 + 3) * 4", "Python_Coder"),),
    )

    def sub_goals(error: float) -> set[str]:
        plans = [
            asyncio.run(expert(error).plan(puzzle, Memory(), turn, 0, 1.0)) for turn in range(20)
        ]
        assert all(
            plan.action is not None and plan.action.tool_name == "Python_Coder" for plan in plans
        )
        return {plan.action.sub_goal for plan in plans if plan.action is not None}

    assert sub_goals(0.0) == {"(1 + 2 + 3) * 4"}
    guesses = sub_goals(1.0)
    assert len(guesses) > 15
    assert all(sorted(filter(str.isdigit, guess)) == ["1", "2", "3", "4"] for guess in guesses)


# ---- put together from the config

TASKS = TaskSet(
    (SUM,), {"texts": (SUM,)}, ("The area of Chad is 1284.", "The area of Mali is 1240.")
)


def test_the_toolset_is_what_the_config_names() -> None:
    config = toy({"agent": {"tools": ["Base_Generator", "Search"]}})
    assert list(make_tools(config, TASKS)) == ["Base_Generator", "Search"]


def test_the_full_prompt_needs_a_chat_template() -> None:
    config, plain = toy({"agent": {"prompt": "full"}}), CharTokenizer()
    plain.chat_template = None
    with pytest.raises(UserError, match=r"model\.path='tiny' has no chat template"):
        make_planner(config, replace(POLICY, tokenizer=plain), {})
    of_toy = make_planner(toy(), replace(POLICY, tokenizer=plain), {})
    assert isinstance(of_toy.prompt, CompactPrompt)
    assert isinstance(make_planner(config, POLICY, {}).prompt, FullPrompt)


def test_an_answer_as_long_as_the_model_leaves_no_prompt() -> None:
    config = toy({"rollout": {"max_new_tokens": 100}})
    told = r"rollout\.max_new_tokens=100 must be below the model's 100 positions"
    with pytest.raises(UserError, match=told):
        make_policy(config, "planner", says(max_tokens=100), CharTokenizer())


@pytest.mark.parametrize(
    ("rules", "verdict", "answer"),
    [("facts", "CONTINUE", "24"), ("gameof24", "STOP", "6 * 4"), ("", "STOP", "24")],
)
def test_a_task_names_its_rules(rules: str, verdict: str, answer: str) -> None:
    config = toy({"agent": {"rollout_timeout_s": 7.0}})
    flow = make_flow(config, POLICY, {}, max_turns=9)
    task = Task("t", "What is the area of Chad?", ("1284",), rules=rules)
    found = memory(("Python_Coder", "6 * 4", "24"))

    async def both() -> tuple[str, str]:
        done = await flow.verifier.verify(task, found, 0, 1.0)
        return done.verdict.name, (await flow.generator.answer(task, found, 0, 1.0)).text

    assert asyncio.run(both()) == (verdict, answer)
    assert (flow.limits.max_turns, flow.limits.timeout_s) == (9, 7.0)
