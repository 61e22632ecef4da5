"""Sampling by real vLLM: tokens and log-probs, ends of responses, weight updates under way, and an
engine that dies.

One engine serves the whole file; the test that kills it comes last.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from engines_under_way import loud_model, run, under_way
from flowkernels import LossSpec
from torch import Tensor
from toy_options import toy
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from flowtrain.agents.agentflow.build import make_policy
from flowtrain.agents.agentflow.planner import ModelPlanner
from flowtrain.agents.agentflow.prompts import CHAT_TEMPLATE, CompactPrompt
from flowtrain.agents.base import AgentContext
from flowtrain.agents.collect import collect
from flowtrain.agents.policy import Policy, opening
from flowtrain.agents.registry import load_kind
from flowtrain.config import Vllm
from flowtrain.inference.requests import stop_ids
from flowtrain.inference.torch_engine import TorchEngine
from flowtrain.inference.vllm import runner
from flowtrain.inference.vllm.engine import VllmEngine
from flowtrain.inference.vllm.process import (
    VllmModel,
    check_version,
    cpu_environment,
    engine_args,
    environment,
    explain,
    without_main,
)
from flowtrain.records import (
    Call,
    FinishReason,
    Sample,
    Sampling,
    Task,
    UserError,
    VersionSpan,
)
from flowtrain.tools.search import Search
from flowtrain.trainer.attention import registration as attention
from flowtrain.trainer.distributed import World
from flowtrain.trainer.loss import equip
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.packing import pack_rows
from flowtrain.trainer.trainer import OptimSpec, Trainer
from flowtrain.weights import Publisher, PublishOptions, StoreError, WeightStore

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_agent.py"
PROGRAM = """
from openai import AsyncOpenAI


