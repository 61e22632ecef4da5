"""Start the language models that `[roles]` names, those that are used and no others, each once."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowtrain.config import NO_ENGINE, Chat, Config
from flowtrain.engines.chat import ChatEngine
from flowtrain.engines.endpoint import Endpoint
from flowtrain.engines.protocol import Engine
from flowtrain.engines.token_chat import ChatTokenizer, TokenChat
from flowtrain.types import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

POLICY = "policy"
"""The planner as it stands."""
_WITHOUT_POLICY = ("judge",)
"""Roles that the model in training may not have."""


@dataclass(frozen=True, slots=True)
class ChatEngines:
    """The models behind the roles; close them when done."""

    started: Mapping[str, Endpoint | TokenChat]
    """By the name in [engines], or "policy"."""
    roles: Mapping[str, ChatEngine]
    """The engine of every role that has one; two that name the same engine share it."""

    def bind(self, policy: Engine) -> None:
        """Say what samples from the policy, once that is there."""
        chat = self.started.get(POLICY)
        if isinstance(chat, TokenChat):
            chat.engine = policy

    def metrics(self) -> dict[str, float]:
        """What all of them were asked for since the start, by name; adds up over ranks."""
        return {
            f"engines/{name}/{key}": value
            for name, chat in self.started.items()
            for key, value in chat.meter.metrics().items()
        }

    def close(self) -> None:
        """The policy's engine belongs to who has bound it."""
        for name, chat in self.started.items():
            if name != POLICY:
                chat.close()


def make_chat_engines(
    config: Config, tokenizer: ChatTokenizer, device: torch.device, planner: str = ""
) -> ChatEngines:
    """Start what the roles name, and a frozen `planner` if one is named. `tokenizer` is the
    planner's, frozen models compute on `device`.

    Raises UserError for a role that names no engine, and for an engine that cannot start: no key,
    no model, no chat template.
    """
    named = {
        role: name for role, name in config.roles.model_dump().items() if name not in NO_ENGINE
    }
    _check(config, named)
    if planner:
        named["planner"] = planner
    with ExitStack() as cleanup:  # closes what has started when another cannot
        started: dict[str, Endpoint | TokenChat] = {}
        for name in dict.fromkeys(named.values()):
            started[name] = (
                _policy(config, tokenizer) if name == POLICY else _start(name, config, device)
            )
            cleanup.callback(started[name].close)
        cleanup.pop_all()
    return ChatEngines(started, {role: started[name] for role, name in named.items()})


def _check(config: Config, named: Mapping[str, str]) -> None:
    reserved = [name for name in config.engines if name in (*NO_ENGINE, POLICY)]
    if reserved:
        raise UserError(
            f"[engines.{reserved[0]}] needs another name: roles use {reserved[0]!r} for something "
            "else"
        )
    for role, name in named.items():
        if name not in config.engines and (name != POLICY or role in _WITHOUT_POLICY):
            known = ", ".join(config.engines) or "nothing yet"
            default = type(config.roles).model_fields[role].default
            policy = "" if role in _WITHOUT_POLICY else f"{POLICY!r} or "
            raise UserError(
                f"roles.{role}={name!r} may be {default!r}, {policy}a name in [engines], which "
                f"holds {known}"
            )


def _policy(config: Config, tokenizer: ChatTokenizer) -> TokenChat:
    """The policy as it stands, at temperature 0; its engine is bound later."""
    key, path = config.path_of("planner")
    if not tokenizer.chat_template:
        raise UserError(
            f"{key}={path!r} has no chat template, which a role that is done by the policy needs"
        )
    rollout = config.rollout
    options = Chat(
        model=path, max_tokens=rollout.max_new_tokens, timeout_s=rollout.request_timeout_s
    )
    return TokenChat(POLICY, options, tokenizer)


def _start(name: str, config: Config, device: torch.device) -> Endpoint | TokenChat:
    options = config.engines[name]
    if options.kind == "openai":
        return Endpoint(name, options)
    from flowtrain.training.model import load_tokenizer

    key = f"engines.{name}.model"
    if not options.model:
        raise UserError(f"{key} must be a folder or hub name")
    tokenizer = load_tokenizer(options.model, key)
    if not tokenizer.chat_template:
        raise UserError(
            f"{key}={options.model!r} has no chat template, so it cannot be asked anything"
        )
    make = _torch_engine if options.kind == "torch" else _vllm_engine
    return TokenChat(
        f"engines.{name}", options, tokenizer, make(key, options, config, tokenizer, device)
    )


def _torch_engine(
    key: str,
    options: Chat,
    config: Config,
    tokenizer: PreTrainedTokenizerFast,
    device: torch.device,
) -> Engine:
    import torch

    from flowtrain.engines.torch_engine import TorchEngine
    from flowtrain.training.model import load_model

    model = load_model(options.model, getattr(torch, config.model.dtype), "sdpa", key).to(device)
    return TorchEngine(model, tokenizer, None, max_batch_size=options.max_concurrency)


def _vllm_engine(
    key: str,
    options: Chat,
    config: Config,
    tokenizer: PreTrainedTokenizerFast,
    device: torch.device,
) -> Engine:
    """In a vLLM of its own, which takes [vllm].gpu_memory_utilization of the GPU too."""
    import torch
    from transformers import AutoConfig, GenerationConfig

    from flowtrain.engines.requests import stop_ids
    from flowtrain.engines.vllm_engine import VllmEngine
    from flowtrain.engines.vllm_process import (
        VllmModel,
        check_installed,
        cpu_environment,
        gpu_environment,
    )

    check_installed(f"{key.removesuffix('model')}kind")
    try:
        shape = AutoConfig.from_pretrained(options.model)
        positions = int(shape.max_position_embeddings)
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"{key}={options.model!r} is no model that vLLM can run: {error}"
        ) from error
    try:
        ends = GenerationConfig.from_pretrained(options.model)
    except OSError:  # a model need not have one
        ends = GenerationConfig.from_model_config(shape)
    is_cpu = device.type == "cpu"
    model = VllmModel(
        options.model,
        config.model.dtype,
        min(config.vllm.max_model_len or positions, positions),
        stop_ids(ends, tokenizer),
        is_cpu=is_cpu,
        environment=cpu_environment(torch.get_num_threads())
        if is_cpu
        else gpu_environment(device.index or 0),
    )
    return VllmEngine(
        model, tokenizer, config.vllm.model_copy(update={"max_num_seqs": options.max_concurrency})
    )
