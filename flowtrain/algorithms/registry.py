"""Find algorithms by name: those of this package, and those of other packages behind the entry
point group `flowtrain.algorithms`, which names subclasses of `Algorithm`.
"""

from __future__ import annotations

from difflib import get_close_matches

from flowtrain.algorithms.base import Algorithm
from flowtrain.config import Config
from flowtrain.types import UserError
from flowtrain.utils import plugins

GROUP = "flowtrain.algorithms"
BUILT_IN = plugins.built_in(
    GROUP,
    "flowtrain.algorithms",
    {
        "flow_grpo": "flow_grpo:FlowGrpo",
        "appo": "appo:Appo",
        "infoflow": "infoflow:Infoflow",
    },
)

_MEANT = {"grpo": "flow_grpo"}
"""Names that others use: Flow-GRPO on rollouts of one turn is GRPO."""


def load_algorithm(config: Config) -> Algorithm:
    """Make the algorithm that `algorithm.name` asks for.

    Raises UserError for a name that nobody offers, for a config that the algorithm refuses, and for
    a package whose code fails.
    """
    name = config.algorithm.name
    offered = plugins.offered("algorithm", GROUP, BUILT_IN)
    if name not in offered:
        meant = _MEANT.get(name) or next(iter(get_close_matches(name, offered, 1, 0.88)), "")
        hint = f"did you mean {meant}? " if meant else ""
        raise UserError(f"algorithm.name={name!r} is unknown; {hint}there are {', '.join(offered)}")
    entry = offered[name]
    package = plugins.package(entry)
    with plugins.guard(entry, f"algorithm {name!r} of package {package} cannot be made"):
        algorithm: Algorithm = entry.load()(config)
    return algorithm
