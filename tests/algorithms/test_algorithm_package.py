"""The package in examples/algorithm_package, installed by pip into a folder of its own, trains."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runs import Server

from flowtrain.algorithms import load_algorithm
from flowtrain.config.options import parse
from flowtrain.types import UserError

pytest_plugins = ("cli_runs",)

ROOT = Path(__file__).resolve().parents[2]
TRAIN = (
    *("--algorithm.name", "rloo", "--train.num_steps", "2", "--train.lr", "1e-3"),
    *("--train.num_minibatches", "1", "--eval.at_ends", "false", "--algorithm.kl_coef", "0"),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which pip has installed the package."""
    pytest.importorskip("setuptools", "77", "the package is built with what is installed")
    folder = tmp_path_factory.mktemp("package")
    # A copy, because building leaves files beside the source.
    shutil.copytree(ROOT / "examples" / "algorithm_package", folder / "source")
    options = "--quiet --no-deps --no-build-isolation --no-index --disable-pip-version-check"
    command = [sys.executable, "-m", "pip", "install", *options.split()]
    command += ["--target", str(folder / "site"), str(folder / "source")]
    subprocess.run(command, timeout=120, check=True)
    return folder / "site"


def train(
    server: Server, site: Path, words: tuple[str, ...], *argv: object
) -> tuple[int, list[str]]:
    """(exit code, lines on stderr) of a run that has the package on its path."""
    path = f"import sys; sys.path.insert(0, {str(site)!r})"
    code, lines, _ = server.run("train", *words, *TRAIN, *argv, before=path)
    return code, lines


def test_installed_algorithm_trains_two_steps(
    site: Path, server: Server, words: tuple[str, ...], tmp_path: Path
) -> None:
    argv = ("--run.dir", tmp_path / "run", "--algorithm.options", "{max_advantage = 0.25}")
    code, said = train(server, site, words, *argv)
    assert code == 0, said
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["num_optim_steps"] == 1 and step["num_tokens"] > 0 for step in steps)
    records = (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()
    trained = [
        turn["training"]["advantage"]
        for record in map(json.loads, records)
        for turn in record["turns"]
        if turn["training"]
    ]
    assert 0.0 < max(map(abs, trained)) <= 0.25 + 1e-6


def test_options_of_an_installed_algorithm_are_checked(
    site: Path, server: Server, words: tuple[str, ...], tmp_path: Path
) -> None:
    argv = ("--run.dir", tmp_path / "run", "--algorithm.options", "{max_advantag = 1.0}")
    code, lines = train(server, site, words, *argv)
    assert code == 2 and "algorithm.options.max_advantag=1.0" in lines[-1]
    assert not (tmp_path / "run").exists()


def test_unknown_algorithm_is_refused_with_the_names_that_there_are() -> None:
    config = parse(["--algorithm.name", "grpo"])
    assert config is not None
    with pytest.raises(UserError, match=r"'grpo' is unknown; did you mean flow_grpo\? there are"):
        load_algorithm(config)


def test_a_package_whose_algorithm_cannot_be_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "halves-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: halves\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[flowtrain.algorithms]\nhalf = json:Half\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = parse(["--algorithm.name", "half"])
    assert config is not None
    with pytest.raises(UserError) as raised:
        load_algorithm(config)
    assert str(raised.value) == (
        "algorithm 'half' of package halves 1.2 cannot be made: AttributeError: module 'json' has "
        "no attribute 'Half'"
    )


def test_built_in_algorithm_has_no_options_of_its_own() -> None:
    config = parse(["--algorithm.options", "{beta = 1}"])
    assert config is not None
    with pytest.raises(UserError, match=r"algorithm\.options\.beta=1: Extra inputs"):
        load_algorithm(config)
