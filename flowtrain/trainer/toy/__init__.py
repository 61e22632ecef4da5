"""A small decoder with random weights, and a byte-level tokenizer for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from flowtrain.records import UserError
from flowtrain.trainer.attention import registration as attention

END, PAD = "<|end|>", "<|pad|>"
_SMALLEST_VOCAB = 256 + 2  # one token per byte, END and PAD
_NUM_EXPERTS, _NUM_CHOSEN, _WINDOW = 8, 2, 64
_HYBRID = ("full_attention", "linear_attention")


def new_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer trained on `texts`; any string round-trips, and digits are
    separate tokens, so that numbers can be copied.
    """
    if vocab_size < _SMALLEST_VOCAB:
        raise UserError(
            f"tiny.vocab_size={vocab_size} is too small: encoding every byte needs at least "
            f"{_SMALLEST_VOCAB}"
        )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=PAD)


def new_model(
    tokenizer: PreTrainedTokenizerFast,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    max_positions: int,
    family: str = "qwen3",
) -> PreTrainedModel:
    """Return a decoder of `tiny.family` with random weights; seed torch before the call."""
    options: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": max_positions,
        # The usual 0.02 is made for widths of thousands; a narrow model learns to copy much later
        # with it.
        "initializer_range": 0.4 * hidden_size**-0.5,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    config = _config(family, hidden_size * 8 // 3, options)
    return AutoModelForCausalLM.from_config(
        config, attn_implementation=attention.NAME, trust_remote_code=False
    )


def _config(family: str, width: int, options: dict[str, Any]) -> PreTrainedConfig:
    """`width`: of the MLP, or of the experts that a token chooses. vLLM goes by `architectures`."""
    part = width // _NUM_CHOSEN
    chosen = {"num_experts_per_tok": _NUM_CHOSEN}
    if family == "qwen3_moe":
        return Qwen3MoeConfig(
            **options,
            **chosen,
            intermediate_size=width,
            moe_intermediate_size=part,
            num_experts=_NUM_EXPERTS,
            norm_topk_prob=True,
            architectures=["Qwen3MoeForCausalLM"],
        )
    if family == "gpt_oss":
        return GptOssConfig(
            **options,
            **chosen,
            intermediate_size=part,
            num_local_experts=_NUM_EXPERTS,
            sliding_window=_WINDOW,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            architectures=["GptOssForCausalLM"],
        )
    if family == "qwen3_5":
        number = options["num_attention_heads"]
        return Qwen3_5TextConfig(
            **options,
            intermediate_size=width,
            layer_types=[_HYBRID[i % 2] for i in range(options["num_hidden_layers"])],
            linear_num_key_heads=number,
            linear_num_value_heads=number,
            linear_key_head_dim=options["head_dim"],
            linear_value_head_dim=options["head_dim"],
            architectures=["Qwen3_5ForCausalLM"],
        )
    return Qwen3Config(**options, intermediate_size=width, architectures=["Qwen3ForCausalLM"])
