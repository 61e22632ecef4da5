"""Which policies may stand in for each other."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from flowtrain.config import Lora
from flowtrain.inference.factory import ModelSpec
from flowtrain.trainer import toy
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.model.loading import layout_digest


def policy(
    words: str = "capital of Chad", num_layers: int = 1, seed: int = 0
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    tokenizer = toy.new_tokenizer([words] * 9, vocab_size=264)
    torch.manual_seed(seed)
    return toy.new_model(tokenizer, 16, num_layers, 2, 64), tokenizer


def test_it_looks_at_shapes_and_tokens_and_not_at_values() -> None:
    ours = layout_digest(*policy(), torch.float32)
    assert len(ours) == 32
    assert layout_digest(*policy(seed=1), torch.float32) == ours
    found = layout_digest(policy()[0].bfloat16(), policy()[1], torch.float32)
    assert found == ours, "published in the dtype that is asked for"
    model, tokenizer = policy()
    other_end = copy.deepcopy(tokenizer)
    other_end.eos_token = toy.PAD
    others = [
        layout_digest(model, tokenizer, torch.bfloat16),
        layout_digest(*policy(num_layers=2), torch.float32),
        layout_digest(model, policy("something else")[1], torch.float32),
        layout_digest(model, other_end, torch.float32),
    ]
    assert len({ours, *others}) == 5


def test_it_survives_a_folder(tiny_path: str, tmp_path: Path) -> None:
    model, tokenizer = models.load_model(tiny_path, torch.float32), models.load_tokenizer(tiny_path)
    models.export(model, tokenizer, models.full_weights(model), tmp_path)
    again = models.load_model(str(tmp_path), torch.float32), models.load_tokenizer(str(tmp_path))
    digest = layout_digest(model, tokenizer, torch.float32)
    assert layout_digest(*again, torch.float32) == digest
    found = ModelSpec.load("model.path", str(tmp_path)).layout(torch.float32, Lora())
    assert found == digest, "which loads no weights"


def test_policies_that_exchange_adapters_need_the_same_base(tmp_path: Path) -> None:
    model, tokenizer = policy()
    export(model, tokenizer, tmp_path / "a")
    export(model, tokenizer, tmp_path / "same")
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[0] += 1.0
    export(model, tokenizer, tmp_path / "other")

    def digest(folder: str, **options: object) -> str:
        lora = Lora.model_validate({"rank": 2, "sync": "adapter", **options})
        spec = ModelSpec.load("model.path", str(tmp_path / folder))
        return spec.layout(torch.float32, lora)

    assert digest("a") == digest("same")
    digests = [digest("a"), digest("other"), digest("a", rank=4), digest("a", sync="merged")]
    assert len(set(digests)) == 4
    assert digests[-1] == digest("other", sync="merged"), "merged weights are whole"


def export(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    models.export(model, tokenizer, models.full_weights(model), path)
