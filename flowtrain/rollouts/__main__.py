"""The dataflow between rollout nodes and trainers: serve it, look at it, check it.

Nodes and trainers on other machines reach it at the address that `serve` prints, with the token
FLOWTRAIN_TOKEN. Exit codes: 0 all is well, 1 the audit found something or the service does
not answer, 2 the command was not understood.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from flowtrain.config import Config
from flowtrain.config.options import parse, shows_config, to_toml
from flowtrain.records import UserError
from flowtrain.rollouts.client import Client
from flowtrain.rollouts.contract import Refused, Unavailable
from flowtrain.rollouts.measures import Measures
from flowtrain.rollouts.service import Service
from flowtrain.rollouts.show import status_text
from flowtrain.utils.commands import Commands, add_server, add_tokens, end_on_signals
from flowtrain.utils.lock import Lock
from flowtrain.utils.net import credentials, serving
from flowtrain.utils.net.credentials import Access, Role, TokenFile
from flowtrain.utils.terminal import bare, protect_output, say

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_COMMAND = "python -m flowtrain.rollouts"
_CLEAR = "\x1b[H\x1b[2J"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    protect_output()
    end_on_signals()
    options, extras = _parser().parse_known_args(arguments)
    try:
        code: int = options.run(options, extras)
        return code
    except (Refused, Unavailable) as error:
        say(f"{_COMMAND}: {error}")
        return 1
    except UserError as error:
        say(f"{_COMMAND}: {error}")
        return 2
    except KeyboardInterrupt:
        return 130


def _serve(options: argparse.Namespace, extras: Sequence[str]) -> int:
    from flowtrain.rollouts.ledger import open_ledger

    config = _config(extras)
    token_file = TokenFile(options.tokens) if options.tokens else None
    with ExitStack() as cleanup:
        if "://" not in options.database:  # several services may share a PostgreSQL server
            path = Path(options.database)
            lock = path.with_name(f"{path.name}.lock")
            cure = "end this process or choose another --database"
            cleanup.enter_context(Lock(lock, options.database, cure))
        ledger = open_ledger(config, options.database)
        run = ledger.run
        # Who joins, ends or falls silent.
        logging.basicConfig(format="%(message)s")
        logging.getLogger("flowtrain.rollouts").setLevel(logging.INFO)

        def make_app(token: str) -> ASGIApp:
            readers = None if options.open_metrics else Access(token, token_file)
            measures = Measures(ledger, readers)
            seconds = measures.ledger_seconds
            return measures.monitor.watching(Service(ledger, run, token, token_file, seconds))

        with suppress(KeyboardInterrupt):  # the normal end
            serving.serve(
                f"run {run}",
                make_app,
                options.host,
                options.port,
                has_tokens=token_file is not None,
            )
    return 0


def _token(options: argparse.Namespace, extras: Sequence[str]) -> int:
    _refuse_extras(extras)
    if (options.action == "list") != (options.name is None):
        raise UserError("token issue and token revoke take a NAME, token list takes none")
    if options.action == "list":
        for entry in credentials.read(options.tokens):
            print(f"{entry.role:8} {entry.name:30} issued {entry.issued} UTC")
    elif options.action == "revoke":
        credentials.revoke(options.tokens, options.name)
    else:
        print(credentials.issue(options.tokens, options.name, Role(options.role)))
    return 0


def _status(options: argparse.Namespace, extras: Sequence[str]) -> int:
    _refuse_extras(extras)
    token = os.environ.get(serving.TOKEN_VARIABLE, "")
    with Client(options.url, token, wait_s=options.wait) as client:
        if options.json:
            print(json.dumps(client.status(), indent=1))
            return 0
        while True:
            text = status_text(client.status())
            if not sys.stdout.isatty():
                print(text, end="")
                return 0
            bare(sys.stdout).write(_CLEAR)
            print(f"{text}\n(every {options.every:g} s; Ctrl-C ends)", flush=True)
            time.sleep(options.every)


def _audit(options: argparse.Namespace, extras: Sequence[str]) -> int:
    from flowtrain.rollouts.ledger import audit_database

    _refuse_extras(extras)
    audit = audit_database(options.database)
    if options.json:
        tokens = {policy: account.metrics() for policy, account in audit.tokens.items()}
        record = {"problems": audit.problems, "counts": audit.counts, "tokens": tokens}
        print(json.dumps(record, indent=1))
    else:
        counts = ", ".join(f"{num:,} {name}" for name, num in audit.counts.items())
        print(counts or "the database holds no events yet")
        for policy, account in audit.tokens.items():
            print(f"tokens of {policy}: {account.text()}")
        print(
            "\n".join(f"problem: {problem}" for problem in audit.problems)
            or "all counts are consistent"
        )
    return 1 if audit.problems else 0


def _config(args: Sequence[str]) -> Config:
    config = parse(args)
    assert config is not None, "--help has been answered"
    if shows_config(args):
        print(to_toml(config), end="")
        sys.exit(0)
    return config


def _refuse_extras(extras: Sequence[str]) -> None:
    if extras:
        raise UserError(f"{extras[0]!r} is not an argument of this command; see --help")


def _parser() -> argparse.ArgumentParser:
    commands = Commands(_COMMAND, __doc__)
    database = "--database runs/flow.sqlite"
    run_options = "--config configs/quickstart.toml " + database
    run_usage = "--database DATABASE [--config FILE.toml] [--section.key VALUE ...]"

    summary = "serve nodes and trainers until Ctrl-C or SIGTERM"
    server = commands.add("serve", _serve, summary, example=f"{run_options} --port 8400")
    server.usage = f"{_COMMAND} serve [--host HOST] [--port PORT] [--tokens FILE] {run_usage}"
    server.epilog = (
        f"{server.epilog}. The run's options are those of python -m flowtrain.train, see its "
        "--help all; [dataflow] is read here."
    )
    _add_database(server, "created if missing; several services can share one on PostgreSQL")
    add_server(server, 8400)

    summary = "issue, list or revoke access tokens of nodes, trainers and monitors, one per name"
    token = commands.add("token", _token, summary, example="issue eu-1 --tokens tokens.json")
    text = (
        "issue prints a new token, of which only the hash is stored; servers apply changes at once"
    )
    token.add_argument("action", choices=("issue", "list", "revoke"), help=text)
    text = "name of the node (its --name), policy of the trainer, or any name of a monitor"
    token.add_argument("name", metavar="NAME", nargs="?", help=text)
    roles = [role.value for role in Role if role != Role.ALL]
    token.add_argument("--role", choices=roles, default="node", help="default: node")
    add_tokens(token, required=True)

    summary = "show rates, buffers, staleness and nodes; refreshes in a terminal"
    status = commands.add("status", _status, summary, example="http://host:8400")
    status.add_argument("url", metavar="URL", help="address of the service")
    status.add_argument("--json", action="store_true", help="print the status once, as JSON")
    for option, default_s, purpose in (
        ("--every", 2.0, "between two looks"),
        ("--wait", 10.0, "to wait for an answer"),
    ):
        text = f"seconds {purpose} (default: {default_s:g})"
        status.add_argument(option, type=_seconds, default=default_s, metavar="S", help=text)

    summary = "check that no group was lost or trained twice"
    audit = commands.add("audit", _audit, summary, example=database)
    _add_database(audit, "the database may be in use")
    audit.add_argument("--json", action="store_true", help="print the result as JSON")
    return commands.parser


def _add_database(parser: argparse.ArgumentParser, note: str) -> None:
    text = f"path of an SQLite file, or postgresql://user@host/name; {note}"
    parser.add_argument("--database", required=True, help=text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds above 0")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
