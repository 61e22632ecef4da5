"""The planner that comes with flowtrain: small, named by a word, made from what is there now."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowtrain.config import Config
from flowtrain.config.options import parse, to_toml
from flowtrain.config.shipped import PLANNER
from flowtrain.records import UserError
from flowtrain.tasks.sets import task_set
from flowtrain.trainer.model.loading import load_tokenizer
from flowtrain.trainer.setup.components import load_trained_policy


def quickstart(*argv: str) -> Config:
    return parse(["--config", "quickstart", *argv])


def test_a_policy_beside_the_trained_one_is_named_by_the_same_word() -> None:
    words = ("--model.path", "quickstart", "--roles.verifier", "own")
    config = quickstart(*words, "--policies.verifier.path", "quickstart")
    assert config.policies["verifier"].path == str(PLANNER)
    assert to_toml(config).count('path = "quickstart"') == 2


def test_it_is_small_and_named_by_a_word() -> None:
    assert quickstart("--model.path", "quickstart").model.path == str(PLANNER)
    files = {path.name: path.stat().st_size for path in PLANNER.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    assert sum(files.values()) < 1_000_000


def test_a_config_names_it_by_its_word_so_that_other_machines_find_theirs() -> None:
    config = quickstart("--model.path", "quickstart")
    text = to_toml(config)
    assert 'path = "quickstart"' in text and str(PLANNER) not in text
    assert Config.model_validate(config.model_dump()) == config


@pytest.mark.parametrize("word", ["tiny", "quickstart"])
def test_a_folder_of_that_name_is_not_passed_over(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    quickstart("--model.path", word)
    (tmp_path / word).mkdir()
    with pytest.raises(UserError, match=rf"model.path='{word}': .* write '\./{word}'"):
        quickstart("--model.path", word)
    assert quickstart("--model.path", f"./{word}").model.path == f"./{word}"


def test_its_shape_and_tokens_are_those_that_its_command_makes() -> None:
    config = quickstart("--model.path", "tiny", "--rft.fictional", "true")
    made, model = load_trained_policy(config, task_set(config, True), with_weights=True)
    shipped = load_tokenizer(str(PLANNER))
    assert made.get_vocab() == shipped.get_vocab()
    text = "Question: What is the area of Norway minus 12? Tool Name: Search"
    assert made.encode(text) == shipped.encode(text)
    own = quickstart("--model.path", "quickstart")
    _, planner = load_trained_policy(own, task_set(own), with_weights=True)
    found = {n: p.shape for n, p in planner.named_parameters()}
    assert found == {n: p.shape for n, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif("FLOWTRAIN_PLANNER" not in os.environ, reason="FLOWTRAIN_PLANNER=1: minutes")
def test_its_command_makes_an_equal_one() -> None:
    """On another processor, or with another torch, the last bits may differ."""
    check = [sys.executable, "-m", "examples.planner", "--check"]
    done = subprocess.run(check, cwd=Path(__file__).parents[2], text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
