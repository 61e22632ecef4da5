"""Build the engine that samples from a model: from a policy, or from a frozen chat model."""

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

from flowtrain.config import Chat, Config, Vllm
from flowtrain.engines.protocol import Engine
from flowtrain.engines.requests import stop_ids
from flowtrain.engines.torch_engine import TorchEngine
from flowtrain.engines.vllm_engine import VllmEngine
from flowtrain.engines.vllm_process import VllmModel, cpu_environment, gpu_environment
from flowtrain.training import model as models
from flowtrain.types import UserError
from flowtrain.utils.errors import user_error
from flowtrain.weights import Source, WeightStore


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model without its weights."""

    key: str
    """The option that names the path."""
    path: str
    """Folder or hub name of the model; "tiny": one that is made here."""
    tokenizer: PreTrainedTokenizerFast
    shape: PretrainedConfig
    generation: GenerationConfig
    """Names the tokens that end a response."""

    @classmethod
    def of(
        cls, key: str, path: str, tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel
    ) -> ModelSpec:
        shape = copy.deepcopy(model.config)
        shape.architectures = [type(model).__name__]
        return cls(key, path, tokenizer, shape, model.generation_config)

    @classmethod
    def load(cls, key: str, path: str, any_attention: bool = False) -> ModelSpec:
        """Load the spec of a folder or hub name. `any_attention`: allow layers that vLLM alone can
        compute. Raises UserError that names the option.
        """
        if not path:
            raise UserError(f"{key} must be the folder or hub name of a model")
        tokenizer = models.load_tokenizer(path, key)
        problem = f"{key}={path!r} is no causal language model that transformers can load"
        with user_error(problem, OSError, ValueError):
            shape = AutoConfig.from_pretrained(path)
        if not hasattr(shape, "max_position_embeddings"):
            raise UserError(f"{key}={path!r} does not say how many positions the model has")
        if not any_attention:
            models.check_model(shape, path, key)
        try:
            generation = GenerationConfig.from_pretrained(path)
        except OSError:  # a model need not have one
            generation = GenerationConfig.from_model_config(shape)
        return cls(key, path, tokenizer, shape, generation)

    @property
    def max_positions(self) -> int:
        return int(self.shape.max_position_embeddings)

    def num_parameters(self) -> int:
        return int(self.without_weights().num_parameters())

    def layout(self, dtype: torch.dtype) -> str:
        """Return the `layout_digest` of the model."""
        return models.layout_digest(self.without_weights(), self.tokenizer, dtype)

    def without_weights(self) -> PreTrainedModel:
        """Build the model on the meta device."""
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(self.shape))
        return model


def make_engine(
    config: Config,
    model: ModelSpec,
    device: torch.device,
    store: Source | None = None,
    *,
    chat: Chat | None = None,
    records_entropies: bool = False,
) -> Engine:
    """Build the engine that samples from `model`.

    Args:
        config: chooses the engine of a policy in [rollout], and how vLLM runs in [vllm].
        store: gives the weights by version; None: they are those at the model's path for good.
        chat: options of a frozen chat model, which choose its engine and how many replies it
            samples at a time; None: the model is a policy.
        records_entropies: completions hold the sampler's entropies (torch engine with a store).
    """
    kind = config.rollout.engine if chat is None else chat.kind
    if kind == "vllm":
        options = config.vllm
        if chat is not None:
            options = options.model_copy(update={"max_num_seqs": chat.max_concurrency})
        vllm_model = _vllm_model(config, options, model, device, store)
        return VllmEngine(vllm_model, model.tokenizer, options)
    dtype = getattr(torch, config.model.dtype)
    if store is None:
        network = models.load_model(model.path, dtype, "sdpa", model.key)
    else:
        # from_config writes the attention that it was asked for into the config it was given
        network = AutoModelForCausalLM.from_config(
            copy.deepcopy(model.shape), dtype=dtype, attn_implementation="sdpa"
        )
    network.generation_config = model.generation
    return TorchEngine(
        network.to(device),
        model.tokenizer,
        store,
        max_batch_size=config.rollout.max_batch_size if chat is None else chat.max_concurrency,
        verify_every=config.weights.verify_every,
        records_entropies=store is not None and records_entropies,
    )


def _vllm_model(
    config: Config, options: Vllm, model: ModelSpec, device: torch.device, store: Source | None
) -> VllmModel:
    positions = model.max_positions
    if options.max_model_len > positions:
        raise UserError(
            f"vllm.max_model_len={options.max_model_len} must be at most the {positions} positions "
            f"of {model.key}={model.path!r}"
        )
    is_cpu = device.type == "cpu"
    if is_cpu and options.sleep:
        raise UserError("vllm.sleep=true needs a GPU: on a CPU vLLM cannot give its memory back")
    if is_cpu:
        environment = cpu_environment(torch.get_num_threads())
    else:
        environment = gpu_environment(device.index or 0)
    return VllmModel(
        source=model.path if store is None else copy.deepcopy(model.shape),
        dtype=config.model.dtype,
        max_tokens=options.max_model_len or positions,
        stop_ids=stop_ids(model.generation, model.tokenizer),
        store=_location(store),
        verify_every=config.weights.verify_every,
        is_cpu=is_cpu,
        environment=environment,
    )


def _location(store: Source | None) -> str:
    """Name the store for a process with another working folder."""
    if store is None:
        return ""
    return str(store.root.resolve()) if isinstance(store, WeightStore) else str(store)
