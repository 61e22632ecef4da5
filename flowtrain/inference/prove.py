"""Prove that an endpoint samples with the policy that was trained.

Log-probs of fixed tokens from a server that tells those of a prompt, as vLLM's does, are compared
with those of a checkpoint, or of an adapter on its base, computed here. How far apart rounding puts
them is measured on the same tokens. Other models that it may hold instead, such as an earlier
checkpoint or another adapter, are named if it holds them; the base of an adapter is always tried.
FLOWTRAIN_TOKEN is the key for the endpoint.
Exit codes: 0 it samples with the policy, 1 it does not, 2 the question was not understood.
"""

from __future__ import annotations

import argparse
import os
import sys

from flowtrain.config import Chat
from flowtrain.inference.protocol import EngineError
from flowtrain.records import UserError
from flowtrain.utils.commands import number
from flowtrain.utils.event_loop import run_to_end
from flowtrain.utils.terminal import protect_output, say

_COMMAND = "python -m flowtrain.inference.prove"
_NUM_TOKENS = 64


def main(arguments: list[str] | None = None) -> int:
    """Ask an endpoint, and return the exit code."""
    protect_output()
    options = _parser().parse_args(arguments)
    import torch  # takes seconds, and --help does not need it

    from flowtrain.inference.endpoint import Endpoint
    from flowtrain.inference.endpoint_scorer import EndpointScorer
    from flowtrain.inference.proof import prove

    key = "FLOWTRAIN_TOKEN" if os.environ.get("FLOWTRAIN_TOKEN") else ""
    # With adapters on a CPU vLLM 0.32 ends over two prompts that it scores at once.
    chat = Chat(model=options.model, base_url=options.url, api_key_env=key, max_concurrency=1)
    try:
        endpoint = Endpoint("proof", chat)
        try:
            scorer = EndpointScorer(endpoint, options.model, options.timeout)
            dtype = getattr(torch, options.dtype)
            others = dict(options.other)
            proof = run_to_end(prove(scorer, options.policy, others, dtype, options.tokens))
        finally:
            endpoint.close()
    except (UserError, EngineError) as error:
        say(f"{_COMMAND}: {error}")
        return 2
    print(proof.text())
    return 0 if proof.is_proven else 1


def _parser() -> argparse.ArgumentParser:
    summary, _, *rest = (__doc__ or "").splitlines()
    example = f"example: {_COMMAND} http://localhost:8000/v1 --model policy --policy run/model"
    parser = argparse.ArgumentParser(
        prog=_COMMAND, description=summary, epilog=" ".join([*rest, example]), allow_abbrev=False
    )
    add = parser.add_argument
    add("url", metavar="URL", help="the endpoint's address, such as http://localhost:8000/v1")
    add("--model", required=True, help="the name of the policy, or of its adapter, at the endpoint")
    add("--policy", required=True, metavar="FOLDER", help="the checkpoint or adapter it should be")
    text = "another model that it may hold; may be given several times"
    add("--other", metavar="NAME=FOLDER", type=_named, action="append", default=[], help=text)
    dtypes = ("bfloat16", "float16", "float32")
    add("--dtype", choices=dtypes, default="bfloat16", help="in which it computes")
    text = f"tokens to compare (default: {_NUM_TOKENS})"
    add("--tokens", type=number(1, 4096), default=_NUM_TOKENS, help=text)
    add("--timeout", type=number(1, 3600), default=120, help="seconds for an answer (default: 120)")
    return parser


def _named(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=FOLDER")
    return name, folder


if __name__ == "__main__":
    sys.exit(main())
