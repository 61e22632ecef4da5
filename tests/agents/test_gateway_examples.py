"""The example programs behind the gateway, with the SDKs that are installed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from gateway_runs import call_text, calls_of, logging_engine, make_agent, roll_out

from examples.gateway import shell_demonstrations, tools
from flowtrain.logging.rollouts import RolloutStats, count_rollouts

EXAMPLES = Path(__file__).parents[2] / "examples" / "gateway"
PROGRAMS = {
    "plain": (),
    "agents_sdk": ("agents.agent",),
    "langgraph_agent": ("langgraph.prebuilt", "langchain_openai"),
}
"""With the modules that each needs."""


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_calls_tools_until_it_answers(program: str) -> None:
    for module in PROGRAMS[program]:
        pytest.importorskip(module)
    asks = call_text("area of Chad", "area of Mali").replace("search", "Search")
    engine = logging_engine(asks, call_text("6 * 7").replace("search", "Python_Coder"), "42")
    agent = make_agent(engine, function=f"{EXAMPLES / program}.py:solve")
    trajectory = roll_out(agent)
    agent.close()
    assert (trajectory.error, trajectory.answer) == ("", "42")
    assert calls_of(trajectory) == engine.log
    for (prompt, said), (later, _) in pairwise(engine.log):
        assert later[: len(prompt) + len(said)] == prompt + said
    first, second, third = trajectory.turns
    assert ["Chad" in used.result.output for used in first.tool_calls] == [True, False]
    assert [used.result.output for used in second.tool_calls] == ["42"]
    assert third.tool_calls == ()


def test_a_program_that_rewrites_its_history_is_trained_in_segments() -> None:
    asks = [call_text(f"area of {name}").replace("search", "Search") for name in ("Chad", "Mali")]
    engine = logging_engine(*asks, call_text("6 * 7").replace("search", "Python_Coder"), "42")
    agent = make_agent(engine, function=f"{EXAMPLES / 'compacting'}.py:solve")
    trajectory = replace(roll_out(agent), reward=1.0)
    agent.close()
    assert (trajectory.error, trajectory.answer) == ("", "42")
    assert calls_of(trajectory) == engine.log, "what was sampled is trained once"
    stats = RolloutStats.of_counts(count_rollouts([trajectory], ()), ())
    assert stats.segments_mean == 3.0 and 0.4 < stats.reread_share < 0.8
    last = engine.tokenizer.decode(engine.log[-1][0])
    assert "Chad" in last and "Mali" in last and last.count('"query": "') == 1


ASK = """
import json, os, urllib.request
question = json.load(open(os.environ["FLOWTRAIN_TASK"]))["question"]
body = {
    "messages": [{"role": "user", "content": f"Solve this: {question}"}],
    "tools": [{"type": "function", "function": {"name": "sh", "parameters": {"type": "object"}}}],
}
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), key))
"""


def test_demonstrations_begin_as_the_harness_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell_demonstrations, "NUM_CONVERSATIONS", 40)
    path = tmp_path / "shell.jsonl"
    shell_demonstrations.main(str(path), sys.executable, "-c", ASK)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    asked = [row["messages"][0]["content"] for row in rows]
    assert len(set(asked)) > 30 and all(each.startswith("Solve this: ") for each in asked)
    for row in rows:
        _, looks, result, answers = row["messages"]
        (call,) = looks["tool_calls"]
        assert call["function"]["name"] == row["tools"][0]["function"]["name"] == "sh"
        assert answers["content"] == f"<answer>{result['content']}</answer>"
    with pytest.raises(SystemExit, match="it asks for nothing"):
        shell_demonstrations.main(str(path), sys.executable, "-c", "exit(3)")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_gives_up_on_a_policy_that_never_answers(program: str) -> None:
    for module in PROGRAMS[program]:
        pytest.importorskip(module)
    engine = logging_engine()
    engine.reply = lambda prompt: call_text("Chad").replace("search", "Search")
    agent = make_agent(engine, function=f"{EXAMPLES / program}.py:solve")
    trajectory = roll_out(agent)
    agent.close()
    assert (trajectory.error, trajectory.answer, len(trajectory.turns)) == ("", "", 5)


def test_the_calculator_takes_no_more_than_sums() -> None:
    assert tools.calculate("2 * (3 - 5) / 4") == "-1.0"
    for hostile in ("__import__('os')", "9 ** 9 ** 9", "(" * 500, "1 / 0", "x", "'a' * 9", ""):
        assert tools.calculate(hostile).startswith("Error: ")
