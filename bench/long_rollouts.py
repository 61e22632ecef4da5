"""Long rollouts on their way from the sampler to the loss:  python -m bench.long_rollouts
[--tokens 16384,32768,65536,131072] [--json F]

Recorded tokens go through the stages of a step that are no model's: those of 4 rollouts of 30 turns
and those of one whose turns have 256 tokens, on histories that grow, half of them sampled. Measured
are CPU seconds; `tokens` are about those of the tree, each once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.gateway_clients import text
from bench.measure import Row, extra_bytes, new_parser, report
from bench.simulated_chat import chat_tokenizer
from flowtrain.agents.base import AgentContext
from flowtrain.agents.chat.conversation import Conversation
from flowtrain.agents.chat.template import ChatTemplate
from flowtrain.agents.collect import collect
from flowtrain.agents.policy import Policy
from flowtrain.agents.session import Session, SessionAgent
from flowtrain.algorithms import filter_samples, load_algorithm
from flowtrain.config import Config
from flowtrain.inference.requests import answer
from flowtrain.logging import TrajectoryLog
from flowtrain.logging.page.log import find_rollouts
from flowtrain.logging.page.rollouts import rollout_record
from flowtrain.logging.rollouts import count_rollouts
from flowtrain.records import Call, FinishReason, Group, Rollouts, Sampling, Task
from flowtrain.replay.batch_digests import digests_of
from flowtrain.replay.log import decode, encode
from flowtrain.rollouts.codec import pack_group, unpack_group
from flowtrain.rollouts.ledger.group_checks import GroupLimits
from flowtrain.trainer.packing import pack
from flowtrain.trainer.walk import passes

SHAPES = {"4 x 30 turns": (4, 30, 0), "1, turns of 256": (1, 0, 256)}
"""Rollouts; turns of each, or tokens of a turn."""
KEPT, PASS, REPLY = 4, 16_384, {"role": "assistant", "content": ""}
"""Ids that each token is drawn from, with top-k; tokens of a pass of a walk; a message."""
VOCAB, POSITIONS = 1 << 16, 1 << 20
"""Of the model that is not there."""


class Recorded:
    """An engine whose tokens are drawn at once."""

    version, max_tokens = 0, POSITIONS

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Call:
        ids = random.Random(sampling.seed).choices(range(256, 4096), k=sampling.max_new_tokens)
        kept, logprobs = [range(own, own + KEPT) for own in ids], [-1.5] * len(ids)
        reason = FinishReason.LENGTH
        return answer(prompt_ids, ids, logprobs, [(0, 0)], reason, kept)


class Growing(SessionAgent):
    """Goes on with one conversation, as the agent of tools does."""

    num_turns = num_tokens = 0

    async def answer(self, session: Session) -> str:
        template = ChatTemplate(session.policy.tokenizer)
        result = {"role": "user", "content": text(session.seed, self.num_tokens)}
        conversation = Conversation.start(template, [result])
        for _ in range(self.num_turns):
            call = await session.sample(conversation.prompt_ids)
            conversation = conversation.add_response(call.response_ids, REPLY).add([result])
        return "done"


def stages(
    shape: str, tokens: int, folder: Path, made: Mapping[str, Any]
) -> dict[str, Callable[[], Any]]:
    """Return the stages in their order; each reads what those before it have `made`."""
    size, num_turns, of_turn = SHAPES[shape]
    num_turns = num_turns or tokens // of_turn
    num_new = tokens // size // num_turns // 2
    config = Config.model_validate(
        {"rollout": {"group_size": size, "top_k": KEPT}, "agent": {"max_turns": num_turns}}
    )
    engine: Any = Recorded()
    algorithm, tokenizer = load_algorithm(Config()), chat_tokenizer()
    policy = Policy(engine, tokenizer, num_new, 1.0, 60.0, top_k=KEPT, name="planner")
    agent = Growing(AgentContext(config, {"planner": policy}, {}, {}, num_turns))
    agent.num_turns, agent.num_tokens = num_turns, num_new
    log, limits = TrajectoryLog(folder, 0, -1), GroupLimits(config, {"planner": (VOCAB, POSITIONS)})

    def roll_out() -> list[Group]:
        (group,) = collect(agent, [Task("t-1", "?", ("done",))], group_size=size, seed=0)
        rollouts = tuple(replace(each, reward=1.0) for each in group.trajectories)
        return [replace(group, trajectories=rollouts)]

    return {
        "agent": roll_out,
        "push": lambda: pack_group(made["agent"][0]),
        "ledger": lambda: limits.check(unpack_group(made["push"])),
        "advantages": lambda: algorithm.advantages(made["agent"]),
        "filter": lambda: filter_samples(made["advantages"], POSITIONS, VOCAB),
        "pack": lambda: pack(made["filter"].samples, 1),
        "walk": lambda: passes(made["pack"][0][0], PASS),
        "count": lambda: count_rollouts(made["agent"][0].trajectories, ()),
        "keep": lambda: encode(Rollouts(made["agent"], {}, {})),
        "digests": lambda: digests_of(made["filter"]),
        "log": lambda: log.log(1, 0, made["agent"], made["filter"].samples),
        "page": lambda: [
            rollout_record(place, place.read(), tokenizer.backend_tokenizer)
            for place in find_rollouts(folder, "train")
        ],
        "replay": lambda: decode(made["keep"]),
    }


def measure(shape: str, sizes: Sequence[int]) -> list[Row]:
    """Return a row for each stage: CPU seconds and MB at the peak, by the number of tokens."""
    rows, cpu = dict[str, dict[str, Any]](), torch.device("cpu")
    for tokens in sizes:
        made, seconds = dict[str, Any](), dict[str, float]()
        with TemporaryDirectory(prefix="flowtrain-bench-") as folder:
            for name, run in stages(shape, tokens, Path(folder), made).items():
                num_bytes = extra_bytes(partial(_run, name, run, made, seconds), cpu)
                row = rows.setdefault(name, {"rollouts": shape, "stage": name})
                row |= {f"{tokens >> 10}k s": seconds[name], f"{tokens >> 10}k MB": num_bytes / 1e6}
    return list(rows.values())


def _run(name: str, run: Callable[[], Any], made: dict[str, Any], seconds: dict[str, Any]) -> None:
    started = time.process_time()
    made[name] = run()
    seconds[name] = time.process_time() - started


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--tokens", default="16384,32768,65536,131072", help="of the tree")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [int(size) for size in args.tokens.split(",")]
    report(args.json, *(measure(shape, sizes) for shape in SHAPES))


if __name__ == "__main__":
    main()
