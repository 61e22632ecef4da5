"""What the policy wrote as the refiner of rollouts, as samples to imitate beside the planner's
turns (InfoFlow, arXiv 2510.26575).
"""

from __future__ import annotations

from collections.abc import Sequence

from flowtrain.agents.flow import Flow
from flowtrain.agents.refiner import render
from flowtrain.engines.token_chat import ChatTokenizer, encode_chat
from flowtrain.types import Sample, Trajectory


def refinements(
    flow: Flow,
    rollouts: Sequence[Trajectory],
    tokenizer: ChatTokenizer,
    end_id: int,
    max_chars: int,
) -> list[Sample]:
    """One of every result that was refined; none where the reply may have been cut, because it has
    `max_chars` characters.

    `flow` is one that could have made the rollouts: each sample has the prompt that the refiner
    read.
    """
    samples = []
    for rollout in rollouts:
        for number, turn in enumerate(rollout.turns):
            reply = turn.result.output
            if turn.action is None or not turn.retrieved or len(reply) >= max_chars:
                continue
            prompt = render(
                rollout.task.question,
                flow.shown_before(rollout, number),
                turn.action.sub_goal,
                turn.retrieved,
            )
            ids = (*tokenizer.encode(reply, add_special_tokens=False), end_id)
            zeros, ones = (0.0,) * len(ids), (1.0,) * len(ids)
            samples.append(Sample(tuple(encode_chat(tokenizer, prompt)), ids, zeros, ones, ones))
    return samples
