"""Nodes as processes, a service on loopback and weights that change."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_runs import Process, Server
from loopback_dataflow import (
    TOKEN,
    DataflowServer,
    Trainer,
    begin_node,
    keep_exit_code,
    killed_at_the_end,
    make_config,
    make_model,
    serve_dataflow,
)

from flowtrain.algorithms import load_algorithm
from flowtrain.records import Group
from flowtrain.trainer.loss import score_row
from flowtrain.trainer.model import loading as models
from flowtrain.utils.net.credentials import Role, TokenFile, issue, revoke
from flowtrain.weights import WeightStore
from tests.weights import http_stores as hs

pytest_plugins = ("cli_runs",)
Start = Callable[..., Process]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def dataflow(model: str, tmp_path: Path) -> Iterator[DataflowServer]:
    with serve_dataflow(
        make_config(
            model,
            # Nodes go on while batches wait, so that they have leases when they are stopped.
            dataflow={"lease_s": 1.5, "wait_s": 60.0, "max_staleness": 8, "max_waiting": 99},
        ),
        tmp_path,
    ) as made:
        yield made
        assert not made.ledger.audit().problems


@pytest.fixture
def trainer(dataflow: DataflowServer, model: str, tmp_path: Path) -> Trainer:
    made = Trainer(dataflow.ledger, model, tmp_path / "weights")
    made.register(num_groups=2)
    return made


@pytest.fixture
def start(server: Server, dataflow: DataflowServer) -> Iterator[Start]:
    with killed_at_the_end() as started:

        def begin(name: str, *words: object) -> Process:
            started.append(begin_node(server, dataflow, name, *words))
            return started[-1]

        yield begin


def terminate(process: Process) -> None:
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait() == 0, process.err.read_text()


@contextmanager
def node_of(server: Server, url: str, **where: Any) -> Iterator[Process]:
    """A node that is ended by a signal, or killed after an error."""
    command = ("node", "--dataflow", url, "--name", "one")
    node = keep_exit_code(server.start(*command, env={"FLOWTRAIN_TOKEN": TOKEN}, **where))
    try:
        yield node
        terminate(node)
    finally:
        if node.poll() is None:
            os.kill(node.pid, signal.SIGKILL)


def wait_for(is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def versions(groups: list[Group]) -> list[set[int]]:
    """Read the versions of each rollout."""
    return [
        {span.version for turn in t.turns for span in turn.calls["planner"].spans}
        for group in groups
        for t in group.trajectories
    ]


def newest(group: Group) -> int:
    """Read the newest version that sampled one of the two roots."""
    return max(version for found in versions([group])[:2] for version in found)


def is_held(dataflow: DataflowServer, node: str) -> bool:
    """A node that is stopped has leases, and no push of it is on its way any more."""
    return all(dataflow.ledger.status()["nodes"][node]["num_leased"] > 0 for _ in range(200))


def test_groups_follow_the_weights_and_survive_a_node_that_dies(
    dataflow: DataflowServer, trainer: Trainer, start: Start
) -> None:
    nodes = {name: start(name) for name in ("one", "two")}
    seen = [versions(trainer.step(1))]
    for step in itertools.count(2):
        # No node begins a group while a whole batch waits.
        seen.append(versions(trainer.step(step)))
        pushed = dataflow.ledger.status()["nodes"]
        if len(pushed) < 2 or not all(node["num_groups"] for node in pushed.values()):
            continue
        os.kill(nodes["one"].pid, signal.SIGSTOP)
        if is_held(dataflow, "one"):
            break
        os.kill(nodes["one"].pid, signal.SIGCONT)
    os.kill(nodes["one"].pid, signal.SIGKILL)
    assert nodes["one"].wait() == -signal.SIGKILL
    # Groups that waited may be of one version for as many steps as their staleness allows.
    for later in range(step + 1, step + 60):
        seen.append(versions(trainer.step(later)))
        if len(set().union(*(each for batch in seen for each in batch))) >= 3:
            break
    else:
        raise AssertionError("tokens of several versions")
    for step, batch in enumerate(seen, 1):
        assert all(step - 1 - 8 <= version <= step - 1 for each in batch for version in each)
    wait_for(lambda: dataflow.ledger.status()["nodes"]["one"]["num_leased"] == 0)
    trainer.step(later + 1)  # and so a node is given work again, that of the lost leases first
    wait_for(lambda: dataflow.ledger.status()["lost_leases"].get("ran out", 0) >= 1)
    terminate(nodes["two"])
    left = dataflow.ledger.status()["work_items"]
    assert left["leased"] == left["failed"] == 0


def test_a_node_scores_by_the_function_that_the_run_names(
    model: str, server: Server, tmp_path: Path
) -> None:
    """A relative path is one in the node's own working folder."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "mine.py").write_text(
        "async def score(task, answer, trajectory):\n"
        "    return {'odd': trajectory.seed % 2, 'turns': -len(trajectory.turns)}\n"
    )
    reward = {"function": "mine.py:score", "low": -2.0}
    with serve_dataflow(make_config(model, reward=reward), tmp_path) as dataflow:
        trainer = Trainer(dataflow.ledger, model, tmp_path / "weights")
        trainer.register(num_groups=2)
        command = ("node", "--dataflow", dataflow.url, "--name", "one")
        lost = server.start(*command, env={"FLOWTRAIN_TOKEN": TOKEN}, cwd=tmp_path)
        assert lost.wait() == 2 and "reward.function='mine.py:score': " in lost.err.read_text()
        with node_of(server, dataflow.url, cwd=home):
            scored = [each for group in trainer.step(1) for each in group.trajectories]
        for each in scored:
            parts = {"odd": each.seed % 2, "turns": -len(each.turns)}
            assert not each.error and each.reward_parts == parts
            assert each.reward == sum(parts.values()) and each.scored_by == "mine.py:score"


