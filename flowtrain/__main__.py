"""The commands of flowtrain by their short names: `flowtrain evaluation ...` is
`python -m flowtrain.evaluation ...`.
"""

from __future__ import annotations

import difflib
import runpy
import sys

COMMANDS = {
    "train": ("flowtrain.train", "train a policy"),
    "torchrun": (
        "flowtrain.torchrun",
        "a command on several devices: torchrun --nproc_per_node 8 -m flowtrain.train ...",
    ),
    "rft": (
        "flowtrain.rft",
        "rejection-sampling fine-tuning, the warm-up before reinforcement learning",
    ),
    "evaluation": ("flowtrain.evaluation", "benchmarks and turn budgets, one table"),
    "replay": ("flowtrain.replay", "make a run again from its log, and compare every version"),
    "rollouts": (
        "flowtrain.rollouts",
        "the service that hands out leases and collects groups; audit, status",
    ),
    "node": (
        "flowtrain.rollouts.node",
        "a rollout node: follows weights, leases work, pushes groups",
    ),
    "weights": ("flowtrain.weights", "verify, serve and clean versions of weights"),
    "prove": (
        "flowtrain.inference.prove",
        "whether an endpoint samples with the policy that was trained, by log-probs",
    ),
    "view": (
        "flowtrain.logging.page",
        "a run as a page, every rollout turn by turn, also while it trains",
    ),
}
"""The module of each command, and what it does."""


def usage() -> str:
    """Return the table of commands."""
    width = max(map(len, COMMANDS))
    rows = [f"  {name:{width}}  {meaning}" for name, (_, meaning) in COMMANDS.items()]
    return "\n".join(["flowtrain COMMAND ...; flowtrain COMMAND --help", "", *rows])


def main() -> int:
    """Run the command that the first argument names; without one, or after --help, list them."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("--help", "-h"):
        print(usage())
        return 0
    if name == "--version":
        from flowtrain import __version__

        print(f"flowtrain {__version__}")
        return 0
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}"
        print(f"flowtrain: unknown command {name!r}; {hint}", file=sys.stderr)
        return 2
    sys.argv[:2] = [f"flowtrain {name}"]
    try:
        # As `python -m` would, so that processes which it starts import the same main module.
        runpy.run_module(COMMANDS[name][0], run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:  # commands catch it by themselves, once they are imported
        print(f"flowtrain {name}: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
