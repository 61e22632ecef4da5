"""A dry run shows what a run would do, and leaves nothing behind."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path

import pytest
from cli_runs import Server
from toy_options import FLOW

from flowtrain.config.command import run_command
from flowtrain.records import UserError
from flowtrain.train import train
from flowtrain.trainer.run import dry_run

pytest_plugins = ("cli_runs",)

SMALL = (
    *FLOW,
    *("--run.dry_run", "true", "--run.device", "cpu", "--run.threads", "1"),
    *("--tasks.num_train", "60", "--eval.num_tasks", "5", "--tiny.hidden_size", "24"),
    *("--tiny.num_layers", "2", "--rollout.max_new_tokens", "8", "--train.token_budget", "512"),
)
SINGLE = ("--agent.name", "single", "--agent.tools", "[]", "--agent.eval_max_turns", "1")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the folder for temporary files in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def shown(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert run_command("flowtrain.train", train, [*SMALL, *argv]) == code
    said = capsys.readouterr()
    return said.err if code else said.out


def test_it_shows_prompts_memory_and_scored_rollouts_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(folder)
    text = shown(capsys, "--run.dir", "runs/x", "--train.token_budget", "auto")
    assert files(folder) == before
    assert re.search(r" GB \(.*\) with train\.token_budget = \d+", text), "which it may be made"
    assert "first prompts of 60 tasks: " in text and "the model has 256 positions" in text
    assert "memory of a rank at the peak of a step, predicted: " in text
    assert "rollouts of tiny with rollout.engine='torch'" in text
    assert text.count("==== rollout ") == 2 and text.count("(scored by exact)") == 2
    assert "planner reads " in text and "planner writes " in text
    assert text.index("first prompts") < text.index("memory of a rank") < text.index("==== rollout")


def test_where_the_engine_is_not_installed_a_scripted_expert_shows_its_rollouts(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise UserError("rollout.engine='vllm' needs vLLM")

    monkeypatch.setattr(dry_run, "check_installed", missing)
    text = shown(capsys, "--rollout.engine", "vllm")
    assert (
        "rollouts of a scripted expert, because the engine is unavailable: rollout.engine=" in text
    )
    assert text.count("reward: 1.0 (scored by exact)") == 2 and 'tool Search({"query": "' in text
    error = shown(capsys, "--rollout.engine", "vllm", *SINGLE, code=2)
    assert error.count("\n") == 1 and "no scripted expert" in error


def test_questions_of_a_file_are_shown_as_they_are_read_and_escaped(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"question": f"What is {n} \x1b[2J plus 1? {'so ' * n}", "answer": n} for n in range(90)
    ]
    Path("q.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    before = files(folder)
    text = shown(
        capsys,
        *("--tasks.name", "file", "--tasks.path", "q.jsonl", "--tiny.max_positions", "100"),
        *SINGLE,
    )
    assert files(folder) == before
    assert text.startswith("tasks: q.jsonl")
    assert "\x1b" not in text and "\\x1b[2J plus 1?" in text
    assert " prompts are too long" in text


def test_a_cut_response_names_the_option_that_cut_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, *SINGLE, "--rollout.max_new_tokens", "2")
    assert "policy writes 2 tokens (length, by rollout.max_new_tokens = 2):" in text
    assert "planner" not in text and "verdict" not in text, "there is neither"
    text = shown(capsys, *SINGLE, "--rollout.request_timeout_s", "1e-9")
    assert "(deadline, by rollout.request_timeout_s = 1e-09):" in text
    Path("mine.py").write_text(
        "from flowtrain.agents.chat import Chat\n"
        "from flowtrain.agents.session import SessionAgent\n\n\n"
        "class Short(SessionAgent):\n"
        "    async def answer(self, session):\n"
        "        return await Chat(session).ask('1 + 1?', max_new_tokens=2)\n"
    )
    text = shown(capsys, "--agent.name", "mine.py:Short")
    assert "writes 2 tokens (length):" in text, "the agent has asked for no more"


def test_rollouts_that_all_fail_end_it_with_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.py").write_text(
        "from flowtrain.agents.session import SessionAgent\n\n\n"
        "class Broken(SessionAgent):\n"
        "    async def answer(self, session):\n"
        "        raise OSError('no such thing')\n"
    )
    error = shown(capsys, "--agent.name", "mine.py:Broken", code=2)
    assert "all rollouts failed, the first with: agent: OSError: no such thing" in error


def test_what_would_keep_the_run_from_starting_is_told_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(folder)
    for argv, reason in (
        (("--agent.tools", '["Serch"]'), "agent.tools: no tool 'Serch'"),
        (("--tasks.corpus", "no/such.json"), "no/such.json"),
        (("--rollout.max_new_tokens", "300"), "rollout.max_new_tokens=300"),
    ):
        error = shown(capsys, *argv, code=2)
        assert error.startswith("flowtrain.train: ") and reason in error
        assert error.count("\n") == 1
    assert files(folder) == before


def test_a_chat_template_that_no_message_goes_through_is_told_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], tiny_path: str
) -> None:
    model = Path(shutil.copytree(tiny_path, "model"))
    for template, told in (
        ("{{ raise_exception('Give documents') }}", "fails: TemplateError: Give documents"),
        ("{% for %}", "fails: TemplateSyntaxError: "),
        ("{{ 1 / 0 }}", "fails: ZeroDivisionError: "),
        ("nothing", "does not render the message"),
    ):
        (model / "chat_template.jinja").write_text(template)
        argv = ("--model.path", "model", "--agent.prompt", "full")
        error = shown(capsys, *argv, *SINGLE, code=2)
        assert "the chat template of model.path='model', which agent.prompt='full' needs" in error
        assert told in error and error.count("\n") == 1
    (model / "chat_template.jinja").unlink()
    named = {"chat_template": [{"name": "rag", "template": "{{ messages }}"}]}
    record = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(record | named))
    error = shown(capsys, *argv, *SINGLE, code=2)
    assert "fails: ValueError: " in error and error.count("\n") == 1


@pytest.mark.dist
def test_of_several_ranks_one_shows_it(folder: Path, server: Server) -> None:
    env = {"TMPDIR": str(folder / "tmp")}
    processes = server.start_ranks(2, *SMALL, env=env, cwd=folder)
    codes = [process.wait() for process in processes]
    assert codes == [0, 0], [process.err.read_text()[-2000:] for process in processes]
    shown = "".join(process.out.read_text() for process in processes)
    assert shown.count("first prompts of") == shown.count("memory of a rank") == 1
    assert shown.count("==== rollout ") == 2
    assert files(folder) == ["tmp"]
