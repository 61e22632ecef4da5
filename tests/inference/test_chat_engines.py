"""Which models a config starts, and models of tokens behind roles, on the torch engine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines_under_way import loud_model
from toy_options import toy
from transformers import PreTrainedTokenizerFast

from flowtrain.agents.agentflow.build import make_flow
from flowtrain.agents.collect import collect
from flowtrain.agents.policy import Policy
from flowtrain.config import Config
from flowtrain.inference import chat_engines
from flowtrain.inference.chat_engines import ChatEngines, make_chat_engines
from flowtrain.inference.endpoint import Endpoint
from flowtrain.inference.protocol import EngineError
from flowtrain.inference.token_chat import TokenChat
from flowtrain.inference.torch_engine import TorchEngine
from flowtrain.records import Action, FinishReason, Task, UserError, Verdict
from flowtrain.tools.base_generator import BaseGenerator
from flowtrain.trainer.model import loading as models
from flowtrain.utils.event_loop import run_to_end

CPU = torch.device("cpu")
TEXTS = ("You write the final answer. Steps so far, question, tools: the area of Chad",)
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}<|assistant|>"
ALL_ROLES = ("analyst", "executor", "verifier", "generator", "tools")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random model whose tokenizer has a chat template."""
    return saved(tmp_path_factory, hidden_size=32, num_heads=4, max_positions=4096)


def saved(tmp_path_factory: pytest.TempPathFactory, **shape: int) -> str:
    path = tmp_path_factory.mktemp("model")
    tokenizer, model = loud_model(TEXTS, 300, seed=1, **shape)
    tokenizer.chat_template = TEMPLATE
    models.export(model, tokenizer, models.full_weights(model), path)
    return str(path)


@pytest.fixture(scope="module")
def tokenizer(folder: str) -> PreTrainedTokenizerFast:
    return models.load_tokenizer(folder)


@pytest.fixture
def policy(folder: str, tokenizer: PreTrainedTokenizerFast) -> Iterator[TorchEngine]:
    engine = TorchEngine(
        models.load_model(folder, torch.float32, "sdpa"), tokenizer, None, version=3
    )
    yield engine
    engine.close()


def config(roles: dict[str, str], engines: dict[str, Any] | None = None, **sections: Any) -> Config:
    return toy({"roles": roles, "engines": engines or {}, **sections})


def start(config: Config, tokenizer: PreTrainedTokenizerFast) -> ChatEngines:
    return make_chat_engines(config, tokenizer, CPU)


# ---- what is started


def test_no_engine_starts_without_a_role(tokenizer: PreTrainedTokenizerFast) -> None:
    """Not even an engine that stands in the config without a key."""
    chats = start(
        config({}, {"unused": {"model": "m", "api_key_env": "NOT_SET_ANYWHERE"}}), tokenizer
    )
    assert (dict(chats.roles), chats.metrics()) == ({}, {})
    chats.close()


def test_roles_that_name_the_same_engine_share_it(tokenizer: PreTrainedTokenizerFast) -> None:
    engine = {"model": "m", "base_url": "http://127.0.0.1:1/v1", "api_key_env": ""}
    chats = start(
        config({"verifier": "a", "generator": "a", "judge": "b"}, {"a": engine, "b": engine}),
        tokenizer,
    )
    assert set(chats.roles) == {"verifier", "generator", "judge"}
    assert set(chats.started) == {"a", "b"}
    assert chats.roles["verifier"] is chats.roles["generator"] is not chats.roles["judge"]
    assert all(isinstance(chat, Endpoint) for chat in chats.started.values())
    assert set(chats.metrics()) >= {"engines/a/requests", "engines/b/cost"}
    chats.close()
    with pytest.raises(EngineError):
        run_to_end(chats.roles["verifier"].ask("x"))


