"""The configs of AgentFlow's paper and of APPO begin: they run dry here, with the roles, judge,
tools and data that they name, against a scripted endpoint and a tiny model instead of Qwen's.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_servers import chat_server

from flowtrain.agents.agentflow.prompts import CHAT_TEMPLATE
from flowtrain.algorithms import load_algorithm
from flowtrain.config import Config
from flowtrain.config.command import run_command
from flowtrain.config.options import parse
from flowtrain.rft.loop import rft
from flowtrain.train import train
from flowtrain.trainer import toy
from flowtrain.trainer.model import loading as models

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
CHANGED = {
    "agentflow-7b": set(),
    "agentflow-base": {"model.path"},
    "agentflow-3b": {"model.path"},
    "agentflow-0.5b": {"model.path", "vllm.gpu_memory_utilization"},
    "agentflow-7b-split": {"rollout.num_engine_ranks", "vllm.gpu_memory_utilization"},
    "agentflow-7b-released": {
        *("agent.prompt_order", "tasks.path", "tasks.mixture", "algorithm.mode"),
        *("algorithm.clip_high", "algorithm.dual_clip", "algorithm.kl"),
        *("train.num_minibatches", "train.minibatch_size", "train.beta2", "train.decay_all"),
        *("rollout.top_p", "rollout.frequency_penalty", "train.rescore"),
    },
    "agentflow-torl": {
        *("agent.name", "agent.instructions", "agent.memory_tokens", "agent.max_result_chars"),
        *("roles.analyst", "roles.executor", "roles.verifier", "roles.generator"),
        *("agent.max_turns", "agent.eval_max_turns"),  # the answer counts as one
    },
    "agentflow-sft": {
        *("engines.teacher", "rft.expert", "rft.num_rollouts", "rft.num_epochs", "rft.num_steps"),
        *("rft.lr", "rft.batch_size", "rft.warmup_steps", "rft.max_tokens"),
    },
}
"""Every config, and the keys in which it differs from agentflow-7b."""
HERE = (
    *("--run.dry_run", "true", "--run.device", "cpu", "--run.threads", "1"),
    *("--model.dtype", "float32", "--rollout.engine", "torch", "--rollout.max_new_tokens", "4"),
    *("--rollout.num_engine_ranks", "0"),
)
"""What a machine without GPUs has to change. With it and --model.path, all configs but the released
one are agentflow-7b, so that one dry run stands for them.
"""


def config_of(name: str) -> Config:
    config = parse(["--config", str(CONFIGS / f"{name}.toml")])
    assert config is not None
    return load_algorithm(config).config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder of random weights with a chat template and room for the longest prompt."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = toy.new_tokenizer([(CONFIGS.parent / "docs" / "tools.md").read_text()], 1500)
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    tiny = toy.new_model(tokenizer, hidden_size=16, num_layers=1, num_heads=2, max_positions=20480)
    models.export(tiny, tokenizer, models.full_weights(tiny), path)
    return path


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the training data in their published layouts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for key in ("OPENAI_API_KEY", "SERPER_API_KEY"):
        monkeypatch.setenv(key, "none")
    nq = [
        {
            "id": f"train_{n}",
            "question": f"who wrote book {n}",
            "golden_answers": [f"Author {n}", f"A. {n}"],
            "data_source": ("nq", "hotpotqa")[n % 2],
            "prompt": [{"role": "user", "content": f"who wrote book {n}?"}],
            "reward_model": {"style": "rule", "ground_truth": {"target": [f"Author {n}"]}},
        }
        for n in range(40)
    ]
    write(tmp_path / "data/nq_hotpotqa_train/train.parquet", nq)
    write(tmp_path / "data/nq_hotpotqa_train/test.parquet", nq[:4])
    math = [
        {
            "question": f"Find $x$ with $x - 1 = {n}$.",
            "final_answer": f"${n + 1}$",
            "difficulty": 5.0,
            "topic": "Algebra",
            "r1_solution_1": "long",
        }
        for n in range(40)
    ]
    for part in range(2):
        name = f"data/DeepMath-103K/data/train-0000{part}-of-00002.parquet"
        write(tmp_path / name, math[part::2])
    rows: list[dict[str, Any]] = [*nq, *math]
    mixed = [
        {
            "id": n,
            "question": row["question"],
            "chain": "",
            "result": row.get("final_answer") or "; ".join(row["golden_answers"]),
            "source": "mathhard" if "topic" in row else "nq",
            "extra_info": {"ground_truth": "x", "idx": n},
        }
        for n, row in enumerate(rows)
    ]
    write(tmp_path / "data/combined_train.parquet", mixed)
    aime = tmp_path / "data/test/aime24/data/data.json"
    aime.parent.mkdir(parents=True)
    aime.write_text(json.dumps([{"pid": 0, "query": "How many?", "answer": "204"}]))
    return tmp_path


def scripted(body: dict[str, Any]) -> str:
    """All frozen roles in one: the generator answers, the verifier ends, the judge agrees."""
    asked = body["messages"][-1]["content"]
    if body["model"] == "gpt-4o":
        return "They are the same.\nVerdict: True"
    if "<answer>" in asked:
        return "I cannot tell. <answer>nothing known</answer>"
    return "Nothing is found.\nConclusion: STOP"


@pytest.mark.parametrize("name", ["agentflow-7b", "agentflow-7b-released"])
def test_it_runs_dry(
    name: str, model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with chat_server(scripted) as server:
        endpoints = [f"--engines.{each}.base_url={server.base_url}" for each in ("frozen", "judge")]
        argv = ["--config", str(CONFIGS / f"{name}.toml"), *HERE, "--model.path", str(model)]
        argv += ["--tasks.benchmarks", "data/test", "--eval.benchmarks", '["aime24"]']
        code = run_command("flowtrain.train", train, [*argv, *endpoints])
    said = capsys.readouterr()
    assert code == 0, said.err
    text = said.out
    for tool in config_of(name).agent.tools:
        assert tool in text, "the prompts that are shown have its card"
    assert "benchmark aime24: 1 questions, 'How many?' first" in text
    assert text.count("==== rollout ") == 2 and "prompts are too long" not in text
    assert "failed: " not in text and text.count("answer: nothing known") == 2
    assert text.count("reward: 1.0 (scored by judge)") == 2
    assert {body["model"] for body in server.asked} == {"Qwen/Qwen2.5-7B-Instruct", "gpt-4o"}
    if name == "agentflow-7b-released":
        assert "tasks: combined_train.parquet, 80 rows, preset agentflow" in text
    else:
        assert "tasks: nq_hotpotqa_train, 40 rows, preset search-r1" in text
        assert "tasks: DeepMath-103K, 40 rows, preset deepmath" in text
    assert sorted(path.name for path in folder.iterdir()) == ["data", "tmp"]


def teaching(body: dict[str, Any]) -> str:
    """GPT-4o as planner and as judge, and the other roles; the planner's rules end its prompt."""
    if "Answer with these four fields" in body["messages"][-1]["content"]:
        return "Justification: x\nContext: y\nSub-Goal: what is asked\nTool Name: Base_Generator"
    return scripted(body)


