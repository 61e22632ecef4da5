"""Folders of models as others write them: what can be loaded is, and what is wrong is one line."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5 import Qwen3_5Config

from flowtrain.config import Lora
from flowtrain.inference.factory import ModelSpec
from flowtrain.records import UserError
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.model.files import reading

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
UP = "model.layers.0.mlp.up_proj.weight"
IDS = torch.arange(12)[None]


@pytest.fixture
def folder(tiny_path: str, tmp_path: Path) -> Path:
    """A model that may be changed; its config says that the head is tied."""
    return Path(shutil.copytree(tiny_path, tmp_path / "model"))


def load(path: Path) -> tuple[ModelSpec, PreTrainedModel]:
    """Load as ranks do: the main one the weights, others the shape."""
    spec = ModelSpec.load("k", str(path))
    model = models.load_model(str(path), torch.float32, key="k")
    ours, theirs = models.named_weights(model), models.named_weights(spec.without_weights())
    assert {n: w.shape for n, w in ours.items()} == {n: w.shape for n, w in theirs.items()}
    assert spec.layout(torch.float32, Lora()) == models.layout_digest(
        model, spec.tokenizer, torch.float32
    )
    return spec, model


def logits(model: PreTrainedModel) -> Tensor:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model.eval()(IDS).logits


def check_saved(model: PreTrainedModel, spec: ModelSpec, out: Path) -> None:
    """What is saved is the same model to us and to others."""
    models.export(model, spec.tokenizer, models.named_weights(model), out)
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert torch.equal(logits(theirs), logits(model))
    assert torch.equal(logits(load(out)[1]), logits(model))


def weights(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        file = path / "model.safetensors"
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    return edit


def values(file: str, **changed: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        record = json.loads((path / file).read_text()) if (path / file).exists() else {}
        (path / file).write_text(json.dumps({**record, **changed}))

    return edit


def text(file: str, content: bytes) -> Callable[[Path], Any]:
    return lambda path: (path / file).write_bytes(content)


def renamed(name: str) -> Callable[[Path], Any]:
    return lambda path: (path / "model.safetensors").rename(path / name)


def cut(path: Path) -> None:
    os.truncate(path / "model.safetensors", 5000)


def without_a_shard(path: Path) -> None:
    renamed("model-00001-of-00002.safetensors")(path)
    index = {HEAD: "model-00001-of-00002.safetensors", UP: "model-00002-of-00002.safetensors"}
    values("model.safetensors.index.json", weight_map=index)(path)


def tokens(**changed: Any) -> Callable[[Path], None]:
    return values("tokenizer_config.json", **changed)


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "bin": (renamed("pytorch_model.bin"), r"pytorch_model\.bin, .* convert them, .* with Auto"),
    "pth": (renamed("consolidated.00.pth"), "in consolidated.00.pth, but only model.safetensors"),
    "gguf": (renamed("model-q4.gguf"), r"in model-q4\.gguf"),
    "another name": (renamed("model.fp16.safetensors"), r"in model\.fp16\.safetensors"),
    "none": (lambda path: (path / "model.safetensors").unlink(), "is not a causal language model"),
    "cut": (cut, "model.safetensors is damaged: "),
    "a pointer": (text("model.safetensors", b"version https://git-lfs"), "is damaged: "),
    "a shard": (without_a_shard, "lacks model-00002-of-00002.safetensors, which model.safe"),
    "shape": (weights(lambda w: w.update({UP: w[UP][1:]})), rf"holds {UP} of shape \(\d+, 32\)"),
    "vocabulary": (values("config.json", vocab_size=300), rf"{EMBEDDING} of shape .*\(300, 32\)"),
    "int8": (weights(lambda w: w.update({UP: w[UP].char()})), f"holds {UP} as I8, not one of"),
    "nan": (weights(lambda w: w[UP].view(-1)[7].fill_(torch.nan)), f"non-finite numbers in {UP}"),
    "inf": (weights(lambda w: w[UP].view(-1)[7].fill_(torch.inf)), f"non-finite numbers in {UP}"),
    "missing": (weights(lambda w: w.pop(UP)), f"lacks 1 of its tensors, such as {UP}"),
    "no head": (values("config.json", tie_word_embeddings=False), f"such as {HEAD}"),
    "a bias": (weights(lambda w: w.update({UP[:-6] + "bias": torch.ones(9)})), "does not include"),
    "field": (values("config.json", hidden_size=None), "'hidden_size' expected int, got None"),
    "dtype": (values("config.json", dtype="float3"), "has no attribute 'float3'"),
    "generation": (
        values("generation_config.json", compile_config={"mode": "x"}),
        "generation_config.json cannot be read: You provided `compile_config`",
    ),
    "generation list": (text("generation_config.json", b"[]"), "generation_config.json cannot"),
    "generation text": (text("generation_config.json", b"{"), "generation_config.json cannot"),
    "end": (values("generation_config.json", eos_token_id="x"), "ends replies with the token 'x'"),
    "far end": (tokens(eos_token="<far>"), "ends replies with the token 280, and has embeddings"),
    "special": (tokens(eos_token=7), "holds no tokenizer that transformers can load: Special"),
    "tokenizer kind": (values("tokenizer.json", model={"type": "X"}), "holds no tokenizer that"),
    "tokenizer list": (text("tokenizer_config.json", b"[]"), "holds no tokenizer that"),
    "templates": (tokens(chat_template=[1]), "holds no tokenizer that"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_one_line_with_key_and_path(folder: Path, name: str) -> None:
    damage, told = BROKEN[name]
    damage(folder)
    with pytest.raises(UserError, match=told) as refused:
        load(folder)
    assert f"k='{folder}'" in str(refused.value) and "\n" not in str(refused.value)


def test_a_reason_is_one_line_of_bounded_length_whatever_is_raised() -> None:
    for error, told in (
        (KeyError("weight_map"), "what: KeyError 'weight_map'"),
        (RuntimeError(), "what: RuntimeError"),
        (ValueError("two\n\tlines\x1b[31m"), r"what: two lines.*"),
        (Exception("x" * 9999), "what: x{300}"),
    ):
        with pytest.raises(UserError, match=f"^{told}$"), reading("what"):
            raise error
    with pytest.raises(MemoryError), reading("what"):
        raise MemoryError


# ---- heads


def other_head(tensors: dict[str, Tensor]) -> None:
    torch.manual_seed(5)
    tensors[HEAD] = torch.randn_like(tensors[EMBEDDING])


def test_a_head_of_its_own_is_loaded_and_saved_whatever_the_config_says(
    folder: Path, tmp_path: Path
) -> None:
    weights(other_head)(folder)
    spec, model = load(folder)
    assert not spec.shape.tie_word_embeddings and models.tied_names(model) == set()
    head = load_file(folder / "model.safetensors")[HEAD]
    assert torch.equal(models.named_weights(model)[HEAD], head)
    check_saved(model, spec, tmp_path / "saved")


def test_a_copy_of_the_embeddings_is_a_tied_head(folder: Path, tmp_path: Path) -> None:
    weights(lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))(folder)
    spec, model = load(folder)
    assert models.tied_names(model) == {HEAD}
    check_saved(model, spec, tmp_path / "saved")


@pytest.mark.parametrize("where", ["whole", "text"])
@pytest.mark.parametrize("own", [False, True])
def test_ties_of_a_text_decoder_are_found_wherever_the_config_says_so(
    tmp_path: Path, tiny_path: str, where: str, own: bool
) -> None:
    from test_vision_parts import whole_config

    config: Qwen3_5Config = whole_config(tie_word_embeddings=True)
    config.text_config.tie_word_embeddings = True
    torch.manual_seed(0)
    whole = Qwen3_5ForConditionalGeneration(config)
    path = tmp_path / "model"
    whole.save_pretrained(path)
    if own:
        name = "model.language_model.embed_tokens.weight"
        head = torch.randn_like(whole.state_dict()[name])
        weights(lambda tensors: tensors.update({HEAD: head}))(path)
    record = json.loads((path / "config.json").read_text())
    if where == "whole":
        record["text_config"]["tie_word_embeddings"] = False
    else:
        record["tie_word_embeddings"] = False
    (path / "config.json").write_text(json.dumps(record))
    model = models.load_model(str(path), torch.float32)
    assert models.tied_names(model) == (set() if own else {HEAD})


# ---- adapters


def adapter(path: Path, base: Path, named: str | None = None, **options: Any) -> Tensor:
    """Save an adapter as peft does, without a config of its model, and return what it computes."""
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    given = {"r": 4, "task_type": "CAUSAL_LM", "target_modules": ["q_proj"], **options}
    adapted = get_peft_model(model, LoraConfig(**given))
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight), alpha=0.3)
        computed: Tensor = adapted.eval()(IDS).logits
    adapted.peft_config["default"].base_model_name_or_path = str(base) if named is None else named
    adapted.save_pretrained(path)
    return computed


@pytest.mark.parametrize("named", [None, "model", "../model"])
def test_an_adapter_as_peft_saves_it_is_a_model(
    folder: Path, tmp_path: Path, named: str | None
) -> None:
    """Its model may be named from the adapter; tokenizer and generation config are the model's."""
    values("generation_config.json", eos_token_id=[0, 7])(folder)
    expected = adapter(tmp_path / "adapter", folder, named)
    spec, model = load(tmp_path / "adapter")
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    assert spec.generation.eos_token_id == [0, 7]
    check_saved(model, spec, tmp_path / "saved")


