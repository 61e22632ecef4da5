"""Sampling by vLLM, in processes of its own; weights change in place while requests are under way.

`VllmEngine` is what the flow and the trainer see. Below it a `AsyncLLMRunner` is one life of vLLM.
When it ends (its process died, or did not answer for `vllm.hang_timeout_s`), the next one is
brought to the same version from the store, and what was not answered is asked once more.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from transformers import PretrainedConfig

from flowtrain.config import Vllm
from flowtrain.engines.protocol import EngineError
from flowtrain.engines.requests import Decodes, check_request, completion
from flowtrain.engines.supervisor import EngineDied, Supervisor
from flowtrain.engines.vllm_process import VllmModel, check_installed
from flowtrain.engines.vllm_runner import AsyncLLMRunner
from flowtrain.types import Completion, FinishReason, Sampling
from flowtrain.utils.threads import within

T = TypeVar("T")


class VllmEngine:
    """See `Engine`."""

    def __init__(self, model: VllmModel, tokenizer: Decodes, options: Vllm) -> None:
        """Starts vLLM and waits for it. Raises UserError when it is missing, too old, or cannot run
        the model in the memory it may use.
        """
        check_installed()
        self._model, self._tokenizer, self._options = model, tokenizer, options
        self._folder = tempfile.TemporaryDirectory(prefix="flowtrain-vllm-")
        if isinstance(model.source, PretrainedConfig):
            model.source.save_pretrained(self._folder.name)
            self._model = replace(model, source=self._folder.name)
        self._version: int | None = None
        self.num_requeued = 0
        """Requests that were under way when vLLM died or hung, and were asked once more."""
        self._load_metrics: dict[str, float] = {}
        self._supervisor = Supervisor(self._begin)
        self._supervisor.present.result()

    @property
    def version(self) -> int:
        return self._version or 0

    @property
    def max_tokens(self) -> int:
        return self._model.max_tokens

    def metrics(self) -> dict[str, float]:
        return {
            **self._load_metrics,
            "engine_restarts": self._supervisor.num_restarts,
            "engine_requeued": self.num_requeued,
        }

    def close(self) -> None:
        self._supervisor.close()
        self._folder.cleanup()

    def load(self, version: int) -> None:
        """Raises StoreError when the store does not lead there: the engine then samples with the
        version that it had.
        """
        self._load_metrics = self._insist(
            lambda core: core.load(version), f"it loaded version {version}"
        )
        self._version = version

    def sleep(self) -> None:
        """With vllm.sleep: vLLM's weights go to the host and its cache away, until the next `load`."""
        if self._options.sleep:
            self._insist(AsyncLLMRunner.sleep, "it went to sleep")

    def _insist(self, call: Callable[[AsyncLLMRunner], T], doing: str) -> T:
        """What the call gives, if need be in a second life."""
        error: EngineDied | None = None
        for _ in range(2):
            core = self._supervisor.present.result()
            try:
                return call(core)
            except EngineDied as died:
                error = died
                self._supervisor.replace(core, str(died))
        raise EngineError(f"vLLM died twice while {doing}") from error

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Raises UserError for a request that `check_request` refuses, EngineError when vLLM died
        over it twice.
        """
        check_request(prompt_ids, sampling, self.max_tokens)
        deadline = time.monotonic() + sampling.deadline_s
        error: EngineDied | None = None
        for _ in range(2):
            self.num_requeued += error is not None
            try:
                core = await within(self._supervisor.present, deadline)
                return await core.answer(prompt_ids, sampling, deadline)
            except TimeoutError:
                return completion((), (), [(self.version, 0)], FinishReason.DEADLINE)
            except EngineDied as died:
                error = died
                self._supervisor.replace(core, str(died))
        raise EngineError(f"vLLM died twice over a prompt of {len(prompt_ids)} tokens") from error

    def _begin(self) -> AsyncLLMRunner:
        core = AsyncLLMRunner(
            self._model, self._options, self._tokenizer, Path(self._folder.name) / "errors.log"
        )
        core.start()
        try:
            if self._version is not None:
                core.load(self._version)
        except BaseException:
            core.kill()
            raise
        return core
