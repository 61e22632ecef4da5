"""A rollout node: makes rollouts for the trainers behind a dataflow until training ends.

    python -m flowtrain.rollouts.node --dataflow http://trainer:8400

The node gets the options of the run from the dataflow, leases tasks, rolls each of them out on the
engine of this machine, scores the answers and pushes the groups; it loads new weights while
rollouts go on. Start as many nodes as there are machines or GPUs, and stop them as you like (Ctrl-C
or SIGTERM gives the leases back at once; a second one ends the node hard). Options that differ from
machine to machine follow:
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from flowtrain.config.options import check_allowed
from flowtrain.inference.protocol import EngineError
from flowtrain.records import Outage, UserError
from flowtrain.rollouts.contract import Refused, Unavailable
from flowtrain.utils.commands import end_on_signals
from flowtrain.utils.net.serving import TOKEN_VARIABLE
from flowtrain.utils.terminal import protect_output, say

_COMMAND = "python -m flowtrain.rollouts.node"
OWN_KEYS = (
    "run.device",
    "run.threads",
    "model.path",
    "policies.*.path",
    "tasks.path",
    "tasks.corpus",
    "tasks.benchmarks",
    "rollout.engine",
    "rollout.max_batch_size",
    "rollout.max_in_flight",
    "vllm.*",
    "weights.verify_every",
    "dataflow.wait_s",
    "engines.*.base_url",
    "engines.*.api_key_env",
    "engines.*.model",
    "engines.*.max_concurrency",
    "corpus.retriever",
    "corpus.path",
    "corpus.index",
    "judge.cache",
    "agent.sandbox",
    "web_search.base_url",
    "web_search.api_key_env",
    "wikipedia.base_url",
    "wikipedia.contact",
)
"""Options that say where things are and how many run at a time. Options that decide on tokens and
rewards are the same on every node."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 after the work or a signal, 1 when something failed, 2 for a user's mistake, 75 when
    the dataflow or its trainers were away for too long.
    """
    protect_output()
    options, args = _parser().parse_known_args(argv)
    end_on_signals()
    try:
        check_allowed(args, OWN_KEYS)
        # These import torch, for which --help and mistakes need not wait.
        from tqdm.contrib.logging import logging_redirect_tqdm

        from flowtrain.rollouts.node.main import run

        with logging_redirect_tqdm():
            run(options, args, os.environ.get(TOKEN_VARIABLE, ""))
    except (UserError, Refused, Unavailable, EngineError) as error:
        say(f"{_COMMAND}: {error}")
        if isinstance(error, Outage | Unavailable):
            return os.EX_TEMPFAIL
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:  # before there was a lease
        pass
    return 0


def _store(text: str) -> tuple[str, str]:
    """Read [POLICY=]PLACE; "" is the run's first policy."""
    match = re.fullmatch(r"([a-z][a-z0-9_]{0,31})=(.+)", text)
    return (match[1], match[2]) if match else ("", text)


def _parser() -> argparse.ArgumentParser:
    own_keys = "\n  --".join(f"{key} VALUE" for key in OWN_KEYS)
    parser = argparse.ArgumentParser(
        prog=_COMMAND,
        description=__doc__,
        epilog=f"  --{own_keys}\n\npython -m flowtrain.train --help explains them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--dataflow",
        metavar="URL",
        required=True,
        help=f"address of the service; {TOKEN_VARIABLE} holds the token for it",
    )
    parser.add_argument(
        "--store",
        metavar="[POLICY=]PLACE",
        action="append",
        type=_store,
        default=[],
        help="folder or URL of a weight store, of the policy before a '=', or of the first; "
        "default: the store that the trainer names",
    )
    parser.add_argument(
        "--cache",
        metavar="FOLDER",
        type=Path,
        help="folder for downloaded weights, which a restarted node reuses; default: a temporary "
        "one",
    )
    host = re.sub("[^A-Za-z0-9._-]", "-", socket.gethostname())[:80]
    parser.add_argument(
        "--name",
        default=f"{host}-{os.getpid()}",
        help="name of this node, unique among nodes (default: %(default)s)",
    )
    parser.add_argument(
        "--num_groups",
        type=int,
        default=0,
        metavar="N",
        help="groups to push before the node ends; default: no end",
    )
    return parser


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without waiting for threads that still fetch or ask
