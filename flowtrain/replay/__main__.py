"""Make a run again from what `log.replay` kept, and compare every version with the run's.

Every batch and optimizer step is made once more; nothing is sampled.
With several ranks: torchrun --nproc_per_node 2 -m flowtrain.replay RUN. Exit codes: 0 all versions
are equal, 1 something differs or was changed, 2 the command was not understood.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowtrain.logging.tables import aligned
from flowtrain.records import UserError
from flowtrain.replay import log_path
from flowtrain.utils.commands import end_on_signals, end_process, number
from flowtrain.utils.terminal import protect_output
from flowtrain.utils.waiting import waiting

if TYPE_CHECKING:
    from flowtrain.replay.session import Outcome

_COMMAND = "python -m flowtrain.replay"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; under torchrun only rank 0 prints."""
    protect_output()
    end_on_signals()
    options = _parser().parse_args(arguments)
    is_main = os.environ.get("RANK", "0") == "0"

    def say(text: str) -> None:
        if is_main:
            print(text, file=sys.stderr, flush=True)

    try:
        log_path(options.run)  # before it takes seconds
        with waiting("loading torch and the trainer", is_main):
            from flowtrain.replay.session import replay

        outcome = replay(options.run, options.first, options.last, options.tolerance, say)
    except UserError as error:
        say(f"{_COMMAND}: {error}")
        return 2
    except KeyboardInterrupt:
        return 130
    if is_main:
        print(json.dumps(_record(outcome), indent=1) if options.json else _table(outcome))
    return 0 if outcome.is_equal else 1


def _record(outcome: Outcome) -> dict[str, Any]:
    """Describe the outcome for programs."""
    return {
        "is_equal": outcome.is_equal,
        "steps": [outcome.steps[0], outcome.steps[-1]],
        "num_steps": outcome.num_steps,
        "num_equal": outcome.num_equal,
        "num_close": outcome.num_close,
        "largest_difference": outcome.largest,
        "problems": outcome.problems,
        "notes": outcome.notes,
        "seconds": round(outcome.seconds, 3),
    }


def _table(outcome: Outcome) -> str:
    """Write the outcome as a table, and what differs below it."""
    num_versions = outcome.num_steps + 1
    rows = [
        ("replay", ""),
        ("steps made again", f"{outcome.num_steps} of {len(outcome.steps)}"),
        ("versions equal, bit by bit", f"{outcome.num_equal} of {num_versions}"),
    ]
    if outcome.num_close:
        rows.append(("versions within the tolerance", str(outcome.num_close)))
    if outcome.largest is not None:
        rows.append(("largest difference of a weight", f"{outcome.largest:.3g}"))
    rows.append(("seconds", f"{outcome.seconds:.2f}"))
    differences = [f"differs: {problem}" for problem in outcome.problems]
    if not differences and not outcome.is_equal:
        differences = ["the last version could not be compared (see weights.keep)"]
    return "\n".join([aligned(rows), *(differences or ["the replay reproduces the run"])])


def _parser() -> argparse.ArgumentParser:
    summary, _, *epilog_lines = (__doc__ or "").strip().splitlines()
    parser = argparse.ArgumentParser(
        prog=_COMMAND, description=summary, epilog=" ".join(epilog_lines), allow_abbrev=False
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    text = "first step (default: the first on record); its weights and moments come from the "
    text += "checkpoint before it, for step 1 from model.path"
    parser.add_argument("--from", dest="first", type=number(1, 1 << 40), metavar="STEP", help=text)
    text = "last step (default: the last on record)"
    parser.add_argument("--to", dest="last", type=number(1, 1 << 40), metavar="STEP", help=text)
    text = "largest accepted difference of a weight if bits differ, as with another number of "
    text += "ranks (default: 0)"
    parser.add_argument("--tolerance", type=float, metavar="X", help=text)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


if __name__ == "__main__":
    end_process(main())
