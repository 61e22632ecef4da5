"""The registry of algorithms: built-in ones, entry points `flowtrain.algorithms` of other packages,
and classes in user files, `algorithm.name = "mine.py:Mine"`. All are subclasses of `Algorithm`.
"""

from __future__ import annotations

from flowtrain.algorithms.base import Algorithm
from flowtrain.config import Config
from flowtrain.records import UserError
from flowtrain.utils import plugins
from flowtrain.utils.errors import foreign

GROUP = "flowtrain.algorithms"
BUILT_IN = plugins.built_in(
    GROUP,
    "flowtrain.algorithms",
    {
        "flow_grpo": "flow_grpo:FlowGrpo",
        "appo": "appo:Appo",
        "infoflow": "infoflow:Infoflow",
        "distill": "distill:Distill",
        "dr_grpo": "relatives:DrGrpo",
        "dapo": "relatives:Dapo",
        "rloo": "relatives:Rloo",
        "spo": "relatives:Spo",
        "reinforce_plus_plus": "relatives:ReinforcePlusPlus",
    },
)


def load_algorithm(config: Config) -> Algorithm:
    """Return the algorithm that `algorithm.name` selects.

    Raises UserError for an unknown name, for a config that the algorithm rejects, and for
    third-party code that fails.
    """
    name = config.algorithm.name
    origin = f"algorithm.name={name!r}"
    algorithm_type = plugins.load(name, origin, "algorithm", GROUP, BUILT_IN)
    if not (isinstance(algorithm_type, type) and issubclass(algorithm_type, Algorithm)):
        raise UserError(f"{origin} is not a subclass of flowtrain.algorithms.Algorithm")
    if algorithm_type.__module__.startswith("flowtrain.algorithms."):
        return algorithm_type(config)
    with foreign(f"{origin} cannot be constructed"):
        return algorithm_type(config)
