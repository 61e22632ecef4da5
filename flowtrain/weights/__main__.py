"""Look into a weight store, check it, join its deltas, serve it, clean it up.

LOCATION is the folder that holds HEAD, or its URL; FLOWTRAIN_TOKEN is the token for it.
Exit codes: 0 all is well, 1 something is damaged or not there, 2 the command was not understood.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from safetensors import SafetensorError

from flowtrain.types import UserError
from flowtrain.weights import serve, show
from flowtrain.weights.compose import compose
from flowtrain.weights.files import write_delta
from flowtrain.weights.manifest import StoreError
from flowtrain.weights.remote import HttpStore
from flowtrain.weights.store import Source, WeightStore
from flowtrain.weights.verify import Verifier

_COMMAND = "python -m flowtrain.weights"


class _Kept(HttpStore):
    """Keeps what it fetched until the command ends."""

    def loaded(self, version: int) -> None:
        pass


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="flowtrain-") as cache:
            code: int = options.run(options, Path(cache))
            return code
    except (StoreError, OSError, SafetensorError) as error:
        print(f"{_COMMAND}: {error}", file=sys.stderr)
        return 1
    except UserError as error:
        print(f"{_COMMAND}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _inspect(options: argparse.Namespace, cache: Path) -> int:
    place = Path(options.location)
    if place.is_file():
        if options.version is not None:
            raise UserError(f"--version chooses from a store; {place} is a file")
        record = show.delta_record(place)
        print(json.dumps(record, indent=1) if options.json else show.delta_table(record))
        return 0
    source = _open(options.location, cache)
    if options.version is not None:
        record = show.whole_record(source, source.manifest(options.version))
        print(json.dumps(record, indent=1) if options.json else show.whole_table(record))
        return 0
    records = []
    for version in _versions(source):
        try:
            records.append(show.version_record(source.manifest(version)))
        except StoreError as error:
            records.append(show.damaged_record(version, error))
    print(json.dumps(records, indent=1) if options.json else show.versions_table(records))
    return 1 if any("error" in record for record in records) else 0


def _verify(options: argparse.Namespace, cache: Path) -> int:
    source = _open(options.location, cache)
    versions = (
        _versions(source)
        if options.all
        else [_head(source) if options.version is None else options.version]
    )
    verifier = Verifier(source, options.threads)
    problems = verifier.run(versions)
    for problem in problems:
        print(f"damaged: {problem}")
    counts = (
        f"{len(versions)} versions, {verifier.num_files} files, "
        f"{show.human(verifier.num_bytes) or '0 B'}"
    )
    print(f"{len(problems)} problems in {counts}" if problems else f"fine: {counts}")
    return 1 if problems else 0


def _compose(options: argparse.Namespace, cache: Path) -> int:
    out = Path(options.output)
    if options.start >= options.end:
        raise UserError(f"FROM must be before TO, not {options.start} and {options.end}")
    if not out.parent.is_dir():
        raise UserError(f"the folder {out.parent} of -o does not exist")
    source = _open(options.location, cache)
    blobs = compose(source, options.start, options.end, options.level, options.threads)
    part = out.with_name(f"{out.name}.part")
    try:
        num_bytes = write_delta(
            part, blobs, source.manifest(options.end).layout, options.start, options.end
        ).num_bytes
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    print(
        f"{out}: from {options.start} to {options.end}, {len(blobs)} tensors changed, "
        f"{show.human(num_bytes)}"
    )
    return 0


def _serve(options: argparse.Namespace, _cache: Path) -> int:
    try:
        serve.serve(_open_folder(options.store), options.host, options.port)
    except KeyboardInterrupt:
        print("stopped")  # which is how it ends
    return 0


def _gc(options: argparse.Namespace, _cache: Path) -> int:
    store = _open_folder(options.store)
    garbage = store.garbage(options.keep)
    num_bytes = sum(
        path.stat().st_size for version in garbage for path in store.place(version).iterdir()
    )
    if not options.dry_run:
        garbage = store.collect_garbage(options.keep)
    what = "would delete" if options.dry_run else "deleted"
    named = ", ".join(map(str, garbage)) or "nothing"
    print(
        f"{what} {named} ({show.human(num_bytes) or '0 B'}); {len(store.versions())} versions "
        f"{'are there' if options.dry_run else 'stay'}"
    )
    return 0


def _open(location: str, cache: Path) -> Source:
    return (
        _Kept(location, cache, os.environ.get("FLOWTRAIN_TOKEN", ""))
        if "://" in location
        else _open_folder(location)
    )


def _open_folder(place: str) -> WeightStore:
    if "://" in place:
        raise UserError(f"{place} is an address; this command needs the folder itself")
    if not Path(place).is_dir():
        raise UserError(f"{place} is no folder")
    return WeightStore(Path(place))


def _head(source: Source) -> int:
    head = source.head()
    if head is None:
        raise StoreError(f"{source} holds no version")
    return head


def _versions(source: Source) -> list[int]:
    _head(source)
    versions = show.list_versions(source)
    if not versions or versions[-1] != source.head():
        raise StoreError(
            f"HEAD of {source} is {source.head()}, which is not there; publish a new version, or "
            "write the newest one into it"
        )
    return versions


def _parser() -> argparse.ArgumentParser:
    lines = (__doc__ or "").strip().splitlines()
    parser = argparse.ArgumentParser(
        prog=_COMMAND, description=lines[0], epilog=" ".join(lines[2:])
    )
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="{inspect,verify,compose,serve,gc}"
    )

    inspect = _add(
        commands,
        "inspect",
        _inspect,
        "what a store, a version or a delta file holds",
        "inspect runs/a/weights --version 12",
    )
    inspect.add_argument("location", metavar="LOCATION", help="a store, its URL, or a delta file")
    inspect.add_argument(
        "--version",
        type=_count,
        help="show the tensors of this version; default: a line per version",
    )
    inspect.add_argument("--json", action="store_true", help="print JSON, with whole digests")

    verify = _add(
        commands,
        "verify",
        _verify,
        "check files, deltas and digests",
        "verify http://trainer:8321 --all",
    )
    verify.add_argument("location", metavar="LOCATION", help="a store or its URL")
    which = verify.add_mutually_exclusive_group()
    which.add_argument("--version", type=_count, help="this version instead of HEAD")
    which.add_argument(
        "--all", action="store_true", help="every version; over HTTP those that HEAD leads back to"
    )
    verify.add_argument("--threads", type=_positive, default=1, help="CPU threads (default: 1)")

    join = _add(
        commands,
        "compose",
        _compose,
        "one delta file between two versions",
        "compose runs/a/weights 3 12 -o step.safetensors",
    )
    join.add_argument("location", metavar="STORE", help="a store or its URL")
    join.add_argument(
        "start", metavar="FROM", type=_count, help="the version that the delta starts from"
    )
    join.add_argument("end", metavar="TO", type=_count, help="the version that it leads to")
    join.add_argument("-o", "--output", metavar="FILE", required=True, help="the file to write")
    join.add_argument(
        "--level",
        type=int,
        choices=(1, 2),
        default=1,
        help="2: smaller, readable only with the old weights (default: 1)",
    )
    join.add_argument("--threads", type=_positive, default=1, help="CPU threads (default: 1)")

    server = _add(
        commands,
        "serve",
        _serve,
        "serve a store over HTTP, read-only",
        "serve runs/a/weights --port 8321",
    )
    server.add_argument("store", metavar="STORE", help="the folder that holds HEAD")
    server.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen at (default: this machine alone, 127.0.0.1); plain HTTP",
    )
    server.add_argument("--port", type=_port, default=8321, help="0: any free one (default: 8321)")

    clean = _add(
        commands,
        "gc",
        _gc,
        "delete versions that nobody needs",
        "gc runs/a/weights --keep 10 --dry-run",
    )
    clean.add_argument("store", metavar="STORE", help="the folder that holds HEAD")
    clean.add_argument(
        "--keep",
        type=_positive,
        required=True,
        help="newest versions to keep, with the anchor they come from and all since",
    )
    clean.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    return parser


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: object,
    what: str,
    example: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=what, description=f"{what}.", epilog=f"example: {_COMMAND} {example}"
    )
    parser.set_defaults(run=run)
    return parser


def _count(text: str) -> int:
    return _between(text, 0, 10**17)


def _positive(text: str) -> int:
    return _between(text, 1, 10**9)


def _port(text: str) -> int:
    return _between(text, 0, 65535)


def _between(text: str, low: int, high: int) -> int:
    if not text.isdecimal() or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no whole number from {low} on" + (f" to {high}" if high < 10**6 else "")
        )
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
