"""The config of APPO as released begins: it runs dry here, with its tools, data and limits, with a
tiny model in the place of Qwen's; and it trains as the released scripts say.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from flowtrain import toy
from flowtrain.agents.agentflow.prompts import CHAT_TEMPLATE
from flowtrain.algorithms import load_algorithm
from flowtrain.config import Config
from flowtrain.config.command import run_command
from flowtrain.config.options import parse
from flowtrain.train import train
from flowtrain.training import model as models

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "appo-7b.toml"
HERE = (
    *("--run.dry_run", "true", "--run.device", "cpu", "--run.threads", "1"),
    *("--model.dtype", "float32", "--rollout.engine", "torch", "--rollout.max_new_tokens", "4"),
)
"""What a machine without GPUs has to change."""


def config_of(*words: str) -> Config:
    config = parse(["--config", str(CONFIG), *words])
    assert config is not None
    return load_algorithm(config).config


def test_it_runs_dry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("SERPER_API_KEY", "none")
    tokenizer = toy.new_tokenizer([(CONFIG.parent.parent / "docs/tools.md").read_text()], 1500)
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    tiny = toy.new_model(tokenizer, hidden_size=16, num_layers=1, num_heads=2, max_positions=8192)
    models.export(tiny, tokenizer, models.full_weights(tiny), tmp_path / "model")
    rows = [
        {
            "data_source": ("math_dapo", "hotpotqa")[n % 2],
            "prompt": [{"role": "user", "content": f"who wrote book {n}?"}],
            "reward_model": {"style": "rule", "ground_truth": f"Author {n}"},
        }
        for n in range(120)
    ]
    (tmp_path / "data").mkdir()
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "data/train_10k.parquet")
    argv = ["--config", str(CONFIG), *HERE, "--model.path", str(tmp_path / "model")]
    code = run_command("flowtrain.train", train, argv)
    said = capsys.readouterr()
    assert code == 0, said.err
    text = said.out
    assert "tasks: train_10k.parquet, 120 rows, preset verl" in text
    assert "Web_Search" in text and "Python_Coder" in text, "the prompts have the tools"
    assert text.count("==== rollout ") == 2 and "prompts are too long" not in text
    assert "failed: " not in text and text.count("(scored by f1)") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "model", "tmp"]


def test_it_trains_as_the_released_script_for_reasoning() -> None:
    config = config_of()
    appo, algorithm, rollout, train_ = config.appo, config.algorithm, config.rollout, config.train
    assert (appo.num_roots, rollout.group_size, rollout.num_questions) == (8, 16, 96)
    assert train_.num_minibatches == 6 and rollout.num_questions // 6 == 16
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip) == (0.2, 0.28, 3.0)
    assert (algorithm.kl, algorithm.kl_coef, algorithm.entropy_coef) == ("k3", 0.001, 0.0)
    assert (train_.lr, train_.lr_schedule, train_.warmup_steps) == (1e-6, "constant", 0)
    assert (train_.beta1, train_.beta2, train_.weight_decay, train_.grad_clip) == (
        *(0.9, 0.999),
        *(0.01, 1.0),
    )
    assert (appo.future_coef, appo.future_half_life) == (1.0, 64.0)
    assert (appo.future_low, appo.future_high, appo.gamma, appo.clip) == (1.0, 1.2, 1.0, 0.2)
    assert (appo.future_scope, appo.dual_clipped) == ("rollout", "drop")
    assert appo.advantage_groups == "dual" and config.vllm.max_model_len == 8192
    assert config.agent.tools == ("Web_Search", "Python_Coder") and rollout.temperature == 1.0


def test_every_default_of_appo_that_it_changes_is_a_mark_of_the_released_code() -> None:
    ours, default = config_of().appo.model_dump(), Config().appo.model_dump()
    changed = {key for key in ours if ours[key] != default[key]}
    assert changed == {"num_roots", "future_scope", "dual_clipped"}


def test_the_14b_script_fits_too() -> None:
    words = ("--appo.num_roots", "6", "--rollout.group_size", "12")
    more = ("--rollout.num_questions", "64", "--train.num_minibatches", "8")
    config = config_of(*words, *more, "--agent.max_turns", "7")
    assert config.rollout.num_questions // config.train.num_minibatches == 8
