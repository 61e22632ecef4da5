"""Reward functions: what they may be, what they may return, and what happens when they do not."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import make
import pytest

from flowtrain.config import Config, Reward
from flowtrain.records import Group, Task, Trajectory, UserError
from flowtrain.rewards import RewardFunctions, functions, score, score_one

TASK = Task("a", "Capital of Norway?", ("Oslo",), columns='{"tests": ["t"], "weight": 0.5}')
SLOW_S = 300.0
"""A deadline that no test reaches."""


def rollout(answer: str = "Oslo", task: Task = TASK, seed: int = 5, **fields: Any) -> Trajectory:
    return make.rollout(task=task, answer=answer, seed=seed, **fields)


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[..., RewardFunctions]]:
    """Loads functions from the text of a file, as the config would name them. `names` maps names in
    it to weights.
    """
    number = iter(range(99))

    def load(
        source: str,
        names: dict[str, float] | None = None,
        policies: tuple[str, ...] = ("planner",),
        **options: Any,
    ) -> RewardFunctions:
        path = tmp_path / f"mine{next(number)}.py"
        path.write_text(source)
        function = {
            (f"{path}:{name}" if name.isidentifier() and name not in ("exact", "f1") else name): w
            for name, w in (names or {"score": 1.0}).items()
        }
        reward = Reward(**{"function": function, "timeout_s": SLOW_S, **options})
        found = RewardFunctions.load(reward, policies)
        assert found is not None
        return found

    yield load


def scored(given: RewardFunctions, *trajectories: Trajectory) -> list[Trajectory]:
    (group,) = score([Group(3, trajectories)], None, given)
    assert group.index == 3
    return list(group.trajectories)


Load = Callable[..., RewardFunctions]
PLAIN = "def score(task, answer, trajectory):\n    "
ASYNC = (
    "import asyncio\nasync def score(task, answer, trajectory):\n    await asyncio.sleep(0)\n    "
)
BOTH = pytest.mark.parametrize("head", [PLAIN, ASYNC], ids=["plain", "async"])


def test_without_functions_there_are_none() -> None:
    assert RewardFunctions.load(Reward()) is None


@BOTH
def test_a_function_gets_the_task_with_its_columns_the_final_answer_and_the_rollout(
    head: str, load: Load
) -> None:
    given = load(
        head + "assert task.extra['tests'] == ['t'] and answer == 'Oslo', answer\n"
        "    assert trajectory.seed == 7 and trajectory.answer == 'Oslo'\n"
        "    return task.extra['weight']"
    )
    (found,) = scored(given, rollout("Oslo", seed=7))
    assert (found.error, found.reward, found.reward_parts) == ("", 0.5, {"score": 0.5})
    assert found.scored_by == given.name and found.scored_by.endswith(":score")
    assert found.sub_goals is not None, "InfoFlow's are filled beside it"


@BOTH
def test_one_rollout_is_scored_as_many_are(head: str, load: Load) -> None:
    given = load(head + "return len(answer) / 10")
    trajectories = [rollout("x" * n) for n in range(8)]
    many = scored(given, *trajectories)
    assert [each.reward for each in many] == [n / 10 for n in range(8)], "in their order"
    assert [asyncio.run(score_one(each, None, given)) for each in trajectories] == many


def test_functions_have_weights(load: Load) -> None:
    given = load(
        "def score(task, answer, trajectory):\n    return {'close': 0.5, 'long': 0.25}\n"
        "async def other(task, answer, trajectory):\n    return True\n",
        {"score": 1.0, "other": 0.5, "exact": 0.25},
        high=2.0,
    )
    right, wrong = scored(given, rollout("Oslo"), rollout("Bergen"))
    parts = {"close": 0.5, "long": 0.25, "other": 1.0}
    assert right.reward_parts == {**parts, "exact": 1.0}
    assert wrong.reward_parts == {**parts, "exact": 0.0}
    assert (right.reward, wrong.reward) == (0.75 + 0.5 + 0.25, 0.75 + 0.5)
    assert right.scored_by == given.name and given.name.endswith(":other + exact")


@BOTH
def test_a_part_may_be_of_turns(head: str, load: Load) -> None:
    source = head + "return {'right': 0.25, 'steps': [0.25, -0.75]}"
    given = load(source, {"score": 2.0}, low=-1)
    two, one = scored(
        given, *(replace(rollout(), turns=(make.turn(),) * number) for number in (2, 1))
    )
    assert (two.reward, two.turn_rewards) == (0.5 - 1.0, (0.5, -1.5))
    assert two.reward_parts == {"right": 0.25, "steps": -0.5}
    assert one.error.endswith("'steps' has 2 numbers for 1 turns") and one.reward is None


def test_built_in_scorers_score_as_they_do_by_themselves(load: Load) -> None:
    given = RewardFunctions.load(Reward.model_validate({"function": "f1", "timeout_s": SLOW_S}))
    assert given is not None
    answers = ("Oslo", "Oslo, Norway", "", "x" * 3000 + " Oslo")
    by_function = scored(given, *(rollout(each) for each in answers))
    task = Task("a", "Capital of Norway?", ("Oslo",), scorer="f1")
    (group,) = score([Group(0, tuple(rollout(each, task) for each in answers))])
    assert [each.reward for each in by_function] == [each.reward for each in group.trajectories]
    assert len({each.reward for each in by_function}) > 2


def test_weights_that_sum_to_1_give_1(load: Load) -> None:
    names = [f"f{n}" for n in range(10)]
    source = "".join(f"def {name}(task, answer, trajectory): return 1\n" for name in names)
    (found,) = scored(load(source, dict.fromkeys(names, 0.1 * 1.1 / 1.1)), rollout())
    assert found.reward == 1.0
    (found,) = scored(load(source, dict.fromkeys(names, 0.1 + 1e-15)), rollout())
    assert found.reward == 1.0, "by rounding alone"


def test_a_failed_rollout_is_not_scored(load: Load) -> None:
    failed = rollout("", error="generator: gone")
    assert scored(load(PLAIN + "raise AssertionError"), failed) == [failed]


@BOTH
@pytest.mark.parametrize(
    ("body", "reason", "text"),
    [
        ("raise ValueError('boom\\nand more')", "exception", "ValueError: boom"),
        ("raise SystemExit(3)", "exception", "SystemExit: 3"),
        ("raise StopIteration", "exception", "StopIteration"),
        ("raise asyncio.CancelledError", "exception", "the function cancelled itself"),
        ("raise ValueError('\\ud800')", "exception", "ValueError: ?"),
        ("return task.extra['none']", "exception", "KeyError: 'none'"),
        ("return '0.5'", "value", "it returned '0.5', not a number or a mapping of names to them"),
        ("return None", "value", "it returned None, not a number"),
        ("return float('nan')", "value", "its part 'score' is nan"),
        ("return {'a': 0.5, 'b': float('inf')}", "value", "its part 'b' is inf"),
        ("return {'a': '1'}", "value", "its part 'a' is '1', not a number"),
        ("return {1: 1}", "value", "its part 1 is 1, not a number"),
        ("return {}", "value", "it returned an empty mapping"),
        ("return {'a' * 65: 1}", "value", "a part's name must be 1 to 64 printable characters"),
        ("return {'\\n': 1}", "value", "a part's name must be 1 to 64 printable characters"),
        ("return {str(n): 0.0 for n in range(33)}", "value", "33 parts, 32 are allowed"),
        ("return 1.5", "value", "is 1.5, not from 0 to 1 (reward.low, reward.high)"),
        ("return -1e-6", "value", "is -1e-06, not from 0 to 1"),
    ],
)
def test_what_is_no_reward_fails_the_rollout(
    head: str, body: str, reason: str, text: str, load: Load
) -> None:
    given = load("import asyncio\n" + head + body)
    failed, again = scored(given, rollout(), rollout())
    assert failed.reward is None and failed.reward_parts == {} and text in failed.error
    assert given.name in failed.error and failed == again
    assert "\n" not in failed.error and failed.error.encode()
    assert functions.failure_of(failed.scored_by) == reason


def test_an_error_names_its_line(load: Load) -> None:
    (failed,) = scored(load(PLAIN + "x = 1\n    return x / 0"), rollout())
    assert failed.error.endswith("ZeroDivisionError: division by zero (mine0.py, line 3)")


def test_only_what_is_wrong_fails_and_the_first_of_each_kind_is_told(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    given = load(PLAIN + "return {0: 1.0, 1: 2.0}.get(trajectory.seed) or 1 / 0")
    found = scored(given, *(rollout(seed=seed) for seed in (0, 1, 2, 1, 2, 0)))
    assert [each.reward for each in found] == [1.0, None, None, None, None, 1.0]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and "reward_failures/value" in told[0], told
    assert "ZeroDivisionError" in told[1] and "reward_failures/exception" in told[1]


def test_bounds_are_the_runs(load: Load) -> None:
    source = PLAIN + "return trajectory.seed"
    given = load(source, low=-2.0, high=3.0)
    found = scored(given, *(rollout(seed=seed) for seed in (-3, -2, 3, 4)))
    assert [each.reward for each in found] == [None, -2.0, 3.0, None]
    assert "-3, not from -2 to 3" in found[0].error


def test_sums_beyond_what_floats_hold_fail_the_rollout(load: Load) -> None:
    source = PLAIN + "return {'a': 1e308, 'b': 1e308, 'c': -1e308}"
    for weight in (1.0, 1e9):
        (failed,) = scored(load(source, {"score": weight}), rollout())
        assert failed.reward is None and "not from 0 to 1" in failed.error


def test_two_parts_of_one_name_are_a_mistake(load: Load) -> None:
    given = load(PLAIN + "return {'exact': 0.5}", {"score": 1.0, "exact": 0.5})
    (failed,) = scored(given, rollout())
    assert "another function returns 'exact' too" in failed.error


HANGS = """
import threading
entered, leave = threading.Event(), threading.Event()
def score(task, answer, trajectory):
    if trajectory.seed:
        entered.set()
        leave.wait()
    return 1.0
