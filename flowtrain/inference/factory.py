"""Construction of the engine of a policy or of a frozen chat model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from flowtrain.config import Chat, Config, Lora, Vllm
from flowtrain.inference.protocol import Engine
from flowtrain.inference.requests import stop_ids
from flowtrain.inference.shared_cache import NAME
from flowtrain.inference.token_chat import TEMPLATE_ERRORS, encode_chat
from flowtrain.inference.torch_engine import TorchEngine
from flowtrain.inference.vllm.engine import AdapterEngine, VllmEngine
from flowtrain.inference.vllm.process import VllmModel, cpu_environment, gpu_environment
from flowtrain.records import PolicyName, UserError
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.model.check import load_config
from flowtrain.trainer.model.files import reading
from flowtrain.trainer.model.lora import adapter_weights, add_adapter, fingerprint, home, is_adapter
from flowtrain.weights import Source, WeightStore
from flowtrain.weights.format.manifest import AdapterSpec
from flowtrain.weights.format.tensor_shards import spec_of

_GENERATION = "generation_config.json"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model without its weights."""

    key: str
    """The option that names the path."""
    path: str
    """Folder or hub name of the model; "tiny": a new model."""
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
        """Return the spec of a folder or hub name. `any_attention`: allow layers that only vLLM can
        compute. Raises UserError, which names the option.
        """
        if not path:
            raise UserError(f"{key} must be the folder or hub name of a model")
        shape = load_config(path, key, trained=not any_attention)
        tokenizer = models.load_tokenizer(path, key)
        if not hasattr(shape, "max_position_embeddings"):
            raise UserError(f"{key}={path!r} has a config without the number of positions")
        folder = home(path, key, _GENERATION)
        generation = GenerationConfig.from_model_config(shape)  # a model need not have another
        # A file that is there must be readable; one that is missing is no mistake.
        has_file = (Path(folder) / _GENERATION).exists()
        with (
            reading(f"{key}={path!r}: {_GENERATION} cannot be read"),
            suppress(*() if has_file else (OSError,)),
        ):
            generation = GenerationConfig.from_pretrained(folder)
        _check_tokens(f"{key}={path!r}", tokenizer, shape, generation)
        return cls(key, path, tokenizer, shape, generation)

    @property
    def max_positions(self) -> int:
        return int(self.shape.max_position_embeddings)

    def num_parameters(self) -> int:
        return int(self.without_weights().num_parameters())

    def layout(self, dtype: torch.dtype, lora: Lora) -> str:
        """Return the `layout_digest` of the model under a trainer with these options."""
        model = self.without_weights()
        base = ""
        if lora.sync == "adapter":
            add_adapter(model, lora, self.path)
            base = fingerprint(self.path)
        return models.layout_digest(model, self.tokenizer, dtype, base)

    def adapters(self, lora: Lora, dtype: torch.dtype) -> AdapterSpec:
        """Return the spec of the model's adapters under a trainer with these options."""
        model = self.without_weights()
        add_adapter(model, lora, self.path)
        tensors = adapter_weights(model).items()
        layout = {name: spec_of(name, tensor, dtype) for name, tensor in tensors}
        return AdapterSpec(lora.rank, lora.alpha, layout)

    def without_weights(self) -> PreTrainedModel:
        """Build the model on the meta device."""
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                copy.deepcopy(self.shape), trust_remote_code=False
            )
        model.generation_config = copy.deepcopy(self.generation)
        return model


def _check_tokens(
    label: str,
    tokenizer: PreTrainedTokenizerFast,
    shape: PretrainedConfig,
    generation: GenerationConfig,
) -> None:
    """Raise UserError if a reply ends with, or follows, a token without an embedding."""
    used = dict.fromkeys(stop_ids(generation, tokenizer), "ends replies with")
    # The template may be used for nothing.
    with reading(f"{label} has a tokenizer that fails"), suppress(*TEMPLATE_ERRORS):
        if tokenizer.chat_template:
            used |= dict.fromkeys(encode_chat(tokenizer, "Hi"), "has a chat template with")
    vocab = range(getattr(shape.get_text_config(), "vocab_size", 1 << 40))
    if beyond := [token for token in used if token not in vocab]:
        raise UserError(
            f"{label} {used[beyond[0]]} the token {beyond[0]!r}, and has embeddings of {len(vocab)}"
        )


