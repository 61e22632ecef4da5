"""The run of a node from its start to its end: joining, waiting for a trainer, serving, signals."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from flowtrain.config import Config
from flowtrain.config.options import parse_over
from flowtrain.inference.protocol import EngineError
from flowtrain.records import Outage, UserError
from flowtrain.rollouts.client import Client
from flowtrain.rollouts.contract import Refused, Unavailable
from flowtrain.rollouts.node.node import Node
from flowtrain.rollouts.node.setup import check, make_sampler, store_of
from flowtrain.rollouts.node.weight_syncer import PoliciesChanged, WeightSyncer
from flowtrain.rollouts.node_client import NodeClient
from flowtrain.utils.event_loop import begin, first_of, run_to_end

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 10.0
_ECHO_S = 2.0
"""Seconds within which a second signal counts as the first, sent by terminal and launcher both."""
_log = logging.getLogger(__name__)


def run(options: Namespace, args: Sequence[str], token: str) -> None:
    """Serve until a signal, `--num_groups` groups, or the end of training, as the command line
    says; `args` are config options over those of the run.

    Raises UserError, Refused, Unavailable, EngineError, or an ExceptionGroup of unforeseen errors.
    """
    with Client(options.dataflow, token) as client:
        member = NodeClient(client, options.name)
        config = parse_over(member.joined.config, args)
        check(config)
        client.wait_s = config.dataflow.wait_s
        while True:
            try:
                num_pushed = _serve(member, config, options, token)
                break
            except (PoliciesChanged, ExceptionGroup) as error:
                if isinstance(error, ExceptionGroup) and not error.subgroup(PoliciesChanged):
                    raise _cause(error) from None
            _log.warning("the trained policy has changed: restarting the engines")
            member = NodeClient(client, options.name)
    print(f"{options.name}: {num_pushed} groups pushed", file=sys.stderr)


def _serve(member: NodeClient, config: Config, options: Namespace, token: str) -> int:
    """Serve until the node is stopped, and return the number of groups pushed. Raises
    PoliciesChanged, alone or in a group.
    """
    locations = _wait_for_trainers(member, config, dict(options.store))
    with make_sampler(config, locations, token, options.cache) as sampler:
        member.announce(sampler.layouts, sampler.sampled.copy)
        wait_s = config.dataflow.wait_s
        syncer = WeightSyncer(sampler.engines, sampler.stores, sampler.layouts, wait_s)
        syncer.on_policy_state(member.policies)
        node = Node(
            member,
            sampler.rollout,
            sampler.answer,
            syncer,
            max_in_flight=config.rollout.max_in_flight,
            max_staleness=config.dataflow.max_staleness,
            num_groups=options.num_groups,
            branching=sampler.branching,
        )
        try:
            return _until_signalled(node)
        finally:
            syncer.close()


def _wait_for_trainers(
    member: NodeClient, config: Config, stores: Mapping[str, str]
) -> dict[str, str]:
    """Wait for a trainer unless `stores` names a store; returns the locations of the weights."""
    wait_s, pause_s = config.dataflow.wait_s, _FIRST_PAUSE_S
    end = time.monotonic() + wait_s
    while not (locations := store_of(member.policies, stores, config.policy_names)):
        if time.monotonic() > end:
            raise Outage(f"no trainer has registered within dataflow.wait_s={wait_s:g} seconds")
        if pause_s == _FIRST_PAUSE_S:
            _log.warning("waiting for a trainer to register")
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        member.renew()
    return locations


def _until_signalled(node: Node) -> int:
    signalled_at = 0.0

    def end(_number: int, _frame: FrameType | None) -> None:
        nonlocal signalled_at
        if signalled_at and time.monotonic() - signalled_at > _ECHO_S:
            os._exit(1)
        if not signalled_at:
            notice = (
                "returning leases and pushing finished groups (interrupt again to stop at once)"
            )
            print(f"\n{notice}", file=sys.stderr, flush=True)
            signalled_at = time.monotonic()
            begin(stop())

    async def stop() -> None:
        node.stop()

    handlers = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return run_to_end(node.run())
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _cause(failures: ExceptionGroup[Any]) -> Exception:
    """Return the error that the user can act on, if the group has one, else the whole group."""
    for kinds in ((UserError, EngineError), (Refused, Unavailable)):
        if error := first_of(failures, *kinds):
            return error
    return failures
