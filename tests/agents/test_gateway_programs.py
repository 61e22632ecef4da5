"""Commands and functions that solve tasks through the gateway."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from gateway_runs import TASK, function_agent, logging_engine, make_agent, roll_out

from flowtrain.agents.gateway.programs import task_record
from flowtrain.records import Task, Trajectory, UserError

ASK = """
import json, os, sys, urllib.request
body = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


def running(tmp_path: Path, source: str, *replies: str, **options: Any) -> Any:
    """The agent of a command, to be closed."""
    path = tmp_path / "program.py"
    path.write_text(source)
    command = [sys.executable, "-S", str(path)]
    return closing(make_agent(logging_engine(*replies), command=command, **options))


def run_command(tmp_path: Path, source: str, *replies: str, **options: Any) -> Trajectory:
    with running(tmp_path, source, *replies, **options) as agent:
        return roll_out(agent)


def test_the_answer_of_a_command_is_its_last_line(tmp_path: Path) -> None:
    trajectory = run_command(tmp_path, ASK + "print('log')\nprint(said)\nprint()", "1284")
    assert (trajectory.answer, trajectory.error, len(trajectory.turns)) == ("1284", "", 1)


def test_or_what_it_marks_as_the_answer(tmp_path: Path) -> None:
    source = "print('<answer>two\\nlines</answer> and more')\nprint('log')"
    assert run_command(tmp_path, source).answer == "two\nlines"


def test_or_what_it_writes_as_its_outcome(tmp_path: Path) -> None:
    source = "import os\nopen(os.environ['FLOWTRAIN_OUTCOME'], 'w').write({told!r})\nprint('log')"
    told = json.dumps({"answer": "told", "reward": 0.25})
    trajectory = run_command(tmp_path, source.format(told=told))
    assert (trajectory.answer, trajectory.error) == ("told", "")
    assert trajectory.reported == {"reward": 0.25}
    for bad, problem in (("{", "FLOWTRAIN_OUTCOME"), ('{"answer": 3}', "the answer is a int")):
        assert problem in run_command(tmp_path, source.format(told=bad)).error


def test_a_link_is_run_as_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the python of an environment, which imports what lies beside the link."""
    (tmp_path / "bin").mkdir()
    link = tmp_path / "bin" / "python"
    link.symlink_to(sys.executable)
    (tmp_path / "program.py").write_text("import sys; print(sys.orig_argv[0])")
    monkeypatch.chdir(tmp_path)
    with closing(make_agent(logging_engine(), command=["bin/python", "program.py"])) as agent:
        assert roll_out(agent).answer == str(link)


def test_a_command_gets_a_folder_and_few_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "1")
    monkeypatch.setenv("SHARED", "2")
    source = (
        "import json, os\n"
        "task = json.load(open(os.environ['FLOWTRAIN_TASK']))\n"
        "print(json.dumps([task, sorted(os.environ), os.getcwd(), os.environ['HOME']]))"
    )
    answer = run_command(tmp_path, source, environment=["SHARED"]).answer
    task, variables, folder, home = json.loads(answer)
    assert task == {"id": "t-1", "question": TASK.question}
    assert set(variables) - {"LC_CTYPE"} == {
        *("ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"),
        *("FLOWTRAIN_OUTCOME", "FLOWTRAIN_TASK", "HOME", "LANG", "OPENAI_API_KEY"),
        *("OPENAI_BASE_URL", "PATH", "SHARED"),
    }
    assert folder == home and not Path(folder).exists()


def test_the_removal_of_a_folder_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, others_went_on = threading.Event(), threading.Event()
    waited: list[bool] = []
    remove = shutil.rmtree

    def slow(path: str, *arguments: Any, **options: Any) -> None:
        begun.set()
        waited.append(others_went_on.wait(60))
        remove(path, *arguments, **options)

    async def run() -> Trajectory:
        rolling = asyncio.create_task(agent.run(TASK, 0))
        while not begun.is_set():
            await asyncio.sleep(0)
        others_went_on.set()
        return await rolling

    monkeypatch.setattr(shutil, "rmtree", slow)
    with running(tmp_path, "print(42)") as agent:
        trajectory = asyncio.run(run())
    assert waited == [True] and (trajectory.answer, trajectory.error) == ("42", "")


def test_a_failed_command_says_why(tmp_path: Path) -> None:
    trajectory = run_command(tmp_path, "import sys\nprint('42')\nsys.exit('no key')")
    assert trajectory.answer == "" and trajectory.turns == ()
    assert "exit code 1: no key" in trajectory.error


def test_a_command_that_meets_the_limit_of_turns_is_cut(tmp_path: Path) -> None:
    trajectory = run_command(tmp_path, ASK + ASK, "one", "two", agent={"max_turns": 1})
    assert (trajectory.truncated, trajectory.error, len(trajectory.turns)) == ("turns", "", 1)


def test_at_the_deadline_a_command_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    source = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '100'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(100)"
    )
    trajectory = run_command(tmp_path, source, agent={"rollout_timeout_s": 2})
    assert trajectory.truncated == "time"
    for pid in map(int, pids.read_text().split()):
        wait_until_gone(pid)


def test_what_a_command_leaves_running_is_killed(tmp_path: Path) -> None:
    source = "import subprocess\nchild = subprocess.Popen(['sleep', '100'])\nprint(child.pid)"
    wait_until_gone(int(run_command(tmp_path, source).answer))


def test_a_daemon_of_a_command_holds_no_rollout(tmp_path: Path) -> None:
    """It left the process group with the pipes of its parent, as servers of MCP and tmux do."""
    pid = tmp_path / "pid"
    source = (
        "import json, os, subprocess\n"
        "child = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "print('text', flush=True)\n"
        "json.dump({'answer': '42'}, open(os.environ['FLOWTRAIN_OUTCOME'], 'w'))"
    )
    try:
        trajectory = run_command(tmp_path, source, agent={"rollout_timeout_s": 100})
        assert (trajectory.answer, trajectory.truncated, trajectory.error) == ("42", "", "")
        printed = run_command(
            tmp_path, source.rpartition("\n")[0], agent={"rollout_timeout_s": 100}
        )
        assert printed.answer == "text"
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


def wait_until_gone(pid: int) -> None:
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        os.sched_yield()


def test_endless_output_takes_no_memory_and_its_end_counts(tmp_path: Path) -> None:
    source = "import sys\nfor _ in range(4000): sys.stdout.write('x' * 1000 + '\\n')\nprint('end')"
    assert run_command(tmp_path, source).answer == "end"


def test_only_so_many_commands_run_at_a_time(tmp_path: Path) -> None:
    source = (
        "import os, time\n"
        f"folder = {str(tmp_path)!r}\n"
        "mine = os.path.join(folder, f'{os.getpid()}.running')\n"
        "open(mine, 'w').close()\n"
        "count = len([name for name in os.listdir(folder) if name.endswith('.running')])\n"
        "time.sleep(0.05)\n"
        "os.remove(mine)\n"
        "print(count)"
    )

    async def run() -> list[Trajectory]:
        return await asyncio.gather(*(agent.run(TASK, seed) for seed in range(3)))

    with running(tmp_path, source, max_programs=1) as agent:
        assert [each.answer for each in asyncio.run(run())] == ["1", "1", "1"]


# ---- functions


def test_an_async_function_runs_on_a_loop_that_lives_on(tmp_path: Path) -> None:
    source = """