def test_the_baseline_collects_traces_of_its_teacher_and_imitates_them(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To collect, the student's shape and tokenizer are enough."""
    student = shutil.copytree(model, folder / "student", ignore=lambda *_: ["model.safetensors"])
    with chat_server(teaching) as server:
        names = ("frozen", "judge", "teacher")
        endpoints = [f"--engines.{each}.base_url={server.base_url}" for each in names]
        argv = ["--config", str(CONFIGS / "agentflow-sft.toml"), *HERE[2:], *endpoints]
        argv += ["--model.path", str(student), "--run.dir", str(folder / "run")]
        argv += ["--judge.cache", str(folder / "judge.sqlite"), "--rft.num_rollouts", "3"]
        collects = ["--rft.collect_only", "true"]
        assert run_command("flowtrain.rft", rft, [*argv, *collects]) == 0, capsys.readouterr()
        shutil.copy(model / "model.safetensors", student)
        code = run_command("flowtrain.rft", rft, [*argv, "--resume", "auto"])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "3 rollouts, mean reward 1.000, kept 3: 3 turns" in said.out
    facts = json.loads((folder / "run/model/rft.json").read_text())
    assert (facts["num_steps"], facts["num_turns"]) == (1, 3) and facts["usage"]["cost"] > 0
    asked = Counter(body["model"] for body in server.asked)
    assert asked["gpt-4o"] == 6 and set(asked) == {"gpt-4o", "Qwen/Qwen2.5-7B-Instruct"}
    assert {body["temperature"] for body in server.asked} == {0.0, 0.7}


def test_a_policy_without_modules_runs_dry(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its prompts have the cards of all tools, and nobody but the judge is asked."""
    with chat_server(scripted) as server:
        endpoints = [f"--engines.{each}.base_url={server.base_url}" for each in ("frozen", "judge")]
        config = str(CONFIGS / "agentflow-torl.toml")
        argv = ["--config", config, *HERE, "--model.path", str(model), *endpoints]
        code = run_command("flowtrain.train", train, argv)
    said = capsys.readouterr()
    assert code == 0, said.err
    assert all(tool in said.out for tool in config_of("agentflow-torl").agent.tools)
    assert "between <answer> and </answer>" in said.out
    assert said.out.count("==== rollout ") == 2 and "failed: " not in said.out
    assert {body["model"] for body in server.asked} == {"gpt-4o"}


@pytest.mark.parametrize("name", CHANGED)
def test_a_config_differs_from_that_of_7b_in_what_it_says(name: str) -> None:
    one, other = (config_of(each).model_dump() for each in (name, "agentflow-7b"))
    found = {
        f"{section}.{key}"
        for section, values in one.items()
        for key in values
        if values[key] != other[section].get(key)
    }
    assert found == CHANGED[name]


def test_none_is_forgotten() -> None:
    assert {path.stem for path in CONFIGS.glob("agentflow-*.toml")} == set(CHANGED)


def test_the_config_of_appo_runs_dry(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {
            "data_source": ("math_dapo", "hotpotqa")[n % 2],
            "prompt": [{"role": "user", "content": f"who wrote book {n}?"}],
            "reward_model": {"style": "rule", "ground_truth": f"Author {n}"},
        }
        for n in range(120)
    ]
    write(folder / "data/train_10k.parquet", rows)
    argv = ["--config", str(CONFIGS / "appo-7b.toml"), *HERE, "--model.path", str(model)]
    code = run_command("flowtrain.train", train, argv)
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "tasks: train_10k.parquet, 120 rows, preset verl" in said.out
    assert all(tool in said.out for tool in ("Web_Search", "Python_Coder"))
    assert said.out.count("==== rollout ") == 2 and "prompts are too long" not in said.out
    assert "failed: " not in said.out and said.out.count("(scored by f1)") == 2
    assert sorted(path.name for path in folder.iterdir()) == ["data", "tmp"]


def test_the_configs_of_appo_fit_its_algorithm() -> None:
    """That of 14B is the same with other numbers."""
    config = config_of("appo-7b")
    changed = {k: v for k, v in config.appo.model_dump().items() if v != getattr(Config().appo, k)}
    assert changed.keys() == {"num_roots", "future_scope", "dual_clipped"}, "as released"
    words = "--appo.num_roots 6 --rollout.group_size 12 --rollout.num_questions 64"
    more = "--train.num_minibatches 8 --agent.max_turns 7"
    assert parse(["--config", "appo-7b", *words.split(), *more.split()]) is not None