"""


def module_of(given: RewardFunctions) -> SimpleNamespace:
    return SimpleNamespace(**given.functions[0].call.__globals__)


def test_a_call_that_hangs_fails_its_rollout_and_holds_nothing_up(load: Load) -> None:
    given = load(HANGS, timeout_s=0.05)
    module = module_of(given)
    while not module.entered.is_set():  # a thread may not get to it in time
        (hung,) = scored(given, rollout(seed=1))
        assert hung.error.endswith("score: no reward within 0.05 s") and hung.reward is None
        assert functions.failure_of(hung.scored_by) == "timeout"
    quick = load(PLAIN + "return 1.0")
    assert scored(quick, rollout())[0].reward == 1.0, "beside it"
    module.leave.set()


def test_calls_that_never_return_are_bounded(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "MAX_LOST", 2)
    before = threading.active_count()
    monkeypatch.setattr(functions, "MAX_CONCURRENCY", 1)
    given = load(HANGS, timeout_s=0.05)
    for _ in range(9):
        (failed,) = scored(given, rollout(seed=1))
        assert failed.error.endswith("no reward within 0.05 s")
    assert threading.active_count() - before <= 3
    module_of(given).leave.set()
    patient = replace(given, options=Reward(function=given.options.function, timeout_s=SLOW_S))
    assert scored(patient, rollout(seed=1))[0].reward == 1.0, "those that returned do not count"


def test_an_async_call_that_hangs_is_cancelled(load: Load) -> None:
    given = load(
        "import asyncio, threading\nbegun, ended = threading.Event(), threading.Event()\n"
        "async def score(task, answer, trajectory):\n"
        "    begun.set()\n"
        "    try:\n        await asyncio.Event().wait()\n"
        "    finally:\n        ended.set()\n",
        timeout_s=0.05,
    )
    module = module_of(given)
    while not module.begun.is_set():
        (failed,) = scored(given, rollout())
        assert failed.error.endswith("no reward within 0.05 s")
    assert module.ended.wait(60)


def test_async_functions_keep_their_loop_between_steps(load: Load) -> None:
    given = load(
        "import asyncio\nloops = set()\nasync def score(task, answer, trajectory):\n"
        "    loops.add(asyncio.get_running_loop())\n    return len(loops)\n"
    )
    assert [scored(given, rollout())[0].reward for _ in range(3)] == [1.0] * 3


def test_at_most_so_many_calls_run_at_a_time(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "MAX_CONCURRENCY", 3)
    given = load(
        "import threading\nlock, now, most = threading.Lock(), [0], [0]\n"
        "def score(task, answer, trajectory):\n"
        "    with lock:\n        now[0] += 1\n        most[0] = max(most[0], now[0])\n"
        "    threading.Event().wait(0.001)\n"
        "    with lock:\n        now[0] -= 1\n    return 1.0\n",
    )
    scored(given, *(rollout() for _ in range(30)))
    assert module_of(given).most[0] <= 3


# ---- what the config may name


def refused(name: str) -> str:
    with pytest.raises(UserError) as caught:
        RewardFunctions.load(Reward.model_validate({"function": name}))
    text = str(caught.value)
    assert "\n" not in text and f"reward.function={name!r}" in text
    return text


def test_names_that_are_no_functions(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "value = 3\ndef two(task, answer): ...\ndef four(task, answer, trajectory, more): ...\n"
        "def named(*, task, answer, trajectory): ...\n"
    )
    assert "FILE.py:NAME or PACKAGE.MODULE:NAME" in refused("exat") and "exact" in refused("exat")
    assert "FILE.py:NAME" in refused("mine.py:") and "FILE.py:NAME" in refused(":score")
    assert f"FileNotFoundError: there is no file {path}x.py" in refused(f"{path}x.py:score")
    assert f"{path} has no 'score'" in refused(f"{path}:score")
    assert "'value' is 3, not a function" in refused(f"{path}:value")
    for name in ("two", "four", "named"):
        assert "must take (task, answer, trajectory): " in refused(f"{path}:{name}")
    assert "ModuleNotFoundError: No module named 'no_such'" in refused("no_such.module:score")


@pytest.mark.parametrize("source", ["def f(:", "1 / 0", "raise SystemExit(0)", "import no_such"])
def test_a_file_that_cannot_be_imported_is_a_users_mistake(source: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    for _ in range(2):
        refused(f"{path}:score")
    path.write_text(PLAIN + "return 1")
    assert RewardFunctions.load(Reward.model_validate({"function": f"{path}:score"}))


def test_a_module_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package_of_mine").mkdir()
    (tmp_path / "package_of_mine" / "rewards.py").write_text(PLAIN + "return 0.5")
    monkeypatch.syspath_prepend(tmp_path)
    name = "package_of_mine.rewards:score"
    given = RewardFunctions.load(Reward.model_validate({"function": name}))
    assert given is not None and scored(given, rollout())[0].reward == 0.5
    assert given.name == name


def test_a_file_is_imported_once_and_an_object_may_be_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Scorer:\n    value: float\n"
        "    def __call__(self, task, answer, trajectory):\n        return self.value\n"
        "class Later(Scorer):\n    async def __call__(self, task, answer, trajectory):\n"
        "        return self.value\n"
        "one, two = Scorer(0.25), Later(0.5)\nprint('imported')\n"
    )
    names = {f"{path}:one": 1.0, f"{path}:two": 1.0}
    given = RewardFunctions.load(Reward(function=names))
    assert given is not None and [each.is_async for each in given.functions] == [False, True]
    assert scored(given, rollout())[0].reward_parts == {"one": 0.25, "two": 0.5}
    assert capsys.readouterr().out == "imported\n"


def test_functions_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(PLAIN + "return 1")
    names = {f"{tmp_path / name}:score": 1.0 for name in ("a.py", "b.py")}
    with pytest.raises(UserError, match="two functions have the part name 'score'"):
        RewardFunctions.load(Reward(function=names))


def test_a_built_in_scorer_needs_answers_that_it_can_use() -> None:
    given = RewardFunctions.load(Reward.model_validate({"function": "choice"}))
    assert given is not None
    given.check([Task("c", "q", ("b",), choices=("a", "b"))])
    for task, text in (
        (Task("x", "q", ()), "task 'x': reward.function='choice' needs an answer"),
        (Task("y", "q", ("z",), choices=("a", "b")), "task 'y': scorer 'choice' needs an answer"),
    ):
        with pytest.raises(UserError, match=text):
            given.check([task])


def test_options_that_need_a_function_or_exclude_one() -> None:
    for options, text in (
        ({"reward": {"high": 2}}, "reward.high=2.0 needs reward.function"),
        ({"reward": {"function": "exact", "low": 1}}, "reward.low=1 must be below reward.high=1"),
        (
            {
                "reward": {"function": "exact"},
                "roles": {"judge": "j"},
                "engines": {"j": {"model": "m"}},
            },
            "roles.judge='j' cannot be combined with reward.function=",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            Config.model_validate(options)
    function = Config.model_validate({"reward": {"function": "exact"}}).reward.function
    assert function == {"exact": 1.0}
    assert Config.model_validate({"reward": {"function": ""}}) == Config()


# ---- by policy

BY_POLICY = f"from flowtrain.rewards import ByPolicy\n{PLAIN}"
TWO = ("solver", "verifier")


def test_each_policy_is_paid_its_own(load: Load) -> None:
    source = f"{BY_POLICY}return {{'right': ByPolicy(solver=0.5, verifier=0.25), 'short': 0.25}}\n"
    source += f"{PLAIN.replace('score', 'more')}return 0.25"
    (found,) = scored(load(source, {"score": 1.0, "more": 0.5}, TWO), rollout("x"))
    assert found.policy_rewards == {"solver": 0.875, "verifier": 0.625}
    assert found.reward == 0.875, "the first policy's is the rollout's"
    own = {"right/solver": 0.5, "right/verifier": 0.25}
    assert found.reward_parts == {**own, "short": 0.25, "more": 0.25}
    (plain,) = scored(load(f"{PLAIN}return 0.5", None, TWO), rollout("x"))
    assert (plain.reward, plain.policy_rewards) == (0.5, {})


def test_a_policy_that_a_reward_does_not_name_gets_nothing_of_it(load: Load) -> None:
    (found,) = scored(load(f"{BY_POLICY}return ByPolicy(verifier=1)", None, TWO), rollout("x"))
    assert found.policy_rewards == {"solver": 0.0, "verifier": 1.0} and found.reward == 0.0


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ("ByPolicy(judge=1.0)", "'score' has a reward for 'judge', which is no policy"),
        ("ByPolicy(solver=2.0)", "the reward of .* for solver is 2, not from 0 to 1"),
        ("ByPolicy(solver='x')", "not numbers"),
        ("ByPolicy(solver=float('nan'))", "nan"),
    ],
)
def test_wrong_rewards_by_policy_fail_the_rollout(load: Load, returned: str, told: str) -> None:
    (found,) = scored(load(f"{BY_POLICY}return {returned}", None, TWO), rollout("x"))
    assert found.reward is None and re.search(told, found.error), found.error
