"""A teacher behind an endpoint, which is asked about a step's tokens before they are packed."""

from __future__ import annotations

from dataclasses import replace

from flowtrain.inference.chat_engines import TEACHER
from flowtrain.inference.endpoint import Endpoint
from flowtrain.inference.endpoint_scorer import EndpointScorer
from flowtrain.inference.protocol import EngineError
from flowtrain.records import TrainBatch, UserError
from flowtrain.trainer.setup.components import RunComponents
from flowtrain.utils.event_loop import run_to_end
from flowtrain.weights.ranks import on_all_ranks


def taught(batch: TrainBatch, components: RunComponents) -> TrainBatch:
    """Return this rank's batch with what the teacher says of it, if there is one; collective. With
    distill.top_k samples have its likeliest tokens; else each token's advantage grows by the
    teacher's log-prob less the sampler's: its mean is the reverse KL with its sign changed.

    Raises UserError on every rank where the teacher leaves one without an answer.
    """
    config, endpoint = components.config, components.chats.roles.get(TEACHER)
    if not isinstance(endpoint, Endpoint):
        return batch
    model, timeout_s = config.engines[config.teacher_engine].model, config.rollout.request_timeout_s
    scorer = EndpointScorer(endpoint, model, timeout_s)
    top_k, vocab = config.distill.top_k, components.model.config.vocab_size

    def ask() -> TrainBatch:
        try:
            return run_to_end(_taught(batch, scorer, top_k, vocab))
        except EngineError as error:
            raise UserError(f"distill.teacher={config.distill.teacher!r}: {error}") from None

    return on_all_ranks(components.world, ask, other_failed=UserError)


async def _taught(batch: TrainBatch, scorer: EndpointScorer, top_k: int, vocab: int) -> TrainBatch:
    asked = [replace(s, prompt_ids=s.teacher_prompt_ids or s.prompt_ids) for s in batch.samples]
    # With the answers at hand nobody reads the teacher's prompts again.
    samples = [replace(sample, teacher_prompt_ids=()) for sample in batch.samples]
    if top_k:
        told = zip(samples, await scorer.likeliest(asked, top_k, vocab), strict=True)
        return replace(batch, samples=tuple(replace(s, likeliest=tokens) for s, tokens in told))
    _, found = await scorer.score(asked, 1.0)
    drawn, total = [], 0.0
    for sample, logprobs in zip(samples, found, strict=True):
        gap = [own - teachers for own, teachers in zip(sample.logprobs, logprobs, strict=True)]
        total += sum(x for x, weight in zip(gap, sample.loss_weights, strict=True) if weight)
        advantages = tuple(a - x for a, x in zip(sample.advantages, gap, strict=True))
        drawn.append(replace(sample, advantages=advantages))
    return replace(batch, samples=tuple(drawn), divergence_sum=total)
