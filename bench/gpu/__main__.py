"""What minutes on one GPU must answer:

    python -m bench.gpu --plan first --out DIR           # on the machine with the GPU
    python -m bench.gpu --plan first --out DIR --dry-run # a rehearsal in tiny shapes, on a CPU
    python -m bench.gpu --keep DIR                       # results of DIR -> bench/results/DEVICE/
    python -m bench.gpu --page                           # docs/gpu.md from bench/results/DEVICE/

A plan runs its stages in order, each in a process of its own with a time limit, until its minutes
are over; some test at once. Every case of a stage fails alone. What each found lies in DIR as it
comes: `STAGE.json` (rows, and what they were measured under), `STAGE.log`, `report.md`. A second
call goes on where the first stopped, and then tries the broken stages anew. PyTorch and Triton are
enough to begin; a case that needs more says what. `python -m bench.gpu.pack` makes a folder with
all that a machine without a network lacks.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from bench.gpu.plans import PLANS, STAGES


def main() -> None:
    args = _arguments()
    if args.keep or args.page:
        from bench.gpu import page

        if args.keep:
            print(*page.keep(args.keep), sep="\n")
        print(page.write())
        return
    import torch

    from bench.gpu.runner import ROOT, Results, run_plan

    if not torch.cuda.is_available() and not args.dry_run:
        raise SystemExit("torch finds no GPU here; --dry-run takes tiny shapes on the CPU")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    results = Results(args.plan, args.out, args.dry_run, args.copy_to)
    results.take_caches(ROOT / ".gpu" / "caches.tar.gz")
    seconds = 60 * args.minutes or results.patience * PLANS[args.plan].seconds
    run_plan(results, seconds, _chosen(args.stages), _chosen(args.again))
    results.keep_caches()
    print(f"report: {args.out / 'report.md'}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    plans = ", ".join(f"{name} ({plan.seconds} s)" for name, plan in PLANS.items())
    add("--plan", choices=PLANS, default="first", help=f"{plans} (default: %(default)s)")
    add("--out", type=Path, metavar="DIR", help="for the results")
    add("--copy-to", type=Path, metavar="DIR", help="also put results.tar and report.md there")
    add("--minutes", type=float, default=0.0, help="for this call (default: the plan's)")
    add("--stages", default="", metavar="S,S", help=f"only these of: {', '.join(STAGES)}")
    add("--again", default="", metavar="S,S", help="stages to begin from nothing")
    add("--dry-run", action="store_true", help="tiny shapes, and no goal is judged")
    add("--keep", type=Path, metavar="DIR", help="file the results of DIR, or of its results.tar")
    add("--page", action="store_true", help="write docs/gpu.md")
    args = parser.parse_args()
    if not (args.out or args.keep or args.page):
        parser.error("--out DIR is missing: where do the results go?")
    return args


def _chosen(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in STAGES:
            raise SystemExit(f"{name!r} is not a stage: {', '.join(STAGES)}")
    return names


if __name__ == "__main__":
    main()
