"""Rollouts in environments of the package `verifiers`: `gateway.function =
"flowtrain.agents.gateway.hub:solve"`, with the tasks of `tasks.name = "verifiers"`.

Such an environment drives its rollout itself, through any OpenAI-compatible endpoint: the gateway.
Its own rules then score it.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flowtrain.records import Task
from flowtrain.tasks.verifiers import COLUMN, load_environment

MAX_EPISODES = 64
"""Episodes under way at a time; each has servers, and often processes, of its own."""
_MODEL = "policy"


class EpisodeFailed(Exception):
    """The environment could not play or score the rollout."""


_places = asyncio.Semaphore(MAX_EPISODES)


async def solve(task: Task, *, base_url: str, api_key: str) -> dict[str, Any]:
    """Play one episode and return its last reply, and its reward by parts, weights included.

    The environment is made anew for each: its servers keep a client, with its key, for every
    endpoint that they have ever seen.
    """
    import verifiers.v1 as vf

    spec = task.extra[COLUMN]
    async with _places:
        environment = await asyncio.to_thread(load_environment, spec["env"])
        kind = type(environment.taskset).task_type()
        row = kind.data_type().model_validate(spec["data"])
        with _in_environment(api_key) as variable:
            client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
            context = vf.ModelContext(client=client, model=_MODEL, sampling=vf.SamplingConfig())
            async with environment.serving():
                episode = await environment.run_episode(
                    kind(row, environment.config.taskset.task), context
                )
    return _outcome(episode)


def _outcome(episode: Any) -> dict[str, Any]:
    """Read the one trained trace. Raises EpisodeFailed where it has no reward."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        reason = f"{errors[-1].type}: {errors[-1].message}" if errors else "it says nothing"
        raise EpisodeFailed(reason)
    if len(episode.traces) != 1:
        raise EpisodeFailed(f"it has {len(episode.traces)} agent runs, and only one can be scored")
    (trace,) = episode.traces
    parts = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    if not parts:
        raise EpisodeFailed("it returns no reward")
    return {"answer": trace.last_reply, "reward": parts}


@contextmanager
def _in_environment(api_key: str) -> Iterator[str]:
    """Put the key into an environment variable, the only place where verifiers looks for one. Its
    name keeps it from child processes, which get none with API_KEY in it.
    """
    variable = f"FLOWTRAIN_API_KEY_{uuid.uuid4().hex}"
    os.environ[variable] = api_key
    try:
        yield variable
    finally:
        del os.environ[variable]
