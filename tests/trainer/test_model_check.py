"""Families of models: those on the list agree with transformers, others are refused in one line."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import pytest
import torch
from family_cases import families
from torch import nn
from transformers import CONFIG_MAPPING, GraniteMoeConfig, LlamaConfig, MistralConfig, Qwen2Config

from bench.families import REFUSED, SHAPE, TRAINED, config_of, refusal
from flowtrain.config import Config, Vllm
from flowtrain.inference.factory import ModelSpec
from flowtrain.inference.vllm.process import VllmModel, engine_args
from flowtrain.records import UserError
from flowtrain.trainer.attention import registration as attention
from flowtrain.trainer.attention.forest import Forest
from flowtrain.trainer.attention.registration import forest_attention, windows_of
from flowtrain.trainer.distributed import World
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.model.check import check_config, load_config
from flowtrain.trainer.setup import simulation
from flowtrain.trainer.setup.components import RunComponents
from flowtrain.trainer.setup.placement import Placement

ROOT = Path(__file__).resolve().parents[2]
HARMLESS = ("GenerationConfig", "PeftConfig", "PeftModel")
KNOWN = [name for name in TRAINED if name in CONFIG_MAPPING]
FOUND = {
    "bert": "no module list `layers`",
    "bloom": "its own attention",
    "dbrx": "AttributeError: 'DbrxAttentionConfig' object has no attribute 'rope_theta'",
    "falcon": "its own attention",
    "gemma2": "attn_logit_softcapping=50.0",
    "gemma3": "vision_config",
    "gemma4_text": "no attribute 'shared_kv_states'",
    "gpt2": "no module list `layers`",
    "granitemoe": "num_local_experts=8): GraniteMoeTopKRouter uses",
    "jamba": "recurrent state",
    "mamba2": "recurrent state",
    "moshi": "its attention",  # gets no windows; or, in transformers 5.19, no structure of a row
    "nemotron": "does not pass the structure of a row",
    "phi3": "rope_type='longrope'",
    "qwen2_5_vl": "vision_config",
    "qwen3_next": "recurrent state",
    "stablelm": "its own attention",
    "t5": "an encoder with a decoder",
}


@pytest.mark.parametrize("family", KNOWN)
def test_families_on_the_list_pass(family: str) -> None:
    assert check_config(config_of(family, TRAINED[family]), "PATH") is not None


@pytest.mark.parametrize("family", families(KNOWN))
def test_the_memory_of_families_on_the_list_is_planned(family: str) -> None:
    """One layer more of each kind than it takes to have all: what a plan counts with."""
    config = config_of(family, TRAINED[family])
    few, repeated = simulation._few_layers(config)
    layers = [*few, *(layer for layer, _ in repeated)]
    how = {"layers": layers, "lora": None, "fused": True}
    at_head, peak = simulation._simulate(config, torch.float32, 32, False, **how)
    assert 0 < at_head < peak


@pytest.mark.parametrize("family", [name for name in REFUSED if name in CONFIG_MAPPING])
def test_what_cannot_be_trained_is_refused(family: str) -> None:
    told = refusal(config_of(family, REFUSED[family]))
    assert FOUND[family] in told and "\n" not in told


OTHER = {
    "capped attention": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    "ALiBi": ({"alibi": True}, "ALiBi"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "quant_method='gptq'"),
    "dynamic positions": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "rope_type='dynamic'",
    ),
}


@pytest.mark.parametrize("name", OTHER)
def test_properties_are_refused_whatever_the_family(name: str) -> None:
    options, found = OTHER[name]
    assert found in refusal(LlamaConfig(**SHAPE, **options))


@pytest.mark.skipif("qwen3_5_text" not in KNOWN, reason="this transformers has no Qwen3.5")
def test_a_convolution_wider_than_the_known_is_refused() -> None:
    config = config_of("qwen3_5_text", TRAINED["qwen3_5_text"])
    config.linear_conv_kernel_dim = 5
    assert "a convolution of layer 0 reads 5 tokens" in refusal(config)


def test_layers_have_the_windows_of_the_config() -> None:
    """One that holds all positions hides nothing, and Qwen2 names one that it does not use."""
    assert windows_of(MistralConfig(**SHAPE, sliding_window=63)) == [63, 63]
    assert windows_of(MistralConfig(**SHAPE, sliding_window=64)) == [None, None]
    for window, left in ((63, 63), (64, None)):
        config = check_config(MistralConfig(**SHAPE, sliding_window=window), "PATH")
        assert config.sliding_window == left
    used = {"sliding_window": 16, "max_window_layers": 1}
    assert windows_of(Qwen2Config(**SHAPE, **used, use_sliding_window=False)) == [None, None]
    assert windows_of(Qwen2Config(**SHAPE, **used, use_sliding_window=True)) == [None, 16]


def test_a_family_that_hands_on_other_windows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "windows_of", lambda _: [None, 7])
    told = refusal(Qwen2Config(**SHAPE))
    assert "receives the windows [None, None], but its config has [None, 7]" in told


@pytest.mark.parametrize("asked", [{"softcap": 50.0}, {"position_bias": torch.zeros(2)}])
def test_the_attention_of_trees_swallows_nothing_that_it_does_not_compute(asked: dict) -> None:
    query = torch.zeros(1, 2, 3, 4)
    forest = Forest.of(torch.tensor([3, 3, 3]))
    forest_attention(nn.Module(), *[query] * 3, None, forest=forest, **dict.fromkeys(asked))
    with pytest.raises(UserError, match=next(iter(asked))):
        forest_attention(nn.Module(), *[query] * 3, None, forest=forest, **asked)


# ---- every place that loads a model


@pytest.fixture
def experts(tmp_path: Path) -> str:
    """A folder with nothing in it but the config of a mixture that cannot be trained."""
    folder = tmp_path / "moe"
    GraniteMoeConfig(**SHAPE, num_local_experts=4).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("key", ["model.path", "policies.verifier.path"])
def test_a_refusal_names_the_key_and_the_path_before_anything_else_is_read(
    experts: str, key: str
) -> None:
    """The folder has neither weights nor a tokenizer, whose lack would be another message."""
    expected = (
        f"^{key}='{experts}' is a mixture of experts .*experts=4.: .*; training does not support"
    )
    for load in (
        lambda: models.load_model(experts, torch.float32, key=key),
        lambda: ModelSpec.load(key, experts),
        lambda: load_config(experts, key),
    ):
        with pytest.raises(UserError, match=expected):
            load()


def test_vllm_alone_may_sample_from_any_model(experts: str) -> None:
    assert load_config(experts, trained=False).model_type == "granitemoe"


def test_a_run_is_refused(experts: str) -> None:
    questions = Path(experts).parent / "questions.jsonl"
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(20)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config.model_validate(
        {"model": {"path": experts}, "tasks": {"name": "file", "path": str(questions)}}
    )
    with pytest.raises(UserError, match="is a mixture of experts"):
        RunComponents.prepare(config, Placement.colocated(World(0, 1, torch.device("cpu"))))


def test_a_model_without_a_tokenizer_is_refused(tiny_path: str, tmp_path: Path) -> None:
    for path in Path(tiny_path).iterdir():
        if "token" not in path.name:
            shutil.copy(path, tmp_path)
    with pytest.raises(UserError, match="tokenizer"):
        models.load_tokenizer(str(tmp_path))


def with_code(tiny_path: str, folder: Path, file: str, **values: object) -> str:
    """A copy of a model's folder that has code, which `file` names."""
    shutil.copytree(tiny_path, folder)
    (folder / "code.py").write_text("raise SystemExit('code of the model ran')")
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | values))
    return str(folder)


