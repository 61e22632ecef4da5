"""Start of the language models in `[roles]`, each of them once."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowtrain.config import NO_ENGINE, Chat, Config
from flowtrain.inference.chat import ChatEngine
from flowtrain.inference.endpoint import Endpoint
from flowtrain.inference.protocol import Engine
from flowtrain.inference.token_chat import ChatTokenizer, TokenChat, check_template
from flowtrain.records import UserError

if TYPE_CHECKING:
    import torch

POLICY = "policy"
"""The name of the current planner in a role."""
TOOL = "tools.{}"
"""The role of the model inside a tool that has one of its own (agent.tool_engines)."""
TEACHER = "teacher"
"""The role of the model that demonstrates (rft.expert), or that distill.teacher names."""
_NEED = "which a model behind a role needs"
_WITHOUT_POLICY = ("judge",)
"""Roles for which the policy is not allowed."""


@dataclass(frozen=True, slots=True)
class ChatEngines:
    """The models of the roles; the owner closes them."""

    started: Mapping[str, Endpoint | TokenChat]
    """By the name in [engines], or "policy"."""
    roles: Mapping[str, ChatEngine]
    """The engine of every role that has one; roles that name the same engine share it."""

    def bind(self, policy: Engine) -> None:
        """Set the policy's engine, which starts after the tools that use it."""
        chat = self.started.get(POLICY)
        if isinstance(chat, TokenChat):
            chat.engine = policy

    def metrics(self) -> dict[str, float]:
        """Return the meters of all models by name; the values add up over ranks."""
        return {
            f"engines/{name}/{key}": value
            for name, chat in self.started.items()
            for key, value in chat.meter.metrics().items()
        }

    def sleep(self) -> None:
        """Release the memory of local vLLM models until the next request; the caller of `bind` owns
        the policy's engine.
        """
        for name, chat in self.started.items():
            if name != POLICY and isinstance(chat, TokenChat) and chat.engine is not None:
                chat.engine.sleep()

    def close(self) -> None:
        """Close all engines except the policy's, which the caller of `bind` owns."""
        for name, chat in self.started.items():
            if name != POLICY:
                chat.close()


def teacher_role(config: Config) -> dict[str, str]:
    """Return the role of the teacher that training asks, with its name in [engines]; {}: none."""
    return {TEACHER: config.teacher_engine} if config.teacher_engine else {}


def make_chat_engines(
    config: Config,
    tokenizer: ChatTokenizer | None,
    device: torch.device,
    others: Mapping[str, str] | None = None,
) -> ChatEngines:
    """Start the models of `[roles]` and of `others` (further roles with names in [engines]).
    `tokenizer` is the planner's, or None if no role is the policy; frozen models compute on
    `device`.

    Raises UserError for an unknown engine, and for an engine without a key, model or chat template.
    """
    roles = {
        role: name for role, name in config.roles.model_dump().items() if name not in NO_ENGINE
    }
    _check_roles(config, roles)
    for tool, name in config.agent.tool_engines.items():
        _check_tool(config, tool, name)
        roles[TOOL.format(tool)] = name
    roles |= others or {}
    with ExitStack() as cleanup:  # closes what has started when another cannot
        started: dict[str, Endpoint | TokenChat] = {}
        for name in dict.fromkeys(roles.values()):
            started[name] = (
                _policy_chat(config, tokenizer) if name == POLICY else _start(name, config, device)
            )
            cleanup.callback(started[name].close)
        cleanup.pop_all()
    return ChatEngines(started, {role: started[name] for role, name in roles.items()})


def _check_roles(config: Config, roles: Mapping[str, str]) -> None:
    reserved = [name for name in config.engines if name in (*NO_ENGINE, POLICY)]
    if reserved:
        raise UserError(
            f"[engines.{reserved[0]}] needs another name, because {reserved[0]!r} is a reserved "
            "word of roles"
        )
    for role, name in roles.items():
        if name not in config.engines and (name != POLICY or role in _WITHOUT_POLICY):
            known = ", ".join(config.engines) or "nothing yet"
            default = type(config.roles).model_fields[role].default
            policy = "" if role in _WITHOUT_POLICY else f"{POLICY!r} or "
            raise UserError(
                f"roles.{role}={name!r} may be {default!r}, {policy}a name in [engines], which "
                f"holds {known}"
            )


def _check_tool(config: Config, tool: str, name: str) -> None:
    key = f"agent.tool_engines.{tool}={name!r}"
    if tool not in {name.rpartition(":")[2] for name in config.agent.tools}:
        raise UserError(f"{key}: agent.tools={list(config.agent.tools)} does not include this tool")
    if name not in config.engines:
        known = ", ".join(config.engines) or "nothing yet"
        raise UserError(f"{key} must be a name in [engines], which holds {known}")


def _policy_chat(config: Config, tokenizer: ChatTokenizer | None) -> TokenChat:
    """Chat with the current policy at temperature 0; its engine is bound later."""
    assert tokenizer is not None, "roles that name the policy need its tokenizer"
    key, path = config.path_of(config.first_policy)
    check_template(tokenizer, key, path, _NEED)
    rollout = config.rollout
    options = Chat(
        model=path, max_tokens=rollout.max_new_tokens, timeout_s=rollout.request_timeout_s
    )
    return TokenChat(POLICY, options, tokenizer)


def _start(name: str, config: Config, device: torch.device) -> Endpoint | TokenChat:
    options = config.engines[name]
    if options.kind == "openai":
        return Endpoint(name, options)
    from flowtrain.inference.factory import ModelSpec, make_engine
    from flowtrain.inference.vllm.process import check_installed

    if options.kind == "vllm":
        check_installed(f"engines.{name}.kind")
    key = f"engines.{name}.model"
    model = ModelSpec.load(key, options.model, any_attention=options.kind == "vllm")
    check_template(model.tokenizer, key, options.model, _NEED)
    engine = make_engine(config, model, device, chat=options)
    return TokenChat(f"engines.{name}", options, model.tokenizer, engine)