def make_engine(
    config: Config,
    model: ModelSpec,
    device: torch.device,
    store: Source | None = None,
    *,
    chat: Chat | None = None,
    records_entropies: bool = False,
) -> Engine:
    """Return the engine that samples from `model`.

    Args:
        config: chooses the engine of a policy in [rollout], and how vLLM runs in [vllm].
        store: the store of weight versions; None: the fixed weights at the model's path.
        chat: options of a frozen chat model, which select its engine and concurrency; None: the
            model is a policy.
        records_entropies: calls hold the sampler's entropies (for a model with a store).
    """
    kind = config.rollout.engine if chat is None else chat.kind
    has_adapter = store is not None and config.lora.sync == "adapter"
    if kind == "vllm" and has_adapter:
        stores = {model.key: store}
        (engine,) = make_adapter_engines(
            config, model, device, stores, records_entropies=records_entropies
        ).values()
        return engine
    if kind == "vllm":
        options = config.vllm
        if chat is not None:
            options = options.model_copy(update={"max_num_seqs": chat.max_concurrency})
        vllm_model = _vllm_model(config, options, model, device, store)
        vllm_model = replace(
            vllm_model,
            records_entropies=store is not None and records_entropies,
            records_routes=store is not None and _is_mixture(model),
        )
        return VllmEngine(vllm_model, model.tokenizer, options)
    dtype = getattr(torch, config.model.dtype)
    if store is None or has_adapter:
        network = models.load_model(model.path, dtype, key=model.key)
        if has_adapter:
            add_adapter(network, config.lora, model.path, dtype)
    else:
        # from_config writes the attention that it was asked for into the config it was given
        network = AutoModelForCausalLM.from_config(
            copy.deepcopy(model.shape),
            dtype=dtype,
            attn_implementation=NAME,
            trust_remote_code=False,
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


def shared_policies(config: Config, policies: Mapping[PolicyName, ModelSpec]) -> list[PolicyName]:
    """Return the policies that one vLLM can serve: adapters of the model at model.path, and frozen
    policies with this model.
    """
    if config.rollout.engine != "vllm" or config.lora.sync != "adapter":
        return []
    return [name for name, policy in policies.items() if policy.path == config.model.path]


def make_adapter_engines(
    config: Config,
    model: ModelSpec,
    device: torch.device,
    stores: Mapping[str, Source | None],
    *,
    records_entropies: bool = False,
) -> dict[str, Engine]:
    """Start one vLLM for policies that are adapters ([lora]) of one model, and return each policy's
    engine.

    Args:
        model: the base model, which vLLM loads once from its path.
        stores: store of each policy's adapter; None: the policy is the base model.
        records_entropies: calls hold the sampler's entropies.
    """
    dtype = getattr(torch, config.model.dtype)
    shared = replace(
        _vllm_model(config, config.vllm, model, device, None),
        adapters=model.adapters(config.lora, dtype),
        adapter_stores={policy: _location(store) for policy, store in stores.items()},
        records_entropies=records_entropies,
        records_routes=_is_mixture(model),
    )
    return {**AdapterEngine.start(shared, model.tokenizer, config.vllm)}


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
        raise UserError("vllm.sleep=true needs a GPU: on a CPU vLLM cannot release its memory")
    _check_parallel(options.tensor_parallel_size, model, device)
    if is_cpu:
        environment = cpu_environment(torch.get_num_threads())
    else:
        environment = gpu_environment(device.index or 0, options.tensor_parallel_size)
    return VllmModel(
        source=_weights_of(model, config) if store is None else copy.deepcopy(model.shape),
        dtype=config.model.dtype,
        max_tokens=options.max_model_len or positions,
        stop_ids=stop_ids(model.generation, model.tokenizer),
        store=_location(store),
        verify_every=config.weights.verify_every,
        is_cpu=is_cpu,
        environment=environment,
    )


def _is_mixture(model: ModelSpec) -> bool:
    return bool(getattr(model.shape, "num_experts_per_tok", 0))


def _weights_of(model: ModelSpec, config: Config) -> str | PreTrainedModel:
    """Return the path of the model's weights, or a model that vLLM would load wrongly: with a saved
    adapter to merge, or with a separate head that its config denies.
    """
    if not Path(model.path).is_dir():
        return model.path
    if not is_adapter(model.path):
        stored = AutoConfig.from_pretrained(model.path, trust_remote_code=False)
        texts = (shape.get_text_config() for shape in (model.shape, stored))
        is_tied, says_tied = (getattr(text, "tie_word_embeddings", False) for text in texts)
        if is_tied or not says_tied:
            return model.path
    return models.load_model(model.path, getattr(torch, config.model.dtype), key=model.key)


def _check_parallel(size: int, model: ModelSpec, device: torch.device) -> None:
    """Raise UserError if the model or the GPUs do not divide among `size` workers."""
    for key in ("num_attention_heads", "intermediate_size"):
        number = getattr(model.shape, key, 0)
        if number % size:
            raise UserError(
                f"vllm.tensor_parallel_size={size} must divide {key} of "
                f"{model.key}={model.path!r}, which is {number}"
            )
    index = device.index or 0
    if device.type == "cuda" and index + size > torch.cuda.device_count():
        raise UserError(
            f"vllm.tensor_parallel_size={size} takes GPUs {index} to {index + size - 1}, but this "
            f"machine has {torch.cuda.device_count()}"
        )


def _location(store: Source | None) -> str:
    """Return the location of the store for a process with another working folder."""
    if store is None:
        return ""
    return str(store.root.resolve()) if isinstance(store, WeightStore) else str(store)
