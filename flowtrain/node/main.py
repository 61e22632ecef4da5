"""A node from its start to its end: what it is told, what it samples with, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from flowtrain.config import Config
from flowtrain.config.options import parse_over
from flowtrain.dataflow.client import Client
from flowtrain.dataflow.contract import Dataflow, Join, Refused, Unavailable
from flowtrain.engines.protocol import EngineError
from flowtrain.node.node import Limits, Membership, Node
from flowtrain.node.setup import check, make_sampler, store_of
from flowtrain.node.weight_syncer import PoliciesChanged, WeightSyncer
from flowtrain.types import UserError

_ASK_AGAIN_S = 2.0
_ECHO_S = 2.0
"""The terminal and a launcher may send the same signal twice."""
_log = logging.getLogger(__name__)


def run(
    url: str,
    name: str,
    stores: Mapping[str, str],
    num_groups: int,
    words: Sequence[str],
    token: str,
) -> None:
    """Until a signal, `num_groups` groups, or the end of training; 0: any number. `words`: options
    of the config over those of the run.

    Raises UserError, Refused, Unavailable, EngineError, or an ExceptionGroup with what nobody
    foresaw.
    """
    with Client(url, token) as client:
        config = parse_over(_join(client, name, {}).joined.config, words)
    check(config)
    with Client(url, token, config.dataflow.wait_s) as client:
        while True:
            try:
                return _live(client, config, name, stores, num_groups, token)
            except PoliciesChanged:  # while the engines were made
                pass
            except ExceptionGroup as failures:
                if failures.subgroup(PoliciesChanged) is None:
                    raise _first(failures) from None
            _log.warning("another policy is trained now: the engines start anew")


def _live(
    client: Dataflow,
    config: Config,
    name: str,
    stores: Mapping[str, str],
    num_groups: int,
    token: str,
) -> None:
    """Until it is stopped, or the policies are others."""
    locations = _wait_for_trainers(client, config, stores, name)
    with make_sampler(config, locations, token) as sampler:
        member = _join(client, name, sampler.layouts)
        syncer = WeightSyncer(
            sampler.engines, sampler.stores, sampler.layouts, config.dataflow.wait_s
        )
        syncer.on_policy_state(member.joined.policies)
        limits = Limits(config.rollout.max_in_flight, config.dataflow.max_staleness, num_groups)
        node = Node(client, member, sampler.rollout, syncer, limits)
        try:
            num_pushed = asyncio.run(_until_signalled(node))
        finally:
            syncer.close()
    print(f"{name}: {num_pushed} groups pushed", file=sys.stderr)


def _wait_for_trainers(
    client: Dataflow, config: Config, given: Mapping[str, str], name: str
) -> dict[str, str]:
    """Where the weights are, once a trainer has announced so or the command line does."""
    began = time.monotonic()
    while not (
        locations := store_of(_join(client, name, {}).joined.policies, given, config.policy_names)
    ):
        waited_s = time.monotonic() - began
        if waited_s > config.dataflow.wait_s:
            raise UserError(
                f"no trainer has registered within dataflow.wait_s={config.dataflow.wait_s:g} "
                "seconds"
            )
        if waited_s < _ASK_AGAIN_S:
            _log.warning("waiting for a trainer to register")
        time.sleep(_ASK_AGAIN_S)
    return locations


def _join(client: Dataflow, name: str, layouts: Mapping[str, str]) -> Membership:
    """With a life of its own each time, for a dataflow keeps what a life has announced first."""
    request = Join(name, uuid.uuid4().hex, layouts)
    return Membership(request, client.join(request))


async def _until_signalled(node: Node) -> int:
    signalled_at = 0.0

    def end() -> None:
        nonlocal signalled_at
        if signalled_at and time.monotonic() - signalled_at > _ECHO_S:
            os._exit(1)
        if not signalled_at:
            print(
                "\ngiving leases back, pushing what is done (once more to end at once)",
                file=sys.stderr,
                flush=True,
            )
            signalled_at = time.monotonic()
            node.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    return await node.run()


def _first(failures: BaseExceptionGroup[Any]) -> BaseException:
    """Of what ended a node: what the person in front of it can do something about, else all of it."""
    for kinds in ((UserError, EngineError), (Refused, Unavailable)):
        found: BaseException | None = failures.subgroup(kinds)
        while isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
        if found is not None:
            return found
    return failures
