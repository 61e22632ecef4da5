"""Model families, tiny and with random weights: log-probs of one packed tree against transformers
on the samples one by one, in fp32:  python -m bench.families [--json F]

The tree has five samples of 25 to 37 tokens, which share prompts and turns. Both sides run the same
weights; transformers takes its own attention and loops over experts (eager). A family that the
check of configs refuses is listed with the reason, in the words of the message.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from bench.measure import new_parser, report
from flowtrain.records import Sample, UserError
from flowtrain.trainer.attention import registration as attention
from flowtrain.trainer.loss import equip, fused_head, score_row
from flowtrain.trainer.model import delta_net, experts
from flowtrain.trainer.model.check import check_config
from flowtrain.trainer.model.fused_layers import fuse_layers, fused_text
from flowtrain.trainer.packing import pack_row

VOCAB = 100
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS_OF_8 = {"head_dim": 8}
_FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_FEW_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_UPPER_WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
_HYBRID = {
    **_HEADS_OF_8,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
TRAINED: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": _WINDOWS,
    "cwm": _HEADS_OF_8 | _WINDOWS,
    "deepseek_v3": {
        **_LATENT,
        **_FEW_ROUTED,
        "n_group": 2,
        "topk_group": 1,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
    },
    "ernie4_5": _HEADS_OF_8,
    "exaone4": _WINDOWS,
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "gemma": _HEADS_OF_8,
    "gemma3_text": _HEADS_OF_8 | _WINDOWS,
    "glm": _HEADS_OF_8,
    "glm4": _HEADS_OF_8,
    "glm4_moe": {**_HEADS_OF_8, **_FEW_ROUTED, "num_hidden_layers": 3},  # the first is dense
    "glm4_moe_lite": {**_LATENT, **_FEW_ROUTED, "num_hidden_layers": 3},
    "gpt_neox": {},
    "gpt_oss": {
        **_HEADS_OF_8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    },
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.2, "embedding_multiplier": 3.0},
    "granite_swa": _HEADS_OF_8 | _WINDOWS,
    "helium": _HEADS_OF_8,
    "hunyuan_v1_dense": _HEADS_OF_8,
    "llama": {},
    "minicpm3": _LATENT,
    "ministral": _HEADS_OF_8 | _WINDOWS,
    "ministral3": _HEADS_OF_8 | {"sliding_window": 8},
    "mistral": {"sliding_window": 8},
    "mixtral": {"num_local_experts": 4},
    "nanochat": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": _WINDOWS,
    "olmo_hybrid": {**_HYBRID, "linear_num_value_heads": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "persimmon": {},
    "phi": {},
    "phi3": {"sliding_window": 8},
    "qwen2": _UPPER_WINDOWS,
    "qwen2_moe": {**_FEW_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3": _HEADS_OF_8 | _UPPER_WINDOWS,
    "qwen3_5_moe_text": {**_HYBRID, **_FEW_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": _HYBRID,
    "qwen3_moe": {**_HEADS_OF_8, **_FEW_EXPERTS},
    "qwen3_next": {**_HYBRID, **_FEW_EXPERTS, "shared_expert_intermediate_size": 16},
    "seed_oss": _HEADS_OF_8,
    "smollm3": {"num_hidden_layers": 4},  # the fourth has no positions
    "solar_open": {**_HEADS_OF_8, **_FEW_ROUTED},
    "starcoder2": {"sliding_window": 8},
}
"""`model_type` of the families that train, and what their tiny configs need beside `SHAPE`."""
REFUSED: dict[str, dict[str, Any]] = {
    "bert": {},
    "bloom": {},
    "dbrx": {},
    "falcon": {},
    "gemma2": {},
    "gemma3": {},
    "gemma4_text": {"num_kv_shared_layers": 0},
    "gpt2": {},
    "granitemoe": {},
    "jamba": {},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "moshi": {"sliding_window": 8},
    "nemotron": {},
    "phi3": {
        "max_position_embeddings": 64,
        "original_max_position_embeddings": 32,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
        },
    },
    "qwen2_5_vl": {},
    "stablelm": {},
    "t5": {},
}
"""Families that are refused, with the config that the check is shown."""


def config_of(family: str, options: dict[str, Any]) -> PreTrainedConfig:
    """Make the tiny config of a family, or where that has no use for our shape, its own default."""
    kind = CONFIG_MAPPING[family]
    try:
        return kind(**{**SHAPE, **options})
    except (TypeError, ValueError):
        return kind(**options)


def build(config: PreTrainedConfig) -> PreTrainedModel:
    """A model with transformers' own attention, and weights large enough that all of it counts."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(0.05 * torch.randn_like(weight))
            else:
                weight.normal_(0, 0.25)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model


def samples() -> list[Sample]:
    """Three continuations of one prompt, two of which share their beginning; a second turn of that
    beginning; and another prompt.
    """
    rng = torch.Generator().manual_seed(0)

    def ids(number: int) -> tuple[int, ...]:
        return tuple(torch.randint(5, VOCAB - 5, (number,), generator=rng).tolist())

    def sample(prompt: tuple[int, ...], response: tuple[int, ...]) -> Sample:
        ones = (1.0,) * len(response)
        return Sample(prompt, response, (-1.0,) * len(response), ones, ones)

    prompt, start = ids(20), ids(8)
    return [
        sample(prompt, start + ids(7)),
        sample(prompt, start + ids(5)),
        sample(prompt, ids(9)),
        sample(prompt + start + ids(3), ids(6)),
        sample(ids(15), ids(10)),
    ]


@torch.no_grad()
def one_by_one(model: PreTrainedModel, each: Sample) -> Tensor:
    """transformers' log-probs of a sample's response."""
    ids = torch.tensor(each.prompt_ids + each.response_ids)
    logprob_NV = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
    first = len(each.prompt_ids)
    return logprob_NV[first - 1 : -1].gather(1, ids[first:, None])[:, 0]


@torch.no_grad()
def in_a_tree(model: PreTrainedModel, every: Sequence[Sample]) -> list[Tensor]:
    """Our log-probs of the samples in one row, by a model that is `equip`ped for it."""
    row = pack_row(every)
    lengths = [len(sample.response_ids) for sample in every]
    return list(score_row(model, row, 1.0).logprob_T.split(lengths))


def parity(config: PreTrainedConfig) -> dict[str, Any]:
    """The largest difference of a log-prob in nats, beside how far log-probs spread."""
    model, every = build(config), samples()
    truth = torch.cat([one_by_one(model, each) for each in every])
    model.set_attn_implementation(attention.NAME)
    equip(model)
    experts.equip(model)
    delta_net.equip(model)
    fuse_layers(model)
    ours = torch.cat(in_a_tree(model, every))
    return {
        "largest_difference": float((ours - truth).abs().max()),
        "std_of_logprobs": float(truth.std()),
        "linear_loss": fused_head(model) is not None,
        "fused": fused_text(model),
    }


def refusal(config: PreTrainedConfig) -> str:
    """The message of the check without the path; "" where it has none."""
    try:
        check_config(config, "PATH")
    except UserError as error:
        return str(error).removeprefix("model.path='PATH' ")
    return ""


def main() -> None:
    args = new_parser(__doc__).parse_args()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)

    def trained() -> Iterator[dict[str, Any]]:
        for family, options in TRAINED.items():
            config = config_of(family, options)
            assert not (found := refusal(config)), f"{family}: {found}"
            yield {"family": family, **parity(config)}

    refused = (
        {"family": family, "refused": refusal(config_of(family, options))}
        for family, options in REFUSED.items()
    )
    report(args.json, trained(), refused)


if __name__ == "__main__":
    main()
