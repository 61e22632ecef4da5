"""Evaluations that nodes answer, in real processes: a service, a trainer without an engine, nodes
of which one is killed in the middle; against what an engine answers that has the same weights.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from cli_runs import Process, Server, read
from loopback_dataflow import TOKEN, keep_exit_code, make_config, make_model, serve_dataflow

from flowtrain.config import Config
from flowtrain.config.options import to_toml
from flowtrain.evaluation.benchmarks import load_benchmarks
from flowtrain.evaluation.evaluator import Evaluator
from flowtrain.trainer.distributed import World
from flowtrain.trainer.setup.components import RunComponents
from flowtrain.trainer.setup.placement import Placement
from flowtrain.weights import WeightStore

pytest_plugins = ("cli_runs",)

NUM_STEPS, NUM_TASKS = 3, 5
REWARD = """
def score(task, answer, trajectory):
    ids = [each for turn in trajectory.turns for each in turn.calls["planner"].response_ids]
    return sum(ids) % 8 / 8
"""
"""Any other token is another reward, so that there is something to learn and to compare."""


def a_config(tmp_path: Path) -> Config:
    (tmp_path / "mine.jsonl").write_text(
        '{"question": "Who?", "answer": "Ann Lee"}\n{"question": "Where?", "answer": "Oslo"}\n'
    )
    (tmp_path / "mine.py").write_text(REWARD)
    return make_config(
        make_model(tmp_path / "model"),
        reward={"function": f"{tmp_path / 'mine.py'}:score"},
        rollout={"max_in_flight": 4},
        train={"num_steps": NUM_STEPS, "num_minibatches": 1, "lr": 3e-3},
        eval={
            "num_tasks": NUM_TASKS,
            "every": 2,
            "benchmarks": (f"mine={tmp_path / 'mine.jsonl'}:qa",),
            "trials": 2,
        },
        agent={"eval_max_turns": 3},
        log={"tensorboard": False},
        dataflow={"lease_s": 1.0, "wait_s": 60.0},
    )


def answers_of_an_engine(config: Config, version: int, store: Path) -> tuple[Any, Any]:
    """The comparison of the synchronous loop, and the tokens of its rollouts of the main split."""
    components = RunComponents.prepare(
        config, Placement.colocated(World(0, 1, torch.device("cpu")))
    )
    engines = components.make_policy_engines({"planner": WeightStore(store)})
    engines["planner"].load(version)
    evaluator = Evaluator(
        components=components,
        engines=engines,
        benchmarks=load_benchmarks(config),
    )
    found = evaluator.roll_out(evaluator.parts_of_ends())
    components.close()
    return evaluator.compared(found), [
        (t.task.id, t.seed, [list(turn.calls["planner"].response_ids) for turn in t.turns])
        for t in found["held-out texts"]
    ]


def stop_amid_questions(dataflow: Any, node: Process) -> None:
    """Stop the node while it has leased questions of an evaluation."""

    def is_held() -> bool:
        (held,) = [each["num_leased"] for each in dataflow.ledger.status()["nodes"].values()]
        return held > 0

    while True:
        node.wait_for(lambda: bool(dataflow.ledger.status()["nodes"]) and is_held())
        os.kill(node.pid, signal.SIGSTOP)
        if all(is_held() for _ in range(10)):
            return
        os.kill(node.pid, signal.SIGCONT)


def test_nodes_answer_as_an_engine_of_the_trainer_would(server: Server, tmp_path: Path) -> None:
    config, run, env = a_config(tmp_path), tmp_path / "run", {"FLOWTRAIN_TOKEN": TOKEN}
    config_file = tmp_path / "run.toml"
    config_file.write_text(to_toml(config))
    with serve_dataflow(config, tmp_path) as dataflow:
        trainer = server.start(
            *("train", "--config", config_file, "--run.dir", run),
            *("--dataflow.url", dataflow.url),
            env=env,
        )
        words = ("node", "--dataflow", dataflow.url, "--name")
        killed = keep_exit_code(server.start(*words, "one", env=env))
        stop_amid_questions(dataflow, killed)
        first = dataflow.ledger.status()["evaluations"]
        assert first[0]["name"] == "at the ends, held-out texts" and first[0]["num_leased"] > 0
        os.kill(killed.pid, signal.SIGKILL)
        assert killed.wait() == -signal.SIGKILL
        node = keep_exit_code(server.start(*words, "two", env=env))
        assert trainer.wait() == 0, trainer.err.read_text()
        assert node.wait() == 0, "training is done and every question answered"
        status, audit = dataflow.ledger.status(), dataflow.ledger.audit()
    assert audit.problems == () and status["evaluations"] == []
    # Three splits, sampled and greedy, and two questions of mine at both ends; one split after
    # step 2.
    assert audit.counts["questions.committed"] == 2 * (3 * 2 * NUM_TASKS + 2) + NUM_TASKS + 2
    assert any(why.startswith("ran out") for why in status["lost_leases"])
    records = read(run / "metrics.jsonl")
    steps = [each["step"] for each in records if "eval_reward" in each]
    assert sorted(steps) == [0, 2] and all(
        each["eval_version_min/planner"] >= each["step"]
        for each in records
        if "eval_reward" in each
    )
    assert any(each.get("grad_norm", 0) > 0 for each in records), "the weights have changed"
    summary, rollouts = json.loads((run / "summary.json").read_text()), read(run / "held_out.jsonl")
    assert [each["step"] for each in rollouts] == [0] * NUM_TASKS + [2] * NUM_TASKS
    for version, name in ((0, "warm"), (NUM_STEPS, "trained")):
        expected, tokens = answers_of_an_engine(config, version, run / "weights")
        found = summary[name]
        assert found.pop("versions") == {
            "eval_version_min/planner": version,
            "eval_version_max/planner": version,
            "eval_newer_share": 0.0,
        }
        assert found == expected and 0 < found["eval_reward"] < 1
        if version == 0:
            assert tokens == [
                (each["task_id"], each["seed"], [turn["response_ids"] for turn in each["turns"]])
                for each in rollouts[:NUM_TASKS]
            ]
