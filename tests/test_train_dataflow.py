"""Runs that take batches from a real ledger behind a real service; a script has pushed them."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from checkpoints import check_same
from cli_runs import (
    AFTER_STEP_3,
    KILL,
    NUM_STEPS,
    Process,
    Server,
    alike,
    check_equal,
    read,
    rows,
    text_of,
)
from http_servers import running
from safetensors.torch import load_file
from toy_options import FLOW

from flowtrain.config.options import parse
from flowtrain.records import (
    Action,
    Call,
    FinishReason,
    Group,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    Verdict,
    VersionSpan,
)
from flowtrain.rollouts.codec import pack_group
from flowtrain.rollouts.contract import Join, Lease, LeaseRequest, Push, Register
from flowtrain.rollouts.ledger import Ledger, open_ledger
from flowtrain.rollouts.service import Service
from flowtrain.weights import WeightStore

pytest_plugins = ("cli_runs",)

NUM_QUESTIONS, GROUP_SIZE, TOKEN = 4, 3, "secret"
WORDS = (
    *FLOW,
    *("--tiny.hidden_size", "32", "--tiny.num_layers", "1", "--tiny.num_heads", "2"),
    *("--tasks.num_train", "40", "--eval.num_tasks", "8"),
    *("--eval.every", "0", "--eval.at_ends", "false", "--log.tensorboard", "false"),
    *("--run.threads", "1", "--run.device", "cpu"),
    *("--rollout.num_questions", str(NUM_QUESTIONS), "--rollout.group_size", str(GROUP_SIZE)),
    *("--train.num_steps", str(NUM_STEPS)),
    *("--train.lr", "3e-3", "--checkpoint.every", "2", "--dataflow.max_staleness", "20"),
    *("--dataflow.max_waiting", "99"),
    *("--dataflow.wait_s", "60"),
)


def scripted(lease: Lease, verifies: bool) -> Group:
    """Rollouts of random tokens that only the work item decides on; the seed of each names it."""
    rng = random.Random(lease.work_item)

    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(256) for _ in range(rng.randint(1, most)))

    def call() -> Call:
        response = ids(9)
        logprobs = tuple(-5.5 + rng.random() for _ in response)
        spans = (VersionSpan(0, len(response), 0),)
        return Call(ids(20), response, logprobs, spans, FinishReason.STOP, "text")

    def turn() -> Turn:
        planner, verifier = call(), call()
        return Turn(
            calls={"planner": planner, "verifier": verifier} if verifies else {"planner": planner},
            action=Action("", "", "look", "Search"),
            tool_calls=(ToolCall("Search", "{}", ToolResult("found")),),
            verdict=Verdict.STOP,
            seconds=0.1,
        )

    members = [
        Trajectory(
            lease.task,
            tuple(turn() for _ in range(rng.randint(1, 3))),
            "answer",
            0.1,
            1000 * lease.work_item + n,
            reward=float(n == 0),
        )
        for n in range(GROUP_SIZE)
    ]
    return Group(0, tuple(members))


class Dataflow:
    """A database of a run; `served` while others may ask it."""

    def __init__(self, path: Path, *words: str) -> None:
        config = parse([*WORDS, *words])
        self.path, self.config = path, config
        self.ledger: Ledger = open_ledger(config, path)

    def register(self, *policies: str) -> None:
        """So that work items can be leased before the trainers come."""
        for policy in policies:
            self.ledger.register(
                Register(policy, "not known yet", "nowhere", NUM_QUESTIONS, 20, 512, 256)
            )

    def fill(self, num_steps: int) -> None:
        self.ledger.join(Join("script", "one"))
        leases = self.ledger.lease(LeaseRequest("script", "one", num_steps * NUM_QUESTIONS)).leases
        assert len(leases) == num_steps * NUM_QUESTIONS
        verifies = "verifier" in self.config.policy_names
        for lease in leases:
            self.ledger.push(
                Push(
                    "script", lease.work_item, lease.attempt, pack_group(scripted(lease, verifies))
                )
            )

    def answer(self) -> int:
        """Answer the questions of evaluations that are asked; returns how many were until now."""
        asked = {"planner": NUM_STEPS}
        for lease in self.ledger.lease(LeaseRequest("script", "one", 99, asked)).leases:
            if lease.evaluation is not None:
                group = scripted(lease, verifies=False)
                one = Group(lease.index, group.trajectories[:1])
                self.ledger.push(Push("script", lease.work_item, lease.attempt, pack_group(one)))
        return self.ledger.audit().counts.get("questions.committed", 0)

    @contextlib.contextmanager
    def served(self, port: int = 0) -> Iterator[str]:
        """The URL."""
        try:
            with running(Service(self.ledger, self.ledger.run, TOKEN), port) as url:
                yield url
        finally:
            self.ledger.close()

    def work_items(self) -> list[tuple[int, int, int]]:
        """(step, position, work item) of the planner's batches."""
        with contextlib.closing(sqlite3.connect(self.path)) as database:
            return database.execute(
                "SELECT step, position, work_item FROM assignments WHERE policy = 'planner'"
                " ORDER BY step, position"
            ).fetchall()

    def policy(self, name: str = "planner") -> dict[str, Any]:
        return self.ledger.status()["policies"][name]


