"""The embedded engine: what it samples, what it reports, and how requests share batches."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engines_under_way import run
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from flowtrain.inference.torch_engine import TorchEngine, _choose
from flowtrain.records import Call, FinishReason, Sample, Sampling, UserError, VersionSpan
from flowtrain.trainer.loss import score_row
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.packing import pack_row
from flowtrain.weights import Publisher, PublishOptions, WeightStore

Request = tuple[Sequence[int], Sampling]
MakeEngine = Callable[..., TorchEngine]
PROMPTS = [(5,), (9, 8, 7), tuple(range(100, 130)), (9, 8, 7, 6), (250, 3, 250)]


@pytest.fixture
def model(tiny_path: str) -> PreTrainedModel:
    return models.load_model(tiny_path, torch.float32, attn="sdpa")


@pytest.fixture
def tokenizer(tiny_path: str) -> PreTrainedTokenizerFast:
    return models.load_tokenizer(tiny_path)


@pytest.fixture
def engine(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> TorchEngine:
    """Its model is another one, for the sake of its attention."""
    return TorchEngine(copy.deepcopy(model), tokenizer, WeightStore(tmp_path / "weights"))


def generate(engine: TorchEngine, requests: Sequence[Request]) -> list[Call]:
    async def together() -> list[Call]:
        return await asyncio.gather(*(engine.generate(*request) for request in requests))

    return run(together())


def ids_of(calls: Sequence[Call]) -> list[tuple[int, ...]]:
    return [call.response_ids for call in calls]


def trainer_logprobs(path: str, completions: Sequence[Call], temperature: float) -> Tensor:
    """Log-probs of all sampled tokens by the trainer; a row per sample keeps their order."""
    policy = models.load_model(path, torch.float32)
    rows = [pack_row([Sample.of(call)]) for call in completions]
    with torch.no_grad():
        scores = [score_row(policy, row, temperature) for row in rows]
    return torch.cat([each.logprob_T for each in scores])


# ---- what is sampled


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_the_sampler_reports_the_logprobs_that_the_trainer_computes(
    engine: TorchEngine, tiny_path: str, temperature: float
) -> None:
    """Of mixed lengths in one batch, fp32; greedy ones at temperature 1."""
    requests = [
        (p, Sampling(4 + 6 * i, temperature, seed=i)) for i, p in enumerate(PROMPTS + PROMPTS)
    ]
    requests = [(p, s) for p, s in requests if len(p) + s.max_new_tokens <= 64]
    completions = generate(engine, requests)
    recorded = torch.tensor([x for c in completions for x in c.logprobs])
    truth = trainer_logprobs(tiny_path, completions, temperature or 1.0)
    assert len(recorded) > 100 and recorded.min() < -1
    assert (recorded - truth).abs().max() <= 1e-5


@pytest.mark.parametrize("top_k", [0, 3])
def test_the_entropies_are_those_that_the_trainer_computes(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tiny_path: str, top_k: int
) -> None:
    """At temperature 0.7, over all tokens even where few are kept."""
    engine = TorchEngine(model, tokenizer, None, records_entropies=True)
    completions = generate(
        engine, [(p, Sampling(4 + 3 * i, 0.7, top_k, seed=i)) for i, p in enumerate(PROMPTS)]
    )
    policy = models.load_model(tiny_path, torch.float32)
    for done in completions:
        with torch.no_grad():
            truth = score_row(policy, pack_row([Sample.of(done)]), 0.7).entropy_T
        assert done.entropies == pytest.approx(truth.tolist(), abs=1e-5)
        assert min(done.entropies) > 0.1


def test_entropies_are_recorded_on_request_only(engine: TorchEngine) -> None:
    assert generate(engine, [(PROMPTS[0], Sampling(4, 1.0))])[0].entropies == ()


def test_greedy_is_what_transformers_generates(engine: TorchEngine, model: PreTrainedModel) -> None:
    completions = generate(engine, [(p, Sampling(12, 0.0, seed=i)) for i, p in enumerate(PROMPTS)])
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        truth = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=12,
            do_sample=False,
        )
        assert list(completion.response_ids) == truth[0, len(prompt) :].tolist()


def test_a_completion_does_not_depend_on_its_batch(engine: TorchEngine) -> None:
    """Neither on other prompts, nor on how long they go on, nor on their temperatures."""
    requests = [(p, Sampling(5 + i, 0.5 + 0.25 * i, seed=1000 + i)) for i, p in enumerate(PROMPTS)]
    together = generate(engine, requests)
    alone = [generate(engine, [request])[0] for request in requests]
    among_clones = generate(engine, [requests[1]] * 2 + [requests[3]])
    assert ids_of(together) == ids_of(alone)
    assert ids_of(among_clones) == ids_of([alone[1], alone[1], alone[3]])
    for mine, other in zip(together, alone, strict=True):
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_the_seed_decides(engine: TorchEngine) -> None:
    same = generate(engine, [(PROMPTS[1], Sampling(10, 1.0, seed=4))] * 2)
    other = generate(engine, [(PROMPTS[1], Sampling(10, 1.0, seed=seed)) for seed in range(8)])
    assert same[0].response_ids == same[1].response_ids == other[4].response_ids
    assert len({c.response_ids for c in other}) == 8


def chi_square_excess(counts: Tensor, probs: Tensor) -> float:
    """Standard deviations by which Pearson's statistic, cells below 5 merged, exceeds its mean."""
    expected = probs * counts.sum()
    is_large = expected >= 5
    counts = torch.cat([counts[is_large], counts[~is_large].sum()[None]])
    expected = torch.cat([expected[is_large], expected[~is_large].sum()[None]])
    statistic = ((counts - expected) ** 2 / expected.clamp(min=1e-9)).sum()
    freedom = len(counts) - 1
    assert freedom >= 5, "the case is to have several likely tokens"
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_are_drawn_from_the_softmax(
    engine: TorchEngine, model: PreTrainedModel, temperature: float
) -> None:
    """The first token, and the second given the most frequent first one, over 6000 seeds."""
    prompt = PROMPTS[1]
    completions = generate(
        engine, [(prompt, Sampling(2, temperature, seed=seed)) for seed in range(6000)]
    )

    def probs(ids: Sequence[int]) -> Tensor:
        with torch.no_grad():
            return (model(torch.tensor([ids])).logits[0, -1].double() / temperature).softmax(-1)

    ids_GT = torch.tensor(ids_of(completions))
    first = torch.bincount(ids_GT[:, 0], minlength=280).double()
    assert chi_square_excess(first, probs(prompt)) < 4
    top = int(first.argmax())
    second = torch.bincount(ids_GT[ids_GT[:, 0] == top, 1], minlength=280).double()
    assert second.sum() > 250
    assert chi_square_excess(second, probs((*prompt, top))) < 4


