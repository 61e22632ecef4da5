"""One stage of a plan, in a process of its own:  python -m bench.gpu.stage STAGE FILE"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from bench.gpu.cases import Cases
from bench.gpu.plans import STAGES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("path", type=Path, metavar="FILE", help="for its rows")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--seconds", type=float, default=600.0, help="default: %(default)s")
    args = parser.parse_args()
    module = importlib.import_module(f"bench.gpu.{STAGES[args.stage][0]}")
    getattr(module, args.stage)(Cases(args.path, args.small, args.seconds))


if __name__ == "__main__":
    main()