@pytest.mark.parametrize(
    ("roles", "engines", "message"),
    [
        (
            {"verifier": "gtp-4o"},
            {"gpt-4o": {}, "qwen": {}},
            r"roles\.verifier='gtp-4o' may be 'rules', 'policy' or a name in \[engines\].*gpt-4o, "
            r"qwen",
        ),
        (
            {"analyst": "x"},
            {},
            r"roles\.analyst='x' may be 'none', 'policy' or .* holds nothing yet",
        ),
        ({"judge": "policy"}, {}, r"roles\.judge='policy' may be 'none', a name"),
        ({"verifier": "rules"}, {"policy": {}}, r"\[engines\.policy\] needs another name"),
        (
            {"verifier": "a"},
            {"a": {"model": "m", "api_key_env": "NOT_SET_ANYWHERE"}},
            r"engines\.a\.api_key_env='NOT_SET_ANYWHERE'",
        ),
        ({"verifier": "a"}, {"a": {"kind": "torch"}}, r"engines\.a\.model must be the folder"),
        (
            {"verifier": "a"},
            {"a": {"kind": "torch", "model": "/nowhere"}},
            r"engines\.a\.model='/nowhere': there is no such folder",
        ),
    ],
)
def test_errors_of_the_start_name_the_key(
    roles: dict[str, str], engines: dict[str, Any], message: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        start(config(roles, engines), tokenizer)
    assert "\n" not in str(caught.value)


def test_started_engines_are_closed_when_another_cannot_start(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(chat_engines.Endpoint, "close", lambda self: closed.append(self.name))
    good = {"model": "good", "base_url": "http://127.0.0.1:1/v1", "api_key_env": ""}
    with pytest.raises(UserError):
        start(
            config({"verifier": "a", "generator": "b"}, {"a": good, "b": {**good, "model": ""}}),
            tokenizer,
        )
    assert len(closed) == 1 and closed[0].startswith("good at ")


@pytest.mark.parametrize("role", ["policy", "a"])
def test_a_model_that_cannot_chat_is_refused(role: str, tiny_path: str) -> None:
    plain = models.load_tokenizer(tiny_path)
    with pytest.raises(UserError, match="has no chat template"):
        start(config({"verifier": role}, {"a": {"kind": "torch", "model": tiny_path}}), plain)


# ---- models of tokens


def test_a_frozen_model_in_this_process(folder: str, tokenizer: PreTrainedTokenizerFast) -> None:
    options = {"kind": "torch", "model": folder, "max_tokens": 12, "price_out": 1.0}
    chats = start(config({"verifier": "a"}, {"a": options}), tokenizer)
    chat = chats.roles["verifier"]

    async def twice() -> list[str]:
        return list(await asyncio.gather(chat.ask("the area"), chat.ask("the area", seed=5)))

    first, second = run_to_end(twice())
    assert first == second != "", "at temperature 0 the seed does not matter"
    assert folder in chat.name and "temperature 0" in chat.name
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "the area"}], tokenize=True, add_generation_prompt=True
    )["input_ids"]
    metrics = chats.metrics()
    found = (metrics["engines/a/requests"], metrics["engines/a/prompt_tokens"])
    assert found == (2, 2 * len(prompt))
    assert metrics["engines/a/cost"] == pytest.approx(metrics["engines/a/reply_tokens"] / 1e6) != 0
    chats.close()


def test_seeds_matter_above_temperature_0(folder: str, tokenizer: PreTrainedTokenizerFast) -> None:
    chats = start(
        config(
            {"verifier": "a"},
            {"a": {"kind": "torch", "model": folder, "max_tokens": 12, "temperature": 1.0}},
        ),
        tokenizer,
    )
    replies = [run_to_end(chats.roles["verifier"].ask("the area", seed=seed)) for seed in (1, 2, 1)]
    assert replies[0] == replies[2] != replies[1]
    chats.close()


