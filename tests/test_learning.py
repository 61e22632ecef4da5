"""Does it learn? A planner that guesses on more than half of its turns must find out that searching
pays, and only then.

The whole path at a reduced size: fine-tuning on a scripted expert that errs, then Flow-GRPO through
the main loop, measured by the sampled reward on held-out questions. The control deals the same
rewards out at random, so nothing but the rewards can explain the difference. And a reward that can
be hacked is: a true score tells it from an honest one.
"""

from __future__ import annotations

import dataclasses
import json
import random
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from cli_runs import read
from toy_options import toy

from flowtrain.config import Config
from flowtrain.config.command import Interrupt
from flowtrain.records import PlanStep, Task
from flowtrain.rft.loop import _run as fine_tune
from flowtrain.tasks.sets import TaskSet
from flowtrain.train import train
from flowtrain.trainer.distributed import World
from flowtrain.trainer.setup.components import RunComponents
from flowtrain.trainer.setup.placement import Placement

pytestmark = pytest.mark.usefixtures("no_side_effects")
ATTRIBUTES = ("area", "height", "age", "rank")
NAMES = (
    *("Ada", "Bo", "Cy", "Dee", "Eli", "Fay", "Gus", "Hal", "Ida", "Jo", "Kim", "Lee"),
    *("Max", "Ned", "Oz", "Pam"),
)
SEED = 2
ERRING = {"keep": "all", "expert_error": 0.6}
WORDINGS = (
    "What is the {} of {}?",
    "Tell me the {} of {}.",
    "Find the {} of {}.",
    "Give me the {} of {}.",
)
LONG = """
def score(task, answer, trajectory):
    return min(trajectory.num_sampled_tokens / 48, 1.0)
"""


def write_questions(place: Path) -> None:
    """256 look-ups over a small corpus, whose answers a guess hits once in 64 times."""
    values = random.Random(0).sample(range(100, 1000), len(NAMES) * len(ATTRIBUTES))
    facts = {(name, attribute): values.pop() for name in NAMES for attribute in ATTRIBUTES}
    corpus = [
        {"name": name, "kind": "person", "facts": {a: facts[name, a] for a in ATTRIBUTES}}
        for name in NAMES
    ]
    (place / "corpus.json").write_text(json.dumps(corpus))
    tasks = [
        {"question": wording.format(a, name), "answer": value, "id": f"{a} of {name}/{number}"}
        for (name, a), value in facts.items()
        for number, wording in enumerate(WORDINGS)
    ]
    (place / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))


def config(place: Path, run: str, seed: int, **sections: dict[str, Any]) -> Config:
    values: dict[str, dict[str, Any]] = {
        "run": {"dir": str(place / run), "seed": seed, "threads": 1, "device": "cpu"},
        "tiny": {
            "vocab_size": 320,
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 2,
            "max_positions": 128,
        },
        "tasks": {
            "name": "file",
            "path": str(place / "tasks.jsonl"),
            "corpus": str(place / "corpus.json"),
            "held_out_share": 0.25,
        },
        "agent": {"tools": ["Search", "Base_Generator"], "max_turns": 2, "eval_max_turns": 2},
        "rollout": {"num_questions": 8, "group_size": 8, "max_new_tokens": 24},
        "rft": {"num_rollouts": 600, "num_steps": 150, "lr": 8e-3, **ERRING},
        "train": {"num_steps": 16, "lr": 3e-4},
        "eval": {"every": 0, "num_tasks": 64},
        "checkpoint": {"every": 0},
        "log": {"tensorboard": False},
    }
    for name, section in sections.items():
        values[name] = values[name] | section if name in values else section
    return toy(values)


def with_plans(tasks: TaskSet) -> TaskSet:
    """Task files hold no plans; the scripted expert needs them."""

    def planned(task: Task) -> Task:
        return dataclasses.replace(task, plan=(PlanStep(task.id.partition("/")[0], "Search"),))

    return dataclasses.replace(tasks, train=tuple(map(planned, tasks.train)))


def fine_tuned(components: RunComponents, cleanup: ExitStack) -> None:
    """`flowtrain.rft` with the plans put in."""
    assert fine_tune(components, None, [], Interrupt(), cleanup) == 0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the questions, and a planner in warm/model that errs."""
    place = tmp_path_factory.mktemp("learning")
    write_questions(place)
    with ExitStack() as cleanup:
        world = World.join("cpu")
        cleanup.callback(world.leave)
        components = RunComponents.prepare(config(place, "warm", SEED), Placement.colocated(world))
        cleanup.callback(components.close)
        planned = dataclasses.replace(components, tasks=with_plans(components.tasks))
        fine_tuned(planned, cleanup)
    return place


def flow_grpo(place: Path, run: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """The summary of a training run."""
    model = {"path": str(place / "warm" / "model")}
    assert train(config(place, run, SEED, model=model, **sections)) == 0
    return json.loads((place / run / "summary.json").read_text())


@pytest.fixture(scope="module")
def real(place: Path) -> dict[str, Any]:
    """The summary of a run with the reward as it is."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("flowtrain.logging.page.curves.plot_curves", lambda path: None)
        return flow_grpo(place, "real")


def test_flow_grpo_learns_from_the_rewards_and_from_nothing_else(
    place: Path, real: dict[str, Any]
) -> None:
    """Over seeds 0 to 4 the reward rose by 0.44 to 0.73, in the control by -0.23 to 0.05; the
    standard error of one is 0.06.
    """
    control = flow_grpo(place, "control", algorithm={"shuffle_rewards": True})
    before = real["warm"]["eval_reward"]
    found = control["warm"]["eval_reward"]
    assert found == pytest.approx(before, abs=0.05), "both start from the same planner"
    assert 0.2 < before < 0.6, "there is something to learn"
    rise, control_rise = (summary["trained"]["eval_reward"] - before for summary in (real, control))
    assert rise > 0.3
    assert control_rise < 0.2
    assert rise - control_rise > 0.3
    assert (
        real["trained"]["tool_shares"]["Search"] > 0.8 > 0.6 > real["warm"]["tool_shares"]["Search"]
    ), "it learnt to search"
    assert real["trained"]["eval_reward_greedy"] >= real["warm"]["eval_reward_greedy"]


def test_a_part_of_no_weight_tells_a_hacked_reward(place: Path) -> None:
    (place / "long.py").write_text(LONG)
    hack = {"function": {f"{place}/long.py:score": 1.0, "exact": 0.0}}
    steps = {"num_steps": 15, "lr": 1e-3}
    hacked = flow_grpo(place, "hacked", reward=hack, eval={"every": 5}, train=steps)
    warm, trained = hacked["warm"], hacked["trained"]
    assert trained["eval_reward"] > warm["eval_reward"] + 0.4
    held_out = read(place / "hacked" / "held_out.jsonl")
    ends = [[x for x in held_out if x["step"] == 0], read(place / "hacked" / "trained.jsonl")]
    before, after = (fmean(x["reward_parts"]["exact"] for x in found) for found in ends)
    assert before > 0.2 > 0.05 > after
    evaluated = [x for x in read(place / "hacked" / "metrics.jsonl") if "eval_reward" in x]
    assert [each["step"] for each in evaluated] == [0, 5, 10, 15]

    rewards = [each["reward"] for each in ends[1]]
    assert fmean(rewards) == pytest.approx(trained["eval_reward"]), "its own rollouts"
    trained_on = {each["question"] for each in read(place / "hacked" / "trajectories.jsonl")}
    assert not {each["question"] for each in held_out} & trained_on
