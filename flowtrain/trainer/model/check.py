"""Which models can be trained: what token trees or the weight sync would get wrong is refused by
its config, before any weight is read.

Properties that are known by name come first, because they make the better message. Then the model
is built without memory (torch's meta device) and runs once: the attention of every layer must come
to ours, with its window and nothing in hand that ours leaves out, and the functions of every
recurrent layer likewise. docs/models.md lists the families
that were tried, and what is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from flowtrain.records import UserError
from flowtrain.trainer import loss
from flowtrain.trainer.attention import registration as attention
from flowtrain.trainer.model import delta_net, experts, lora
from flowtrain.trainer.model.files import has_own_head, reading, reason_of

_HUB_S = 10.0
"""Seconds that the hub may take to say whether it has a model."""
# The hub's releases ask by different libraries; their errors are bases of the hub's own. It refuses
# what cannot be a name with a ValueError.
_HUB_ERRORS: tuple[type[Exception], ...] = (OSError, ValueError, *HfHubHTTPError.__bases__)
MXFP4 = "mxfp4"
"""The quantisation that transformers undoes while it loads."""
_NUM_TOKENS = 4
_OTHER_PARTS = ("vision_config", "audio_config", "text_config")
_ROW_LENGTH_ROPES = ("dynamic", "longrope")


def load_config(path: str, key: str = "model.path", trained: bool = True) -> PreTrainedConfig:
    """Load the config of a model folder or hub name, and check it.

    Args:
        path: folder or hub name.
        key: the option that names the path.
        trained: token trees or our engine run the model; else vLLM alone does, which knows more.

    Raises UserError, one line, when there is none or the model cannot be trained.
    """
    *adapters, base = lora.chain(path, key)
    told = f"{key}={path!r}: base_model_name_or_path" if adapters else key
    _check_there(base, told)
    with reading(f"{told}={base!r} is not a causal language model that transformers can load"):
        config = AutoConfig.from_pretrained(base, trust_remote_code=False)
    if not trained:
        return config
    config = check_config(config, base, told)
    if getattr(config, "tie_word_embeddings", False):
        model = _without_memory(config)
        is_own = has_own_head(base, told, model.all_tied_weights_keys)
        if is_own or any(lora.unties(model, adapter, key) for adapter in adapters):
            config = copy.deepcopy(config)
            config.tie_word_embeddings = False
    return config


def _check_there(path: str, key: str) -> None:
    """Raise UserError unless there is such a folder, or such a model in the hub or its cache. The
    hub is asked once, where transformers would try for most of a minute.
    """
    if (Path(path) / "model" / "config.json").is_file():
        raise UserError(f"{key}={path!r} is a checkpoint; its model is in {path}/model")
    if Path(path).is_dir():
        return
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise UserError(f"{key}={path!r}: there is no such folder")
    nothing = f"{key}={path!r}: there is no such folder"
    try:
        if not isinstance(huggingface_hub.try_to_load_from_cache(path, "config.json"), str):
            huggingface_hub.model_info(path, timeout=_HUB_S)
    except RepositoryNotFoundError:
        raise UserError(f"{nothing}, and the hub has no such model") from None
    except _HUB_ERRORS as error:
        raise UserError(
            f"{nothing}; looking it up in the hub failed: {reason_of(error)}"
        ) from error


def check_config(config: PreTrainedConfig, path: str, key: str = "model.path") -> PreTrainedConfig:
    """Return the config of a model that can be trained: of its text alone, without a quantisation,
    which `load_model` undoes, and without a window of all layers that holds as many tokens as there
    are positions.

    Raises UserError that names the key, the path and what was found.
    """
    config = _of_text(config)
    try:
        problem = next(_problems(config), "")
        if not problem and hasattr(config, "quantization_config"):
            config = copy.deepcopy(config)
            del config.quantization_config
        if not problem:
            _run_without_memory(config)
    except Exception as error:  # a family's own code may fail in any way
        is_ours = isinstance(error, UserError)
        reason = (str(error) if is_ours else f"{type(error).__name__}: {error}").splitlines()[0]
        raise UserError(
            f"{key}={path!r} (model_type={config.model_type!r}) cannot be trained on token trees: "
            f"{reason}"
        ) from error
    if problem:
        raise UserError(f"{key}={path!r} {problem}; training does not support such models yet")
    if getattr(config, "sliding_window", None) and not (
        getattr(config, "layer_types", None) or any(attention.windows_of(config))
    ):
        config = copy.deepcopy(config)
        config.sliding_window = None
    return config


def _of_text(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the text decoder of a model with more parts, where transformers loads
    that alone as a causal language model, else `config`.
    """
    text: Any = getattr(config, "text_config", None)
    kinds = MODEL_FOR_CAUSAL_LM_MAPPING
    known = type(config) in kinds and type(text) in kinds
    if not known or kinds[type(config)] is not kinds[type(text)]:
        return config
    text = copy.deepcopy(text)
    # Which of them says so differs among those who publish; a head of its own counts more.
    ties = [getattr(each, "tie_word_embeddings", False) for each in (text, config)]
    text.tie_word_embeddings = any(ties)
    text.architectures = [kinds[type(text)].__name__]
    if hasattr(config, "quantization_config"):
        text.quantization_config = config.quantization_config
    return text