def test_long_prompts_shorten_the_reply_or_fail(
    policy: TorchEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    cfg = config({"verifier": "policy"}, rollout={"max_new_tokens": 48})
    chats = start(cfg, tokenizer)
    chats.bind(policy)
    chat = chats.roles["verifier"]
    length = len(tokenizer.encode("7"))
    empty = len(
        tokenizer.encode(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": ""}], tokenize=False, add_generation_prompt=True
            )
        )
    )
    run_to_end(chat.ask("7" * ((policy.max_tokens - empty) // length - 2)))
    assert chats.metrics()["engines/policy/reply_tokens"] <= 2
    with pytest.raises(EngineError, match="does not fit into 4096"):
        run_to_end(chat.ask("7" * policy.max_tokens))
    assert chats.metrics()["engines/policy/failures"] == 1


def test_an_incomplete_reply_is_an_error(
    policy: TorchEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    chats = start(config({"verifier": "policy"}), tokenizer)
    chats.bind(policy)
    with pytest.raises(EngineError, match="no complete reply within 0 s"):
        run_to_end(chats.roles["verifier"].ask("the area", deadline_s=0.0))


def test_a_frozen_model_loads_no_version(policy: TorchEngine) -> None:
    with pytest.raises(AssertionError, match="frozen"):
        policy.load(1)


class Sleeper:
    """An engine that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def sleep(self) -> None:
        self.told.append("sleep")


def test_frozen_models_sleep_and_the_policy_is_left_to_its_owner() -> None:
    options = toy({"engines": {"a": {"kind": "openai", "model": "m"}}}).engines
    sleepers: Any = {name: Sleeper() for name in ("frozen", "policy")}
    chats: Any = {
        name: TokenChat(name, options["a"], None, engine) for name, engine in sleepers.items()
    }
    ChatEngines({**chats, "endpoint": object()}, {}).sleep()
    expected = {"frozen": ["sleep"], "policy": []}
    assert {name: engine.told for name, engine in sleepers.items()} == expected


def test_close_leaves_the_policys_engine_open(
    policy: TorchEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    chats = start(config({"verifier": "policy", "tools": "policy"}), tokenizer)
    assert isinstance(chats.started["policy"], TokenChat) and list(chats.started) == ["policy"]
    chats.bind(policy)
    assert "version 3" in chats.roles["tools"].name
    chats.close()
    assert run_to_end(chats.roles["tools"].ask("still there"))


def test_the_policy_in_all_roles_runs_end_to_end(
    policy: TorchEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    """A random model talks nonsense; what it is part of holds all the same."""
    cfg = config(
        dict.fromkeys(ALL_ROLES, "policy"),
        agent={"prompt": "full", "tools": ("Base_Generator",), "memory_tokens": 400},
        rollout={"max_new_tokens": 16},
    )
    chats = start(cfg, tokenizer)
    chats.bind(policy)
    tools = {"Base_Generator": BaseGenerator(chats.roles["tools"], 30.0)}
    flow = make_flow(cfg, Policy(policy, tokenizer, 16, 1.0, 30.0), tools, 2, chats.roles)
    groups = collect(
        flow,
        [Task("a", "What is the area of Chad?", ("x",)), Task("b", "And of Mali?", ("x",))],
        group_size=3,
        seed=1,
    )
    for group in groups:
        assert len({trajectory.analysis for trajectory in group.trajectories}) == 1
        assert group.trajectories[0].analysis
        for trajectory in group.trajectories:
            expected = ("", "turns", 2)
            assert (trajectory.error, trajectory.truncated, len(trajectory.turns)) == expected
            assert trajectory.answer == trajectory.output.strip()
            for turn in trajectory.turns:
                call = turn.calls["planner"]
                assert call.spans[0].version == 3
                assert call.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
                assert len(call.response_ids) == len(call.logprobs) > 0
                assert (turn.action, turn.verdict) == (None, Verdict.CONTINUE) and turn.verdict_text
    assert groups[0].trajectories[0].analysis != groups[1].trajectories[0].analysis
    assert chats.metrics()["engines/policy/requests"] == 2 + 2 * 3 * (2 + 1), (
        "analyses, verdicts, answers; a malformed action has no command"
    )
    used, _, _ = run_to_end(
        flow.executor.execute("q", Action("", "", "x", "Base_Generator"), 0, 30.0)
    )
    assert used is not None and not used.arguments
    assert str(used.result.error).startswith("the executor wrote no command: ")
    assert run_to_end(tools["Base_Generator"].execute(query="the area")), (
        "the tool's model is the policy, too"
    )
    again = collect(flow, [groups[0].trajectories[0].task], group_size=3, seed=1)
    assert [t.output for t in again[0].trajectories] == [t.output for t in groups[0].trajectories]


def test_engine_options_on_the_command_line(tmp_path: Path) -> None:
    """Options of an engine reach it from the command line."""
    from flowtrain.config.options import parse

    parsed = parse(
        ["--roles.verifier", "v", "--engines.v.kind", "torch", "--engines.v.model", str(tmp_path)]
    )
    assert parsed is not None and parsed.engines["v"].model == str(tmp_path)


def test_missing_vllm_is_reported_under_its_option(
    folder: str, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    told = r"engines\.a\.kind='vllm' needs vLLM, which is not installed"
    with pytest.raises(UserError, match=told):
        start(config({"verifier": "a"}, {"a": {"kind": "vllm", "model": folder}}), tokenizer)


@pytest.mark.vllm
def test_a_frozen_model_replies_the_same_in_vllm(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = saved(tmp_path_factory)  # with heads that vLLM takes on a CPU
    tokenizer, replies = models.load_tokenizer(path), {}
    for kind in ("torch", "vllm"):
        options = {"kind": kind, "model": path, "max_tokens": 12}
        chats = start(
            config({"verifier": "a"}, {"a": options}, vllm={"kv_cache_gb": 0.125}), tokenizer
        )
        replies[kind] = run_to_end(chats.roles["verifier"].ask("the area"))
        assert chats.metrics()["engines/a/reply_tokens"] > 0
        chats.close()
    assert replies["torch"] == replies["vllm"] != ""
