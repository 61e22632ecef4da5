"""A rollout node: makes rollouts for the trainers behind a dataflow, for as long as it is let.

    python -m flowtrain.node --dataflow http://trainer:8400

It gets the options of the run from the dataflow, leases tasks, rolls each of them out in the flow
on the engine of this machine, scores the answers and hands the groups in; new weights are loaded
while rollouts go on. Start as many nodes as there are machines or GPUs, and stop them as you like
(Ctrl-C or SIGTERM: leases go back at once; once more: ends hard). What this machine knows better
follows as options:
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType

from flowtrain.config.options import check_allowed
from flowtrain.types import UserError
from flowtrain.utils.serving import TOKEN_VARIABLE

_COMMAND = "python -m flowtrain.node"
_POLICIES = ("planner", "verifier")
OWN_KEYS = (
    *(
        "run.device",
        "run.threads",
        "model.path",
        "policies.*.path",
        "tasks.path",
        "tasks.corpus",
        "tasks.benchmarks",
    ),
    *(
        "rollout.engine",
        "rollout.max_batch_size",
        "rollout.max_in_flight",
        "vllm.*",
        "weights.verify_every",
        "dataflow.wait_s",
    ),
    *(
        "engines.*.base_url",
        "engines.*.api_key_env",
        "engines.*.model",
        "engines.*.max_concurrency",
    ),
    *("corpus.path", "corpus.index", "judge.cache", "judge.max_concurrency", "agent.sandbox"),
    *(
        "web_search.base_url",
        "web_search.api_key_env",
        "web_search.cx_env",
        "wikipedia.base_url",
        "wikipedia.contact",
    ),
)
"""Where things are and how much of them runs at a time. What decides on tokens and rewards is the
same on every node."""


def main(argv: Sequence[str] | None = None) -> int:
    """0 after its work or a signal, 1 when something failed, 2 for what a person got wrong."""
    options, words = _parser().parse_known_args(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        check_allowed(words, OWN_KEYS)
        return _run(options, words)
    except UserError as error:
        print(f"{_COMMAND}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before there was a lease
        return 0


def _run(options: argparse.Namespace, words: Sequence[str]) -> int:
    from tqdm.contrib.logging import logging_redirect_tqdm

    from flowtrain.dataflow.contract import Refused, Unavailable
    from flowtrain.engines.protocol import EngineError
    from flowtrain.node import (
        main,  # torch comes with it, which --help and mistakes need not wait for
    )

    token = os.environ.get(TOKEN_VARIABLE, "")
    try:
        with logging_redirect_tqdm():
            main.run(
                options.dataflow,
                options.name,
                dict(map(_store, options.store)),
                options.num_groups,
                words,
                token,
            )
    except (Refused, Unavailable, EngineError) as error:
        print(f"{_COMMAND}: {error}", file=sys.stderr)
        return 1
    return 0


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _store(text: str) -> tuple[str, str]:
    policy, separator, location = text.partition("=")
    return (policy, location) if separator and policy in _POLICIES else (_POLICIES[0], text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_COMMAND,
        description=__doc__,
        epilog="  --"
        + "\n  --".join(f"{key} VALUE" for key in OWN_KEYS)
        + "\n\npython -m flowtrain.train --help says what they mean.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    own = f"{re.sub('[^A-Za-z0-9._-]', '-', socket.gethostname())[:80]}-{os.getpid()}"
    parser.add_argument(
        "--dataflow",
        metavar="URL",
        required=True,
        help=f"of the service; {TOKEN_VARIABLE} is the token for it",
    )
    store = (
        "weight store: folder or URL, of the planner or of the policy before a '='; default: where "
        "the trainer says it is"
    )
    parser.add_argument(
        "--store", metavar="[POLICY=]PLACE", action="append", default=[], help=store
    )
    parser.add_argument(
        "--name", default=own, help="of this node, unique among nodes (default: %(default)s)"
    )
    parser.add_argument(
        "--num_groups",
        type=int,
        default=0,
        metavar="N",
        help="groups to push before it ends; default: no end",
    )
    return parser


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that still fetch or ask have nobody to answer to