Start = Callable[..., list[Process]]


@pytest.fixture
def start(server: Server) -> Start:
    def begin(
        url: str, run: Path, *words: str, size: int = 1, before: str = "", token: str = TOKEN
    ) -> list[Process]:
        argv = (*WORDS, "--dataflow.url", url, "--run.dir", run, "--resume", "auto", *words)
        return server.start_ranks(
            size, *argv, before=[before] * size, env={"FLOWTRAIN_TOKEN": token}
        )

    return begin


def ended(processes: list[Process], code: int = 0) -> str:
    """stderr of the first."""
    codes = [process.wait() for process in processes]
    expected = [code] * len(processes)
    assert codes == expected, [process.err.read_text()[-3000:] for process in processes]
    return processes[0].err.read_text()


def has_logged(run: Path, step: int) -> bool:
    return f'{{"step": {step},' in text_of(run / "metrics.jsonl")


def seeds(run: Path) -> list[tuple[int, int, int]]:
    """(step, place, seed) of every rollout that was trained."""
    records = [record for path in run.glob("trajectories*.jsonl") for record in read(path)]
    return sorted((record["step"], record["group_index"], record["seed"]) for record in records)


def last_of(run: Path) -> Path:
    return run / "checkpoints" / f"step_{NUM_STEPS:08d}"


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with groups for all steps."""
    dataflow = Dataflow(tmp_path_factory.mktemp("filled") / "ledger.sqlite")
    dataflow.register("planner")
    dataflow.fill(NUM_STEPS)
    dataflow.ledger.close()
    return dataflow.path


@pytest.fixture
def copied(filled: Path, tmp_path: Path) -> Dataflow:
    shutil.copy(filled, tmp_path / "ledger.sqlite")
    return Dataflow(tmp_path / "ledger.sqlite")


@pytest.fixture(scope="module")
def whole(
    filled: Path, server: Server, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[tuple[int, int, int]]]:
    """The folder of a run that nothing disturbed, and the work items of its batches."""
    path = tmp_path_factory.mktemp("whole")
    shutil.copy(filled, path / "ledger.sqlite")
    dataflow = Dataflow(path / "ledger.sqlite")
    with dataflow.served() as url:
        argv = (*WORDS, "--dataflow.url", url, "--run.dir", path / "run")
        ended([server.start("train", *argv, env={"FLOWTRAIN_TOKEN": TOKEN})])
        assert dataflow.policy()["state"] == "done" and dataflow.ledger.audit().problems == ()
    return path / "run", dataflow.work_items()


def test_a_run_trains_what_nodes_have_made(whole: tuple[Path, list[tuple[int, int, int]]]) -> None:
    run, work_items = whole
    assert (
        len({work_item for *_, work_item in work_items})
        == len(work_items)
        == NUM_STEPS * NUM_QUESTIONS
    )
    assert seeds(run) == sorted(
        (step, place, 1000 * work_item + n)
        for step, place, work_item in work_items
        for n in range(GROUP_SIZE)
    )
    records = read(run / "metrics.jsonl")
    found = [record["step"] for record in records]
    assert found == list(range(1, NUM_STEPS + 1)), "there was no evaluation"
    for record in records:
        assert (
            record["dataflow/staleness_mean"]
            == record["dataflow/staleness_max"]
            == record["step"] - 1
        )
        assert record["num_tokens"] > 0 and record["reward_mean"] == pytest.approx(1 / GROUP_SIZE)
        assert {
            "dataflow/waited_s",
            "dataflow/num_buffered",
            "dataflow/num_stale",
            "dataflow/replay_share",
        } <= record.keys()
    first, last = (
        load_file(run / "checkpoints" / f"step_{step:08d}" / "model" / "model.safetensors")
        for step in (NUM_STEPS - 2, NUM_STEPS)
    )
    assert any((first[name] != last[name]).any() for name in last)
    found = WeightStore(run / "weights").versions()
    assert found == list(range(NUM_STEPS + 1)), "nodes may still sample with any of them"


def test_evaluations_outlive_a_trainer_that_is_killed(
    copied: Dataflow, start: Start, tmp_path: Path
) -> None:
    """Killed after step 3 with that of step 2 under way; it goes on with two ranks, which share the
    questions, and waits for the last one at the end.
    """
    run, often, num = tmp_path / "run", ("--eval.every", "2"), 8
    with copied.served() as url:
        killed = start(url, run, *often, before=AFTER_STEP_3)
        assert [process.wait() for process in killed] == [-signal.SIGKILL]
        assert not any("eval_reward" in record for record in read(run / "metrics.jsonl"))
        processes = start(url, run, *often, size=2)
        processes[0].wait_for(lambda: copied.answer() == NUM_STEPS // 2 * num)
        ended(processes)
        assert copied.ledger.audit().problems == ()
        assert copied.ledger.audit().counts["questions.committed"] == NUM_STEPS // 2 * num
    records = read(run / "metrics.jsonl")
    found = [record for record in records if "eval_reward" in record]
    assert [record["step"] for record in found] == [2, 4, 6]
    assert all(record["eval_reward"] == 1 for record in found)
    assert [record["step"] for record in records if record not in found] == [1, 2, 3, 4, 5, 6]
    rollouts = [each for path in run.glob("held_out*.jsonl") for each in read(path)]
    seen = sorted((each["step"], each["group_index"]) for each in rollouts)
    assert seen == [(step, index) for step in (2, 4, 6) for index in range(num)]


def check_alike(run: Path, whole: Path) -> None:
    """Two ranks train what one trains, but for the rounding of sums."""
    names = (
        "num_tokens",
        "loss",
        "grad_norm",
        "ratio_mean",
        "reward_mean",
        "turns_mean",
        "dataflow/staleness_mean",
        "mismatch_left_out",
    )
    ours, theirs = (
        [{name: row[name] for name in names} for row in rows(run, "metrics.jsonl")]
        for run in (run, whole)
    )
    assert len(ours) == len(theirs) and all(map(alike, ours, theirs))
    first, *later = rows(run, "metrics.jsonl")
    assert first["mismatch_kl"] > 0.1 and first["mismatch_left_out"] == 0, "they are made up"
    for step in later:
        assert "mismatch_kl" not in step, "tokens of version 0 may differ from later weights"
        assert 0 < step["mismatch_left_out"] < step["num_tokens"]


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_that_is_killed_gets_the_same_batches_again_and_ends_with_the_same_bits(
    copied: Dataflow,
    start: Start,
    whole: tuple[Path, list[tuple[int, int, int]]],
    tmp_path: Path,
    size: int,
) -> None:
    """From the checkpoint of step 2."""
    run = tmp_path / "run"
    with copied.served() as url:
        killed = start(url, run, size=size, before=AFTER_STEP_3)
        assert -signal.SIGKILL in [process.wait() for process in killed]
        assert copied.policy()["step"] >= 3
        assert copied.policy()["checkpoint"] in (0, 2), "the last report may have died with the run"
        ended(start(url, run, size=size))
        assert copied.ledger.audit().problems == ()
    assert copied.work_items() == whole[1] and seeds(run) == seeds(whole[0])
    if size == 1:
        check_same(last_of(run), last_of(whole[0]))
        assert rows(run, "trajectories.jsonl") == rows(whole[0], "trajectories.jsonl")
    else:
        check_alike(run, whole[0])


def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(
    copied: Dataflow, start: Start, whole: tuple[Path, list[tuple[int, int, int]]], tmp_path: Path
) -> None:
    """The dataflow still has the batches and the answers that came after it."""
    run, often, num = tmp_path / "run", ("--eval.every", "2"), 8
    waiting = "from flowtrain.evaluation.nodes import PoolEvaluations as P; P.complete = P.wait\n"
    kill = KILL.format(
        module="flowtrain.trainer.run.run_logger", path="RunLogger.log", number=6, after=True
    )
    with copied.served() as url:
        killed = start(url, run, *often, before=waiting + kill)
        killed[0].wait_for(lambda: copied.answer() == 3 * num)
        assert [process.wait() for process in killed] == [-signal.SIGKILL]
        newest = run / "checkpoints" / "step_00000004"
        data = newest / "model" / "model.safetensors"
        data.write_bytes(data.read_bytes()[:-1])
        err = ended(start(url, run, *often))
        assert f"skipping checkpoint {newest}" in err
        assert copied.ledger.audit().problems == ()
    assert copied.work_items() == whole[1]
    check_same(last_of(run), last_of(whole[0]))
    evaluated = [r["step"] for r in read(run / "metrics.jsonl") if "eval_reward" in r]
    assert evaluated == [2, 4, 6]


def test_a_service_that_is_away_for_a_while_is_waited_for(
    start: Start, whole: tuple[Path, list[tuple[int, int, int]]], tmp_path: Path
) -> None:
    dataflow, run = Dataflow(tmp_path / "ledger.sqlite"), tmp_path / "run"
    dataflow.register("planner")
    dataflow.fill(2)
    with dataflow.served() as url:
        (process,) = start(url, run)
        process.wait_for(lambda: has_logged(run, 2))
    dataflow.fill(NUM_STEPS - 2)
    with dataflow.served(int(url.rpartition(":")[2])) as url:
        ended([process])
        assert dataflow.ledger.audit().problems == ()
    assert seeds(run) == seeds(whole[0])
    check_same(last_of(run), last_of(whole[0]), but_state=True)


def test_a_run_that_waits_ends_when_it_is_told_to_and_goes_on_later(
    start: Start, whole: tuple[Path, list[tuple[int, int, int]]], tmp_path: Path
) -> None:
    """It waits for its first batch, and later for that of step 4."""
    dataflow, run = Dataflow(tmp_path / "ledger.sqlite"), tmp_path / "run"
    dataflow.register("planner")
    with dataflow.served() as url:
        for num_steps, more in ((0, 3), (3, NUM_STEPS - 3)):
            (process,) = start(url, run)
            process.wait_for(
                lambda num_steps=num_steps: (
                    has_logged(run, num_steps) if num_steps else (run / "weights" / "HEAD").exists()
                )
            )
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait(20) == 130 and "Traceback" not in process.err.read_text()
            assert num_steps == 0 or (run / "checkpoints" / f"step_{num_steps:08d}").exists()
            dataflow.fill(more)
        ended(start(url, run))
    assert seeds(run) == seeds(whole[0])
    check_same(last_of(run), last_of(whole[0]), but_state=True)


def test_a_run_that_does_not_fit_is_refused_in_a_line(
    copied: Dataflow, start: Start, server: Server, tmp_path: Path
) -> None:
    """Neither does a checkpoint go on with another database, or without one."""
    no_token = "the token is missing or wrong; set FLOWTRAIN_TOKEN to the token of the service"
    few = "dataflow.max_waiting=99 must be at least the 100 groups of a batch"
    other, first = Dataflow(tmp_path / "other.sqlite"), tmp_path / "first"
    with copied.served() as url:
        ended(start(url, first, "--train.num_steps", "1"))
        for words, token, message in (
            ((), "wrong", no_token),
            (("--tiny.hidden_size", "48"), TOKEN, "has layout"),
            (("--rollout.num_questions", "100"), TOKEN, few),
        ):
            error = ended(start(url, tmp_path / "run", *words, token=token), code=2)
            (line,) = [line for line in error.splitlines() if line.startswith("flowtrain.train: ")]
            assert message in line
    with other.served() as url:
        error = ended(start(url, first), code=2)
    assert (
        f"this is run {other.ledger.run!r}, but the checkpoint was trained from "
        f"{copied.ledger.run!r}" in error
    )
    code, lines, _ = server.run("train", *WORDS, "--run.dir", first, "--resume", "auto")
    assert code == 2
    assert f"trained from the dataflow {copied.ledger.run!r}: set dataflow.url to" in lines[-1]


def test_one_policys_trainer_dies_and_the_others_goes_on(
    start: Start, tiny_path: str, tmp_path: Path
) -> None:
    both = (
        *("--roles.verifier", "own", "--tasks.name", "facts", "--model.path", tiny_path),
        *("--rollout.max_new_tokens", "8"),
    )
    words = {
        "planner": (*both, "--policies.verifier.path", tiny_path),
        "verifier": (*both, "--policies.planner.path", tiny_path, "--train.policy", "verifier"),
    }
    dataflow = Dataflow(tmp_path / "ledger.sqlite", *words["planner"])
    dataflow.register("planner", "verifier")
    dataflow.fill(2)
    with dataflow.served() as url:
        planner = start(url, tmp_path / "planner", *words["planner"], before=AFTER_STEP_3)
        verifier = start(url, tmp_path / "verifier", *words["verifier"])
        for name in words:
            (planner if name == "planner" else verifier)[0].wait_for(
                lambda name=name: has_logged(tmp_path / name, 2)
            )
        dataflow.fill(NUM_STEPS - 2)
        assert planner[0].wait() == -signal.SIGKILL
        ended(verifier)
        assert dataflow.policy("verifier")["state"] == "done"
        assert dataflow.policy("planner")["step"] < NUM_STEPS
        ended(start(url, tmp_path / "planner", *words["planner"]))
        assert dataflow.ledger.audit().problems == ()
    for name in words:
        found = [record["step"] for record in read(tmp_path / name / "metrics.jsonl")]
        assert found == list(range(1, NUM_STEPS + 1))
    (first, *_), (second, *_) = (read(tmp_path / name / "trajectories.jsonl") for name in words)
    assert first["turns"][0]["training"] is not None and second["turns"][0]["training"] is None


def pushed(dataflow: Dataflow, node: str) -> int:
    """Groups of a node."""
    found = dataflow.ledger.status()["nodes"].get(node)
    return found["num_groups"] if found else 0


PACE = (
    *("--dataflow.lease_s", "2", "--dataflow.max_staleness", "3", "--dataflow.wait_s", "120"),
    *("--train.num_steps", str(NUM_STEPS + 2), "--eval.at_ends", "false"),
    *("--log.replay", "true", "--rollout.group_size", "4"),
)


@pytest.mark.dist
def test_two_trainers_and_nodes_that_come_and_go(
    server: Server, warm: Path, words: tuple[str, ...], tmp_path: Path
) -> None:
    model = str(warm / "model")
    own = ("--roles.verifier", "own", "--policies.verifier.max_new_tokens", "8")
    both = (*words, *PACE, *own)
    of = {
        "planner": (*both, "--policies.verifier.path", model),
        "verifier": (*both, "--policies.planner.path", model, "--train.policy", "verifier"),
    }
    come_and_go(server, tmp_path, of)


def come_and_go(server: Server, place: Path, of: Mapping[str, tuple[object, ...]]) -> None:
    """A process for each policy; of three nodes two are killed and one joins, without which
    training would not end. Both runs can be made again from their logs.

    `of`: the options of each trainer by its policy.
    """
    first, num_steps = next(iter(of)), NUM_STEPS + 2
    dataflow = Dataflow(place / "ledger.sqlite", *map(str, of[first]))
    with dataflow.served() as url:

        def node(name: str) -> Process:
            return server.start(
                "node",
                "--dataflow",
                url,
                "--name",
                name,
                "--run.threads",
                "1",
                env={"FLOWTRAIN_TOKEN": TOKEN},
            )

        trainers = {
            name: server.start(
                "train",
                *options,
                "--dataflow.url",
                url,
                "--run.dir",
                place / name,
                env={"FLOWTRAIN_TOKEN": TOKEN},
            )
            for name, options in of.items()
        }
        nodes = {name: node(name) for name in ("one", "two", "three")}
        nodes["three"].wait_for(lambda: has_logged(place / first, 2), timeout_s=120)
        for name in ("one", "two"):
            os.kill(nodes.pop(name).pid, signal.SIGKILL)
        os.kill(nodes["three"].pid, signal.SIGSTOP)
        nodes["four"] = node("four")
        nodes["four"].wait_for(lambda: pushed(dataflow, "four") > 0, timeout_s=120)
        os.kill(nodes["three"].pid, signal.SIGCONT)
        codes = {name: trainer.wait(120) for name, trainer in trainers.items()}
        expected = dict.fromkeys(of, 0)
        assert codes == expected, [trainer.err.read_text()[-3000:] for trainer in trainers.values()]
        ends = [each.wait() for each in nodes.values()]
        assert ends == [0, 0], [
            each.err.read_text()[-2000:] for each in nodes.values()
        ]  # training is done
        audit, status = dataflow.ledger.audit(), dataflow.ledger.status()
    assert audit.problems == ()
    assert all(policy["state"] == "done" for policy in status["policies"].values())
    for name in trainers:
        records = read(place / name / "metrics.jsonl")
        assert [record["step"] for record in records] == list(range(1, num_steps + 1))
        assert all(record["dataflow/staleness_max"] <= 3 for record in records)
        assert sum(record["num_tokens"] for record in records) > 0
        check_equal(server, place / name, num_steps)
