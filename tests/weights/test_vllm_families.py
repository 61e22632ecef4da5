"""Mixtures of experts, windows and sinks in real vLLM on a CPU: words of each version, and the
memory of a model that vLLM has loaded afresh.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import is_torchvision_available
from vllm_in_process import SMALL, change, engines, in_process

from flowtrain.inference.vllm import layouts
from flowtrain.records import Sampling, UserError
from flowtrain.trainer.attention import registration as attention
from flowtrain.trainer.loss import score_row
from flowtrain.trainer.model import delta_net, experts
from flowtrain.trainer.packing import pack_rows
from flowtrain.weights import Publisher, WeightStore

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRID: dict[str, Any] = {
    "layer_types": ["full_attention", "linear_attention"],
    "mlp_only_layers": [0],
    "head_dim": 64,
    **{f"linear_num_{name}_heads": 2 for name in ("key", "value")},
    **{f"linear_{name}_head_dim": 64 for name in ("key", "value")},
}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 32}
FAMILIES: dict[str, tuple[dict[str, Any], torch.dtype, list[str]]] = {
    "qwen3_moe": (EXPERTS, torch.float32, []),
    "olmoe": (EXPERTS | {"num_attention_heads": 2, "intermediate_size": 32}, torch.bfloat16, []),
    "glm4_moe": (
        EXPERTS | {"n_routed_experts": 8, "first_k_dense_replace": 1},
        torch.bfloat16,
        ["mlp.gate.weight"],
    ),
    "gpt_oss": (
        EXPERTS | {"num_local_experts": 8, "intermediate_size": 32, "sliding_window": 16},
        torch.bfloat16,
        ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"],
    ),
    "gemma3_text": ({"sliding_window": 16}, torch.bfloat16, []),
    "qwen3_next": (HYBRID | SHARED, torch.bfloat16, ["linear_attn.A_log"]),
    "qwen3_5_text": (HYBRID, torch.bfloat16, ["linear_attn.A_log"]),
    "qwen3_5_moe_text": (HYBRID | SHARED, torch.bfloat16, ["linear_attn.A_log"]),
    "mistral": ({"sliding_window": 16}, torch.bfloat16, []),
}
"""Sizes, the sampler's dtype, and names of tensors that vLLM's loader writes whole."""
HYBRIDS = [name for name, (sizes, *_) in FAMILIES.items() if "layer_types" in sizes]


@pytest.fixture(autouse=True, scope="module")
def vllm_here() -> Iterator[None]:
    with in_process():
        take_qwen3_5()
        yield


@pytest.fixture
def open_engine() -> Iterator[Any]:
    with engines() as make:
        yield make


def take_qwen3_5() -> None:
    """Import vLLM's Qwen3.5 where torchvision is missing: its vision part takes one function from a
    module that needs it, and transformers has the same function in another.
    """
    parent = "transformers.models.qwen2_vl.image_processing"
    with pytest.MonkeyPatch.context() as patch:
        if not is_torchvision_available():
            other = importlib.import_module(f"{parent}_pil_qwen2_vl")
            patch.setitem(sys.modules, f"{parent}_qwen2_vl", other)
        from vllm.model_executor.models import qwen3_5
    from vllm import ModelRegistry

    for kind in (qwen3_5.Qwen3_5ForCausalLM, qwen3_5.Qwen3_5MoeForCausalLM):
        # Where a class is given, no other process looks at its module.
        ModelRegistry.register_model(kind.__name__, kind)


def new_model(family: str, sizes: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**SMALL, **sizes})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for tensor in weights_of(model).values():
            if tensor.dim() == 1 or not tensor.any():  # zeros and ones hide where they go
                tensor.add_(torch.randn_like(tensor) * 0.1)
    return model


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """As they are published: experts stacked, and buffers, too."""
    tied = model._tied_weights_keys or {} if model.config.tie_word_embeddings else {}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


@pytest.mark.parametrize("family", FAMILIES)
def test_versions_leave_the_memory_of_a_fresh_load(
    store: WeightStore, tmp_path: Path, open_engine: Any, family: str
) -> None:
    sizes, dtype, dense = FAMILIES[family]
    model, publisher = new_model(family, sizes, dtype), Publisher(store)
    model.save_pretrained(tmp_path / "0")
    publisher.publish(weights_of(model), 1)
    engine = open_engine(tmp_path / "0", model.dtype)
    before = engine.rpc("compute_weight_checksums")
    engine.connect(store)
    assert engine.rpc("compute_weight_checksums") == before, "what proved the plan was put back"
    written_whole = engine.transfer.sharded.plan.dense
    assert {name.split(".", 3)[3] for name in written_whole if ".1." in name} == {*dense}
    for version in range(1, 4):
        if version > 1:
            change(model, version)
            publisher.publish(weights_of(model), version)
        engine.update(version)
        assert engine.holds(store, version)
        tokens = engine.greedy(version)
    held = engine.rpc("compute_weight_checksums")
    assert engine.rpc("held_weights")["mode"] == "delta"
    model.save_pretrained(tmp_path / "3")
    fresh = open_engine(tmp_path / "3", model.dtype)
    assert fresh.rpc("compute_weight_checksums") == held != before
    assert fresh.greedy(3) == tokens


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_hybrid_samples_what_the_trainer_computes(
    store: WeightStore, tmp_path: Path, open_engine: Any, family: str
) -> None:
    """A version that came as a delta, in bf16: the sampler's log-probs, the trainer's through token
    trees, and fp32's.
    """
    model, publisher = new_model(family, *FAMILIES[family][:2]), Publisher(store)
    model.save_pretrained(tmp_path / "0")
    publisher.publish(weights_of(model), 1)
    engine = open_engine(tmp_path / "0", model.dtype)
    engine.connect(store)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(tensor.flip(0) if "conv1d" in name else tensor)
    publisher.publish(weights_of(model), 2)
    engine.update(2)
    samples = engine.sample(Sampling(16, 1.0), 24, version=2)
    model.set_attn_implementation(attention.NAME)
    experts.equip(model)
    delta_net.equip(model)
    (row,) = pack_rows(samples, 1)
    trainer_T = score_row(model, row, 1.0).logprob_T
    exact_T = score_row(model.float(), row, 1.0).logprob_T
    off_T, noise_T = (exact_T - other_T for other_T in (row.sampler_logprob_T, trainer_T))
    assert off_T.abs().mean() < 2 * noise_T.abs().mean() < 0.1 * exact_T.std()


def test_a_weight_that_vllm_repacks_is_refused(
    store: WeightStore, tmp_path: Path, open_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A convolution, where its kernels cannot read plain words: its loader writes it as any other,
    and its words are read in another order.
    """
    from vllm.model_executor.layers import utils

    def pack(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear
        if layer.weight.dim() == 3:
            layer.weight.data = layer.weight.data.flip(0)

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", pack)
    model = new_model("qwen3_next", *FAMILIES["qwen3_next"][:2])
    model.save_pretrained(tmp_path / "0")
    Publisher(store).publish(weights_of(model), 1)
    engine = open_engine(tmp_path / "0", model.dtype)
    with pytest.raises(UserError, match=r"linear_attn\.conv1d\.weight': vLLM rearranges it after"):
        engine.connect(store)


def test_sinks_that_attention_reads_from_a_copy_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As FlashInfer's does."""
    layer = torch.nn.Module()
    layer.sinks = torch.nn.Parameter(torch.zeros(4))
    layer.attn = torch.nn.Module()
    layer.attn.impl = SimpleNamespace(sinks=layer.sinks.data)
    with pytest.raises(UserError, match="has not seen how vLLM loaded this model"):
        layouts.refuse_rearranged(layer)
    monkeypatch.setitem(layouts._rearranged, layer, [])
    layouts.refuse_rearranged(layer)
    layer.attn.impl.sinks = layer.sinks.double()
    with pytest.raises(UserError, match="'attn': its attention computes with a copy of the sinks"):
        layouts.refuse_rearranged(layer)


def test_routes_outlast_chunks_preemption_and_hits_of_the_cache(
    tmp_path: Path, open_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are read in parts, and the cache has room for half of the responses."""
    from vllm import SamplingParams

    from flowtrain.inference.vllm.routes import RouteTable

    model = new_model("qwen3_moe", EXPERTS, torch.float32)
    model.save_pretrained(tmp_path / "0")
    options = {"block_size": 32, "num_gpu_blocks_override": 9, "max_num_batched_tokens": 24}
    engine = open_engine(tmp_path / "0", model.dtype, enable_chunked_prefill=True, **options)
    core = engine.llm.llm_engine.engine_core.engine_core
    table = RouteTable(core.model_executor.driver_worker.worker.model_runner)
    preempt, preempted = core.scheduler._preempt_request, []

    def noted(request: Any, *arguments: Any, **options: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *arguments, **options)

    monkeypatch.setattr(core.scheduler, "_preempt_request", noted)

    def check(prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], int]:
        sampling = SamplingParams(
            max_tokens=num_tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs, whole = engine.llm.generate(asked, sampling, use_tqdm=False), []
        for prompt, output in zip(prompts, outputs, strict=True):
            whole.append([*prompt, *output.outputs[0].token_ids])
            num_read = len(whole[-1]) - 1
            experts = table.take(output.request_id.partition("-")[0], num_read)
            assert experts is not None
            found = torch.frombuffer(bytearray(experts), dtype=torch.uint8).view(num_read, 2, 2)
            with torch.no_grad():
                out = model(torch.tensor([whole[-1][:-1]]), output_router_logits=True)
            expected = torch.stack([each.topk(2).indices for each in out.router_logits], 1)
            assert torch.equal(found.long().sort(-1).values, expected.sort(-1).values)
        return whole, sum(output.num_cached_tokens for output in outputs)

    whole, _ = check([[*range(i, i + 30)] for i in range(0, 240, 30)], 30)
    assert preempted
    _, num_cached = check(whole[-1:], 2)
    assert num_cached >= 32
    assert table.take("0", 1) is None, "taken once"
    preempted.clear()
    sampling = SamplingParams(max_tokens=30, ignore_eos=True, detokenize=False)
    for i in range(8):
        prompt = {"prompt_token_ids": [*range(30 * i, 30 * i + 30)]}
        engine.llm.llm_engine.add_request(f"late{i}", prompt, sampling)
    while not preempted:
        engine.llm.llm_engine.step()
    lost = preempted[0].partition("-")[0]
    assert table.take(lost, 30) is None, "its blocks may belong to another"
    assert table.take("late0" if lost != "late0" else "late1", 30) is not None
    engine.llm.llm_engine.abort_request([f"late{i}" for i in range(8)])
