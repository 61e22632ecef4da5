"""A config file over one that it includes, and the config that comes of it as a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from parsing import complaint, parsed

from flowtrain.config import Config
from flowtrain.config.command import run_command
from flowtrain.config.options import parse_over
from flowtrain.records import UserError
from flowtrain.rollouts.__main__ import main as dataflow

Write = Callable[[str, str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, text: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return str(path)

    return write


def test_a_file_wins_over_those_it_includes_and_the_command_line_over_all(write: Write) -> None:
    write("base.toml", "[train]\nlr = 1e-3\nnum_steps = 7\nwarmup_steps = 3\n[run]\nseed = 1\n")
    write("more/mid.toml", 'include = "../base.toml"\n[train]\nlr = 1e-4\nnum_steps = 8\n')
    path = write("top.toml", 'include = "more/mid.toml"\n[train]\nlr = 1e-5\n')
    train = parsed("--config", path, "--train.warmup_steps", "4").train
    assert (train.lr, train.num_steps, train.warmup_steps) == (1e-5, 8, 4)
    assert parsed("--config", path).run.seed == 1


def test_named_tables_are_merged_by_key_and_options_that_are_tables_replaced(write: Write) -> None:
    write(
        "base.toml",
        '[engines.helper]\nmodel = "small"\nmax_tokens = 9\n[engines.judge]\nmodel = "j"\n'
        '[tasks]\nname = "file"\nmixture = { "a.jsonl" = 1, "b.jsonl" = 1 }\n',
    )
    path = write(
        "top.toml",
        'include = "base.toml"\n[engines.helper]\nmodel = "large"\n'
        '[tasks.mixture]\n"c.jsonl" = 1\n',
    )
    config = parsed("--config", path)
    assert config.engines["helper"].model == "large" and config.engines["helper"].max_tokens == 9
    assert config.engines["judge"].model == "j"
    assert config.tasks.mixture == {"c.jsonl": 1.0}, "no file of the base is drawn from by accident"


def test_errors_name_the_file_that_has_the_key(write: Write) -> None:
    base = "[train]\nlr = -1.0\n"
    path = write("top.toml", 'include = "base.toml"\n[run]\nseed = 1\n')
    write("base.toml", base)
    origin = f"--config {path}, include base.toml"
    assert complaint("--config", path).startswith(f"{origin}: train.lr=-1.0: ")
    assert complaint("--config", path, "--run.seed", "x").startswith("run.seed='x': ")
    write("base.toml", "[train]\nlearning_rate = 1.0\n")
    assert complaint("--config", path).startswith(f"{origin}: unknown key train.learning_rate: ")
    write("base.toml", "[train\n")
    assert complaint("--config", path).startswith(f"{origin}: not TOML: ")
    write("top.toml", 'include = "base.toml"\n[run]\nsed = 1\n')
    assert complaint("--config", path).startswith(f"--config {path}: unknown key run.sed: ")


def test_what_cannot_be_included_is_refused(write: Write, tmp_path: Path) -> None:
    path = write("top.toml", 'include = "no.toml"')
    assert "include no.toml: No such file" in complaint("--config", path)
    for value in ("3", '""', '["a.toml"]', '"a\\u0000b"'):
        write("top.toml", f"include = {value}")
        assert "must be the path of a file" in complaint("--config", path)
    write("top.toml", 'include = "top.toml"')
    assert "in a cycle" in complaint("--config", path)
    write("top.toml", 'include = "a.toml"')
    write("a.toml", 'include = "./link.toml"')
    (tmp_path / "link.toml").symlink_to(path)
    message = complaint("--config", path)
    assert "include a.toml: include='./link.toml': the files include each other" in message


def test_the_stored_config_of_a_run_includes_nothing() -> None:
    with pytest.raises(UserError, match="'include' must be in a section"):
        parse_over('include = "base.toml"', [])


def never(config: Config) -> int:
    raise AssertionError("no run was asked for")


def test_the_composed_config_is_shown_as_a_file_that_gives_it_again(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write("base.toml", '[engines.helper]\nmodel = "small"\n[train]\nlr = 1e-3\nnum_steps = 7\n')
    path = write("top.toml", 'include = "base.toml"\n[train]\nlr = 1e-5\n')
    words = ["--config", path, "--run.seed", "3"]
    assert run_command("x", never, [*words, "--show_config", "true"]) == 0
    text = capsys.readouterr().out
    assert parsed("--config", write("shown.toml", text)) == parsed(*words)
    assert "include" not in text
    assert run_command("x", lambda config: 5, [*words, "--show_config", "false"]) == 5
    assert run_command("x", never, [*words, "--show_config", "maybe"]) == 2
    assert "--show_config maybe must be true or false" in capsys.readouterr().err


def test_the_dataflow_shows_it_too(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    database = write("flow.sqlite", "")
    with pytest.raises(SystemExit) as end:
        dataflow(["serve", "--database", database, "--run.seed", "3", "--show_config", "true"])
    assert end.value.code == 0
    assert parsed("--config", write("shown.toml", capsys.readouterr().out)).run.seed == 3


def test_only_the_main_rank_shows_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert run_command("x", never, ["--show_config", "true"]) == 0
    assert capsys.readouterr().out == ""
