"""Statistics of rollouts against numbers worked out by hand, and held-out evaluation with the real
tools and scripted planners.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import make
import pytest
import torch
from make import call
from toy_options import toy

from flowtrain.agents.agentflow.build import make_flow
from flowtrain.agents.agentflow.planner import NO_TOOL
from flowtrain.agents.agentflow.scripts import ScriptVoice, plan_script
from flowtrain.agents.agentflow.voices import Voice
from flowtrain.agents.policy import Moment, Policy, Prompt
from flowtrain.config import Config
from flowtrain.evaluation.benchmarks import load_benchmarks
from flowtrain.evaluation.evaluator import Evaluation, Evaluator, Part, roll_out
from flowtrain.logging.rollouts import RolloutStats, count_rollouts
from flowtrain.records import Action, BranchPoint, Call, Task, ToolResult, Trajectory, Turn
from flowtrain.rollouts.contract import EvalSettings
from flowtrain.tasks.sets import TaskSet, task_set
from flowtrain.tools import Tool
from flowtrain.tools.registry import make_tools
from flowtrain.trainer.distributed import World
from flowtrain.trainer.setup.components import RunComponents
from flowtrain.trainer.setup.placement import Placement
from flowtrain.trainer.toy import new_tokenizer
from tests.long_histories import Token, counted, history

WORLD = World(0, 1, torch.device("cpu"))
TOOLS = ("Search", "Python_Coder", "Base_Generator")


def turn(tool: str | None, num_prompt: int, num_response: int, error: str | None = None) -> Turn:
    said = call(num_response, num_prompt)
    if tool not in TOOLS:
        act = tool and Action("", "", "", tool)
        return make.turn(said, act, tool_calls=(), problem=error or "")
    return make.turn(said, tool, ToolResult("" if error else "found", error))


def rollout(reward: float | None, *turns: Turn, truncated: str = "") -> Trajectory:
    return make.rollout(*turns, reward=reward, truncated=truncated)


ROLLOUTS = (
    rollout(1.0, turn("Search", 10, 4), turn("Python_Coder", 20, 6)),
    rollout(
        0.0,
        turn(None, 10, 2, "malformed"),
        turn("Search", 15, 3, "nothing found"),
        turn("Search", 15, 5),
        truncated="turns",
    ),
    rollout(0.0, turn(NO_TOOL + "Calculator", 10, 4, "not found"), truncated="time"),
    rollout(0.5, truncated="prompt"),
)

# ---- statistics


def stats_of(trajectories: Sequence[Trajectory], tools: Sequence[str] = TOOLS) -> RolloutStats:
    return RolloutStats.of_counts(count_rollouts(trajectories, tools), tools)


def test_statistics_by_hand() -> None:
    """4 rollouts, 6 turns, 95 - 15 = 80 prompt tokens, 24 response tokens."""
    stats = stats_of(ROLLOUTS)
    assert stats == RolloutStats(
        num_rollouts=4,
        failed_rollouts=0,
        straggler_rollouts=0,
        reward_mean=1.5 / 4,
        reward_std=pytest.approx((1.25 / 4 - (1.5 / 4) ** 2) ** 0.5),
        turns_mean=6 / 4,
        malformed_share=2 / 6,
        tool_error_share=1 / 6,
        response_len_mean=24 / 6,
        num_sampled_tokens=24,
        sub_goal_mean=0.0,
        reward_density=1000 * 1.5 / 24,
        hinted_share=0.0,
        prompt_len_mean=80 / 6,
        segments_mean=6 / 4,
        reread_share=(20 + 15 + 15) / 80,
        num_rewritten_tokens=(20 - 10) + (15 - 10),
        out_of_turns_share=1 / 4,
        out_of_time_share=1 / 4,
        out_of_positions_share=1 / 4,
        tool_shares={"Search": 3 / 6, "Python_Coder": 1 / 6, "Base_Generator": 0.0},
    )
    assert sum(stats.tool_shares.values()) + stats.malformed_share == pytest.approx(1)
    assert stats.reward_error == pytest.approx(stats.reward_std / 2)


def test_segments_are_turns_that_go_on_with_no_earlier_one() -> None:
    """The second and the last go on with the first; the third was rewritten."""
    pairs = [((1, 2), (3,)), ((1, 2, 3, 4), (5,)), ((1, 2, 9), (7,)), ((1, 2, 3, 6), (8,))]
    turns = [make.turn(call(said, prompt)) for prompt, said in pairs]
    trajectory = rollout(1.0, *turns)
    stats = stats_of([trajectory], ())
    assert (stats.segments_mean, stats.reread_share) == (2.0, 3 / (2 + 1 + 3 + 1))
    assert stats.num_rewritten_tokens == 1


def test_each_turn_of_a_long_rollout_is_compared_with_one_before_it() -> None:
    pairs = counted(history(num_turns=24, num_new=5))
    trajectory = rollout(1.0, *(make.turn(call(said, prompt)) for prompt, said in pairs))
    Token.num_compared = 0
    stats = stats_of([trajectory], ())
    assert (stats.segments_mean, stats.reread_share) == (1.0, 0.0)
    assert stats.num_rewritten_tokens == 0
    assert Token.num_compared <= sum(len(prompt) for prompt, _ in pairs)


def test_an_answer_without_tools_is_not_malformed() -> None:
    stats = stats_of([rollout(1.0, turn(None, 10, 2))], ())
    assert (stats.malformed_share, stats.tool_error_share, stats.turns_mean) == (0.0, 0.0, 1.0)
    assert stats.tool_shares == {}


def test_a_branch_sampled_only_what_its_root_had_not() -> None:
    """It left the second turn at token 2: 4 tokens of the first turn and 2 of the second are its
    root's.
    """
    branch = replace(ROLLOUTS[0], branch=BranchPoint(0, 1, 2, 1.0))
    assert stats_of([branch]).num_sampled_tokens == 4
    assert stats_of([ROLLOUTS[0], branch]).num_sampled_tokens == 14


def test_sub_goals_and_hints_are_means_over_rollouts() -> None:
    trajectories = (
        replace(ROLLOUTS[0], sub_goals=0.5),
        replace(ROLLOUTS[1], sub_goals=1.0, hint_turn=0),
        ROLLOUTS[3],
    )
    stats = stats_of(trajectories)
    assert (stats.sub_goal_mean, stats.hinted_share) == (0.5, 1 / 3)


def test_statistics_of_nothing_are_zeros() -> None:
    stats = stats_of([])
    found = (stats.num_rollouts, stats.reward_mean, stats.turns_mean, stats.tool_shares["Search"])
    assert found == (0, 0, 0, 0)


def test_a_rollout_that_was_not_scored_is_our_mistake() -> None:
    with pytest.raises(AssertionError):
        stats_of([rollout(None)])


def test_a_rollout_that_failed_is_counted_and_has_no_part_in_the_mean_reward() -> None:
    failed = replace(rollout(None, turn("Search", 10, 4)), error="generator: no reply")
    cut = rollout(0.0, truncated="straggler")
    stats = stats_of([rollout(1.0), failed, cut])
    assert (stats.num_rollouts, stats.failed_rollouts, stats.straggler_rollouts) == (3, 1, 1)
    assert (stats.reward_mean, stats.out_of_time_share, stats.turns_mean) == (1 / 2, 1 / 3, 1 / 3)


def test_metrics_are_flat() -> None:
    metrics = stats_of(ROLLOUTS).metrics()
    assert metrics["reward_mean"] == 0.375 and metrics["tool_share/Search"] == 0.5
    assert set(metrics) == {
        *("reward_mean", "reward_std", "turns_mean", "malformed_share", "tool_error_share"),
        *("response_len_mean", "num_sampled_tokens", "prompt_len_mean", "segments_mean"),
        *(
            "reread_share",
            "num_rewritten_tokens",
            "failed_rollouts",
            "straggler_rollouts",
            "sub_goal_mean",
        ),
        *("reward_density", "hinted_share", "out_of_turns_share", "out_of_time_share"),
        "out_of_positions_share",
        *("tool_share/Search", "tool_share/Python_Coder", "tool_share/Base_Generator"),
    }


@dataclass(frozen=True)
class FakeWorld:
    """One of two ranks whose other half reports the same numbers."""

    rank: int
    size: int = 2

    def gather_text(self, text: str) -> list[str]:
        return [text, text]


def test_statistics_are_over_all_ranks() -> None:
    part = Part("dev", (), 0, EvalSettings(3))
    both = Evaluation.of(part, ROLLOUTS, TOOLS, FakeWorld(0)).stats  # type: ignore[arg-type]
    assert (both.num_rollouts, both.num_sampled_tokens) == (8, 48)
    alone = stats_of(ROLLOUTS).metrics()
    assert replace(both, num_sampled_tokens=24, num_rewritten_tokens=15).metrics() == pytest.approx(
        alone
    )


# ---- evaluation with the real tools on the real questions


@pytest.fixture(scope="module")
def config() -> Config:
    return toy({"tasks": {"num_train": 50}, "eval": {"num_tasks": 60}})


@pytest.fixture(scope="module")
def tasks(config: Config) -> TaskSet:
    return task_set(config)


@pytest.fixture(scope="module")
def tools(config: Config, tasks: TaskSet) -> Iterator[dict[str, Tool]]:
    made = make_tools(config, tasks)
    yield made
    for tool in made.values():
        tool.close()


class FakeEngine:
    """Only knows how long it may get."""

    version, max_tokens = 0, 10_000


def expert(tasks: TaskSet, error: float) -> Voice:
    tokenizer = new_tokenizer([task.question for task in tasks.train], 300)
    policy = Policy(FakeEngine(), tokenizer, 10, 1.0, 1.0)  # type: ignore[arg-type]
    return ScriptVoice(policy, plan_script(error))


def run(
    config: Config,
    planner: Voice,
    tools: dict[str, Tool],
    tasks: Sequence[Task],
    world: World = WORLD,
) -> Evaluation:
    components = FakeComponents(config, world, Placement.colocated(world))
    flow = make_flow(config, planner, tools, max_turns=3)
    found = roll_out(components, flow, tasks, 0, "dev")  # type: ignore[arg-type]
    return Evaluation.of(Part("dev", tasks, 0, EvalSettings(3)), found, TOOLS, world)


@pytest.mark.parametrize("split", ["texts", "entities", "forms"])
def test_a_planner_that_follows_the_plans_is_always_right(
    config: Config, tasks: TaskSet, tools: dict[str, Tool], split: str
) -> None:
    """Questions, plans, tools, verifier, generator and scorer agree with each other."""
    result = run(config, expert(tasks, 0.0), tools, tasks.held_out[split])
    wrong = [
        (t.task.question, t.answer, t.task.answers) for t in result.trajectories if t.reward != 1
    ]
    assert not wrong
    assert (result.stats.reward_mean, result.stats.num_rollouts) == (1.0, 60)
    assert set(result.by("num_turns")) == {"1", "2", "3"} and set(
        result.by("num_turns").values()
    ) == {1.0}
    assert (
        {"lookup", "chain", "sum"}
        <= set(result.by("kind"))
        <= {"lookup", "chain", "sum", "arithmetic"}
    )
    assert set(result.by("kind").values()) == {1.0}
    assert [len(t.turns) for t in result.trajectories] == [
        t.task.num_turns for t in result.trajectories
    ]
    assert (
        result.stats.malformed_share,
        result.stats.tool_error_share,
        result.stats.out_of_turns_share,
    ) == (0, 0, 0)
    assert result.stats.tool_shares["Base_Generator"] == 0


def test_a_planner_that_only_guesses_is_nearly_always_wrong(
    config: Config, tasks: TaskSet, tools: dict[str, Tool]
) -> None:
    result = run(config, expert(tasks, 1.0), tools, tasks.held_out["texts"])
    assert result.stats.reward_mean < 0.1
    assert (result.stats.turns_mean, result.stats.tool_shares["Base_Generator"]) == (1.0, 1.0)


@dataclass
class FakePlanner:
    """Right about questions of one kind, malformed about all others."""

    kind: str
    right: Voice
    is_frozen = False

    async def reply(self, prompt: Prompt, moment: Moment, *, seed: int, deadline_s: float) -> Call:
        if moment.task.kind == self.kind:
            return await self.right.reply(prompt, moment, seed=seed, deadline_s=deadline_s)
        return call(text="well")

    def measure(self, text: str) -> int:
        return self.right.measure(text)


def test_rewards_are_told_apart_by_kind_and_by_turns(
    config: Config, tasks: TaskSet, tools: dict[str, Tool]
) -> None:
    held_out = tasks.held_out["texts"]
    result = run(config, FakePlanner("chain", expert(tasks, 0.0)), tools, held_out)
    counts = {kind: sum(task.kind == kind for task in held_out) for kind in result.by("kind")}
    assert result.by("kind") == {"arithmetic": 0.0, "chain": 1.0, "lookup": 0.0, "sum": 0.0}
    assert result.by("num_turns") == {"1": 0.0, "2": 1.0, "3": 0.0}
    assert result.stats.reward_mean == pytest.approx(counts["chain"] / 60)
    others = 60 - counts["chain"]
    assert result.stats.out_of_turns_share == pytest.approx(others / 60)
    assert result.stats.malformed_share == pytest.approx(
        3 * others / (3 * others + 2 * counts["chain"])
    )


def test_a_rank_evaluates_its_share_and_counts_all_tasks(
    config: Config, tasks: TaskSet, tools: dict[str, Tool]
) -> None:
    by_kind = {
        kind: [task for task in tasks.held_out["texts"] if task.kind == kind]
        for kind in ("sum", "chain", "lookup")
    }
    held_out = [by_kind["sum"][0], *by_kind["chain"][:4], *by_kind["lookup"][:6]]
    result = run(config, expert(tasks, 0.0), tools, held_out, FakeWorld(1))  # type: ignore[arg-type]
    assert [t.task for t in result.trajectories] == list(held_out[1::2])
    # The other rank reports the same; of "sum" neither has any.
    assert result.by("kind") == {"sum": 0.0, "chain": 1.0, "lookup": 1.0}


def test_evaluation_repeats(config: Config, tasks: TaskSet, tools: dict[str, Tool]) -> None:
    first, second = (
        run(config, expert(tasks, 0.5), tools, tasks.held_out["texts"]) for _ in range(2)
    )
    assert first.stats == second.stats and 0 < first.stats.reward_mean < 1


# ---- benchmarks


@dataclass
class FakeAgent:
    """Answers "Oslo, Norway", but fails questions about mountains."""

    seeds: list[int]

    async def run(self, task: Task, seed: int, *_: object) -> Trajectory:
        self.seeds.append(seed)
        error = "generator: no reply" if "mountain" in task.question else ""
        return make.rollout(task=task, answer="Oslo, Norway", seed=seed, error=error)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class FakeComponents:
    """Remembers what agents were made for."""

    config: Config
    world: World = WORLD
    placement: Placement = Placement.colocated(WORLD)  # noqa: RUF009
    tools: dict[str, Tool] = field(default_factory=dict)
    judge = None
    reward_functions = None
    scoring = RunComponents.scoring
    made: list[tuple[int, float | None]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)

    def make_agent(self, engines: object, max_turns: int, temperature: float | None) -> FakeAgent:
        self.made.append((max_turns, temperature))
        return FakeAgent(self.seeds)


def make_evaluator(folder: Path, **options: object) -> tuple[FakeComponents, Evaluator]:
    (folder / "mine.jsonl").write_text(
        '{"question": "Which city?", "answer": "Oslo"}\n'
        '{"question": "Where?", "answer": ["Bergen", "Oslo Norway"]}\n'
        '{"question": "Which mountain?", "answer": "Galdh"}\n'
        '{"question": "And which?", "answer": "Oslo"}\n'
    )
    (folder / "gameof24.json").write_text('[{"query": "24?", "question": [1, 2, 3, 4]}]')
    named = [f"mine={folder / 'mine.jsonl'}:qa", "gameof24"]
    config = toy(
        {
            "agent": {"eval_max_turns": 7},
            "tasks": {"benchmarks": str(folder)},
            "eval": {"benchmarks": named, **options},
        }
    )
    components = FakeComponents(config)
    evaluator = Evaluator(
        components=components,  # type: ignore[arg-type]
        engines={},
        benchmarks=load_benchmarks(config),
    )
    return components, evaluator


def asked(folder: Path, **options: object) -> tuple[FakeComponents, dict[str, float]]:
    components, evaluator = make_evaluator(folder, **options)
    parts = evaluator.benchmark_parts(10)
    results = evaluator.results(parts, evaluator.roll_out(parts))
    return components, evaluator.benchmark_metrics(results)


def test_benchmarks_are_asked_as_the_options_say(tmp_path: Path) -> None:
    components, metrics = asked(tmp_path, rows=3, trials=2, temperature=0.25)
    assert components.made == [(7, 0.25)] * 2
    assert len(set(components.seeds)) == len(components.seeds) == (3 + 1) * 2
    # Right is the second of two that did not fail: F1 of the first is that of one token in two.
    assert metrics == {
        "eval_accuracy/mine": 0.5,
        "eval_em/mine": 0.5,
        "eval_f1/mine": pytest.approx((2 / 3 + 1) / 2),
        "eval_turns/mine": 0.0,
        "eval_failed/mine": 2.0,
        "eval_accuracy/gameof24": 0.0,
        "eval_pass_at_2/mine": 0.5,
        "eval_pass_at_2/gameof24": 0.0,
        "eval_turns/gameof24": 0.0,
    }


def test_benchmarks_are_asked_once_and_with_the_policy_s_temperature_by_default(
    tmp_path: Path,
) -> None:
    components, metrics = asked(tmp_path)
    assert components.made == [(7, None)] * 2
    assert len(components.seeds) == 4 + 1 and metrics["eval_accuracy/mine"] == pytest.approx(1 / 3)
    assert asked(tmp_path)[0].seeds == components.seeds, "the same at the same step"


def test_each_benchmark_has_seeds_of_its_own_in_each_step(tmp_path: Path) -> None:
    _, evaluator = make_evaluator(tmp_path)
    seeds = [part.seed for step in (-1, 10, 20) for part in evaluator.benchmark_parts(step)]
    assert len(set(seeds)) == len(seeds) == 6


@pytest.mark.parametrize(("every", "due"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (3, [3, 6])])
def test_an_evaluation_is_due_every_so_many_steps(
    tmp_path: Path, every: int, due: list[int]
) -> None:
    _, evaluator = make_evaluator(tmp_path, every=every)
    assert [step for step in range(1, 7) if evaluator.is_due(step)] == due