def kept_of(completion: Call) -> list[set[int]]:
    mask = completion.sampling_mask
    ids = iter(mask.ids)
    sets = [{next(ids) for _ in range(count)} for count in mask.counts]
    assert next(ids, None) is None
    return sets


@pytest.mark.parametrize(("top_k", "top_p"), [(6, 1.0), (30, 0.5), (280, 0.9), (1000, 1.0)])
def test_top_k_and_top_p_keep_the_most_likely_tokens(
    engine: TorchEngine, model: PreTrainedModel, top_k: int, top_p: float
) -> None:
    """The right tokens are kept and drawn by their shares, over 3000 seeds of the first token."""
    temperature = 0.7
    completions = generate(
        engine,
        [(PROMPTS[1], Sampling(1, temperature, top_k, top_p, seed=seed)) for seed in range(3000)],
    )
    with torch.no_grad():
        probs_V, order_V = (
            (model(torch.tensor([PROMPTS[1]])).logits[0, -1].double() / temperature)
            .softmax(-1)
            .sort(descending=True)
        )
    best_K = probs_V[:top_k] / probs_V[:top_k].sum()
    num_kept = int((best_K.cumsum(0) - best_K < top_p).sum())
    assert all(kept_of(c) == [set(order_V[:num_kept].tolist())] for c in completions)
    share_V = torch.zeros(280, dtype=torch.float64).scatter(
        0, order_V[:num_kept], best_K[:num_kept] / best_K[:num_kept].sum()
    )
    ids = torch.tensor([c.response_ids[0] for c in completions])
    found = (share_V[ids].log() - torch.tensor([c.logprobs[0] for c in completions])).abs().max()
    assert found <= 1e-5
    counts = torch.bincount(ids, minlength=280).double()
    if num_kept > 5:
        assert chi_square_excess(counts[share_V > 0], share_V[share_V > 0]) < 4
    assert (counts[share_V == 0].sum() == 0 and num_kept < 280) or top_k > 280


