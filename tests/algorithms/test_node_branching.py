"""Branch points on a node: by the sampler's records, newer weights, or the reference policy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import make
import pytest
import torch
from starlette.responses import JSONResponse
from transformers import PreTrainedModel

from flowtrain.algorithms import load_algorithm
from flowtrain.algorithms.base import NodeSampler
from flowtrain.config import Chat, Config
from flowtrain.config.options import parse
from flowtrain.inference.endpoint import Endpoint
from flowtrain.inference.endpoint_scorer import EndpointScorer
from flowtrain.inference.protocol import EngineError, Scorer
from flowtrain.inference.torch_engine import TorchEngine
from flowtrain.records import BranchPoint, Group, Sample, Sampling, UserError
from flowtrain.rollouts.contract import Refused
from flowtrain.rollouts.ledger.group_checks import GroupLimits
from flowtrain.trainer.attention import registration as attention
from flowtrain.trainer.loss import score_row
from flowtrain.trainer.model import loading as models
from flowtrain.utils.event_loop import run_to_end
from flowtrain.weights import Publisher, WeightStore
from tests.chat_servers import ChatServer, chat_server

PROMPTS = [(5, 9), (9, 8, 7)]
NUM_TOKENS = 12


@pytest.fixture
def start(tiny_path: str) -> PreTrainedModel:
    """The policy that training started from."""
    return models.load_model(tiny_path, torch.float32, attn="sdpa")


@pytest.fixture
def policy(tiny_path: str) -> PreTrainedModel:
    """Some steps later."""
    model = models.load_model(tiny_path, torch.float32, attn="sdpa")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture
def store(start: PreTrainedModel, policy: PreTrainedModel, tmp_path: object) -> WeightStore:
    """Version 0 is the start, version 3 the policy."""
    made = WeightStore(tmp_path / "weights")
    publisher = Publisher(made)
    for version, model in ((0, start), (3, policy)):
        publisher.publish(models.named_weights(model), version)
    return made


@pytest.fixture
def engine(tiny_path: str, store: WeightStore) -> Iterator[TorchEngine]:
    """The engine of a node, at version 0."""
    with_engine = make_engine(tiny_path, store)
    with_engine.load(0)
    yield with_engine
    with_engine.close()


def make_engine(path: str, store: WeightStore | None = None) -> TorchEngine:
    model = models.load_model(path, torch.float32, attn="sdpa")
    return TorchEngine(model, models.load_tokenizer(path), store, records_entropies=True)


def config(*options: str) -> Config:
    every = ["--algorithm.name", "appo", "--appo.num_roots", "2", "--rollout.group_size", "5"]
    every += ["--train.token_budget", "8192"]
    return parse([*every, "--appo.spacing", "2", "--appo.gamma", "0.9", *options])


def roll_out(engine: TorchEngine) -> Group:
    """Two roots of two turns each."""

    async def together() -> list[Any]:
        asked = [(p, Sampling(NUM_TOKENS, 1.0, seed=s, ignore_end=True)) for s, p in numbered]
        return await asyncio.gather(*(engine.generate(*each) for each in asked))

    numbered = [(seed, prompt) for seed in range(2) for prompt in PROMPTS]
    turns = [make.turn(call) for call in run_to_end(together())]
    return make.group(make.rollout(*turns[:2]), make.rollout(*turns[2:]))


def samples_of(group: Group) -> list[Sample]:
    calls = [turn.calls["planner"] for t in group.trajectories for turn in t.turns]
    return [Sample.of(call) for call in calls]


def on_a_node(
    config: Config, path: str, roots: Group, engine: Scorer, reference: Scorer | None = None
) -> list[BranchPoint]:
    sampler = NodeSampler(models.load_tokenizer(path), 280, engine, reference)
    return run_to_end(load_algorithm(config).node_points(roots, 0, sampler))


def synchronous(
    config: Config,
    path: str,
    roots: Group,
    policy: PreTrainedModel,
    start: PreTrainedModel,
    step: int = 4,
) -> Sequence[BranchPoint]:
    """Ask the synchronous loop, whose trainer has the policy and the reference."""
    for model in (policy, start):
        model.set_attn_implementation(attention.NAME)
    trainer: Any = SimpleNamespace(
        device=torch.device("cpu"),
        model=policy,
        reference=lambda: nullcontext(start),
        score=lambda model, rows: [score_row(model, row, 1.0) for row in rows],
    )
    with torch.no_grad():
        found = load_algorithm(config).branch(step, [roots], trainer, models.load_tokenizer(path))
    return found.points[0]


def places(points: Sequence[BranchPoint]) -> list[tuple[int, int, int]]:
    return [(point.parent, point.turn, point.token) for point in points]


def test_by_entropy_as_in_the_synchronous_loop(
    engine: TorchEngine, tiny_path: str, start: PreTrainedModel, policy: PreTrainedModel
) -> None:
    by_entropy = config("--appo.rule", "entropy")
    engine.load(3)
    roots = roll_out(engine)
    found = on_a_node(by_entropy, tiny_path, roots, engine)
    assert places(found) == places(synchronous(by_entropy, tiny_path, roots, policy, start))
    assert len(found) == 3 and {(p.scorer, p.version) for p in found} == {("sampler", 3)}


def test_places_at_random_are_drawn_anew_in_each_step(
    engine: TorchEngine, tiny_path: str, start: PreTrainedModel, policy: PreTrainedModel
) -> None:
    at_random = config("--appo.rule", "random")
    roots = roll_out(engine)

    def drawn(step: int) -> tuple[tuple[int, int, int], ...]:
        return tuple(places(synchronous(at_random, tiny_path, roots, policy, start, step)))

    assert len({drawn(step) for step in range(1, 6)}) > 3
    assert drawn(1) == drawn(1)


def test_by_the_reference_as_in_the_synchronous_loop(
    engine: TorchEngine, tiny_path: str, start: PreTrainedModel, policy: PreTrainedModel
) -> None:
    by_score, frozen = config("--appo.rule", "score"), make_engine(tiny_path)
    engine.load(3)
    roots = roll_out(engine)
    found = on_a_node(by_score, tiny_path, roots, engine, frozen)
    frozen.close()
    truth = synchronous(by_score, tiny_path, roots, policy, start)
    assert places(found) == places(truth)
    assert [p.score for p in found] == pytest.approx([p.score for p in truth], abs=1e-3)
    assert {(p.scorer, p.version) for p in found} == {("reference", 3)}
    assert {(p.scorer, p.version) for p in truth} == {("trainer", 3)}
    by_entropy = config("--appo.rule", "entropy")
    assert places(found) != places(on_a_node(by_entropy, tiny_path, roots, engine))


def test_by_newer_weights_than_the_samplers(
    engine: TorchEngine, tiny_path: str, policy: PreTrainedModel
) -> None:
    """The place of the highest product of z-scores, computed by hand from the policy's ratio."""
    by_drift = config("--appo.rule", "score", "--appo.omega", "behavior", "--appo.gamma", "0")
    roots = roll_out(engine)
    unasked: Any = SimpleNamespace(version=0)  # the weights of the roots, which need no pass
    assert on_a_node(by_drift, tiny_path, roots, unasked)[0].version == 0
    engine.load(3)
    found = on_a_node(by_drift, tiny_path, roots, engine)
    assert {(p.scorer, p.version) for p in found} == {("behavior", 3)}
    best = max(found, key=lambda point: point.score)
    calls = [turn.calls["planner"] for turn in roots.trajectories[best.parent].turns]
    entropies, ratios = [], []
    for call in calls:
        ids = [*call.prompt_ids, *call.response_ids]
        with torch.no_grad():
            logits = policy(torch.tensor([ids])).logits[0, len(call.prompt_ids) - 1 : -1]
        newer = logits.log_softmax(-1).gather(1, torch.tensor([call.response_ids]).T)[:, 0]
        ratios += (newer - torch.tensor(call.logprobs)).exp().clamp(0.8, 1.2).tolist()
        entropies += call.entropies
    z = [torch.tensor(x) for x in (entropies, ratios)]
    h, omega = ((x - x.mean()) / x.std(correction=0) for x in z)
    place = best.turn * NUM_TOKENS + best.token
    assert best.score == pytest.approx(float(h[place] * omega[place]), rel=1e-3)


def test_the_engine_scores_as_it_samples(engine: TorchEngine, start: PreTrainedModel) -> None:
    """Whatever shares a pass; at other temperatures; and it samples as before afterwards."""
    roots = roll_out(engine)
    samples = samples_of(roots)
    version, together = run_to_end(engine.score(samples, 1.0))
    assert version == 0
    for sample, found in zip(samples, together, strict=True):
        assert found == pytest.approx(sample.logprobs, abs=1e-5)
        _, (alone,) = run_to_end(engine.score([sample], 0.5))
        ids = [*sample.prompt_ids, *sample.response_ids]
        with torch.no_grad():
            logits = start(torch.tensor([ids])).logits[0, len(sample.prompt_ids) - 1 : -1] / 0.5
        truth = logits.log_softmax(-1).gather(1, torch.tensor([sample.response_ids]).T)[:, 0]
        assert alone == pytest.approx(truth.tolist(), abs=1e-4)
    assert roll_out(engine) == roots
    assert run_to_end(engine.score([], 1.0)) == (0, [])


def scorer_of(server: ChatServer) -> tuple[Endpoint, EndpointScorer]:
    options = Chat(model="start", base_url=server.base_url, api_key_env="", max_retries=0)
    endpoint = Endpoint("scorer", options)
    return endpoint, EndpointScorer(endpoint, "start", timeout_s=20.0)


def test_a_reference_behind_an_endpoint(
    engine: TorchEngine, tiny_path: str, start: PreTrainedModel, policy: PreTrainedModel
) -> None:
    """A FAKE of vLLM's server that computes log-probs of prompts with the model of the start."""

    def served(body: dict[str, Any]) -> JSONResponse:
        ids = body["prompt"]
        assert (body["prompt_logprobs"], body["max_tokens"], body["model"]) == (0, 1, "start")
        with torch.no_grad():
            logprobs = start(torch.tensor([ids])).logits[0].log_softmax(-1)
        told = [{str(t): {"logprob": float(logprobs[i, t])}} for i, t in enumerate(ids[1:])]
        usage = {"prompt_tokens": len(ids), "completion_tokens": 1}
        return JSONResponse({"choices": [{"prompt_logprobs": [None, *told]}], "usage": usage})

    by_score, frozen = config("--appo.rule", "score"), make_engine(tiny_path)
    engine.load(3)
    roots = roll_out(engine)
    with chat_server(served) as server:
        endpoint, scorer = scorer_of(server)
        found = on_a_node(by_score, tiny_path, roots, engine, scorer)
        endpoint.close()
    assert places(found) == places(on_a_node(by_score, tiny_path, roots, engine, frozen))
    assert len(server.asked) == 4 and endpoint.meter.metrics()["prompt_tokens"] == 58
    frozen.close()


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"choices": []}, "without the log-probs of the 3 tokens"),
        ({"choices": [{"prompt_logprobs": [None, None]}]}, "without the log-probs of the 3"),
        ({"choices": [{"prompt_logprobs": [None, {}, {}]}]}, "without a log-prob of token 7"),
        ({"choices": [{"prompt_logprobs": [None, {}, {"7": 1}]}]}, "a log-prob of token 7"),
        (
            {"choices": [{"prompt_logprobs": [None, {}, {"7": {"logprob": 0.5}}]}]},
            "without a log-prob of token 7",
        ),
        ({"choices": [{"prompt_logprobs": [0, 0, {"8": {"logprob": -1.0}}]}]}, "of token 7"),
    ],
)
def test_an_endpoint_that_does_not_score_is_an_error(told: object, why: str) -> None:
    with chat_server(lambda body: JSONResponse(told)) as server:
        endpoint, scorer = scorer_of(server)
        with pytest.raises(EngineError, match=rf"^engines.scorer: .*{why}"):
            run_to_end(scorer.score([Sample((5, 6), (7,), (-1.0,), (0.0,), (0.0,))], 1.0))
        endpoint.close()


def test_a_service_takes_no_place_that_another_scorer_chose(engine: TorchEngine) -> None:
    """Nor one that weights chose which were older than the tokens."""
    by_entropy = config(
        "--appo.rule", "entropy", "--appo.num_roots", "1", "--rollout.group_size", "2"
    )
    engine.load(3)
    root = replace(roll_out(engine).trajectories[0], reward=1.0)

    def check(scorer: str, version: int) -> None:
        branch = replace(root, branch=BranchPoint(0, 1, 2, 1.0, scorer, version))
        GroupLimits(by_entropy, {}).check(Group(0, (root, branch)))

    check("sampler", 3)
    with pytest.raises(
        Refused, match="'trainer' chose its branch point, but this run uses 'sampler'"
    ):
        check("trainer", 3)
    with pytest.raises(Refused, match="from tokens of version 3, but version 2 scored them"):
        check("sampler", 2)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--rollout.top_p", "0.9", "--rollout.top_k", "20"], "rollout.top_k=20 changes"),
        (["--appo.scorer", "x"], r"appo.scorer='x' must be an endpoint of \[engines\] \(it has"),
        (
            ["--appo.omega", "behavior", "--rollout.engine", "vllm", "--rollout.temperature", "2"],
            "rollout.temperature=2.0 must be 1, because vLLM",
        ),
    ],
)
def test_what_a_node_cannot_score_is_refused(options: list[str], why: str) -> None:
    chosen = config("--appo.rule", "score", *options)
    load_algorithm(chosen)  # a run that samples by itself can
    with pytest.raises(UserError, match=why):
        load_algorithm(chosen).check_nodes()
    load_algorithm(config(*options, "--appo.rule", "entropy")).check_nodes()
