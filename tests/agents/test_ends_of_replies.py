"""What a chat template closes a message with ends replies: sampled, imitated and saved."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from char_tokenizer import CharTokenizer
from chat_templates import QWEN25, TEMPLATES, tokenizer_of
from transformers import GenerationConfig, PreTrainedTokenizerFast

from flowtrain.agents.policy import Policy
from flowtrain.config import Config
from flowtrain.inference.protocol import NoEngine
from flowtrain.inference.requests import stop_ids
from flowtrain.inference.token_chat import message_end, reply_end
from flowtrain.tasks.sets import TaskSet
from flowtrain.trainer import toy
from flowtrain.trainer.model.loading import export, full_weights
from flowtrain.trainer.setup.components import load_trained_policy


@pytest.fixture
def base() -> PreTrainedTokenizerFast:
    """The tokenizer of a base model, whose texts end otherwise than messages do."""
    return tokenizer_of(QWEN25, "<|endoftext|>")


def ids(tokenizer: PreTrainedTokenizerFast, *tokens: str) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(token) for token in tokens]


@pytest.mark.parametrize("style", TEMPLATES)
def test_the_end_of_a_message_ends_responses_whatever_the_tokenizer_ends_with(style: str) -> None:
    template, end = TEMPLATES[style]
    tokenizer = tokenizer_of(template, "<|python_tag|>")
    tokenizer_writes_eos = "eos_token" in template
    expected = {"<|python_tag|>", "<|python_tag|>" if tokenizer_writes_eos else end}
    assert stop_ids(SimpleNamespace(eos_token_id=3), tokenizer) == {3, *ids(tokenizer, *expected)}


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{% for m in messages %}{{ m['content'] }}\n{% endfor %}",  # text ends its messages
        "{% for m in messages %}{{ m['content'] | upper }}<|im_end|>{% endfor %}",
        "{{ raise_exception('no replies, please') }}",
        "{{ messages[0]['content'] + 1 }}",
    ],
)
def test_a_template_without_such_a_token_leaves_the_tokenizers_alone(template: str | None) -> None:
    tokenizer = tokenizer_of("", "<|endoftext|>")
    tokenizer.chat_template = template
    assert message_end(tokenizer) is None
    assert stop_ids(None, tokenizer) == set(ids(tokenizer, "<|endoftext|>"))
    assert [reply_end(tokenizer)] == ids(tokenizer, "<|endoftext|>")


def test_what_is_imitated_ends_as_its_prompt_asks(base: PreTrainedTokenizerFast) -> None:
    policy = Policy(NoEngine(9), base, 9, 1.0, 1.0)
    said = [policy.imitate((1,), "12", is_message=each).response_ids[-1] for each in (True, False)]
    assert said == ids(base, "<|im_end|>", "<|endoftext|>")
    assert reply_end(CharTokenizer()) == 0


@pytest.mark.parametrize("with_weights", [True, False])
def test_the_model_that_is_saved_names_the_end_of_a_message(
    base: PreTrainedTokenizerFast, with_weights: bool, tmp_path: Path
) -> None:
    model = toy.new_model(base, 16, 1, 1, 64)
    export(model, base, full_weights(model), tmp_path / "model")
    config = Config.model_validate({"model": {"path": str(tmp_path / "model")}})
    nothing: Any = TaskSet((), {}, ())
    tokenizer, trained = load_trained_policy(config, nothing, with_weights)
    expected = ids(base, "<|endoftext|>", "<|im_end|>")
    assert trained.generation_config.eos_token_id == expected, "its own comes first"
    if with_weights:
        export(trained, tokenizer, full_weights(trained), tmp_path / "saved")
        assert GenerationConfig.from_pretrained(tmp_path / "saved").eos_token_id == expected
