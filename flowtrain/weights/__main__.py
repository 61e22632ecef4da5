"""Look into a weight store, verify it, serve or mirror it, clean it up.

LOCATION is the folder that holds HEAD, or its URL; FLOWTRAIN_TOKEN is the token for it.
Exit codes: 0 all is well, 1 something is damaged or missing, 2 the command was not understood.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from safetensors import SafetensorError

from flowtrain.net.credentials import TokenFile
from flowtrain.net.objects import MissingObject, StoreSilent, open_objects
from flowtrain.types import UserError
from flowtrain.utils.commands import Commands, add_server, end_on_signals, number
from flowtrain.utils.files import make_folder
from flowtrain.utils.json_lines import print_json, say
from flowtrain.utils.lock import Lock
from flowtrain.utils.terminal import protect_output
from flowtrain.weights import show
from flowtrain.weights.format.manifest import StoreError
from flowtrain.weights.stores import serve
from flowtrain.weights.stores.folder import Source, WeightStore
from flowtrain.weights.stores.http import open_source
from flowtrain.weights.stores.mirror import Mirror

_COMMAND = "python -m flowtrain.weights"


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    protect_output()
    end_on_signals()
    options = _parser().parse_args(arguments)
    if getattr(options, "log_format", "") == "json":
        print_json(_COMMAND.removeprefix("python -m "))
    try:
        with tempfile.TemporaryDirectory(prefix="flowtrain-") as cache:
            code: int = options.run(options, Path(cache))
            return code
    except (UserError, OSError, SafetensorError) as error:
        say(f"{_COMMAND}: {error}", "error")
        return 1 if isinstance(error, StoreError | OSError | SafetensorError) else 2
    except KeyboardInterrupt:
        return 130


def _inspect(options: argparse.Namespace, cache: Path) -> int:
    path = Path(options.location)
    if path.is_file():
        if options.version is not None:
            raise UserError(f"--version chooses from a store; {path} is a file")
        print(json.dumps(show.delta_record(path), indent=1))
        return 0
    source = _open(options.location, cache)
    if options.version is not None:
        record = show.version_record(source, source.manifest(options.version))
        print(json.dumps(record, indent=1))
        return 0
    is_damaged = False
    versions = _versions(source)
    print(show.HEADING)
    for version in versions:
        try:
            print(show.version_line(source.manifest(version)))
        except StoreError as error:
            print(f"{version:>8}  damaged  {error}")
            is_damaged = True
    return int(is_damaged)


def _verify(options: argparse.Namespace, cache: Path) -> int:
    from flowtrain.weights.verify import Verifier  # and with it torch

    source = _open(options.location, cache)
    if options.all:
        versions = _versions(source)
    else:
        versions = [_head(source) if options.version is None else options.version]
    verifier = Verifier(source, options.threads)
    problems = verifier.run(versions)
    for problem in problems:
        print(f"damaged: {problem}")
    size = show.human(verifier.num_bytes) or "0 B"
    counts = f"{len(versions)} versions, {verifier.num_files} files, {size}"
    print(f"{len(problems)} problems in {counts}" if problems else f"fine: {counts}")
    return 1 if problems else 0


def _serve(options: argparse.Namespace, _cache: Path) -> int:
    store = WeightStore(_folder(options.store))
    if not store.root.exists():
        print(f"{store} is not there yet; it is served from its first version on", file=sys.stderr)
    elif not store.root.is_dir():
        raise UserError(f"{store} is no folder")
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


def _mirror(options: argparse.Namespace, _cache: Path) -> int:
    store = WeightStore(_folder(options.store))
    make_folder(store.root)
    with Lock(store.root / "mirror.lock", f"the mirror of {store}", "end it"):
        mirror = Mirror(store, open_objects(options.url))
        if options.once:
            try:
                made = mirror.update()
            except (MissingObject, StoreSilent) as error:
                raise StoreError(str(error)) from error
            print(f"put {', '.join(map(str, made)) or 'nothing'}")
            return 0
        try:
            mirror.follow(options.every)
        except KeyboardInterrupt:
            print("stopped")  # the normal end
    return 0


def _gc(options: argparse.Namespace, _cache: Path) -> int:
    store = _open_folder(options.store)
    garbage = store.garbage(options.keep)
    files = [path for version in garbage for path in store.folder(version).iterdir()]
    size = show.human(sum(path.stat().st_size for path in files)) or "0 B"
    if not options.dry_run:
        garbage = store.collect_garbage(options.keep)
    done, rest = ("would delete", "are there") if options.dry_run else ("deleted", "stay")
    named = ", ".join(map(str, garbage)) or "nothing"
    print(f"{done} {named} ({size}); {len(store.versions())} versions {rest}")
    return 0


def _open(location: str, cache: Path) -> Source:
    if "://" not in location:
        return _open_folder(location)
    return open_source(location, cache, os.environ.get("FLOWTRAIN_TOKEN", ""), keeps=True)


def _open_folder(location: str) -> WeightStore:
    path = _folder(location)
    if not path.is_dir():
        raise UserError(f"{location} is no folder")
    return WeightStore(path)


def _folder(location: str) -> Path:
    if "://" in location:
        raise UserError(f"{location} is an address; this command needs the folder itself")
    return Path(location)


def _head(source: Source) -> int:
    head = source.head()
    if head is None:
        raise StoreError(f"{source} holds no version")
    return head


def _versions(source: Source) -> list[int]:
    head = _head(source)
    versions = show.list_versions(source)
    if not versions or versions[-1] != head:
        raise StoreError(
            f"HEAD of {source} is {head}, which is not there; publish a new version, or write the "
            "newest one into it"
        )
    return versions


def _parser() -> argparse.ArgumentParser:
    commands = Commands(_COMMAND, __doc__)
    count = number(0, 10**17)
    positive = number(1, 10**9)

    summary = "what a store, a version or a delta file holds"
    inspect = commands.add("inspect", _inspect, summary, example="runs/a/weights --version 12")
    inspect.add_argument("location", metavar="LOCATION", help="a store, its URL, or a delta file")
    text = "show this version and its deltas as JSON; default: a line per version"
    inspect.add_argument("--version", type=count, help=text)

    summary = "check files, deltas and digests"
    verify = commands.add("verify", _verify, summary, example="http://trainer:8321 --all")
    verify.add_argument("location", metavar="LOCATION", help="a store or its URL")
    which = verify.add_mutually_exclusive_group()
    which.add_argument("--version", type=count, help="this version instead of HEAD")
    text = "every version; over HTTP those that HEAD leads back to"
    which.add_argument("--all", action="store_true", help=text)
    verify.add_argument("--threads", type=positive, default=1, help="CPU threads (default: 1)")

    summary = "serve a store over HTTP, read-only"
    server = commands.add("serve", _serve, summary, example="runs/a/weights --port 8321")
    text = "the folder that holds HEAD, or will hold it once a trainer has published"
    server.add_argument("store", metavar="STORE", help=text)
    add_server(server, 8321)

    summary = "keep a copy of a store in a bucket, from which nodes load"
    example = "runs/a/weights s3://bucket/weights"
    mirror = commands.add("mirror", _mirror, summary, example=example)
    text = "the folder that holds HEAD, or will hold it once a trainer has published"
    mirror.add_argument("store", metavar="STORE", help=text)
    text = "s3://bucket/prefix, gs://, az://, or a folder; credentials are in the environment"
    mirror.add_argument("url", metavar="URL", help=text)
    mirror.add_argument("--once", action="store_true", help="end when the copy is complete")
    text = "seconds between two looks (default: 1)"
    mirror.add_argument("--every", type=positive, default=1, metavar="S", help=text)

    summary = "delete versions that nobody needs"
    clean = commands.add("gc", _gc, summary, example="runs/a/weights --keep 10 --dry-run")
    clean.add_argument("store", metavar="STORE", help="the folder that holds HEAD")
    text = "newest versions to keep, with the full snapshot they come from and all since"
    clean.add_argument("--keep", type=positive, required=True, help=text)
    clean.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    return commands.parser


if __name__ == "__main__":
    sys.exit(main())