def test_top_k_and_top_p_hold_per_request(engine: TorchEngine) -> None:
    bounds = [(0, 1.0), (1, 1.0), (4, 0.7), (0, 1.0), (50, 0.9)]
    requests = [
        (p, Sampling(6 + i, 1.0, *bounds[i], seed=i, ignore_end=True))
        for i, p in enumerate(PROMPTS)
    ]
    requests.append((PROMPTS[0], Sampling(4, 0.0, 4, 0.7, ignore_end=True)))
    together = generate(engine, requests)
    alone = [generate(engine, [request])[0] for request in requests]
    for mine, other in zip(together, alone, strict=True):
        assert mine.response_ids == other.response_ids
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert mine.sampling_mask == other.sampling_mask
    is_whole = [c.sampling_mask is None for c in together]
    assert is_whole == [True, False, False, True, False, True], "greedy knows no bound"
    assert all(
        token in kept
        for c in together
        if c.sampling_mask
        for token, kept in zip(c.response_ids, kept_of(c), strict=True)
    )
    assert together[1].logprobs == pytest.approx([0.0] * 7), "of one token"


def test_a_frequency_penalty_counts_the_response_alone(
    engine: TorchEngine, model: PreTrainedModel
) -> None:
    """Logits lose the penalty per earlier occurrence, request by request."""
    penalties = (0.0, 1.2, -0.5, 2.0, 0.0)
    requests = [
        (prompt, Sampling(24, 0.7, frequency_penalty=penalty, seed=i, ignore_end=True))
        for i, (prompt, penalty) in enumerate(zip(PROMPTS, penalties, strict=True))
    ]
    for (prompt, sampling), completion in zip(requests, generate(engine, requests), strict=True):
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *completion.response_ids]])
            logits_TV = model(ids).logits[0].double()
        for place, token in enumerate(completion.response_ids):
            logits_V = logits_TV[len(prompt) - 1 + place].clone()
            for earlier in completion.response_ids[:place]:
                logits_V[earlier] -= sampling.frequency_penalty
            expected = (logits_V / 0.7).log_softmax(-1)[token]
            assert completion.logprobs[place] == pytest.approx(float(expected), abs=1e-4)
    greedy = Sampling(24, 0.0, ignore_end=True)
    strict = dataclasses.replace(greedy, frequency_penalty=2.0)
    loose, varied = generate(engine, [(PROMPTS[0], greedy), (PROMPTS[0], strict)])
    assert len(set(varied.response_ids)) > len(set(loose.response_ids))


def test_the_largest_random_number_draws_a_token_that_is_kept() -> None:
    """The sum and the threshold round up to more than 1."""
    logprob_BV = torch.full((64, 280), -torch.inf)
    for row in range(64):
        logprob_BV[row, : row + 1] = (torch.arange(row + 1) * 0.37).sin().log_softmax(-1)
    ids_B, chosen_B = _choose(logprob_BV, torch.zeros(64, dtype=torch.bool), torch.full((64,), 1.0))
    assert ids_B.tolist() == list(range(64)) and chosen_B.isfinite().all()


# ---- when it ends


def test_max_new_tokens(engine: TorchEngine) -> None:
    lengths = [1, 2, 7, 12]
    completions = generate(engine, [(PROMPTS[1], Sampling(n, 0.0)) for n in lengths])
    assert [len(c.response_ids) for c in completions] == lengths
    assert {c.finish_reason for c in completions} == {FinishReason.LENGTH}
    assert all(ids == completions[-1].response_ids[: len(ids)] for ids in ids_of(completions))
    assert [len(c.logprobs) for c in completions] == lengths
    assert [c.spans for c in completions] == [(VersionSpan(0, n, 0),) for n in lengths]


