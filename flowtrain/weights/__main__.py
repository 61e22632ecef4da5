"""Verify, serve and clean a weight store.

LOCATION is the folder that holds HEAD, or its URL; FLOWTRAIN_TOKEN is the token for it. Exit codes:
0 all is well, 1 a file is damaged or missing, 2 the command was not understood.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from safetensors import SafetensorError

from flowtrain.records import UserError
from flowtrain.utils.commands import Commands, add_server, end_on_signals, number
from flowtrain.utils.net.credentials import TokenFile
from flowtrain.utils.terminal import protect_output, say
from flowtrain.weights.format.manifest import NotThere, StoreError
from flowtrain.weights.stores import serve
from flowtrain.weights.stores.folder import Source, WeightStore
from flowtrain.weights.stores.remote import open_source

_COMMAND = "python -m flowtrain.weights"


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    protect_output()
    end_on_signals()
    options = _parser().parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="flowtrain-") as cache:
            code: int = options.run(options, Path(cache))
            return code
    except (UserError, OSError, SafetensorError) as error:
        say(f"{_COMMAND}: {error}")
        return 1 if isinstance(error, StoreError | OSError | SafetensorError) else 2
    except KeyboardInterrupt:
        return 130


def _verify(options: argparse.Namespace, cache: Path) -> int:
    source = _open(options.location, cache)
    if options.all:
        versions = _versions(source)
    else:
        versions = [_head(source) if options.version is None else options.version]
    from flowtrain.weights.verify import Verifier  # and with it torch

    verifier = Verifier(source, options.threads)
    problems = verifier.run(versions)
    for problem in problems:
        print(f"damaged: {problem}")
    size = _format_bytes(verifier.num_bytes)
    counts = f"{len(versions)} versions, {verifier.num_files} files, {size}"
    print(f"{len(problems)} problems in {counts}" if problems else f"fine: {counts}")
    return 1 if problems else 0


def _serve(options: argparse.Namespace, _cache: Path) -> int:
    store = WeightStore(_folder(options.store))
    if not store.root.exists():
        print(f"{store} does not exist yet; serving starts with its first version", file=sys.stderr)
    elif not store.root.is_dir():
        raise UserError(f"{store} is not a folder")
    try:
        serve.serve(
            store,
            options.host,
            options.port,
            tokens=TokenFile(options.tokens) if options.tokens else None,
            open_metrics=options.open_metrics,
        )
    except KeyboardInterrupt:
        print("stopped")  # the normal end
    return 0


def _gc(options: argparse.Namespace, _cache: Path) -> int:
    store = _open_folder(options.store)
    garbage = store.garbage(options.keep)
    files = [path for version in garbage for path in store.folder(version).iterdir()]
    size = _format_bytes(sum(path.stat().st_size for path in files))
    if not options.dry_run:
        garbage = store.collect_garbage(options.keep)
    verb, state = ("would delete", "are there") if options.dry_run else ("deleted", "stay")
    numbers = ", ".join(map(str, garbage)) or "nothing"
    print(f"{verb} {numbers} ({size}); {len(store.versions())} versions {state}")
    return 0


def _open(location: str, cache: Path) -> Source:
    if "://" not in location:
        return _open_folder(location)
    return open_source(location, cache, os.environ.get("FLOWTRAIN_TOKEN", ""), keeps=True)


def _open_folder(location: str) -> WeightStore:
    path = _folder(location)
    if not path.is_dir():
        raise UserError(f"{location} is not a folder")
    return WeightStore(path)


def _folder(location: str) -> Path:
    if "://" in location:
        raise UserError(f"{location} is a URL; this command needs the folder itself")
    return Path(location)


def _head(source: Source) -> int:
    head = source.head()
    if head is None:
        raise StoreError(f"{source} holds no version")
    return head


def _versions(source: Source) -> list[int]:
    head = _head(source)
    versions = _list(source)
    if not versions or versions[-1] != head:
        raise StoreError(
            f"HEAD of {source} is {head}, which does not exist; publish a new version, or write "
            "the newest version into HEAD"
        )
    return versions


def _list(source: Source) -> list[int]:
    """Return the versions in order. Other machines offer no listing, so follow the deltas back from
    HEAD and, without deltas, try the previous number.
    """
    if isinstance(source, WeightStore):
        return source.versions()
    versions: list[int] = []
    version = source.head()
    while version is not None and version >= 0:
        try:
            manifest = source.manifest(version)
        except NotThere:
            break
        versions.append(version)
        version = max(manifest.delta_files, default=version - 1)
    return versions[::-1]


def _format_bytes(num_bytes: float) -> str:
    """Write a size with its unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"


def _parser() -> argparse.ArgumentParser:
    commands = Commands(_COMMAND, __doc__)
    count = number(0, 10**17)
    positive = number(1, 10**9)

    summary = "check files, deltas and digests"
    verify = commands.add("verify", _verify, summary, example="http://trainer:8321 --all")
    verify.add_argument("location", metavar="LOCATION", help="folder or URL of the store")
    selection = verify.add_mutually_exclusive_group()
    selection.add_argument("--version", type=count, help="check this version instead of HEAD")
    text = "check every version; over HTTP the versions reachable from HEAD"
    selection.add_argument("--all", action="store_true", help=text)
    verify.add_argument("--threads", type=positive, default=1, help="CPU threads (default: 1)")

    summary = "serve a store over HTTP, read-only"
    server = commands.add("serve", _serve, summary, example="runs/a/weights --port 8321")
    text = "the folder that holds HEAD, or will hold it once a trainer has published"
    server.add_argument("store", metavar="STORE", help=text)
    add_server(server, 8321)

    summary = "delete versions that are no longer needed"
    collect = commands.add("gc", _gc, summary, example="runs/a/weights --keep 10 --dry-run")
    collect.add_argument("store", metavar="STORE", help="the folder that holds HEAD")
    text = "newest versions to keep, with the full snapshot they come from and all since"
    collect.add_argument("--keep", type=positive, required=True, help=text)
    collect.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    return commands.parser


if __name__ == "__main__":
    sys.exit(main())