@pytest.fixture
def yes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says so to whatever is asked, as transformers does on a terminal."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")


@pytest.mark.usefixtures("yes")
def test_a_model_that_needs_code_of_its_own_is_refused(tiny_path: str, tmp_path: Path) -> None:
    of_code = {"model_type": "unheard_of", "auto_map": {"AutoConfig": "code.X"}}
    path = with_code(tiny_path, tmp_path / "model", "config.json", **of_code)
    refused = f"^k='{path}' .*custom code .auto_map., which flowtrain never runs$"
    for load in (
        lambda: load_config(path, "k", trained=False),
        lambda: ModelSpec.load("k", path),
        lambda: models.load_model(path, torch.float32, key="k"),
    ):
        with pytest.raises(UserError, match=refused):
            load()


@pytest.mark.usefixtures("yes")
@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("config.json", {"auto_map": {"AutoConfig": "code.X"}}),
        ("config.json", {"auto_map": {"AutoModelForCausalLM": "code.X"}}),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "X", "auto_map": {"AutoTokenizer": ["code.X", "code.X"]}},
        ),
    ],
)
def test_a_model_that_is_known_runs_without_its_code(
    file: str, values: dict, tiny_path: str, tmp_path: Path
) -> None:
    path = with_code(tiny_path, tmp_path / "model", file, **values)
    ModelSpec.load("model.path", path).without_weights()
    models.load_model(path, torch.float32)


def test_every_load_of_a_model_says_that_its_code_does_not_run() -> None:
    """But those of peft and of generation configs, which know no code of a folder."""
    without = []
    for folder in ("flowtrain", "bench", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                loads = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                if not loads or node.func.attr not in ("from_pretrained", "from_config"):
                    continue
                if node.func.attr == "from_config" and folder != "flowtrain":
                    continue  # of a config that was made there
                given = {each.arg: ast.unparse(each.value) for each in node.keywords}
                owner = ast.unparse(node.func.value)
                if owner not in HARMLESS and given.get("trust_remote_code") != "False":
                    without.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not without
    assert (
        engine_args(VllmModel("x", "float32", 64, frozenset()), Vllm())["trust_remote_code"]
        is False
    )
