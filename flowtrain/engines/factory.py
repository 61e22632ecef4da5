"""The models that sample in the flow, the planner's and, where it is a policy of its own, the
verifier's; and what samples from them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from flowtrain.config import Config
from flowtrain.engines.protocol import Engine
from flowtrain.engines.requests import stop_ids
from flowtrain.engines.torch_engine import TorchEngine
from flowtrain.engines.vllm_engine import VllmEngine
from flowtrain.engines.vllm_process import VllmModel, cpu_environment, gpu_environment
from flowtrain.training import model as models
from flowtrain.types import UserError
from flowtrain.weights import Source, WeightStore


@dataclass(frozen=True, slots=True)
class PolicyModel:
    """A policy without its weights."""

    key: str
    """The option that says where it is."""
    path: str
    """Folder or hub name of the warm model; "tiny": one that is made here."""
    tokenizer: PreTrainedTokenizerFast
    shape: PretrainedConfig
    generation: GenerationConfig
    """Says how a response ends."""

    @classmethod
    def of(
        cls, key: str, path: str, tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel
    ) -> PolicyModel:
        shape = copy.deepcopy(model.config)
        shape.architectures = [type(model).__name__]
        return cls(key, path, tokenizer, shape, model.generation_config)

    @classmethod
    def load(cls, key: str, path: str) -> PolicyModel:
        """Raises UserError for what is no model, with the option that names it."""
        if not path:
            raise UserError(
                f"{key} must be the folder or hub name of a model: this policy is not trained here"
            )
        tokenizer = models.load_tokenizer(path, key)
        try:
            shape = AutoConfig.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise UserError(
                f"{key}={path!r} is no causal language model that transformers can load: {error}"
            ) from error
        models.check_model(shape, path, key)
        try:
            ends = GenerationConfig.from_pretrained(path)
        except OSError:  # a model need not have one
            ends = GenerationConfig.from_model_config(shape)
        return cls(key, path, tokenizer, shape, ends)

    @property
    def max_positions(self) -> int:
        return int(self.shape.max_position_embeddings)

    def num_parameters(self) -> int:
        return int(self.without_weights().num_parameters())

    def layout(self, dtype: torch.dtype) -> str:
        """As `layout_digest` of the model itself."""
        return models.layout_digest(self.without_weights(), self.tokenizer, dtype)

    def without_weights(self) -> PreTrainedModel:
        """The model on the meta device."""
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(self.shape))
        return model


def make_engine(
    config: Config,
    policy: PolicyModel,
    device: torch.device,
    store: Source | None,
    records_entropies: bool = False,
) -> Engine:
    """Its weights come from the store by version; without one they are those at the policy's path,
    and never change. `records_entropies`: completions hold them (torch engine only).
    """
    if config.rollout.engine == "vllm":
        return _vllm_engine(config, policy, device, store)
    return _torch_engine(config, policy, device, store, records_entropies)


def _torch_engine(
    config: Config,
    policy: PolicyModel,
    device: torch.device,
    store: Source | None,
    records_entropies: bool,
) -> TorchEngine:
    dtype = getattr(torch, config.model.dtype)
    if store is None:
        model = models.load_model(policy.path, dtype, "sdpa", policy.key)
    else:
        # A copy, because from_config writes the attention it was asked for into the config it was
        # given.
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(policy.shape), dtype=dtype, attn_implementation="sdpa"
        )
    model.generation_config = policy.generation
    batch, scrub = config.rollout.max_batch_size, config.weights.verify_every
    return TorchEngine(
        model.to(device),
        policy.tokenizer,
        store,
        max_batch_size=batch,
        verify_every=scrub,
        tells_entropies=store is not None and records_entropies,
    )


def _vllm_engine(
    config: Config, policy: PolicyModel, device: torch.device, store: Source | None
) -> VllmEngine:
    options, positions, is_cpu = config.vllm, policy.max_positions, device.type == "cpu"
    if options.max_model_len > positions:
        raise UserError(
            f"vllm.max_model_len={options.max_model_len} must be at most the {positions} positions "
            f"of {policy.key}={policy.path!r}"
        )
    if is_cpu and options.sleep:
        raise UserError("vllm.sleep=true needs a GPU: on a CPU vLLM cannot give its memory back")
    model = VllmModel(
        policy.path if store is None else copy.deepcopy(policy.shape),
        config.model.dtype,
        options.max_model_len or positions,
        stop_ids(policy.generation, policy.tokenizer),
        _location(store),
        config.weights.verify_every,
        is_cpu,
        cpu_environment(torch.get_num_threads()) if is_cpu else gpu_environment(device.index or 0),
    )
    return VllmEngine(model, policy.tokenizer, options)


def _location(store: Source | None) -> str:
    """For a process with a folder of its own."""
    if store is None:
        return ""
    return str(store.root.resolve()) if isinstance(store, WeightStore) else str(store)
