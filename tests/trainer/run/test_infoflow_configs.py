"""The configs of InfoFlow begin: a dry run of training, and the teacher's phase from rows with
trees to a fine-tuned researcher, against scripted endpoints and a tiny model instead of Qwen's.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_servers import chat_server
from http_servers import running
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from test_agentflow_configs import CONFIGS, HERE, config_of, model

from examples import sub_goals
from flowtrain.config.command import run_command
from flowtrain.rft.loop import rft
from flowtrain.train import train

__all__ = ["model"]

NAMES = ("infoflow-base", "infoflow-7b", "infoflow-3b", "infoflow-rft", "infoflow-refiner")
OURS = (*HERE[2:], "--checkpoint.every", "0")
"""What a machine without GPUs has to change, without the dry run."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a small Wikipedia, and with questions that the example annotated."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("GEMINI_API_KEY", "none")
    texts = [
        text
        for n in range(20)
        for text in (
            f'"Book {n}"\nBook {n} was written by Author{n}.',
            f'"Author{n}"\nAuthor{n} was born in Town{n}.',
        )
    ]
    write("data/wiki-18.jsonl", [{"id": n, "contents": text} for n, text in enumerate(texts)])
    rows = [
        {
            "root": {
                "question": f"Where was the writer of Book {n} born?",
                "entity": f"Town{n}",
                "children": [{"entity": f"Author{n}", "question": f"Who wrote Book {n}?"}],
            }
        }
        for n in range(20)
    ]
    write("data/InfoSeek.jsonl", rows)
    keys = ("--question_key", "root.question", "--answer_key", "root.entity")
    files = ("--in", "data/InfoSeek.jsonl", "--out", "data/infoseek-annotated.jsonl")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    assert sub_goals.main([*files, *keys, "--scorer", "qa"]) == 0
    return tmp_path


def write(name: str, rows: list[dict[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def scripted(body: dict[str, Any]) -> str:
    """The teacher as researcher, refiner, verifier and generator."""
    asked = body["messages"][-1]["content"]
    number = re.search(r"Book (\d+)", asked)
    assert number is not None
    author = f"Author{number[1]}"
    if asked.startswith("A researcher works"):
        born = re.search(rf"{author} was born in \w+", asked)
        return f"Evidence: {born[0] if born else f'by {author}'}.\nNext: -"
    found = f"{author} was born" in asked
    if asked.startswith("You check whether"):
        return f"Conclusion: {'STOP' if found else 'CONTINUE'}"
    if asked.startswith("You write the final answer"):
        return f"{author} is it. <answer>Town{number[1]}</answer>"
    sub_goal = f"birthplace of {author}" if author in asked else f"writer of Book {number[1]}"
    return f"Justification: j\nContext: c\nSub-Goal: {sub_goal}\nTool Name: Search"


async def retrieve(request: Request) -> JSONResponse:
    """Search-R1's protocol, over the file: the documents that share most words with the query."""
    asked = await request.json()
    documents = [json.loads(line) for line in Path("data/wiki-18.jsonl").read_text().splitlines()]
    words = set(re.findall(r"\w+", asked["queries"][0]))

    def score(document: dict[str, Any]) -> float:
        return len(words & set(re.findall(r"\w+", document["contents"])))

    best = sorted(documents, key=score, reverse=True)[: asked["topk"]]
    return JSONResponse({"result": [[{"document": doc, "score": score(doc)} for doc in best]]})


@pytest.fixture
def endpoints() -> Iterator[list[str]]:
    """Options that name the endpoints of the teacher and the refiner, and the retriever."""
    app = Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"])])
    with chat_server(scripted) as chat, running(app) as retriever:
        names = ("teacher", "refiner")
        urls = [f"--engines.{name}.base_url={chat.base_url}" for name in names]
        yield [*urls, f"--corpus.retriever={retriever}"]


@pytest.mark.parametrize("name", NAMES[1:])
def test_it_runs_dry(
    name: str, model: Path, folder: Path, endpoints: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """All that it names is there; a model of random weights seldom searches."""
    capsys.readouterr()
    argv = ["--config", str(CONFIGS / f"{name}.toml"), *HERE, "--model.path", str(model)]
    if name == "infoflow-refiner":
        argv += ["--policies.planner.path", str(model), "--policies.refiner.max_new_tokens", "4"]
    code = run_command("flowtrain.train", train, [*argv, *endpoints])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "tasks: infoseek-annotated.jsonl, 20 rows, preset own" in said.out
    assert "prompts are too long" not in said.out and "failed: " not in said.out
    assert said.out.count("==== rollout ") == 2 and "Search" in said.out


def test_the_researcher_learns_from_the_teacher(
    model: Path, folder: Path, endpoints: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two searches per rollout find the writer, then the town; the screen keeps all of them."""
    few = ("--rft.num_rollouts", "6", "--rft.batch_size", "4", "--rft.num_epochs", "1")
    argv = ["--config", str(CONFIGS / "infoflow-rft.toml"), *OURS, *few]
    argv += ["--model.path", str(model), "--run.dir", "runs/rft", *endpoints]
    assert run_command("flowtrain.rft", rft, argv) == 0, capsys.readouterr().err
    assert "6 rollouts, mean reward 1.000, kept 6: 12 turns" in capsys.readouterr().out
    lines = Path("runs/rft/trajectories.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["sub_goals"] for record in records] == [1.0] * 6
    for turns in (record["turns"] for record in records):
        first, second = (turn["evidence"].split()[1] for turn in turns)
        assert first == "by" and second.startswith("Author")
    assert (folder / "runs" / "rft" / "model" / "model.safetensors").exists()


def test_they_differ_in_what_their_heads_say() -> None:
    assert {path.stem for path in CONFIGS.glob("infoflow-*.toml")} == set(NAMES)
    base = config_of("infoflow-base")
    for name in ("infoflow-7b", "infoflow-3b"):
        assert config_of(name).model_copy(update={"model": base.model}) == base
    refiner = config_of("infoflow-refiner")
    assert refiner.policy_names == ("planner", "refiner") and refiner.train.policy == "refiner"
    assert refiner.path_of("planner")[1] == "runs/infoflow-rft-7b/model"
    assert config_of("infoflow-rft").roles.refiner == refiner.rft.expert == "teacher"
