"""A rollout node: makes rollouts for the trainers behind a dataflow, for as long as it is let.

    python -m flowtrain.rollout --dataflow http://trainer:8400

It gets the options of the run from the dataflow, leases tasks, rolls each of them out in the flow on the engine of this machine, scores the
answers and hands the groups in; new weights are loaded while rollouts go on. Start as many nodes as there are machines or GPUs, and stop
them as you like (Ctrl-C or SIGTERM: leases go back at once; once more: ends hard). What this machine knows better follows as options:
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import signal
import socket
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from tqdm.contrib.logging import logging_redirect_tqdm

from flowtrain.config import Config
from flowtrain.dataflow.client import Client
from flowtrain.dataflow.contract import Dataflow, Join, Refused, Unavailable
from flowtrain.options import check_allowed, parse_over
from flowtrain.rollout.engine import EngineError
from flowtrain.rollout.follow import Follower, PoliciesChanged
from flowtrain.rollout.node import Limits, Membership, Node
from flowtrain.rollout.sampler import OWN_KEYS, check, make_sampler, store_of
from flowtrain.serving import TOKEN_VARIABLE
from flowtrain.types import UserError

_COMMAND = "python -m flowtrain.rollout"
_POLICIES = ("planner", "verifier")
_ASK_AGAIN_S = 2.0
_ECHO_S = 2.0
"""The terminal and a launcher may send the same signal twice."""
_log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """0 after its work or a signal, 1 when something failed, 2 for what a person got wrong."""
    parser = _parser()
    options, words = parser.parse_known_args(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with logging_redirect_tqdm():
            check_allowed(words, OWN_KEYS)
            return _run(options, words)
    except UserError as error:
        print(f"{_COMMAND}: {error}", file=sys.stderr)
        return 2
    except (Refused, Unavailable, EngineError) as error:
        print(f"{_COMMAND}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before there was a lease
        return 0


def _run(options: argparse.Namespace, words: Sequence[str]) -> int:
    token = os.environ.get(TOKEN_VARIABLE, "")
    given = dict(map(_store, options.store))
    with Client(options.dataflow, token) as client:
        config = parse_over(_join(client, options.name, {}).joined.config, words)
    check(config)
    with Client(options.dataflow, token, config.dataflow.wait_s) as client:
        while True:
            try:
                return _live(client, config, given, token, options)
            except ExceptionGroup as failures:
                if failures.subgroup(PoliciesChanged) is None:
                    raise _first(failures) from None
                _log.warning("another policy is trained now: the engines start anew")


def _live(client: Dataflow, config: Config, given: Mapping[str, str], token: str, options: argparse.Namespace) -> int:
    """Until it is stopped, or the policies are others."""
    locations = _wait_for_trainers(client, config, given, options.name)
    with make_sampler(config, locations, token) as sampler:
        member = _join(client, options.name, sampler.layouts)
        follower = Follower(sampler.engines, sampler.stores, sampler.layouts, config.dataflow.wait_s)
        follower.hear(member.joined.policies)
        limits = Limits(config.rollout.max_in_flight, config.dataflow.max_staleness, options.units)
        node = Node(client, member, sampler.rollout, follower, limits)
        try:
            num_pushed = asyncio.run(_until_signalled(node))
        finally:
            follower.close()
    print(f"{options.name}: {num_pushed} groups pushed", file=sys.stderr)
    return 0


def _wait_for_trainers(client: Dataflow, config: Config, given: Mapping[str, str], name: str) -> dict[str, str]:
    """Where the weights are, once a trainer has said so or the command line does."""
    began = time.monotonic()
    while not (locations := store_of(_join(client, name, {}).joined.policies, given, config.policy_names)):
        waited_s = time.monotonic() - began
        if waited_s > config.dataflow.wait_s:
            raise UserError(f"no trainer has registered within dataflow.wait_s={config.dataflow.wait_s:g} seconds")
        if waited_s < _ASK_AGAIN_S:
            _log.warning("waiting for a trainer to register")
        time.sleep(_ASK_AGAIN_S)
    return locations


def _join(client: Dataflow, name: str, layouts: Mapping[str, str]) -> Membership:
    """With a life of its own each time, for a dataflow keeps what a life has said first."""
    request = Join(name, uuid.uuid4().hex, layouts)
    return Membership(request, client.join(request))


async def _until_signalled(node: Node) -> int:
    signalled_at = 0.0

    def end() -> None:
        nonlocal signalled_at
        if signalled_at and time.monotonic() - signalled_at > _ECHO_S:
            os._exit(1)
        if not signalled_at:
            print("\ngiving leases back, pushing what is done (once more to end at once)", file=sys.stderr, flush=True)
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


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _store(text: str) -> tuple[str, str]:
    policy, separator, location = text.partition("=")
    return (policy, location) if separator and policy in _POLICIES else (_POLICIES[0], text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_COMMAND,
        description=__doc__,
        epilog="  --" + "\n  --".join(f"{key} VALUE" for key in OWN_KEYS) + "\n\npython -m flowtrain.train --help says what they mean.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    own = f"{re.sub('[^A-Za-z0-9._-]', '-', socket.gethostname())[:80]}-{os.getpid()}"
    parser.add_argument("--dataflow", metavar="URL", required=True, help=f"of the service; {TOKEN_VARIABLE} is the token for it")
    store = "weight store: folder or URL, of the planner or of the policy before a '='; default: where the trainer says it is"
    parser.add_argument("--store", metavar="[POLICY=]PLACE", action="append", default=[], help=store)
    parser.add_argument("--name", default=own, help="of this node, unique among nodes (default: %(default)s)")
    parser.add_argument("--units", type=int, default=0, metavar="N", help="groups to push before it ends; default: no end")
    return parser


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that still fetch or ask have nobody to answer to
