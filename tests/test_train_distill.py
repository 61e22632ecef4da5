"""Runs of the command with a teacher behind HTTP: a sharper version of the policy itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from chat_servers import ChatServer
from cli_runs import Server, read
from prompt_servers import prompt_server

from flowtrain.trainer.model import loading as models

pytest_plugins = ("cli_runs",)


@pytest.fixture
def teacher(warm: Path) -> Iterator[ChatServer]:
    model = models.load_model(str(warm / "model"), torch.float32, attn="sdpa")
    with torch.no_grad():
        model.model.norm.weight *= 2.0
    with prompt_server(model) as server:
        yield server


def options(teacher: ChatServer, top_k: int, path: Path) -> tuple[str, ...]:
    return (
        *("--algorithm.name", "distill", "--algorithm.equal_groups", "keep"),
        *("--engines.big.base_url", teacher.base_url, "--engines.big.model", "sharp"),
        *("--engines.big.api_key_env", "TEACHERS_KEY", "--distill.teacher", "big"),
        *(
            "--distill.top_k",
            str(top_k),
            "--train.lr",
            "2e-3",
            "--train.num_steps",
            "10",
            "--run.dir",
            str(path),
        ),
    )


KEY = {"TEACHERS_KEY": "sk-1"}


@pytest.mark.parametrize("top_k", [0, 5])
def test_the_divergence_from_a_teacher_behind_an_endpoint_falls(
    server: Server, words: tuple[str, ...], teacher: ChatServer, tmp_path: Path, top_k: int
) -> None:
    """Its requests are metered with the key of its environment variable."""
    path = tmp_path / "run"
    code, lines, _ = server.run("train", *words, *options(teacher, top_k, path), env=KEY)
    assert code == 0, "\n".join(lines)
    steps = [row for row in read(path / "metrics.jsonl") if row["step"]]
    found = [row["divergence"] for row in steps]
    assert sum(found[-3:]) < 0.6 * sum(found[:3]) and found[0] > 0.1, found
    assert {body["prompt_logprobs"] for body in teacher.asked} == {top_k}
    assert {headers["authorization"] for headers in teacher.headers} == {"Bearer sk-1"}
    assert steps[-1]["engines/big/requests"] == len(teacher.asked) > 0
    assert steps[-1]["engines/big/failures"] == 0
    num_turns = sum(row["num_tokens"] > 0 for row in steps)
    assert num_turns == len(steps) and min(row["grad_norm"] for row in steps) > 0


@pytest.mark.dist
def test_two_ranks_ask_for_their_own_samples_and_train_as_one(
    server: Server, words: tuple[str, ...], teacher: ChatServer, tmp_path: Path
) -> None:
    steps = []
    for size in (1, 2):
        argv = (*words, *options(teacher, 5, tmp_path / f"{size}"), "--train.num_steps", "2")
        processes = server.start_ranks(size, *argv, env=KEY)
        found = [process.wait() for process in processes]
        assert found == [0] * size, [process.err.read_text()[-1500:] for process in processes]
        steps.append(read(tmp_path / f"{size}" / "metrics.jsonl")[1:])
    for one, two in zip(*steps, strict=True):
        assert two["divergence"] == pytest.approx(one["divergence"], rel=1e-4)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)


def test_a_run_whose_teacher_is_no_server_of_prompts_ends_with_one_line(
    server: Server, words: tuple[str, ...], teacher: ChatServer, tmp_path: Path
) -> None:
    """And one without its key does not begin."""
    argv = (*words, *options(teacher, 0, tmp_path / "run"))
    code, lines, _ = server.run("train", *argv)
    assert code == 2 and "engines.big.api_key_env='TEACHERS_KEY'" in lines[-1]
    wrong = (*argv, "--engines.big.base_url", f"{teacher.base_url}/x")
    code, lines, _ = server.run("train", *wrong, env=KEY)
    assert code == 2 and "engines.big" in lines[-1] and "404" in lines[-1], lines