@pytest.mark.parametrize(
    "options",
    [
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {"trainable_token_indices": [1, 5]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_that_changes_a_tied_head_or_embedding_unties_it(
    folder: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    expected = adapter(tmp_path / "adapter", folder, **options)
    spec, model = load(tmp_path / "adapter")
    assert not spec.shape.tie_word_embeddings and not model.config.tie_word_embeddings
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    check_saved(model, spec, tmp_path / "saved")


def adapter_weights(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        file = path / "adapter_model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return edit


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (text("adapter_model.safetensors", b"cut"), "is no adapter that peft can merge"),
    "bin": (
        lambda path: (path / "adapter_model.safetensors").rename(path / "adapter_model.bin"),
        "lacks adapter_model.safetensors, the only supported",
    ),
    "a part": (adapter_weights(lambda w: w.pop(A)), f"1 tensors differ, such as {A}"),
    "more": (
        adapter_weights(lambda w: w.update({A.replace("0", "7"): torch.ones(4, 32)})),
        r"1 tensors differ, such as .*layers\.7",
    ),
    "shape": (adapter_weights(lambda w: w.update({A: w[A][:, 1:].clone()})), "size mismatch for"),
    "not a number": (
        adapter_weights(lambda w: w[A].fill_(torch.nan)),
        "holds non-finite numbers in .*q_proj",
    ),
    "config": (text("adapter_config.json", b"{"), "adapter_config.json cannot be read"),
    "no base": (
        values("adapter_config.json", base_model_name_or_path=None),
        "adapter_config.json has base_model_name_or_path=None",
    ),
    "lost base": (
        values("adapter_config.json", base_model_name_or_path="/no/such"),
        "base_model_name_or_path='/no/such': there is no such folder",
    ),
    "itself": (
        values("adapter_config.json", base_model_name_or_path="../adapter"),
        "is an adapter of itself",
    ),
    "kind": (values("adapter_config.json", peft_type="X"), "is no adapter that peft can merge"),
    "targets": (values("adapter_config.json", target_modules=["x"]), "Target modules {'x'} not"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_broken_adapter_is_one_line_with_key_and_path(
    folder: Path, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "adapter"
    adapter(path, folder)
    damage, told = WRONG[name]
    damage(path)
    with pytest.raises(UserError, match=told) as refused:
        load(path)
    assert f"k='{path}'" in str(refused.value) and "\n" not in str(refused.value)


def test_an_adapter_with_more_tokens_than_its_model_is_refused(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.resize_token_embeddings(model.config.vocab_size + 5)
    model.save_pretrained(tmp_path / "more")
    adapter(tmp_path / "adapter", tmp_path / "more", str(folder))
    adapter_weights(lambda w: w.update({A[:23] + "embed_tokens.weight": torch.ones(285, 32)}))(
        tmp_path / "adapter"
    )
    with pytest.raises(UserError, match=re.escape("size mismatch for base_model.model.model.emb")):
        load(tmp_path / "adapter")
