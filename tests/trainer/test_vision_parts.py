"""Checkpoints with a vision part: their text decoder is loaded, trained and saved alone."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, PreTrainedModel

from bench.families import TRAINED, config_of, refusal
from flowtrain.records import UserError
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.model.check import check_config, load_config

pytestmark = pytest.mark.skipif(
    "qwen3_5" not in CONFIG_MAPPING, reason="this transformers has no Qwen3.5"
)


def whole_config(**options: object) -> object:
    text = config_of("qwen3_5_text", TRAINED["qwen3_5_text"]).to_dict()
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision["out_hidden_size"] = text["hidden_size"]
    return CONFIG_MAPPING["qwen3_5"](text_config=text, vision_config=vision, **options)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, PreTrainedModel]:
    """A folder, and what it holds."""
    from transformers import Qwen3_5ForConditionalGeneration

    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(whole_config())
    model.save_pretrained(tmp_path / "whole")
    return tmp_path / "whole", model


def test_the_text_decoder_alone_is_loaded_and_saved(
    saved: tuple[Path, PreTrainedModel], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, whole = saved
    with caplog.at_level(logging.WARNING):
        model = models.load_model(str(path), torch.float32)
    assert "only the text decoder is loaded and saved" in caplog.text
    assert model.config.architectures == ["Qwen3_5ForCausalLM"], "by which vLLM finds it"
    text = {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in whole.state_dict().items()
        if "visual" not in name
    }
    loaded = models.named_weights(model)
    assert loaded.keys() == text.keys()
    assert all(torch.equal(loaded[name], text[name]) for name in text)
    model.save_pretrained(tmp_path / "text")
    again = models.load_model(str(tmp_path / "text"), torch.float32)
    assert all(torch.equal(x, text[name]) for name, x in models.named_weights(again).items())


def test_a_trained_decoder_goes_back_into_the_whole(
    saved: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    """As docs/models.md shows it."""
    path, whole = saved
    model = models.load_model(str(path), torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1)
    whole.model.language_model.load_state_dict(model.model.state_dict())
    whole.lm_head.load_state_dict(model.lm_head.state_dict())
    whole.save_pretrained(tmp_path / "again")
    again = models.load_model(str(tmp_path / "again"), torch.float32)
    weights = models.named_weights(model)
    assert all(torch.equal(x, weights[name]) for name, x in models.named_weights(again).items())


def test_a_quantisation_of_the_whole_is_one_of_its_text() -> None:
    config = whole_config(quantization_config={"quant_method": "fp8"})
    assert "quant_method='fp8'" in refusal(config)
    assert check_config(whole_config(), "PATH").model_type == "qwen3_5_text"


def test_vllm_alone_samples_from_the_whole(saved: tuple[Path, PreTrainedModel]) -> None:
    assert load_config(str(saved[0]), trained=False).model_type == "qwen3_5"


def test_a_checkpoint_without_one_of_its_tensors_is_refused(
    saved: tuple[Path, PreTrainedModel],
) -> None:
    path = saved[0] / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.language_model.layers.0.linear_attn.dt_bias"]
    save_file(tensors, path, metadata={"format": "pt"})
    lost = r"lacks 1 of its tensors, such as model\.layers\.0\.linear_attn\.dt_bias"
    with pytest.raises(UserError, match=lost):
        models.load_model(str(saved[0]), torch.float32)
