"""Samples of the policy as the refiner, to imitate beside the planner's turns.

Source: InfoFlow, arXiv 2510.26575.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowtrain.agents.flow import Flow
from flowtrain.agents.refiner import Finding
from flowtrain.engines.special_tokens import encode_plain
from flowtrain.engines.token_chat import ChatTokenizer, encode_chat
from flowtrain.types import Sample, Trajectory


def refinements(
    flow: Flow,
    rollouts: Sequence[Trajectory],
    tokenizer: ChatTokenizer,
    end_id: int,
    max_chars: int,
) -> list[Sample]:
    """Return one sample per refined result, with the prompt that the refiner read.

    `flow` must be able to make such rollouts. A reply of `max_chars` characters is left out,
    because it may have been cut.
    """
    samples = []
    for rollout in rollouts:
        for number, turn in enumerate(rollout.turns):
            reply = turn.result.output
            if turn.action is None or not turn.retrieved or len(reply) >= max_chars:
                continue
            memory = flow.shown_before(rollout, number)
            finding = Finding(rollout.task.prompt, memory, turn.action.sub_goal, turn.retrieved)
            ids = (*encode_plain(tokenizer, reply), end_id)
            zeros = (0.0,) * len(ids)
            ones = (1.0,) * len(ids)
            prompt_ids = tuple(encode_chat(tokenizer, finding.prompt()))
            samples.append(Sample(prompt_ids, ids, zeros, ones, ones))
    return samples