def greedy_ids(
    engine: TorchEngine, prompt: Sequence[int] = PROMPTS[2], length: int = 12
) -> tuple[int, ...]:
    (completion,) = generate(engine, [(prompt, Sampling(length, 0.0))])
    assert completion.finish_reason is FinishReason.LENGTH
    return completion.response_ids


def first_new(ids: Sequence[int], start: int) -> int:
    """A place from `start` on whose token does not occur before."""
    return next(i for i in range(start, len(ids)) if ids[i] not in ids[:i])


@pytest.mark.parametrize("by", ["tokenizer", "model", "a list of the model"])
def test_end_tokens_end_unless_they_are_ignored(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, engine: TorchEngine, by: str
) -> None:
    """They are ignored for measurements of a fixed length."""
    ids = greedy_ids(engine)
    place = first_new(ids, 1)
    if by == "tokenizer":
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ids[place])
    else:
        end = ids[place] if by == "model" else [279, ids[place]]
        model.generation_config.eos_token_id = end
    stopping = TorchEngine(model, tokenizer, WeightStore(Path("unused")))
    ignoring = Sampling(12, 0.0, ignore_end=True)
    ended, whole = generate(stopping, [(PROMPTS[2], Sampling(12, 0.0)), (PROMPTS[2], ignoring)])
    assert ended.response_ids == ids[: place + 1], "the end token itself is kept: it is trained"
    assert ended.finish_reason is FinishReason.STOP and len(ended.logprobs) == place + 1
    assert whole.response_ids == ids and whole.finish_reason is FinishReason.LENGTH


