"""The page as a file: whole, inert, small enough, and what the command says."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.logging.page.__main__ import main
from flowtrain.logging.page.page import build_page, json_block, page_data
from flowtrain.records import UserError

DataOf = Callable[[str], dict[str, Any]]


def test_the_name_of_the_folder_is_text_too(runs: Any) -> None:
    page = build_page(runs.make(name="<b onload=x>&amp;"), 0)
    assert "<title>&lt;b onload=x&gt;&amp;amp; · flowtrain</title>" in page


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_any_value_survives_its_block(value: Any) -> None:
    block = json_block(value)
    assert json.loads(block) == value
    assert block.isascii() and not set("<>&") & set(block)


def test_only_our_script_and_style_are_allowed_and_nothing_is_loaded(run: Path) -> None:
    page = build_page(run, 8)
    policy = dict(
        part.split(" ", 1)
        for part in re.findall(r'Content-Security-Policy" content="(.*?)"', page)[0].split("; ")
    )
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    for directive, tag in (("script-src", "script"), ("style-src", "style")):
        (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"
    assert set(policy) == {"default-src", "script-src", "style-src", "base-uri", "form-action"}
    assert not re.search(r"\b(src|href|action)=|@import|url\(", page.partition('id="data"')[0])
    assert "http://www.w3.org/2000/svg" in page and len(re.findall("https?://", page)) == 1


def test_the_script_makes_no_markup_of_text(run: Path) -> None:
    page = build_page(run, 8)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new "
        r"Function|DOMParser|srcdoc|fetch\(|XMLHttp",
        page,
    )


def test_a_page_keeps_below_its_limit(run: Path) -> None:
    whole = page_data(run, 100)
    size = len(json_block(whole))
    few = page_data(run, 100, max_bytes=size - 1)
    assert len(json_block(few)) < size
    assert 0 < len(few["rollouts"]) < len(whole["rollouts"]) == 38
    assert "rollouts: whole groups" in few["shown"] and whole["shown"] == "All 38 logged rollouts."
    assert page_data(run, 100, max_bytes=1000)["rollouts"] == []


def test_numbers_that_json_lacks_are_null(run: Path, data_of: DataOf) -> None:
    log = run / "trajectories.jsonl"
    log.write_text(
        log.read_text().replace('"reward": 0.0', '"reward": NaN').replace("-0.01", "-Infinity")
    )
    rollouts = data_of(build_page(run, 100))["rollouts"]
    assert None in rollouts[0]["turns"][0]["response_logprobs"]
    assert any(rollout["reward"] is None for rollout in rollouts)


def test_the_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--rollouts", "8"]) == 0
    assert capsys.readouterr().out == f"{run / 'view.html'}\n"
    assert (run / "view.html").read_text() == build_page(run, 8)
    assert main([str(run), "--out", str(tmp_path / "x.html"), "--rollouts", "0"]) == 0
    assert (tmp_path / "x.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}/absent"], "there is no folder {}/absent"),
        (["{}/run/config.toml"], "config.toml is not a run folder: it has none of"),
        (["{}/run", "--rollouts", "-1"], "--rollouts -1 must be 0 or more"),
        (["{}/run", "--out", "{}/absent/x.html"], "cannot write"),
    ],
)
def test_a_mistake_is_one_line(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert main([argument.format(tmp_path) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert message.format(tmp_path) in error and error.count("\n") == 1
    if len(arguments) == 1:
        with pytest.raises(UserError):
            build_page(Path(arguments[0].format(tmp_path)), 1)


def test_it_starts_without_torch() -> None:
    code = (
        "import sys, flowtrain.logging.page.__main__; print(sorted({'torch', 'transformers', "
        "'matplotlib'} & set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )
