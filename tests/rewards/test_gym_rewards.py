"""reasoning-gym's checkers on right, wrong and hostile answers, in the sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flowtrain.config import Agent, Config, GymSet
from flowtrain.metrics.rollouts import RolloutStats
from flowtrain.rewards import gym, score, score_one
from flowtrain.run.components import RunComponents
from flowtrain.tasks.gym import gym_tasks
from flowtrain.tools.sandbox import confine_checkers, make_sandbox
from flowtrain.tools.sandbox.host import Ran
from flowtrain.training.world import World
from flowtrain.types import Group, Task, Trajectory, UserError
from tests.attacks.sandboxes import WHY_NO_BUBBLEWRAP

pytest.importorskip("reasoning_gym", reason="needs pip install 'flowtrain[gym]'")
pytestmark = pytest.mark.filterwarnings("ignore:sandbox 'limits'")

FAKE = '{"reward": 1.0}'
RUNS = f"""__import__("os").write(1, b'{FAKE}') or __import__("os")._exit(0)"""
"""A reward of its own, from an answer that is run as code."""
SPELT = f"eval({'+'.join(f'chr({ord(letter)})' for letter in RUNS)})"
"""The same without strings."""
CODED = "sin('" + "".join(f"\\{ord(letter):o}" for letter in RUNS) + "')"
"""The same without words: sympy's functions evaluate strings."""


def task(name: str, answer: str | None, options: dict[str, Any] | None = None, **data: Any) -> Task:
    entry = {"question": "?", "answer": answer, "metadata": data}
    text = repr({"name": name, "options": options or {}, "entry": entry})
    return Task("t", "?", () if answer is None else (answer,), scorer=gym.NAME, entry=text)


LEGS = task("leg_counting", "12")
PUZZLE = task("puzzle24", "(2 + 4) * 4 * 1", {"min_value": 1}, numbers=[1, 2, 4, 4])
SORTING = task("number_sorting", "['1.0', '2.0']", direction="ascending")
INTEGRAL = task("simple_integration", "x**2 + C", integrand="2*x", variable="x")
QUEENS = task("n_queens", "Q _\n_ Q", solutions=[], valid_answers=["Q _\n_ Q"])