def test_stop_strings_end_with_the_token_that_completes_them(
    engine: TorchEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Also across tokens, which are kept; those of one request stop no other."""
    ids = greedy_ids(engine, length=12)
    texts = [tokenizer.decode(ids[: i + 1]) for i in range(12)]
    place = 6
    stop = texts[place][len(texts[place]) - 2 :]
    place = next(i for i, text in enumerate(texts) if stop in text)
    requests = [
        (PROMPTS[2], Sampling(12, 0.0, stop_strings=("never there", stop))),
        (PROMPTS[2], Sampling(12, 0.0)),
    ]
    stopped, free = generate(engine, requests)
    assert stopped.response_ids == ids[: place + 1] and stopped.finish_reason is FinishReason.STOP
    assert free.response_ids == ids and free.finish_reason is FinishReason.LENGTH


def test_the_prompt_cannot_trigger_a_stop_string(
    engine: TorchEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    prompt = tokenizer("capital").input_ids
    ids = greedy_ids(engine, prompt, 4)
    assert "capital" not in tokenizer.decode(ids)
    (completion,) = generate(engine, [(prompt, Sampling(4, 0.0, stop_strings=("capital",)))])
    assert completion.response_ids == ids


def test_a_deadline_returns_what_there_is(engine: TorchEngine) -> None:
    late, free = generate(
        engine, [(PROMPTS[1], Sampling(12, 0.0, deadline_s=0.0)), (PROMPTS[1], Sampling(12, 0.0))]
    )
    assert late.finish_reason is FinishReason.DEADLINE and free.finish_reason is FinishReason.LENGTH
    num = len(late.response_ids)
    assert num == len(late.logprobs) <= 1 and late.response_ids == free.response_ids[:num]
    assert late.spans == (VersionSpan(0, num, 0),)


def test_a_prompt_that_is_too_long_is_refused(engine: TorchEngine) -> None:
    assert engine.max_tokens == 64
    (completion,) = generate(engine, [([7] * 56, Sampling(8, 0.0))])
    assert len(completion.response_ids) == 8
    told = r"a prompt of 57 tokens with max_new_tokens=8 does not fit: .* at most 64"
    with pytest.raises(UserError, match=told):
        generate(engine, [([7] * 57, Sampling(8, 0.0))])
    for prompt, max_new_tokens in (([], 8), ([7], 0)):
        with pytest.raises(UserError, match="both must be at least 1"):
            generate(engine, [(prompt, Sampling(max_new_tokens, 0.0))])
    with pytest.raises(UserError, match=r"top_p=0\.9 needs a top_k above 0"):
        generate(engine, [([7], Sampling(8, 1.0, top_p=0.9))])
    assert len(generate(engine, [(PROMPTS[0], Sampling(2, 0.0))])) == 1, "the engine goes on"


# ---- weights


def moved(model: PreTrainedModel, seed: int = 0) -> dict[str, Tensor]:
    """Other weights for the model."""
    rng = torch.Generator().manual_seed(seed)
    return {
        name: w + 0.3 * w.abs().mean() * torch.randn(w.shape, generator=rng)
        for name, w in models.full_weights(model).items()
    }


def test_load_swaps_the_weights_and_the_version(
    engine: TorchEngine, model: PreTrainedModel, tokenizer: Any, tmp_path: Path
) -> None:
    first, second = models.full_weights(model), moved(model)
    first = {name: w.clone() for name, w in first.items()}
    publisher = Publisher(WeightStore(tmp_path / "weights"))
    publisher.publish(first, 4)
    publisher.publish(second, 5)
    request = (PROMPTS[1], Sampling(10, 1.0, seed=3))
    (before,) = generate(engine, [request])
    assert engine.version == 0
    engine.load(5)
    (after,) = generate(engine, [request])
    assert engine.version == 5 and after.spans == (VersionSpan(0, len(after.response_ids), 5),)
    models.export(model, tokenizer, second, tmp_path / "second")
    truth = trainer_logprobs(str(tmp_path / "second"), [after], 1.0)
    assert (torch.tensor(after.logprobs) - truth).abs().max() <= 1e-5
    engine.load(4)
    (again,) = generate(engine, [request])
    assert again.response_ids == before.response_ids != after.response_ids
    assert again.spans[0].version == 4


def test_a_load_falls_between_batches(
    engine: TorchEngine, model: PreTrainedModel, tmp_path: Path
) -> None:
    """One that waits is sampled by the new weights, one under way by the old ones."""
    publisher = Publisher(WeightStore(tmp_path / "weights"))
    request = (PROMPTS[1], Sampling(30, 1.0, seed=3, ignore_end=True))
    for version in (1, 2):
        publisher.publish(moved(model, version), version)
    alone = {}
    for version in (2, 1):
        engine.load(version)
        alone[version] = generate(engine, [request])[0].response_ids
    begun, go_on, forward = threading.Event(), threading.Event(), engine._forward

    def slow(*args: Tensor) -> Tensor:
        begun.set()
        assert go_on.wait(30)
        return forward(*args)

    engine._forward = slow

    async def during() -> tuple[Call, Call]:
        first = asyncio.create_task(engine.generate(*request))
        await asyncio.to_thread(begun.wait, 30)
        load = asyncio.create_task(asyncio.to_thread(engine.load, 2))
        while not engine._thread._work_queue.qsize():  # staged, and now behind the batch
            await asyncio.sleep(0.001)
        second = asyncio.create_task(engine.generate(*request))
        go_on.set()
        done = await asyncio.gather(first, second)
        await load
        return done

    first, second = run(during())
    assert first.response_ids == alone[1] and first.spans == (VersionSpan(0, 30, 1),)
    assert second.response_ids == alone[2] != alone[1] and second.spans == (VersionSpan(0, 30, 2),)


def test_an_engine_in_bf16_loads_what_was_published_in_bf16(
    tiny_path: str, model: PreTrainedModel, tokenizer: Any, tmp_path: Path
) -> None:
    store, weights = WeightStore(tmp_path), moved(model)
    Publisher(store, PublishOptions(torch.bfloat16)).publish(weights, 1)
    rounded = models.load_model(tiny_path, torch.bfloat16, attn="sdpa")
    TorchEngine(rounded, tokenizer, store).load(1)
    for name, parameter in rounded.named_parameters():
        assert torch.equal(parameter, weights[name].bfloat16())


def test_a_load_tells_that_something_else_had_changed_weights(
    model: PreTrainedModel, tokenizer: Any, tmp_path: Path
) -> None:
    """A node disowns by it what it has sampled."""
    own, store = copy.deepcopy(model), WeightStore(tmp_path)
    engine, publisher = TorchEngine(own, tokenizer, store, verify_every=1), Publisher(store)
    weights = moved(model)
    for version, num_damaged in ((1, 0), (2, 1)):
        publisher.publish(weights, version)
        engine.load(version)
        assert engine.metrics()["weights_damaged"] == num_damaged
        with torch.no_grad():
            next(own.parameters()).view(-1)[7] += 1.0
        weights["model.norm.weight"] = weights["model.norm.weight"] + 1.0


def test_foreign_weights_are_refused_and_change_nothing(
    engine: TorchEngine, model: PreTrainedModel, tmp_path: Path
) -> None:
    weights = moved(model)
    norm = "model.norm.weight"
    foreign = {
        1: {**weights, "model.layers.2.extra": torch.zeros(3)},
        2: {name: w for name, w in weights.items() if name != norm},
        3: {**weights, norm: torch.zeros(1)},  # would broadcast
        4: {**weights, norm: torch.zeros(33)},
    }
    before = {name: w.clone() for name, w in models.full_weights(model).items()}
    for version, each in foreign.items():
        Publisher(WeightStore(tmp_path / "weights")).publish(each, version)
        told = f"version {version} .*model.{'layers' if version == 1 else 'norm'}"
        with pytest.raises(UserError, match=told):
            engine.load(version)
        assert engine.version == 0
        assert all(torch.equal(before[name], w) for name, w in models.full_weights(model).items())
    with pytest.raises(UserError, match="version 9 is not in"):
        engine.load(9)


# ---- batches


@pytest.fixture
def forwards(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of the input of every forward pass: [tokens]."""
    shapes: list[tuple[int, ...]] = []
    real = engine._forward

    def spy(ids: Tensor, *rest: Any) -> Tensor:
        shapes.append(tuple(ids.shape))
        return real(ids, *rest)

    monkeypatch.setattr(engine, "_forward", spy)
    return shapes


def test_equal_prompts_are_prefilled_once(
    engine: TorchEngine, forwards: list[tuple[int, ...]]
) -> None:
    sharing = [(PROMPTS[2], Sampling(3, 1.0, seed=seed)) for seed in range(6)]
    others = [(PROMPTS[1], Sampling(3, 1.0, seed=seed)) for seed in range(3)]
    generate(engine, [*sharing[:3], *others, *sharing[3:]])
    assert forwards[:2] == [(len(PROMPTS[1]) + len(PROMPTS[2]),), (9,)]


def test_what_prompts_begin_with_is_prefilled_once(
    engine: TorchEngine, forwards: list[tuple[int, ...]]
) -> None:
    start = PROMPTS[2]
    prompts = [(*start, 5, 6), (*start, 7), (*start, 5), start]
    generate(engine, [(p, Sampling(2, 1.0, seed=seed)) for seed, p in enumerate(prompts)])
    assert forwards == [(len(start) + 3,), (4,)], "the last two are within the first"


def test_finished_requests_leave_the_batch(
    engine: TorchEngine, forwards: list[tuple[int, ...]]
) -> None:
    generate(engine, [(PROMPTS[1], Sampling(n, 0.0)) for n in (1, 2, 2, 5)])
    assert forwards == [(3,), (3,), (1,), (1,), (1,)]


class Held:
    """Batches as they are sampled; each waits in the engine's thread until it is released."""

    def __init__(self, engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.error: Exception | None = None
        self.started, self._released = asyncio.Event(), threading.Semaphore(0)
        self._real = engine._sample
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr(engine, "_sample", self._sample)

    def _sample(self, requests: list[Any]) -> None:
        self.sizes.append(len(requests))
        self._loop.call_soon_threadsafe(self.started.set)
        assert self._released.acquire(timeout=20)
        if self.error is not None:
            raise self.error
        self._real(requests)

    def release(self, number: int = 1) -> None:
        self._released.release(number)


async def begin(engine: TorchEngine, requests: Sequence[Request]) -> list[asyncio.Task[Call]]:
    """Ask, and come back when all requests have been taken in."""
    tasks = [asyncio.create_task(engine.generate(*request)) for request in requests]
    await asyncio.sleep(0)
    return tasks


def requests_of(number: int) -> list[Request]:
    return [(PROMPTS[1], Sampling(2, 1.0, seed=seed)) for seed in range(number)]


def test_requests_that_wait_together_share_a_batch(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that come while a batch is sampled make the next one."""

    async def scenario() -> None:
        held = Held(engine, monkeypatch)
        first = await begin(engine, requests_of(3))
        await held.started.wait()
        second = await begin(engine, requests_of(2)) + await begin(engine, requests_of(2))
        assert held.sizes == [3]
        held.release(2)
        completions = await asyncio.gather(*first, *second)
        assert held.sizes == [3, 4]
        assert len({completions[place].response_ids for place in (0, 3, 5)}) == 1

    run(scenario())


def test_the_next_turn_joins_the_waiting_batch(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollout just answered shares the batch of those that came meanwhile."""

    async def two_turns(request: Request) -> list[Call]:
        return [await engine.generate(*request), await engine.generate(*request)]

    async def scenario() -> None:
        held = Held(engine, monkeypatch)
        rollout = asyncio.create_task(two_turns(requests_of(1)[0]))
        await held.started.wait()
        waiting = await begin(engine, requests_of(2))
        held.release(2)
        turns, *_ = await asyncio.gather(rollout, *waiting)
        assert held.sizes == [1, 3] and turns[0].response_ids == turns[1].response_ids

    run(scenario())


def test_a_waiting_request_keeps_its_deadline(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        held = Held(engine, monkeypatch)
        first = await begin(engine, requests_of(1))
        await held.started.wait()
        (late,) = await begin(engine, [(PROMPTS[1], Sampling(2, 1.0, deadline_s=0.01))])
        completion = await late
        assert completion.finish_reason is FinishReason.DEADLINE
        assert not completion.response_ids
        assert held.sizes == [1]
        held.release()
        await asyncio.gather(*first)
        assert held.sizes == [1]

    run(scenario())


def test_an_expired_queue_leaves_a_working_engine(engine: TorchEngine) -> None:
    async def scenario() -> None:
        completion = await engine.generate(PROMPTS[1], Sampling(2, 1.0, deadline_s=0.0))
        assert completion.finish_reason is FinishReason.DEADLINE
        await engine._batcher  # raises what went wrong in it
        assert len((await engine.generate(PROMPTS[1], Sampling(2, 0.0))).response_ids) == 2

    run(scenario())


def test_batches_are_bounded(
    model: PreTrainedModel, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TorchEngine(model, tokenizer, WeightStore(tmp_path), max_batch_size=3)
    wide = TorchEngine(model, tokenizer, WeightStore(tmp_path))

    async def scenario() -> list[Call]:
        held = Held(engine, monkeypatch)
        held.release(3)
        completions = await asyncio.gather(*await begin(engine, requests_of(8)))
        assert held.sizes == [3, 3, 2]
        return completions

    assert ids_of(run(scenario())) == ids_of(generate(wide, requests_of(8)))


def test_an_error_reaches_every_request(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the batch and those that wait; and the engine works again."""

    async def scenario() -> None:
        held = Held(engine, monkeypatch)
        held.error = RuntimeError("out of memory")
        first = await begin(engine, requests_of(2))
        await held.started.wait()
        second = await begin(engine, requests_of(3))
        held.release(2)
        answers = await asyncio.gather(*first, *second, return_exceptions=True)
        assert [type(answer) for answer in answers] == [RuntimeError] * 5
        held.error = None
        held.release()
        (completion,) = await asyncio.gather(*await begin(engine, requests_of(1)))
        assert len(completion.response_ids) == 2

    run(scenario())


@pytest.mark.parametrize("is_sampling", [True, False], ids=["in the batch", "before it"])
def test_a_cancelled_request_does_not_break_the_others(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, is_sampling: bool
) -> None:
    async def scenario() -> None:
        held = Held(engine, monkeypatch)
        tasks = await begin(engine, requests_of(3))
        if is_sampling:
            await held.started.wait()
        tasks[1].cancel()
        held.release()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(answers[1], asyncio.CancelledError)
        assert [len(answers[i].response_ids) for i in (0, 2)] == [2, 2]
        held.release()
        assert len((await engine.generate(*requests_of(1)[0])).response_ids) == 2

    run(scenario())
