"""Task folders of Harbor, by the real package in an environment of its own (`make test-harbor`).

Ten tasks of ours on bubblewrap, trials behind the gateway by a scripted engine, hostile commands.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from gateway_runs import LoggingEngine, calls_of, logging_engine, make_agent, roll_out

from flowtrain.config import Config
from flowtrain.tasks.harbor import harbor_tasks
from flowtrain.tasks.sets import MAIN_SPLIT, task_set
from flowtrain.types import Task, Trajectory, UserError

HERE = Path(__file__).parent
TASKS = HERE.parents[1] / "examples" / "harbor" / "tasks"
PYTHON = os.environ.get("FLOWTRAIN_HARBOR", str(HERE.parents[1] / ".venv/harbor/bin/python"))
OURS = {"python": PYTHON, "environment": {"import_path": "bubblewrap:Bubblewrap"}}

pytestmark = [
    pytest.mark.skipif(not Path(PYTHON).exists(), reason="no environment with Harbor"),
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap"),
    pytest.mark.timeout(180),
]


def options(folder: Path = TASKS, **more: Any) -> dict[str, Any]:
    return {**OURS, "dataset": {"path": str(folder)}, **more}


def bash(*commands: str) -> str:
    return "```bash\n" + "\n".join(commands) + "\n```"


def play(
    engine: LoggingEngine, task: Task, agent: dict[str, Any] | None = None, **more: Any
) -> Trajectory:
    tasks = {"name": "harbor", "harbor": options(**more)}
    with closing(make_agent(engine, agent=agent, tasks=tasks)) as made:
        return roll_out(made, task=task, limit_s=120)


def our_task(name: str) -> Task:
    return next(task for task in harbor_tasks(options()) if task.id == name)


def new_task(folder: Path, test: str, dockerfile: str = "WORKDIR /app\n", **files: str) -> Path:
    """Write one task whose oracle does nothing."""
    for name, text in {
        "task.toml": "",
        "instruction.md": "Do it.",
        "environment/Dockerfile": f"FROM debian:12-slim\n{dockerfile}",
        "solution/solve.sh": "#!/bin/bash\n",
        "tests/test.sh": f"#!/bin/bash\n{test}\n",
        **files,
    }.items():
        path = folder / "made" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def seen_by(*commands: str) -> str:
    """What the policy is told that the commands printed."""
    engine = logging_engine(
        bash(*commands),
        "Done.",
        max_tokens=100_000,
        spell=lambda tokenizer, text: tuple(tokenizer.encode(text, add_special_tokens=False)),
    )
    trajectory = play(engine, our_task("write-a-word"))
    assert trajectory.error == "" and len(engine.log) == 2, trajectory
    shown = engine.tokenizer.decode(engine.log[1][0])
    return shown.rpartition("```")[2]


def test_the_oracle_solves_each_of_the_ten_and_nothing_solves_none() -> None:
    config = {
        "agent": {"name": "gateway"},
        "tasks": {"name": "harbor", "harbor": options(check=True), "held_out_share": 0.2},
    }
    tasks = task_set(Config.model_validate(config))
    assert (len(tasks.train), len(tasks.held_out[MAIN_SPLIT])) == (8, 2)
    (steps,) = [task for task in harbor_tasks(options()) if task.id == "two-steps"]
    assert steps.question == (
        "Append the word first to words.txt.\n\n\nAppend the word second to words.txt."
    )


def test_tests_that_tell_no_solution_from_none_are_refused(tmp_path: Path) -> None:
    always = new_task(tmp_path, "echo 1 > /logs/verifier/reward.txt")
    with pytest.raises(UserError, match=r"'made': the agent nop gets 1\.0") as refused:
        harbor_tasks(options(always, check=True))
    assert "oracle gets" not in str(refused.value)


def test_a_trial_is_trained_as_it_was_sampled_and_its_tests_reward_it() -> None:
    engine = logging_engine(bash("echo harbor > answer.txt", "cat answer.txt"), "Done.")
    trajectory = play(engine, our_task("write-a-word"))
    assert trajectory.error == "", trajectory.error
    assert trajectory.reported == {"reward": 1.0} and calls_of(trajectory) == engine.log
    assert "Write the word harbor" in engine.tokenizer.decode(engine.log[0][0])
    (first, said), (second, _) = engine.log
    assert second[: len(first) + len(said)] == first + said


def test_a_reward_may_lie_between_and_figures_beside_it_are_not_added() -> None:
    engine = logging_engine(bash("touch one three"), "Done.")
    trajectory = play(engine, our_task("part-by-part"))
    assert trajectory.reported == {"reward": pytest.approx(2 / 3, abs=1e-4)}


def test_what_was_done_within_the_limit_is_graded() -> None:
    engine = logging_engine(bash("echo harbor > answer.txt"), bash("echo never"))
    trajectory = play(engine, our_task("write-a-word"), {"max_turns": 1})
    assert (trajectory.reported, trajectory.truncated) == ({"reward": 1.0}, "turns")
    assert calls_of(trajectory) == engine.log and len(engine.log) == 1


def test_each_step_of_a_task_is_asked_and_the_last_one_counts() -> None:
    engine = logging_engine("Skip.", bash("echo second >> words.txt"), "Done.")
    trajectory = play(engine, our_task("two-steps"))
    assert trajectory.reported == {"reward": 1.0} and len(engine.log) == 3


def test_an_agent_of_the_users_is_told_by_its_import_path(tmp_path: Path) -> None:
    agent = {"import_path": "shell:Shell", "kwargs": {"system": "Mind the gap."}}
    engine = logging_engine("Done.")
    tasks = harbor_tasks(options(agent=agent))
    trajectory = play(engine, tasks[0], agent=None)
    assert "Mind the gap." in engine.tokenizer.decode(engine.log[0][0])
    assert trajectory.reported == {"reward": 0.0}


@pytest.mark.parametrize(
    ("dockerfile", "reason"),
    [
        ("RUN no-such-program\n", "no-such-program"),
        ("COPY ../../secret .\n", "outside of the environment"),
        ("VOLUME /data\n", "VOLUME is not for bubblewrap"),
        ("COPY --from=other /x .\n", "only files beside it"),
    ],
)
def test_what_bubblewrap_cannot_build_fails_the_rollout_alone(
    tmp_path: Path, dockerfile: str, reason: str
) -> None:
    folder = new_task(tmp_path, "echo 1 > /logs/verifier/reward.txt", dockerfile)
    (task,) = harbor_tasks(options(folder))
    trajectory = play(logging_engine("Done."), task)
    assert reason in trajectory.error and not trajectory.reported


def test_a_task_without_a_verdict_fails_its_rollout(tmp_path: Path) -> None:
    (task,) = harbor_tasks(options(new_task(tmp_path, "true")))
    assert "RewardFileNotFoundError" in play(logging_engine("Done."), task).error


def test_commands_see_no_network_and_no_file_of_this_machine(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the key")
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        shown = seen_by(
            f"(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null && echo open || echo closed",
            "touch /usr/mine /etc/mine /bin/mine",
            "echo processes $(ls /proc | grep -c '^[0-9]')",
        )
    assert "closed" in shown and shown.count("Read-only file system") == 3
    count = re.search(r"processes (\d+)", shown)
    assert count is not None and int(count[1]) < 10
    # In a rollout of its own: responses have a limit of tokens.
    shown = seen_by(f"cat {secret}", "ls /home; echo keys $(env | grep -c API_KEY)")
    assert "the key" not in shown and shown.count("No such file") == 2
    assert "keys 0" in shown, shown


def test_a_link_laid_in_place_of_the_logs_leads_nowhere(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o777)
    engine = logging_engine(
        bash(
            "echo harbor > answer.txt",
            f"rm -r /logs/verifier /tests && ln -s {outside} /logs/verifier",
            f"ln -s {outside} /tests",
        ),
        "Done.",
    )
    trajectory = play(engine, our_task("write-a-word"))
    assert not any(outside.iterdir())
    assert trajectory.error or trajectory.reported


def test_processes_memory_and_output_have_bounds() -> None:
    forks = "while (defined($p = fork)) { $p ? $n++ : sleep 1000 } print qq(stopped at $n: $!\n)"
    shown = seen_by(f"perl -e '{forks}'")
    stopped = re.search(r"stopped at (\d+): Resource temporarily unavailable", shown)
    assert stopped is not None and int(stopped[1]) < 256, shown[-200:]
    shown = seen_by("yes | head -c 30000000")
    assert "..." in shown and len(shown) < 20_000


def test_a_trial_that_outlasts_its_rollout_ends_with_all_it_started(tmp_path: Path) -> None:
    marker = f"9{os.getpid()}"
    engine = logging_engine(bash(f"(sleep {marker} &); sleep {marker}"))
    trajectory = play(engine, our_task("write-a-word"), {"rollout_timeout_s": 25.0})
    assert trajectory.truncated == "time" and len(engine.log) == 1
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [line for line in running if marker.encode() in line]


def test_what_harbor_refuses_is_one_line() -> None:
    with pytest.raises(UserError, match=r"DatasetConfig.*'path'"):
        harbor_tasks({**OURS, "dataset": {}})
    with pytest.raises(UserError, match=r"no-such-folder"):
        harbor_tasks(options(Path("no-such-folder")))
    columns = json.loads(our_task("write-a-word").columns)["harbor"]
    assert columns["options"] == {"environment": OURS["environment"]}
