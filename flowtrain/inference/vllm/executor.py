"""vLLM's executor for several workers, in the process that schedules them.

No code of flowtrain runs there otherwise: the extension of the workers is imported by them alone.
"""

from __future__ import annotations

import importlib

from vllm.v1.executor.multiproc_executor import MultiprocExecutor


class Executor(MultiprocExecutor):
    """Starts workers in processes of their own. This one ends with the trainer, they with it."""

    def _init_executor(self) -> None:
        # For what the import does, and not at the top: the trainer imports this file, too.
        importlib.import_module("flowtrain.inference.vllm.worker")
        super()._init_executor()