@pytest.fixture(scope="module", autouse=True)
def sandbox() -> Iterator[None]:
    """One worker: each process that waits for answers takes seconds to import the checkers."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("os.cpu_count", lambda: 1)
        confine_checkers(Agent(sandbox="limits" if WHY_NO_BUBBLEWRAP else "auto"))
        gym.start()
    yield
    confine_checkers(Agent())
    gym._sandbox().close()
    gym._sandbox.cache_clear()


def score_all(cases: Sequence[tuple[Task, str]]) -> list[tuple[float, str]]:
    async def all_of_them() -> list[tuple[float, str]]:
        return await asyncio.gather(*(gym.score(*case) for case in cases))

    return asyncio.run(all_of_them())


def rewards(*cases: tuple[Task, str]) -> list[float]:
    found = score_all(cases)
    assert [scored_by for _, scored_by in found] == [gym.NAME] * len(cases)
    return [reward for reward, _ in found]


def test_the_checker_decides_partial_credit_included() -> None:
    expected = [1.0, 0.0, 0.0, 2 / 7]
    assert rewards((LEGS, "12"), (LEGS, "13"), (LEGS, ""), (LEGS, "12 legs")) == expected


def test_checkers_that_evaluate_the_answer_read_expressions_and_lists() -> None:
    assert rewards(
        (PUZZLE, "(2 + 4) * 4 * 1"),
        (PUZZLE, "2 * 4 + 4 * 1"),
        (INTEGRAL, "x**2 + 0.5*C"),
        (SORTING, "['1.0', '2.0']"),
        (QUEENS, "[['Q', '_'], ['_', 'Q']]"),
    ) == [1.0, 0.01, 1.0, 1.0, 0.5]


@pytest.mark.parametrize(
    "asked", [LEGS, PUZZLE, INTEGRAL, SORTING, QUEENS], ids=["eq", "sympy", "sp", "list", "q"]
)
@pytest.mark.parametrize(
    "answer",
    [
        RUNS,
        SPELT,
        CODED,
        f"print('{FAKE}')",
        *("().__class__.__base__", "exit()", "(" * 3000, "\ud800", "\x00", FAKE),
    ],
    ids=["os", "spelt", "coded", "print", "class", "exit", "deep", "surrogate", "nul", "json"],
)
def test_an_answer_is_never_run(asked: Task, answer: str) -> None:
    (reward,) = rewards((asked, answer))
    assert reward <= 0.01


def test_data_with_tuples_and_without_an_answer_is_scored() -> None:
    board = ((1, 2), (3, 4))
    assert rewards((task("arc_agi", "1 2\n3 4", output=board), "1 2\n3 4")) == [1.0]
    graph = {"vertices": [0, 1], "edges": [(0, 1)], "num_colors": 2, "color_options": [1, 2]}
    asked = task("graph_color", None, possible_answer={0: 1, 1: 2}, puzzle=graph)
    assert rewards((asked, '{"0": 1, "1": 2}'), (asked, '{"0": 1, "1": 1}')) == [1.0, 0.01]


def test_what_cannot_be_verified_says_why() -> None:
    broken = replace(LEGS, entry=repr({"name": "leg_counting", "options": {}, "entry": {}}))
    found = score_all([(LEGS, "1" * (gym.MAX_CHARS + 1)), (broken, "12"), (LEGS, "12")])
    assert found == [
        (0.0, "reasoning-gym: too long"),
        (0.0, "reasoning-gym: checker raised"),
        (1.0, gym.NAME),
    ]


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("while True: pass", "time limit"),
        ("bytearray(1 << 40)", "memory limit"),
        ("import os; os._exit(3)", "process died"),
    ],
)
def test_what_stops_a_checker_is_named(
    code: str, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code stands for a checker, in a sandbox that imports nothing."""
    quick = make_sandbox(Agent(tool_timeout_s=0.3, code_timeout_s=0.3), memory_mb=256)
    monkeypatch.setattr(gym, "_sandbox", lambda: quick)
    (tmp_path / "child.py").write_text(code)
    monkeypatch.setattr(gym, "_SOURCE", tmp_path / "child.py")
    assert score_all([(LEGS, "12")]) == [(0.0, f"{gym.NAME}: {failure}")]
    quick.close()


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ('{"reward": 0.25}', (0.25, gym.NAME)),
        ('the checker prints\n{"reward": 7}', (1.0, gym.NAME)),
        ('{"reward": -1}', (0.0, gym.NAME)),
        ('{"reward": NaN}', (0.0, "reasoning-gym: checker raised")),
        ('{"error": "KeyError"}', (0.0, "reasoning-gym: checker raised")),
        ("", (0.0, "reasoning-gym: checker raised")),
    ],
)
def test_rewards_stay_between_0_and_1(
    output: str, expected: tuple[float, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Says:
        async def run(self, code: str) -> Ran:
            return Ran(output)

    monkeypatch.setattr(gym, "_sandbox", Says)
    assert score_all([(LEGS, "12")]) == [expected]


def rollout(asked: Task, answer: str, error: str = "") -> Trajectory:
    return Trajectory(asked, (), answer, 0.0, 0, error=error)


class NoJudge:
    mode = "rules-first"

    async def judge(self, task: Task, answer: str) -> bool:
        raise AssertionError("nobody is to judge it")


def test_score_reads_the_final_answer_and_counts_failures() -> None:
    exact = Task("e", "?", ("Oslo",))
    members = (
        rollout(LEGS, "I think <answer>12</answer>"),
        rollout(LEGS, "1" * (gym.MAX_CHARS + 1)),
        rollout(LEGS, ""),
        rollout(LEGS, "13"),
        rollout(exact, "Oslo"),
        rollout(LEGS, "12", error="generator: gone"),
    )
    (group,) = score([Group(0, members)], NoJudge())  # type: ignore[arg-type]
    assert [(each.reward, each.scored_by) for each in group.trajectories] == [
        (1.0, "reasoning-gym"),
        (0.0, "reasoning-gym: too long"),
        (0.0, "reasoning-gym"),
        (0.0, "reasoning-gym"),
        (1.0, "exact"),
        (None, ""),
    ]
    stats = RolloutStats.of(group.trajectories, (), World(0, 1, torch.device("cpu")))
    assert stats.checker_failures == {"too long": 1}
    assert stats.metrics()["checker_failures/too_long"] == 1.0
    scored = asyncio.run(score_one(members[0]))
    assert (scored.reward, scored.scored_by) == (1.0, "reasoning-gym")


def test_equal_answers_are_scored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Counts:
        async def run(self, code: str) -> Ran:
            seen.append(code)
            return Ran('{"reward": 0.5}')

    monkeypatch.setattr(gym, "_sandbox", Counts)
    found = score_all([(LEGS, "12"), (LEGS, "12"), (LEGS, "13"), (LEGS, "")])
    assert [reward for reward, _ in found] == [0.5, 0.5, 0.5, 0.0] and len(seen) == 2


def test_without_a_sandbox_a_run_is_refused_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym, "_sandbox", gym._sandbox.__wrapped__)
    monkeypatch.setenv("PATH", "")
    values = {
        "tasks": {"name": "reasoning-gym", "gym": {"leg_counting": {}}, "num_train": 4},
        "eval": {"num_tasks": 4},
        "agent": {"name": "single"},
        "tiny": {"hidden_size": 24, "num_layers": 2},
        "run": {"threads": 1},
    }
    with pytest.raises(UserError, match=r"^agent\.sandbox='auto': bubblewrap .* is not installed"):
        RunComponents.prepare(Config.model_validate(values), World(0, 1, torch.device("cpu")))


def test_a_task_without_its_data_is_refused() -> None:
    with pytest.raises(UserError, match="task 't': scorer 'reasoning-gym' is for tasks of"):
        score([Group(0, (rollout(replace(LEGS, entry=""), "12"),))])


def test_an_answer_writes_no_file(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    made = tmp_path / "made"
    rewards((QUEENS, f"open({str(made)!r}, 'w')"), (PUZZLE, f"open({str(made)!r}, 'w')"))
    assert not made.exists()


def test_every_family_scores_its_own_answer() -> None:
    """Its data survives the way into the sandbox, and no guard stands in its checker's way."""
    from reasoning_gym.factory import DATASETS

    slow = {"composite", "knight_swap"}
    families = {name: GymSet() for name in DATASETS if name not in slow}
    train, _ = gym_tasks(families, len(families), len(families), seed=3)
    cases = [(asked, asked.answers[0]) for (asked,) in train.values() if asked.answers]
    assert len(families) == 104 and len(cases) == 99
    assert set(score_all(cases)) == {(1.0, gym.NAME)}