MINE = """
from flowtrain.agents.session import Session, SessionAgent


class Mine(SessionAgent):
    async def answer(self, session: Session) -> str:
        prompt = session.policy.encode(session.task.question)
        first = await session.sample(prompt)
        call = await session.sample(prompt + first.response_ids + session.policy.encode(" So:"))
        session.report(odd=session.seed % 2)
        return call.text
"""


PROGRAM = """
import httpx2


async def solve(task, base_url, api_key):
    messages = [{"role": "user", "content": task.question}]
    headers = {"Authorization": f"Bearer {api_key}"}
    async with httpx2.AsyncClient(base_url=base_url, headers=headers, timeout=60) as client:
        for _ in range(2):
            asked = {"model": "policy", "messages": messages}
            response = await client.post("/chat/completions", json=asked)
            message = response.raise_for_status().json()["choices"][0]["message"]
            messages += [message, {"role": "user", "content": "Are you sure?"}]
    return message["content"]
"""


@pytest.mark.parametrize("name", ["gateway", "mine.py:Mine"])
def test_a_node_rolls_out_with_any_agent(
    name: str, model: str, server: Server, tmp_path: Path
) -> None:
    """What it pushes passes the checks of the door, and holds what was sampled."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "program.py").write_text(PROGRAM)
    is_gateway = name == "gateway"
    agent = {"name": name, "tools": () if is_gateway else ("Search",), "max_turns": 2}
    gateway = {"function": "program.py:solve"} if is_gateway else {}
    config = make_config(model, agent=agent, gateway=gateway)
    with serve_dataflow(config, tmp_path) as dataflow:
        trainer = Trainer(dataflow.ledger, model, tmp_path / "weights")
        trainer.register(num_groups=2)
        with node_of(server, dataflow.url, cwd=tmp_path):
            rollouts = [each for group in trainer.step(1) for each in group.trajectories]
    for rollout in rollouts:
        assert not rollout.error and rollout.reward is not None and rollout.turns
        for before, after in pairwise(turn.calls["planner"] for turn in rollout.turns):
            whole = before.prompt_ids + before.response_ids
            assert after.prompt_ids[: len(whole)] == whole
        assert len(rollout.turns) == 2
        if not is_gateway:
            assert rollout.scored_by == "reported" and rollout.reward == rollout.seed % 2


def test_a_node_with_another_model_is_refused(
    dataflow: DataflowServer, trainer: Trainer, start: Start, tmp_path: Path
) -> None:
    other = make_model(tmp_path / "other", num_layers=2)
    wrong, right = start("wrong", "--model.path", other), start("right")
    assert wrong.wait() in (1, 2)
    assert "layout" in wrong.err.read_text() and "Traceback" not in wrong.err.read_text()
    trainer.step(1)
    terminate(right)


def test_a_node_samples_from_a_lagging_store(
    dataflow: DataflowServer, trainer: Trainer, start: Start, tmp_path: Path
) -> None:
    """With version 0 of a mirror while the trainer is at 2; it says so and catches up."""
    mirror = tmp_path / "mirror"
    shutil.copytree(trainer.store.root, mirror)
    node = start("far", "--store", str(mirror))
    for step in (1, 2):
        trainer.step(step)
    lags = "is at version 0 of the planner, the trainer at 2: sampling continues with 0"
    wait_for(lambda: lags in node.err.read_text())
    shutil.copytree(trainer.store.root, mirror, dirs_exist_ok=True)
    wait_for(lambda: "the planner's weights are at version 2 now" in node.err.read_text())
    assert WeightStore(mirror).head() == 2
    wait_for(
        lambda: (
            dataflow.ledger.status()["nodes"]["far"]["versions"] == {"planner": 2}
            or trainer.take(3) is None
        )
    )
    terminate(node)


def test_a_node_goes_on_with_the_cache_of_an_earlier_one(
    trainer: Trainer, start: Start, tmp_path: Path
) -> None:
    """The first is killed in the midst of a snapshot; meanwhile its cache is nobody else's."""
    (file,) = trainer.store.manifest(0).snapshot_files
    half = file.num_bytes // 2

    def stall(handler: hs.Handler) -> None:
        data = handler.data() or b""
        hs.send_part(handler, data[:half], 0, file.num_bytes, Content_Length=file.num_bytes)
        handler.rfile.read(1)  # until the node is gone

    with hs.misbehaving(trainer.store.root) as weights:
        weights.answers[file.name] = [stall]
        words = ("--store", weights.url, "--cache", str(tmp_path / "cache"))
        first = start("one", *words)
        part = tmp_path / "cache" / "planner" / "v00000000" / f"{file.name}.part"
        wait_for(part.exists)
        other = start("other", *words)
        assert other.wait() == 2 and "give each node a --cache of its own" in other.err.read_text()
        os.kill(first.pid, signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
        node = start("one", *words)
        trainer.step(1)
        terminate(node)
        assert weights.ranges(file.name) == [f"bytes=0-{file.num_bytes - 1}"] * 2


def test_groups_survive_a_service_that_is_away(
    dataflow: DataflowServer, trainer: Trainer, start: Start
) -> None:
    node = start("one")
    trainer.step(1)
    wait_for(
        lambda: (
            dataflow.ledger.status()["work_items"]["leased"] > 0
            or dataflow.ledger.status()["work_items"]["committed"] >= 4  # a whole batch waits
        )
    )
    dataflow.stop()
    before = dataflow.ledger.status()["work_items"]
    wait_for(lambda: "is retried" in node.err.read_text())
    dataflow.start()
    for step in (2, 3, 4, 5, 6):
        trainer.step(step)
    assert node.poll() is None
    terminate(node)
    after = dataflow.ledger.status()
    assert after["work_items"]["committed"] >= before["committed"]
    assert after["work_items"]["failed"] == 0
    assert after["work_items"]["leased"] == 0


def test_a_frozen_policy_is_followed_once_it_has_a_trainer(
    model: str, tmp_path: Path, server: Server
) -> None:
    own = {"roles": {"verifier": "own"}, "policies": {"verifier": {"path": model}}}
    with serve_dataflow(
        make_config(model, dataflow={"lease_s": 0.6, "max_staleness": 8}, **own), tmp_path
    ) as made:
        planner = Trainer(made.ledger, model, tmp_path / "planner")
        planner.register()
        with node_of(server, made.url) as node:
            turns = [turn for g in planner.step(1) for t in g.trajectories for turn in t.turns]
            calls = [turn.calls.get("verifier") for turn in turns]
            assert calls and {span.version for call in calls if call for span in call.spans} == {0}
            verifier = Trainer(made.ledger, model, tmp_path / "verifier", "verifier")
            verifier.register()
            for step in (1, 2):
                verifier.step(step)
            wait_for(lambda: made.ledger.status()["nodes"]["one"]["versions"].get("verifier") == 2)
            assert "the trained policy has changed: restarting the engines" in node.err.read_text()
        assert not made.ledger.audit().problems


def test_a_node_without_a_trainer_waits_until_a_signal(
    dataflow: DataflowServer, start: Start
) -> None:
    node = start("early")
    wait_for(lambda: "waiting for a trainer to register" in node.err.read_text())
    terminate(node)


def test_options_that_a_node_may_not_set(dataflow: DataflowServer, start: Start) -> None:
    odd = {
        ("--rollout.temperature", "2"): "--rollout.temperature is fixed for the whole run",
        ("--run.devise", "cpu"): "--run.devise is fixed for the whole run",
        ("--store", "verifier=x"): "the policies of this run are planner",
        ("--vllm.max_num_seqs", "many"): "vllm.max_num_seqs",
    }
    for node, message in [(start("odd", *words), message) for words, message in odd.items()]:
        assert node.wait() == 2
        (line,) = node.err.read_text().strip().splitlines()
        assert line.startswith("python -m flowtrain.rollouts.node: ") and message in line


def test_a_node_whose_token_is_revoked_ends_with_one_line(
    server: Server, model: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokens.json"
    environment = {"FLOWTRAIN_TOKEN": issue(path, "eu-1", Role.NODE)}
    config = make_config(model, dataflow={"lease_s": 1.5, "wait_s": 8.0, "max_staleness": 8})
    with serve_dataflow(config, tmp_path, tokens=TokenFile(path)) as made:
        trainer = Trainer(made.ledger, model, tmp_path / "weights")
        trainer.register(num_groups=2)
        words = ("node", "--dataflow", made.url, "--name")
        other = keep_exit_code(server.start(*words, "us-1", env=environment))
        node = keep_exit_code(server.start(*words, "eu-1", env=environment))
        trainer.step(1)
        trainer.step(2)
        revoke(path, "eu-1")
        assert (node.wait(), other.wait()) == (75, 1)
        assert list(made.ledger.status()["nodes"]) == ["eu-1"]
    for process, why in (
        (node, "HTTP 401: the token is missing or wrong; set FLOWTRAIN_TOKEN to the token of the"),
        (other, "HTTP 403: the token is that of the node 'eu-1', the request is of 'us-1'"),
    ):
        lines = process.err.read_text().splitlines()
        told = [line for line in lines if "groups pushed (" not in line]  # the progress
        # The token may have been revoked by mistake: for a while it is tried again, and said.
        assert why in told[-1] and all(": HTTP 40" in line for line in told), lines


def test_a_node_branches_where_a_trainer_that_samples_would(
    server: Server, model: str, tmp_path: Path
) -> None:
    """By its sampler's tokens and a copy of the model of the start, which the weights have left; a
    branch shares its parent's tokens up to its point.
    """
    config = make_config(
        model,
        algorithm={"name": "appo"},
        appo={"num_roots": 2, "rule": "score", "spacing": 0, "gamma": 0.9},
        rollout={"group_size": 5, "num_questions": 2},
        dataflow={"max_staleness": 8},
    )
    algorithm, tokenizer = load_algorithm(config), models.load_tokenizer(model)
    reference = models.load_model(model, torch.float32)
    scorer: Any = SimpleNamespace(
        device=torch.device("cpu"),
        model=reference,
        reference=lambda: nullcontext(reference),
        score=lambda model, rows: [score_row(model, row, 1.0) for row in rows],
    )
    with serve_dataflow(config, tmp_path) as made:
        trainer = Trainer(made.ledger, model, tmp_path / "weights")
        trainer.register(num_groups=2)
        with node_of(server, made.url):
            groups = trainer.step(1)
            while min(map(newest, groups)) < 1 and (step := len(groups) // 2 + 1) < 12:
                groups += trainer.step(step)
    assert max(map(newest, groups)) >= 1, "the weights have left the reference"
    for group in groups:
        roots = replace(group, trajectories=group.trajectories[:2])
        with torch.no_grad():
            ((*found,),) = algorithm.branch(2, [roots], scorer, tokenizer).points
        points = [each.branch for each in group.trajectories]
        places = [point and (point.parent, point.turn, point.token) for point in points]
        assert places == [None, None, *((p.parent, p.turn, p.token) for p in found)]
        assert {(p.scorer, p.version) for p in points if p} == {("reference", newest(roots))}
        for each in group.trajectories[2:]:
            parent, at = group.trajectories[each.branch.parent], each.branch
            for left, was in zip(each.turns[: at.turn], parent.turns, strict=False):
                assert left.calls == was.calls
            left, was = (t.turns[at.turn].calls["planner"] for t in (each, parent))
            assert left.prompt_ids == was.prompt_ids
            assert left.response_ids[: at.token] == was.response_ids[: at.token]


def test_help(server: Server) -> None:
    code, _, out = server.run("node", "--help")
    assert code == 0
    assert "leases tasks" in out and "--vllm.*" in out and "--store" in out