async def solve(task, base_url, api_key):
    messages = [{"role": "user", "content": task.question}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(2):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            messages.append(reply.choices[0].message.model_dump(exclude_none=True))
            messages.append({"role": "user", "content": "Are you sure?"})
    return reply.choices[0].message.content
"""
Request = tuple[Sequence[int], Sampling]
OPTIONS = Vllm(kv_cache_gb=0.125, max_num_seqs=64)
PROMPTS = [(5,), (9, 8, 7), tuple(range(100, 130)), (9, 8, 7, 6), tuple(range(20, 90))]
LONG = (tuple(range(100, 130)), Sampling(190, 1.0, seed=3, ignore_end=True))


@dataclasses.dataclass
class Setup:
    engine: VllmEngine
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    store: WeightStore
    versions: dict[int, dict[str, Tensor]]


@pytest.fixture(scope="module", autouse=True)
def impatient() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "HANG_S", 4.0)
        yield


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    """An fp32 engine at version 0 of a store that also has versions 1 and 2, each some steps of
    training away.
    """
    tokenizer, model = loud_model()
    store = WeightStore(tmp_path_factory.mktemp("run") / "weights")
    publisher = Publisher(store, PublishOptions(torch.float32), World(0, 1, torch.device("cpu")))
    versions = {}
    for version in range(3):
        versions[version] = {
            name: tensor.clone() for name, tensor in models.named_weights(model).items()
        }
        publisher.publish(versions[version], version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(
                    0.1 * torch.randn_like(parameter) * (torch.rand_like(parameter) < 0.1)
                )
    spec = VllmModel(
        source=model.config,
        dtype="float32",
        max_tokens=256,
        stop_ids=stop_ids(model.generation_config, tokenizer),
        store=str(store.root),
        environment=cpu_environment(1),
    )
    engine = VllmEngine(spec, tokenizer, OPTIONS)
    yield Setup(engine, model, tokenizer, store, versions)
    engine.close()


@pytest.fixture
def at_0(setup: Setup) -> Setup:
    return at(setup, 0)


def at(setup: Setup, version: int) -> Setup:
    setup.engine.load(version)
    set_weights(setup, version)
    return setup


def set_weights(setup: Setup, version: int) -> None:
    """Into the model of transformers."""
    missing = setup.model.load_state_dict(setup.versions[version], strict=False).missing_keys
    assert set(missing) <= models.tied_names(setup.model)


async def together(engine: VllmEngine | TorchEngine, requests: Sequence[Request]) -> list[Call]:
    return await asyncio.gather(
        *(engine.generate(prompt, sampling) for prompt, sampling in requests)
    )


def generate(engine: VllmEngine | TorchEngine, requests: Sequence[Request]) -> list[Call]:
    return run(together(engine, requests))


@torch.no_grad()
def forward(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """Logits in fp32, [tokens, V]."""
    return model(torch.tensor([ids])).logits[0].float()


def truth(
    model: PreTrainedModel, prompt: Sequence[int], ids: Sequence[int], sampling: Sampling
) -> Tensor:
    """Log-probs of the response by transformers, at the temperature and among the tokens that top-p
    and top-k keep.
    """
    logits_TV = forward(model, [*prompt, *ids])[len(prompt) - 1 : -1] / (
        sampling.temperature or 1.0
    )
    for place, token in enumerate(ids):
        logits_TV[place + 1 :, token] -= sampling.frequency_penalty / (sampling.temperature or 1.0)
    if sampling.top_k:
        logits_TV[logits_TV < logits_TV.topk(sampling.top_k).values[:, -1:]] = -torch.inf
    if sampling.top_p < 1:
        sorted_TV, order_TV = logits_TV.softmax(-1).sort(descending=True)
        is_kept_TV = sorted_TV.cumsum(-1) - sorted_TV < sampling.top_p
        logits_TV[~torch.zeros_like(is_kept_TV).scatter(1, order_TV, is_kept_TV)] = -torch.inf
    return logits_TV.log_softmax(-1).gather(1, torch.tensor([ids]).T)[:, 0]


# ---- what is sampled


@pytest.mark.vllm
class TestVllm:
    def test_greedy_tokens_equal_the_torch_engine(self, at_0: Setup) -> None:
        requests = [
            (prompt, Sampling(40, 0.0, seed=i, ignore_end=True)) for i, prompt in enumerate(PROMPTS)
        ]
        own = copy.deepcopy(at_0.model)  # an engine takes its model over
        theirs = generate(TorchEngine(own, at_0.tokenizer, at_0.store), requests)
        for mine, other in zip(generate(at_0.engine, requests), theirs, strict=True):
            assert mine.response_ids == other.response_ids
            assert mine.finish_reason is other.finish_reason
            assert mine.spans == other.spans
            assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-5)

    @pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.8, 280), (1.0, 5), (0.9, 20)])
    @pytest.mark.parametrize("temperature", [0.6, 1.0])
    def test_logprobs_are_those_of_the_sampling_distribution(
        self, at_0: Setup, temperature: float, top_p: float, top_k: int
    ) -> None:
        """At the temperature, and after top-p and top-k; the trainer computes the same through its
        trees and its head. fp32.
        """
        sampling = Sampling(40, temperature, top_k, top_p, ignore_end=True)
        requests = [
            (prompt, dataclasses.replace(sampling, seed=i)) for i, prompt in enumerate(PROMPTS * 2)
        ]
        completions = generate(at_0.engine, requests)
        recorded = torch.tensor([x for c in completions for x in c.logprobs])
        expected = torch.cat(
            [
                truth(at_0.model, p, c.response_ids, s)
                for (p, s), c in zip(requests, completions, strict=True)
            ]
        )
        assert len(recorded) == 400 and recorded.min() < -1
        # The temperature divides the logits, and their roundings with them.
        assert (recorded - expected).abs().max() <= 1e-5 / temperature
        policy = copy.deepcopy(at_0.model)
        policy.set_attn_implementation(attention.NAME)
        equip(policy)
        samples = [Sample.of(call) for call in completions]
        stats = Trainer(
            policy,
            World(0, 1, torch.device("cpu")),
            LossSpec(),
            OptimSpec(lr=1e-3),
            temperature=temperature,
        ).step([pack_rows(samples, 4)])
        assert abs(stats["ratio_max"] - 1) <= 2e-5
        assert abs(stats["ratio_min"] - 1) <= 2e-5
        assert stats["logprob_mismatch"] <= 1e-5
        assert all((c.sampling_mask is None) == (top_k == 0) for c in completions)

    def test_a_frequency_penalty_is_in_the_logprobs(self, at_0: Setup) -> None:
        requests = [
            (prompt, Sampling(40, 0.7, frequency_penalty=1.2, seed=i, ignore_end=True))
            for i, prompt in enumerate(PROMPTS)
        ]
        for (prompt, sampling), c in zip(requests, generate(at_0.engine, requests), strict=True):
            expected = truth(at_0.model, prompt, c.response_ids, sampling)
            assert (torch.tensor(c.logprobs) - expected).abs().max() <= 1e-4

    @pytest.mark.parametrize("num_kept", [0, 1, 11])
    def test_a_branch_continues_the_tokens_of_its_parent(self, at_0: Setup, num_kept: int) -> None:
        """Prompt and prefix are its root's, the rest is new; all of its log-probs are those of one
        sequence. Kept sets are joined too.
        """
        sampling = Sampling(12, 0.8, 20, 0.9, ignore_end=True, seed=1)
        (root,) = generate(at_0.engine, [(PROMPTS[2], sampling)])
        planner = ModelPlanner(
            Policy(at_0.engine, at_0.tokenizer, 12, 0.8, 60.0, 20, 0.9),
            CompactPrompt(),
            ("Search",),
        )
        branch = run(planner.resume(opening(root, num_kept), 0, seed=7, deadline_s=60.0)).call
        assert branch.response_ids[:num_kept] == root.response_ids[:num_kept]
        assert branch.logprobs[:num_kept] == root.logprobs[:num_kept]
        mask, num_tokens = branch.sampling_mask, len(branch.response_ids)
        assert mask is not None and len(mask.counts) == num_tokens > num_kept
        found = [(s.start, s.end) for s in branch.spans]
        assert found == [*[(0, num_kept)][: num_kept > 0], (num_kept, num_tokens)]
        expected = truth(at_0.model, PROMPTS[2], branch.response_ids, sampling)
        assert (torch.tensor(branch.logprobs) - expected).abs().max() <= 1e-5

    @pytest.mark.parametrize(
        "name", ["agentflow", "single", "tools", "gateway", f"{EXAMPLE}:MyAgent"]
    )
    def test_any_agent_rolls_out(self, at_0: Setup, name: str, tmp_path: Path) -> None:
        """The ids of its calls are those that vLLM has seen, and so are their log-probs."""
        tools = {"agentflow": ("Search",), "tools": ("Search",)}.get(name, ())
        prompt = "full" if name == "tools" else "compact"
        program = tmp_path / "program.py"
        program.write_text(PROGRAM)
        config = toy(
            {
                "agent": {"name": name, "tools": tools, "prompt": prompt},
                "gateway": {"function": f"{program}:solve"} if name == "gateway" else {},
                "rollout": {"max_new_tokens": 8},
            }
        )
        tokenizer = copy.copy(at_0.tokenizer)
        tokenizer.chat_template = CHAT_TEMPLATE
        policy = make_policy(config, "planner", at_0.engine, tokenizer)
        search = {"Search": Search(["The area of Chad is 1284."])} if tools else {}
        context = AgentContext(config, {"planner": policy}, search, {}, config.agent.max_turns)
        agent = load_kind(config).make(context)
        (group,) = collect(agent, [Task("t", "Area of Chad?", ("1284",))], group_size=4, seed=1)
        agent.close()
        for trajectory in group.trajectories:
            assert trajectory.turns and not trajectory.error
            assert name != "gateway" or len(trajectory.turns) == 2
            calls = [turn.calls["planner"] for turn in trajectory.turns]
            for call in calls:
                expected = truth(at_0.model, call.prompt_ids, call.response_ids, Sampling(8))
                assert (torch.tensor(call.logprobs) - expected).abs().max() <= 1e-4
            for before, after in pairwise(calls if name != "agentflow" else ()):
                whole = before.prompt_ids + before.response_ids
                assert after.prompt_ids[: len(whole)] == whole

    def test_the_seed_decides(self, at_0: Setup) -> None:
        requests = [(PROMPTS[1], Sampling(12, 1.0, seed=seed)) for seed in range(8)]
        first, second = generate(at_0.engine, requests), generate(at_0.engine, [requests[5]])
        assert second[0].response_ids == first[5].response_ids
        assert len({c.response_ids for c in first}) == 8

    def test_many_requests_are_under_way_at_once(self, at_0: Setup) -> None:
        """More than vLLM samples at a time; prompts of all lengths, and none is mistaken for
        another.
        """
        order = torch.Generator().manual_seed(0)
        prompts = [
            tuple(torch.randint(5, 280, (1 + 3 * i,), generator=order).tolist()) for i in range(72)
        ]
        requests = [(p, Sampling(1 + i % 20, 0.0, ignore_end=True)) for i, p in enumerate(prompts)]
        completions = generate(at_0.engine, requests)
        assert [len(c.response_ids) for c in completions] == [1 + i % 20 for i in range(72)]
        for prompt, completion in zip(prompts, completions, strict=True):
            assert completion.response_ids[0] == int(forward(at_0.model, prompt)[-1].argmax())

    # ---- when it ends

    def test_an_end_token_ends_and_is_kept(self, at_0: Setup) -> None:
        requests = [(p, Sampling(100, 1.5, seed=i)) for i, p in enumerate(PROMPTS * 12)]
        completions = generate(at_0.engine, requests)
        stopped = [c for c in completions if c.finish_reason is FinishReason.STOP]
        end = at_0.tokenizer.eos_token_id
        assert len(stopped) > 3
        assert all(c.response_ids[-1] == end and end not in c.response_ids[:-1] for c in stopped)
        assert all(
            end not in c.response_ids and len(c.response_ids) == 100
            for c in completions
            if c.finish_reason is FinishReason.LENGTH
        )
        (free,) = generate(
            at_0.engine,
            [(p, dataclasses.replace(s, ignore_end=True)) for p, s in requests if s.seed == 0],
        )
        assert len(free.response_ids) == 100 and free.finish_reason is FinishReason.LENGTH

    def test_stop_strings_equal_the_torch_engine(self, at_0: Setup) -> None:
        torch_engine = TorchEngine(copy.deepcopy(at_0.model), at_0.tokenizer, at_0.store)
        (free,) = generate(torch_engine, [(PROMPTS[2], Sampling(30, 0.0, ignore_end=True))])
        stop = at_0.tokenizer.decode(free.response_ids[7:9])
        requests = [
            (PROMPTS[2], Sampling(30, 0.0, stop_strings=("never there", stop), ignore_end=True))
        ]
        (mine,), (other,) = generate(at_0.engine, requests), generate(torch_engine, requests)
        assert (
            mine.response_ids == other.response_ids
            and len(mine.response_ids) < 30
            and mine.finish_reason is FinishReason.STOP
        )
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert mine.spans == other.spans

    def test_a_deadline_returns_what_there_is(self, at_0: Setup) -> None:
        completions = generate(
            at_0.engine,
            [(LONG[0], dataclasses.replace(LONG[1], deadline_s=s)) for s in (0.0, 0.1, 60.0)],
        )
        nothing, part, whole = completions
        assert not nothing.response_ids and nothing.finish_reason is FinishReason.DEADLINE
        assert 0 < len(part.response_ids) < 190
        assert part.finish_reason is FinishReason.DEADLINE
        assert len(part.logprobs) == len(part.response_ids)
        assert (
            part.response_ids == whole.response_ids[: len(part.response_ids)]
            and whole.finish_reason is FinishReason.LENGTH
        )

    def test_a_cancelled_request_ends_alone(self, at_0: Setup) -> None:
        async def scenario() -> None:
            tasks = [asyncio.create_task(at_0.engine.generate(*LONG)) for _ in range(2)]
            await asyncio.sleep(0.1)
            tasks[0].cancel()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            assert (
                isinstance(answers[0], asyncio.CancelledError)
                and len(answers[1].response_ids) == 190
            )

        run(scenario())

    def test_a_request_that_does_not_fit_is_refused(self, at_0: Setup) -> None:
        (completion,) = generate(at_0.engine, [([7] * 248, Sampling(8, 0.0, ignore_end=True))])
        assert len(completion.response_ids) == 8
        with pytest.raises(UserError, match="at most 256"):
            generate(at_0.engine, [([7] * 249, Sampling(8, 0.0))])

    # ---- weight updates

    def test_an_update_changes_what_is_sampled(self, at_0: Setup) -> None:
        """Greedy outputs are those of each version, whatever came before, and the prefix cache of
        one version serves no other.
        """
        requests = [(p, Sampling(40, 0.0, ignore_end=True)) for p in PROMPTS]
        seen = set()
        for version in (1, 2, 0, 2):
            at(at_0, version)
            assert at_0.engine.version == version
            theirs = generate(
                TorchEngine(copy.deepcopy(at_0.model), at_0.tokenizer, at_0.store, version=version),
                requests,
            )
            mine = generate(at_0.engine, requests)
            assert [c.response_ids for c in mine] == [c.response_ids for c in theirs]
            assert all(c.spans == (VersionSpan(0, 40, version),) for c in mine)
            seen.add(mine[4].response_ids)
        assert len(seen) == 3

    def test_a_request_goes_on_across_an_update(self, at_0: Setup) -> None:
        """Its tokens are stamped by the version that sampled them, and their log-probs are that
        version's.
        """

        async def scenario() -> list[Call]:
            requests = [
                asyncio.create_task(
                    at_0.engine.generate(LONG[0], dataclasses.replace(LONG[1], seed=i))
                )
                for i in range(4)
            ]
            await under_way(at_0.engine, number=4)
            await asyncio.to_thread(at_0.engine.load, 1)
            return await asyncio.gather(*requests)

        for completion in run(scenario()):
            assert (
                len(completion.response_ids) == 190
                and completion.finish_reason is FinishReason.LENGTH
            )
            (before, after) = completion.spans
            assert (before.version, after.version) == (0, 1)
            assert 0 == before.start < before.end == after.start < after.end == 190
            for span in completion.spans:
                set_weights(at_0, span.version)
                expected = truth(at_0.model, LONG[0], completion.response_ids, LONG[1])
                recorded = torch.tensor(completion.logprobs)
                difference = (recorded - expected).abs()
                assert difference[span.start : span.end].max() <= 1e-5
                outside = torch.cat([difference[: span.start], difference[span.end :]])
                assert outside.max() > 1e-3, "or the versions would be too alike to tell"

    def test_the_cache_key_changes_with_the_version(self, at_0: Setup) -> None:
        salts = []
        for version in (1, 2, 1):
            at_0.engine.load(version)
            salts.append(at_0.engine.supervisor.runner.result()._weights[""].salt)
        assert len(set(salts)) == 3

    def test_a_missing_version_leaves_the_old_one(self, at_0: Setup) -> None:
        (before,) = generate(at_0.engine, [(PROMPTS[2], Sampling(20, 0.0))])
        with pytest.raises(StoreError, match="77"):
            at_0.engine.load(77)
        assert at_0.engine.version == 0 and at_0.engine.metrics()["engine_restarts"] == 0
        (after,) = generate(at_0.engine, [(PROMPTS[2], Sampling(20, 0.0))])
        assert after == before

    def test_metrics_of_an_update(self, at_0: Setup) -> None:
        at_0.engine.load(1)
        metrics = at_0.engine.metrics()
        assert metrics["weights_loaded_by_delta"] == 1 and 0 < metrics["weights_pause_s"] < 5

    def test_a_sleeping_engine_wakes_before_an_update(
        self, at_0: Setup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The test looks at the calls, because vLLM can sleep on a GPU only."""
        core, called = at_0.engine.supervisor.runner.result(), []

        def record(name: str, instead: bool) -> None:
            real = getattr(core._llm, name)

            async def call(*args: Any, **options: Any) -> Any:
                called.append(name)
                return None if instead else await real(*args, **options)

            monkeypatch.setattr(core._llm, name, call)

        for name in (
            "sleep",
            "wake_up",
            "start_weight_update",
            "pause_generation",
            "resume_generation",
        ):
            record(name, instead=name in ("sleep", "wake_up"))
        at_0.engine.sleep()
        assert called == [], "unless vllm.sleep says so"
        monkeypatch.setattr(at_0.engine, "_options", OPTIONS.model_copy(update={"sleep": True}))
        at_0.engine.sleep()
        at_0.engine.load(1)
        at_0.engine.load(2)
        update = ["start_weight_update", "pause_generation", "resume_generation"]
        assert called == ["sleep", "wake_up", *update, *update]
        assert not engine_args(VllmModel("x", "float32", 64, frozenset()), OPTIONS).get(
            "enable_sleep_mode"
        )
        assert engine_args(VllmModel("x", "float32", 64, frozenset()), at_0.engine._options)[
            "enable_sleep_mode"
        ]

    # ---- an engine that dies

    @pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
    def test_an_engine_that_dies_is_replaced(self, at_0: Setup, death: signal.Signals) -> None:
        """By one of the same version; every request is asked once more and answered, and all of it
        is counted.
        """
        at(at_0, 2)
        engine = at_0.engine
        before = engine.metrics()
        (expected,) = generate(engine, [LONG])
        patient = dataclasses.replace(LONG[1], deadline_s=240.0)  # a busy machine starts slowly

        async def scenario() -> list[Call]:
            tasks = [asyncio.create_task(engine.generate(LONG[0], patient)) for _ in range(3)]
            hurried = asyncio.create_task(
                engine.generate(LONG[0], dataclasses.replace(LONG[1], deadline_s=2.0))
            )
            await asyncio.sleep(0.1)
            for process in engine.supervisor.runner.result()._processes:
                os.kill(process.pid, death)
            assert (await hurried).finish_reason is FinishReason.DEADLINE
            return await asyncio.gather(*tasks)

        assert [c.response_ids for c in run(scenario(), timeout_s=250)] == [
            expected.response_ids
        ] * 3
        assert engine.version == 2
        metrics = engine.metrics()
        assert metrics["engine_restarts"] - before["engine_restarts"] == 1
        assert 3 <= metrics["engine_requeued"] - before["engine_requeued"] <= 4


# ---- what keeps it from starting


def test_missing_vllm_is_reported_with_its_cure(
    monkeypatch: pytest.MonkeyPatch, tiny_path: str
) -> None:
    monkeypatch.setattr(
        "flowtrain.inference.vllm.process.importlib.util.find_spec", lambda name: None
    )
    with pytest.raises(UserError, match=r"pip install -e '\.\[vllm\]'"):
        VllmEngine(
            VllmModel(tiny_path, "float32", 64, frozenset()),
            models.load_tokenizer(tiny_path),
            OPTIONS,
        )


@pytest.mark.parametrize(
    ("reason", "cure"),
    [
        (
            "ValueError: To serve one request, 0.1 GiB KV cache is needed, which is larger",
            "vllm.kv_cache_gb",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
            "vllm.gpu_memory_utilization",
        ),
        (
            "OSError: nowhere is not a local folder and is not a valid model identifier",
            "model.path",
        ),
        ("RuntimeError: Unsupported CPU attention configuration: head_dim=16", "tiny.num_heads"),
    ],
)
def test_start_errors_are_explained_with_a_cure(tmp_path: Path, reason: str, cure: str) -> None:
    (tmp_path / "errors").write_text(
        f"Traceback (most recent call last):\n  File x\n{reason}\nsomething after it\n"
    )
    error = explain(
        RuntimeError("Engine core initialization failed. See root cause above."),
        tmp_path / "errors",
    )
    assert isinstance(error, UserError)
    assert cure in str(error)
    assert reason[:40] in str(error)
    assert "\n" not in str(error)


def test_unknown_start_errors_are_passed_on(tmp_path: Path) -> None:
    error = explain(KeyError("strange"), tmp_path / "errors")
    assert type(error) is RuntimeError and "KeyError: 'strange'" in str(error)


@pytest.mark.parametrize(
    ("version", "is_old"),
    [("0.24.9", True), ("0.25.0", False), ("0.32.0+cpu", False), ("1.0", False)],
)
def test_versions_from_0_25_on_are_supported(version: str, is_old: bool) -> None:
    with pytest.raises(UserError, match=r"too old, 0\.25") if is_old else contextlib.nullcontext():
        check_version(version)


def test_vllm_does_not_inherit_torchruns_variables_nor_memory_that_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", " expandable_segments : True")
    before = dict(os.environ)
    has_file = hasattr(sys.modules["__main__"], "__file__")
    with environment({"OMP_NUM_THREADS": "7"}), without_main():
        assert "RANK" not in os.environ
        assert "TORCHELASTIC_RUN_ID" not in os.environ
        assert os.environ["OMP_NUM_THREADS"] == "7"
        assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"
        assert os.environ["PYTORCH_ALLOC_CONF"] == ""
        assert sys.modules["__main__"].__spec__ is None
    assert dict(os.environ) == before
    assert hasattr(sys.modules["__main__"], "__file__") == has_file, "workers of xdist have none"
