"""Configs by name: from wherever the command runs, behind a file of the same name."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowtrain.config.options import parse
from flowtrain.config.shipped import config_path, shipped_configs
from flowtrain.records import UserError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_config_goes_by_its_name() -> None:
    assert list(shipped_configs().values()) == sorted(CONFIGS.glob("*.toml"))


def test_a_name_gives_the_config_of_its_file() -> None:
    """One that includes another, and one that does not."""
    for name in ("agentflow-7b", "quickstart"):
        assert parse(["--config", name]) == parse(["--config", str(CONFIGS / f"{name}.toml")])


def test_a_file_of_that_name_goes_first_and_a_folder_does_not(tmp_path: Path) -> None:
    Path("verifier").mkdir()
    assert config_path("verifier") == str(CONFIGS / "verifier.toml")
    Path("quickstart").write_text("[run]\nseed = 7\n")
    config = parse(["--config", "quickstart"])
    assert config is not None and config.run.seed == 7


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("quicstart", "did you mean quickstart?"),
        ("configs/quickstart.toml", "did you mean quickstart?"),
        ("my/own.toml", "--help lists the built-in configs"),
    ],
)
def test_a_file_that_is_not_there_is_refused_with_the_nearest_name(given: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(["--config", given])
    assert str(caught.value) == f"--config {given}: no such file; {hint}"
