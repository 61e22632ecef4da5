"""The extension of vLLM's worker processes, which import it before the model is built.

It registers the sparse-delta plugin (without an installed flowtrain there is no entry point to find
it by), ends the process with its parent, and writes errors to a file, because vLLM tells its parent
only that there was one.
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
"""Methods that vLLM's worker gets, called through `collective_rpc`."""


def _set_up(error_file: str) -> None:
    if sys.platform == "linux":
        # However the trainer ends, its engines end with it and free their memory.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    handler = logging.FileHandler(error_file)
    handler.setLevel(logging.ERROR)
    logging.getLogger("vllm").addHandler(handler)
    vllm_plugin.register()


if ERROR_FILE in os.environ:
    _set_up(os.environ[ERROR_FILE])
