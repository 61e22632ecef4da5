"""A teacher behind HTTP: what it says rides with the samples, and the policy learns it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chat_servers import ChatServer, chat_server
from flowkernels import DIVERGENCES, LossSpec
from gradients import distance, gradient_of, reference_of
from prompt_servers import prompt_server
from starlette.responses import JSONResponse
from torch import Tensor
from transformers import PreTrainedModel

from flowtrain.config import Config
from flowtrain.inference.chat_engines import TEACHER
from flowtrain.inference.endpoint import Endpoint
from flowtrain.records import Sample, TrainBatch, UserError
from flowtrain.trainer.balance import _DECODER, _ENCODER
from flowtrain.trainer.distillation import DistillSpec
from flowtrain.trainer.distributed import World
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.packing import pack_row, pack_rows
from flowtrain.trainer.run.remote_teacher import taught
from tests.trainer.conftest import alone, make_trainer
from tests.trainer.test_tree_gradient import GROUPS, make_samples

__all__ = ["alone", "make_trainer"]


@contextmanager
def asking(server: ChatServer, world: World, top_k: int, vocab_size: int = 512) -> Iterator[Any]:
    """The parts of a run that asks a server."""
    config = Config.model_validate(
        {
            "engines": {
                "big": {
                    "base_url": server.base_url,
                    "model": "b",
                    "api_key_env": "",
                    "max_retries": 0,
                }
            },
            "algorithm": {"name": "distill"},
            "distill": {"teacher": "big", "top_k": top_k},
        }
    )
    with closing(Endpoint("big", config.engines["big"])) as endpoint:
        yield SimpleNamespace(
            config=config,
            chats=SimpleNamespace(roles={TEACHER: endpoint}),
            model=SimpleNamespace(config=SimpleNamespace(vocab_size=vocab_size)),
            world=world,
        )


def teacher_of(path: str) -> PreTrainedModel:
    """A policy a little away from the tiny model, as others compute it."""
    model = models.load_model(path, torch.float64, attn="sdpa")
    model.load_state_dict(reference_of(path).state_dict())
    return model


def ask(teacher: PreTrainedModel, samples: Sequence[Sample], world: World, top_k: int) -> Any:
    """(the batch that is trained, the bodies of all requests)"""
    with prompt_server(teacher) as server, asking(server, world, top_k) as components:
        return taught(TrainBatch(tuple(samples)), components), server.asked


def log_probs(model: PreTrainedModel, sample: Sample) -> Tensor:
    """Of the whole vocabulary at each token of the response, by transformers."""
    prompt = sample.teacher_prompt_ids or sample.prompt_ids
    ids = torch.tensor([*prompt, *sample.response_ids[:-1]])[None]
    return model(input_ids=ids).logits[0, len(prompt) - 1 :].log_softmax(-1)


def of_sampled(logprobs: Tensor, sample: Sample) -> Tensor:
    return logprobs.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]


def gradient_by_hand(
    model: PreTrainedModel, samples: Sequence[Sample], loss_of: Any
) -> dict[str, Tensor]:
    """The gradient of the mean over weighted tokens, sample by sample."""
    total = torch.zeros((), dtype=torch.float64)
    weight = sum(x for sample in samples for x in sample.loss_weights)
    for sample in samples:
        weights = torch.tensor(sample.loss_weights, dtype=torch.float64)
        total = total + (weights * loss_of(sample)).sum() / weight
    total.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def quiet(name: str) -> list[Sample]:
    return [replace(s, advantages=(0.0,) * len(s.advantages)) for s in make_samples(GROUPS[name])]


def test_tokens_are_drawn_to_a_teacher_by_its_log_probs_less_the_samplers(
    tiny_path: str, make_trainer: Any, alone: World
) -> None:
    """The gradient is that of (log p - log q) grad log p, written by hand; rewards come on top."""
    teacher = teacher_of(tiny_path)
    model = models.load_model(tiny_path, torch.float64, attn="sdpa")
    samples = make_samples(GROUPS["turns that extend each other"])
    with torch.no_grad():
        own = [of_sampled(log_probs(model, s), s) for s in samples]
        theirs = [of_sampled(log_probs(teacher, s), s) for s in samples]
    samples = [replace(s, logprobs=tuple(x.tolist())) for s, x in zip(samples, own, strict=True)]
    batch, asked = ask(teacher, samples, alone, 0)
    assert {body["prompt_logprobs"] for body in asked} == {0} and len(asked) == 2
    gaps = [p - q for p, q in zip(own, theirs, strict=True)]
    assert batch.divergence_sum == pytest.approx(float(torch.cat(gaps).sum()), abs=1e-4)
    for before, after, gap in zip(samples, batch.samples, gaps, strict=True):
        wanted = torch.tensor(before.advantages) - gap
        assert after.advantages == pytest.approx(wanted.tolist(), abs=1e-5)

    def loss_of(sample: Sample) -> Tensor:
        index = samples.index(sample)
        advantages = torch.tensor(sample.advantages, dtype=torch.float64) - gaps[index]
        return -advantages * of_sampled(log_probs(model, sample), sample)

    truth = gradient_by_hand(model, samples, loss_of)
    trainer = make_trainer(LossSpec(), grad_clip=0.0)
    found = gradient_of(trainer, [pack_row(batch.samples[:2]), pack_row(batch.samples[2:])])
    assert distance(found, truth) < 1e-5


def test_tokens_without_weight_do_not_count_in_the_divergence(tiny_path: str, alone: World) -> None:
    teacher = teacher_of(tiny_path)
    samples = quiet("several groups")
    idle = [replace(s, loss_weights=(0.0,) * len(s.loss_weights)) for s in samples[:3]]
    some, _ = ask(teacher, [*idle, *samples[3:]], alone, 0)
    rest, _ = ask(teacher, samples[3:], alone, 0)
    assert some.divergence_sum == pytest.approx(rest.divergence_sum, abs=1e-6)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("budget", [None, 3])
def test_the_gradient_of_likeliest_tokens_is_that_of_samples_one_by_one(
    tiny_path: str, make_trainer: Any, alone: World, divergence: Any, budget: int | None
) -> None:
    """On a tree, and walked; the teacher reads more before some samples."""
    teacher = teacher_of(tiny_path)
    model = models.load_model(tiny_path, torch.float64, attn="sdpa")
    samples = [
        replace(s, teacher_prompt_ids=(30, 31, *s.prompt_ids) if n % 2 else ())
        for n, s in enumerate(quiet("turns that extend each other"))
    ]
    batch, asked = ask(teacher, samples, alone, 6)
    assert any(body["prompt"][:2] == [30, 31] for body in asked)
    assert not any(s.teacher_prompt_ids for s in batch.samples)
    assert batch.divergence_sum is None

    def loss_of(sample: Sample) -> Tensor:
        with torch.no_grad():
            best = log_probs(teacher, sample).topk(6)
        p = log_probs(model, replace(sample, teacher_prompt_ids=())).exp()
        p, q = (
            torch.cat([x, 1 - x.sum(1, keepdim=True)], 1)
            for x in (p.gather(1, best.indices), best.values.exp())
        )
        m = 0.3 * q + 0.7 * p
        terms = {
            "reverse_kl": p * (p / q).log(),
            "forward_kl": q * (q / p).log(),
            "jsd": 0.3 * q * (q / m).log() + 0.7 * p * (p / m).log(),
        }
        return terms[divergence].sum(1)

    truth = gradient_by_hand(model, samples, loss_of)
    spec = DistillSpec(divergence, 0.3, "endpoint")
    trainer = make_trainer(LossSpec(), grad_clip=0.0, token_budget=budget, distill=spec)
    found = gradient_of(trainer, [pack_row(batch.samples[:2]), pack_row(batch.samples[2:])])
    assert distance(found, truth) < 1e-5, "its log-probs are fp32"
    assert pack_row(batch.samples).teacher is None


def test_each_target_has_its_tokens_in_rows_that_travel(tiny_path: str, alone: World) -> None:
    batch, _ = ask(teacher_of(tiny_path), quiet("branches within a response"), alone, 3)
    said = {s.response_ids: s.likeliest for s in batch.samples}
    for rows in ([pack_row(batch.samples)], pack_rows(batch.samples, 4)):
        rows = _DECODER.decode(_ENCODER.encode({str(n): row for n, row in enumerate(rows)}))
        for row in rows.values():
            ids, logprobs = row.likeliest
            assert (ids.dtype, logprobs.dtype) == (torch.int32, torch.float32)
            for start, end in pairwise(row.cu_targets_S1.tolist()):
                told = said[tuple(row.target_ids_T[start:end].tolist())]
                assert told is not None and ids[start:end].flatten().tolist() == list(told.ids)
                assert logprobs[start:end].flatten().tolist() == list(told.logprobs)


def test_a_teacher_that_does_not_answer_ends_the_run(alone: World) -> None:
    batch = TrainBatch(tuple(quiet("responses of one token")[:1]))
    with chat_server(lambda body: JSONResponse({"choices": []})) as server:
        for top_k in (0, 2):
            refused = pytest.raises(
                UserError, match=r"^distill.teacher='big': engines.big: .* the 6 tokens"
            )
            with asking(server, alone, top_k) as components, refused:
                taught(batch, components)


def test_a_run_without_one_trains_its_batch_as_it_is(alone: World) -> None:
    batch = TrainBatch(tuple(quiet("one sample")))
    components: Any = SimpleNamespace(chats=SimpleNamespace(roles={}), config=Config(), world=alone)
    assert taught(batch, components) is batch
