"""Samples of the policy as the refiner, to imitate beside the planner's turns.

Source: InfoFlow, arXiv 2510.26575.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowtrain.agents.agentflow.flow import Flow
from flowtrain.agents.agentflow.refiner import FullRefinerPrompt
from flowtrain.agents.policy import Moment
from flowtrain.inference.special_tokens import encode_plain
from flowtrain.inference.token_chat import ChatTokenizer, encode_chat, reply_end
from flowtrain.records import Sample, Trajectory


def refinements(
    flow: Flow, rollouts: Sequence[Trajectory], tokenizer: ChatTokenizer, max_chars: int
) -> list[Sample]:
    """Return one sample per refined result, with the prompt that the refiner read.

    `flow` must be able to make such rollouts. A reply of `max_chars` characters is left out,
    because it may have been cut.
    """
    samples = []
    for rollout in rollouts:
        for number, turn in enumerate(rollout.turns):
            reply = turn.evidence
            if turn.action is None or not reply or len(reply) >= max_chars:
                continue
            memory = flow.shown_before(rollout, number)
            passages = turn.tool_calls[0].result.output
            moment = Moment(rollout.task, memory, turn.action.sub_goal, passages)
            prompt_ids = encode_chat(tokenizer, FullRefinerPrompt().render(moment))
            ids = (*encode_plain(tokenizer, reply), reply_end(tokenizer))
            ones = (1.0,) * len(ids)
            samples.append(Sample(tuple(prompt_ids), ids, (0.0,) * len(ids), ones, ones))
    return samples
