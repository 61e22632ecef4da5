"""A small decoder with random weights, and a byte-level tokenizer for it."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from flowtrain.training import attention
from flowtrain.types import UserError

END, PAD = "<|end|>", "<|pad|>"
_SMALLEST_VOCAB = 256 + 2  # one token per byte, END and PAD


def new_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on `texts`; any string round-trips, and digits stay apart
    so that numbers can be copied.
    """
    if vocab_size < _SMALLEST_VOCAB:
        raise UserError(
            f"tiny.vocab_size={vocab_size} is too small: {_SMALLEST_VOCAB} is the least that can "
            "spell every byte"
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
) -> PreTrainedModel:
    """A Qwen3-shaped decoder with random weights; seed torch before the call."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=max_positions,
        # The usual 0.02 is made for widths of thousands; a narrow model learns to copy much later
        # with it.
        initializer_range=0.4 * hidden_size**-0.5,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        architectures=["Qwen3ForCausalLM"],  # for vLLM, which goes by the name
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