def _problems(config: PreTrainedConfig) -> Iterator[str]:
    """Yield what is known by name to go wrong, a sentence each; the next one is looked for only
    where there was none before.
    """
    families, of_type = MODEL_FOR_CAUSAL_LM_MAPPING, f"(model_type={config.model_type!r})"
    for name in _OTHER_PARTS:
        if name in config.sub_configs:
            yield f"is not a plain text decoder ({name} in its config)"
    if config.is_encoder_decoder:
        yield f"is an encoder with a decoder {of_type}"
    if type(config) not in families:
        yield f"is not a causal language model {of_type}"
    family, layers = families[type(config)], getattr(config, "layer_types", None) or []
    num_recurrent = layers.count(attention.RECURRENT)
    if num_recurrent or family._is_stateful:
        model = _without_memory(config)
        delta_net.equip(model)
        if not num_recurrent or len(delta_net.find_layers(model)) != num_recurrent:
            yield f"has layers with a recurrent state {of_type}"
    if others := set(layers) - {"full_attention", attention.SLIDING, attention.RECURRENT}:
        yield f"has layers other than full and sliding attention ({', '.join(sorted(others))})"
    if cap := getattr(config, "attn_logit_softcapping", None):
        yield f"caps its attention logits (attn_logit_softcapping={cap})"
    if getattr(config, "alibi", False):
        yield "uses ALiBi instead of position ids (alibi=True)"
    for name, value in _options(getattr(config, "rope_parameters", None) or {}):
        if name == "rope_type" and value in _ROW_LENGTH_ROPES:
            yield f"scales rotary embeddings by sequence length (rope_type={value!r})"
    # Of a hybrid transformers says no, though its attention comes to ours.
    if not num_recurrent and not family._supports_attention_backend:
        yield f"has its own attention implementation in transformers {of_type}"
    if found := getattr(config, "quantization_config", None):
        method = found.get("quant_method") if isinstance(found, Mapping) else found.quant_method
        if method != MXFP4:
            yield f"holds quantised weights (quant_method={str(method)!r})"
    for name, value in _options(config.to_dict()):
        if name.endswith("experts") and type(value) is int and value > 1:
            if problem := experts.problem(_without_memory(config)):
                yield f"is a mixture of experts ({name}={value}): {problem}"
            break


def _options(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every option of a config by its name, those of its parts too."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _options(value)
        else:
            yield str(name), value


class _Layers:
    """In the place of a row's structure: notes the layers that ask for attention."""

    def __init__(self) -> None:
        self.windows: list[int | None] = []

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, window: int | None, **_: Any
    ) -> Tensor:
        self.windows.append(window)
        shape = (*query.shape[:3], value.shape[3])
        return query.new_empty(shape).transpose(1, 2).contiguous()


class _Recurrence:
    """In the place of where tokens come: notes the layers that ask for it."""

    def __init__(self) -> None:
        self.convs: list[int] = []
        self.rules: list[int] = []

    def conv(self, layer: int, _: object, x_1CN: Tensor, weight: Tensor, *rest: object) -> Tensor:
        self.convs.append(layer)
        if weight.shape[1] > delta_net.WIDEST:
            raise UserError(f"a convolution of layer {layer} reads {weight.shape[1]} tokens")
        return x_1CN

    def rule(self, layer: int, _: object, *row: Tensor, **options: object) -> Tensor:
        self.rules.append(layer)
        return row[2]


def _without_memory(config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model in bf16, because products of experts have no shapes in another dtype."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            dtype=torch.bfloat16,
            attn_implementation=attention.NAME,
            trust_remote_code=False,
        )
    return model


def _run_without_memory(config: PreTrainedConfig) -> None:
    model = _without_memory(config)
    decoder = model.get_decoder()
    if not hasattr(decoder, "layers"):
        raise UserError("its decoder has no module list `layers`")
    asked, recurrence = _Layers(), _Recurrence()
    delta_net.equip(model)
    recurrent = [layer.layer_idx for layer in delta_net.find_layers(model)]
    more = {"recurrence": recurrence} if recurrent else {}
    ids = torch.empty(1, _NUM_TOKENS, dtype=torch.int64, device="meta")
    with torch.no_grad():
        decoder(input_ids=ids, position_ids=ids, use_cache=False, forest=asked, **more)
    if not recurrence.convs == recurrence.rules == recurrent:
        raise UserError("its recurrent layers do not receive the positions of a row's tokens")
    windows = attention.windows_of(config)
    num_calls, over = divmod(len(asked.windows), len(windows))
    if not num_calls or over:
        raise UserError(f"its {len(windows)} layers ask for attention {len(asked.windows)} times")
    expected = [window for window in windows for _ in range(num_calls)]
    if [attention.hiding(window, config) for window in asked.windows] != expected:
        raise UserError(
            f"its attention receives the windows {asked.windows}, but its config has {expected}"
        )
    loss.equip(model)
