"""Which policies may stand in for each other."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from flowtrain.engines.factory import ModelSpec
from flowtrain.training import model as models
from flowtrain.training.model import layout_digest


def policy(
    words: str = "capital of Chad", num_layers: int = 1, seed: int = 0
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    tokenizer = models.new_tokenizer([words] * 9, vocab_size=264)
    torch.manual_seed(seed)
    return models.new_model(tokenizer, 16, num_layers, 2, 64), tokenizer


def test_it_looks_at_shapes_and_tokens_and_not_at_values() -> None:
    ours = layout_digest(*policy(), torch.float32)
    assert len(ours) == 32
    assert layout_digest(*policy(seed=1), torch.float32) == ours
    assert layout_digest(policy()[0].bfloat16(), policy()[1], torch.float32) == ours, (
        "published in the dtype that is asked for"
    )
    model, tokenizer = policy()
    other_end = copy.deepcopy(tokenizer)
    other_end.eos_token = models.PAD
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
    assert ModelSpec.load("model.path", str(tmp_path)).layout(torch.float32) == digest, (
        "which loads no weights"
    )
