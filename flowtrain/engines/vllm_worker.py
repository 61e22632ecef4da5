"""Runs in vLLM's worker processes: the engine names `Worker` as their extension, so this is
imported there before the model is built.

Makes the sparse-delta plugin known also where flowtrain is not installed (then there is no entry
point to find it by), ties the life of the process to its parent's, and writes errors to a file,
because vLLM tells its parent only that there was one.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys

from flowtrain.engines.vllm_process import ERROR_FILE
from flowtrain.weights import vllm_plugin

_PR_SET_PDEATHSIG = 1


Worker = vllm_plugin.WeightReports
"""What is added to vLLM's worker; called through `collective_rpc`."""


def _begin(error_file: str) -> None:
    if sys.platform == "linux":
        # However the trainer ends, its engines end too and give their memory back.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    handler = logging.FileHandler(error_file)
    handler.setLevel(logging.ERROR)
    logging.getLogger("vllm").addHandler(handler)
    vllm_plugin.register()


if ERROR_FILE in os.environ:
    _begin(os.environ[ERROR_FILE])