import asyncio
from openai import AsyncOpenAI, OpenAI
loops = set()

async def solve(task, base_url, api_key):
    loops.add(asyncio.get_running_loop())
    asked = {"model": "x", "messages": [{"role": "user", "content": task.question}]}
    OpenAI(base_url=base_url, api_key=api_key).chat.completions.create(**asked)  # and it may block
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        replies = await asyncio.gather(*(client.chat.completions.create(**asked) for _ in "ab"))
    return f"{len(loops)} {sorted(each.choices[0].message.content for each in replies)}"
"""
    with function_agent(tmp_path, source, logging_engine(*"xabycd")) as agent:
        assert roll_out(agent).answer == "1 ['a', 'b']"
        trajectory = roll_out(agent)
    assert trajectory.answer == "1 ['c', 'd']" and len(trajectory.turns) == 3


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("raise KeyError('no such file')", "KeyError: 'no such file'"),
        ("raise SystemExit(3)", "it has called exit(3)"),
        ("return 3", "the answer is a int, not a text"),
        ("return {'answer': 'x', 'reward': float('nan')}", "its part 'reward' is nan"),
    ],
)
def test_a_function_that_fails_costs_one_rollout(
    tmp_path: Path, kind: str, body: str, error: str
) -> None:
    with function_agent(tmp_path, f"{kind} solve(task, base_url, api_key): {body}") as agent:
        trajectory = roll_out(agent)
    assert error in trajectory.error and trajectory.answer == ""


def test_a_function_may_report_the_reward(tmp_path: Path) -> None:
    source = (
        "def solve(task, base_url, api_key): return {'answer': 'x', 'reward': {'a': 1, 'b': 0}}"
    )
    with function_agent(tmp_path, source) as agent:
        trajectory = roll_out(agent)
    assert trajectory.reported == {"a": 1.0, "b": 0.0} and trajectory.answer == "x"


def test_a_function_that_does_not_return_costs_its_time_alone(tmp_path: Path) -> None:
    source = """
import threading
never = threading.Event()
def solve(task, base_url, api_key): never.wait()
"""
    with function_agent(tmp_path, source, agent={"rollout_timeout_s": 0.2}) as agent:
        assert [roll_out(agent).truncated for _ in range(2)] == ["time", "time"]
        sys.modules[str(tmp_path / "program.py")].never.set()


def test_an_async_function_is_cancelled_at_the_deadline(tmp_path: Path) -> None:
    source = """
import asyncio
cancelled = []
async def solve(task, base_url, api_key):
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        cancelled.append(task.id)
        raise
"""
    with function_agent(tmp_path, source, agent={"rollout_timeout_s": 0.2}) as agent:
        trajectory = roll_out(agent)
    assert (trajectory.truncated, trajectory.error) == ("time", "")
    assert sys.modules[str(tmp_path / "program.py")].cancelled == ["t-1"]


# ---- what programs see of a task


def test_columns_are_shown_where_they_are_named() -> None:
    task = Task("t", "q", ("a", "b"), choices=("x", "y"), columns='{"repo": "r", "gold": 1}')
    shown = {"id": "t", "question": "q", "choices": ["x", "y"]}
    assert task_record(task, ()) == shown
    more = {"repo": "r", "answers": ["a", "b"]}
    assert task_record(task, ("repo", "answers")) == shown | more
    with pytest.raises(UserError, match="'tests'"):
        task_record(task, ("tests",))
