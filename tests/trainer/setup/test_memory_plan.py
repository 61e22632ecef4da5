"""The memory plan: activations counted on shapes against those of a real pass, and against the
layers' own sums; and what it refuses.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flowkernels import LossSpec
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from flowtrain.algorithms import load_algorithm
from flowtrain.config import Config
from flowtrain.records import UserError
from flowtrain.trainer import sharding
from flowtrain.trainer.attention import registration as attention
from flowtrain.trainer.attention.forest import Forest
from flowtrain.trainer.distributed import World
from flowtrain.trainer.model.fused_layers import fuse_layers, fused_text
from flowtrain.trainer.setup import memory_plan
from flowtrain.trainer.setup.learner import make_trainer
from flowtrain.trainer.setup.memory_plan import MemoryPlan, _vllm_bytes, plan_memory
from flowtrain.trainer.setup.placement import Placement
from flowtrain.trainer.setup.simulation import activations
from flowtrain.trainer.trainer import OptimSpec

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_hidden_layers": 5,
}
CONFIGS = {
    "Qwen3": Qwen3Config(**SHAPE, num_key_value_heads=4, head_dim=16),
    "Qwen3, two key heads": Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=16),
    "Qwen2": Qwen2Config(**SHAPE, num_key_value_heads=2),
    "Llama": LlamaConfig(**SHAPE, num_key_value_heads=4),
}
GROUPED = {"num_attention_heads": 28, "num_key_value_heads": 4}
NUM_TOKENS = 96
BILLION = 10**9
GB_80, GB_24 = 80 * BILLION, 24 * BILLION


def settings(**sections: dict[str, Any]) -> Config:
    """fp32, rows of 96 tokens and no reference, where nothing else is said."""
    defaults: dict[str, Any] = {"model": {"dtype": "float32"}, "algorithm": {"kl_coef": 0.0}}
    sections["train"] = {"token_budget": NUM_TOKENS, **sections.get("train", {})}
    return Config.model_validate({**defaults, **sections})


def changed(config: Config, **sections: dict[str, Any]) -> Config:
    return Config.model_validate({**config.model_dump(), **sections})


def plan(config: Config, model: Any, num_ranks: int, gpu_bytes: int = 0) -> MemoryPlan:
    """Plan with an engine for the model alone."""
    return plan_with(config, model, [model.num_parameters()], num_ranks, gpu_bytes)


def plan_with(
    config: Config,
    model: Any,
    sampled: list[int],
    num_ranks: int = 1,
    gpu_bytes: int = 0,
    size_beside: int = 0,
) -> MemoryPlan:
    return plan_memory(
        config,
        model,
        sampled,
        num_ranks=num_ranks,
        has_reference=load_algorithm(config).needs_reference,
        gpu_bytes=gpu_bytes,
        size_beside=size_beside,
    )


@pytest.fixture
def no_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting them takes a pass on shapes, longer than all else of a plan."""
    monkeypatch.setattr(memory_plan, "activations", lambda *_, **__: (30, 40))


def build(config: Any) -> Any:
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)


def with_layers(number: int) -> Qwen3Config:
    return Qwen3Config(**{**SHAPE, "num_hidden_layers": number}, num_key_value_heads=4, head_dim=16)


def kept_bytes(config: Any, fused: bool) -> int:
    """Count what autograd keeps of a real forward pass on one chain of tokens, without parameters
    and the row's own tensors.
    """
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).train()
    if fused:
        fuse_layers(model)
    forest = Forest.of(torch.full((NUM_TOKENS,), NUM_TOKENS))
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.arange(NUM_TOKENS)[None] % 64
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.get_decoder()(input_ids=ids, position_ids=ids, use_cache=False, forest=forest)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_activations_are_those_of_a_real_pass(name: str, fused: bool) -> None:
    config = CONFIGS[name]
    at_head, peak = activations(config, torch.float32, NUM_TOKENS, recompute=False, fused=fused)
    assert at_head == pytest.approx(kept_bytes(config, fused), rel=0.02)
    assert at_head < peak < 1.5 * at_head


@pytest.mark.parametrize("fused", [True, False])
def test_a_layer_of_qwen3_keeps_what_can_be_counted_by_hand(fused: bool) -> None:
    """Per token and in numbers of fp32: around each of two norms the input and the output; queries
    and keys before their norms and after rotation; values; attention's output twice, and one number
    per head; two of the MLP's width. Not fused: in each norm what is not weighted yet, and four of
    the MLP's width.
    """
    four, five = (
        activations(with_layers(num), torch.float32, NUM_TOKENS, False, fused=fused)[0]
        for num in (4, 5)
    )
    of_norms, of_mlp = (2, 2) if fused else (3, 4)
    by_hand = 4 * of_norms * 64 + 64 + 2 * 64 + 4 + of_mlp * 160
    norms = 2 + 2 * 4  # the reciprocal deviation of each
    assert (five - four) / 4 / NUM_TOKENS == pytest.approx(by_hand + norms, rel=0.01)


@pytest.mark.parametrize("off", ["fused_layers", "compile"])
def test_plan_and_trainer_agree_where_layers_are_not_fused(off: str) -> None:
    counts, alone = [], World(0, 1, torch.device("cpu"))
    for options in ({}, {off: off != "fused_layers"}):
        config = settings(train={"token_budget": 96, **options})
        model = build(CONFIGS["Qwen3"])
        counts.append(plan(config, model, 1).parts["activations"])
        place = Placement.colocated(alone)
        components: Any = SimpleNamespace(config=config, model=model, placement=place)
        trainer = make_trainer(components, loss=LossSpec(), optim=OptimSpec(lr=1.0))
        assert bool(fused_text(trainer.model)) != bool(options)
    assert counts[0] < 0.8 * counts[1]


def test_recomputing_keeps_the_inputs_of_layers_and_one_layer_whole() -> None:
    config = CONFIGS["Qwen3"]
    at_head, peak = activations(config, torch.float32, NUM_TOKENS, recompute=True)
    whole, whole_peak = activations(config, torch.float32, NUM_TOKENS, recompute=False)
    assert at_head == pytest.approx(4 * NUM_TOKENS * 64 * (config.num_hidden_layers + 3), rel=0.25)
    one_layer = whole - activations(with_layers(4), torch.float32, NUM_TOKENS, recompute=False)[0]
    assert peak == pytest.approx(at_head + one_layer + (whole_peak - whole), rel=0.15)


@pytest.mark.usefixtures("no_activations")
def test_the_head_has_all_targets_at_once_while_that_takes_no_more_than_chunks() -> None:
    """64 numbers per hidden state, 64 ids, a third of the tokens targets; chunks of 4096 rows."""
    model, dlogits, of_states = build(CONFIGS["Llama"]), 2 * 64, 2 * 2 * 64
    for num_rows, whole in ((3000, 3000), (5000, 4096 + 64)):
        at_head = dlogits * whole + of_states * num_rows
        assert memory_plan.head(model, 2, 3 * num_rows, True) == (2 * 64 * 64, at_head)
    model.requires_grad_(False)
    at_head = dlogits * 4096 + of_states * 5000
    assert memory_plan.head(model, 2, 15000, True) == (0, at_head)
    half = settings(model={"dtype": "bfloat16"}, train={"token_budget": 96})
    for gpu_bytes, factor in ((GB_80, 3), (0, 1)):
        in_plan = plan(half, model, 1, gpu_bytes).parts["head"]
        assert in_plan == factor * 32 * dlogits + 32 * of_states - 10, "10: of layers"


@pytest.mark.usefixtures("no_activations")
def test_what_is_whole_while_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(CONFIGS["Llama"])
    num, layers = model.num_parameters(), model.model.layers
    half = settings(model={"dtype": "bfloat16"}, algorithm={"kl_coef": 0.001})
    at_once = plan(half, model, 2)
    assert at_once.host == 4 * num, "the main rank reads fp32, once"
    assert at_once.loading == (4 + 2) * num // 2 + 4 * num // 2
    monkeypatch.setattr(sharding, "_SMALL", 0)
    rest = num - len(layers) * sum(p.numel() for p in layers[0].parameters())
    by_layer = plan(half, model, 2)
    assert by_layer.loading == (4 + 2) * num // 2 + 4 * max(rest, (num - rest) // 5) // 2


def test_bf16_takes_less_and_more_tokens_take_more() -> None:
    config = CONFIGS["Qwen2"]
    full, half, twice = (
        activations(config, dtype, n, False)[1]
        for dtype, n in ((torch.float32, 96), (torch.bfloat16, 96), (torch.float32, 192))
    )
    assert 0.5 * full < half < 0.8 * full and twice == pytest.approx(2 * full, rel=0.02)


@pytest.mark.usefixtures("no_activations")
def test_shares_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(CONFIGS["Llama"])
    num = model.num_parameters()
    alone = plan(settings(), model, 1).parts
    assert (alone["weights"], alone["gradients"], alone["moments"]) == (4 * num, 4 * num, 8 * num)
    assert alone["activations"] == 40, "the more of what is there at the head and in a layer"
    assert (alone["reference"], alone["gathered"]) == (0, 0)
    assert (alone["published"], alone["engine"]) == (4 * num, 4 * num)
    two = settings(model={"dtype": "bfloat16"}, algorithm={"kl_coef": 0.001})
    whole = plan(two, model, 2).parts
    assert (whole["weights"], whole["moments"]) == (2 * num, 4 * num)
    assert (whole["reference"], whole["gathered"]) == (num, 2 * num)
    assert (whole["published"], whole["engine"]) == (num, 2 * num)
    monkeypatch.setattr(sharding, "_SMALL", 0)
    layers = plan(two, model, 2).parts
    num_layer = sum(p.numel() for p in model.model.layers[0].parameters())
    assert layers["gathered"] == 2 * (num - 3 * num_layer)
    kept = plan(changed(two, train={"token_budget": 96, "reshard": False}), model, 2).parts
    assert kept["gathered"] == 2 * num
    away = plan(changed(two, train={"token_budget": 96, "offload": "all"}), model, 2, GB_80).parts
    gone = ("weights", "gradients", "moments", "reference", "published")
    assert not any(away[name] for name in gone)
    assert away["gathered"] == layers["gathered"] and away["activations"] == layers["activations"]


BYTES = {
    "adamw": (4, 8),
    "adamw_8bit": (4, 2.03125),
    "adamw_bf16_sr": (2, 4),
}


@pytest.mark.usefixtures("no_activations")
@pytest.mark.parametrize("optimizer", BYTES)
def test_bytes_of_each_optimizer(optimizer: str) -> None:
    model = build(CONFIGS["Llama"])
    num = model.num_parameters()
    for_each, of_moments = BYTES[optimizer]
    half = settings(model={"dtype": "bfloat16"}, train={"optimizer": optimizer})
    parts = plan(half, model, 2, GB_80).parts
    assert parts["weights"] == parts["gradients"] == for_each * num // 2
    assert parts["moments"] == round(of_moments * (num // 2))


@pytest.mark.usefixtures("no_activations")
def test_what_stays_on_the_cpu_takes_nothing_of_the_gpu() -> None:
    model = build(CONFIGS["Llama"])
    config = settings(model={"dtype": "bfloat16"}, algorithm={"kl_coef": 0.001})
    offload = changed(config, train={"token_budget": NUM_TOKENS, "offload": "frozen"})
    before, after = (plan(each, model, 1, GB_80).parts for each in (config, offload))
    assert before["reference"] == before["published"] == 2 * model.num_parameters()
    assert {**before, "reference": 0, "published": 0} == after
    on_a_cpu = plan(offload, model, 1).parts
    assert on_a_cpu["reference"] == on_a_cpu["published"] == before["published"], "its own memory"


@pytest.mark.usefixtures("no_activations")
def test_ranks_that_only_train_have_no_engine() -> None:
    model = build(CONFIGS["Llama"])
    assert plan(settings(rollout={"num_engine_ranks": 1}), model, 1).parts["engine"] == 0
    apart = settings(rollout={"engine": "vllm", "num_engine_ranks": 1})
    assert plan(apart, model, 1, GB_80).vllm == 0


@pytest.mark.usefixtures("no_activations")
def test_every_policy_that_is_sampled_from_has_an_engine() -> None:
    model = build(CONFIGS["Llama"])
    assert plan_with(settings(), model, [1000, 10], 1).parts["engine"] == 4 * 1010
    assert plan_with(settings(), model, [], 1).parts["engine"] == 0
    half = settings(rollout={"engine": "vllm"}, vllm={"gpu_memory_utilization": 0.25})
    assert plan_with(half, model, [1000, 10], 1, GB_80).vllm == 40 * BILLION
    cached = settings(rollout={"engine": "vllm"}, vllm={"kv_cache_gb": 2.0})
    assert plan_with(cached, model, [1000, 10], 1, GB_80).vllm == 4 * 1010 + 4 * 2**30


@pytest.mark.usefixtures("no_activations")
def test_of_a_policy_that_is_trained_beside_stays_what_a_step_leaves() -> None:
    model, options = build(CONFIGS["Llama"]), settings(algorithm={"kl_coef": 0.1})
    alone = plan(options, model, 1).parts
    assert alone["beside"] == 0 < min(alone["reference"], alone["moments"])
    both = plan_with(options, model, [], size_beside=2 * model.num_parameters()).parts
    kept = ("weights", "moments", "reference", "published")
    assert both["beside"] == 2 * sum(both[name] for name in kept)


@pytest.mark.usefixtures("no_activations")
def test_a_reference_that_places_branches_counts_too() -> None:
    branching = settings(algorithm={"name": "appo", "kl_coef": 0.0}, appo={"omega": "reference"})
    found = plan(branching, build(CONFIGS["Llama"]), 1)
    assert found.parts["reference"] == found.parts["weights"] > 0


def test_the_plan_is_told_in_a_line() -> None:
    found = plan(settings(train={"token_budget": 4096}), build(CONFIGS["Llama"]), 1)
    assert found.num_bytes == sum(found.parts.values())
    assert found.text().startswith(
        f"memory of a rank at the peak of a step, predicted: {found.num_bytes / 1e9:.3g} to "
        f"{1.5 * found.num_bytes / 1e9:.3g} GB (activations "
    )
    on_gpu = replace(found, gpu_bytes=80 * BILLION).text()
    assert f"predicted: {found.num_bytes / 1e9:.3g} GB (activations " in on_gpu
    assert "reference" not in found.text() and "with train.token_budget = 4096" in found.text()


@pytest.mark.usefixtures("no_activations")
def test_what_a_pass_moves_between_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer at a time, weights come twice; gradients, in fp32, once."""
    model, config = build(CONFIGS["Llama"]), settings(model={"dtype": "bfloat16"})
    num = model.num_parameters()
    for small, gathers in ((num, 1), (0, 2)):
        monkeypatch.setattr(sharding, "_SMALL", small)
        alone, four = (plan(config, model, ranks) for ranks in (1, 4))
        assert alone.moved == 0 and "receives" not in alone.text()
        assert four.moved == (2 * gathers + 4) * num * 3 // 4
        assert four.text().endswith(f"receives {four.moved / 1e9:.3g} GB from other ranks")


@pytest.mark.usefixtures("no_activations")
def test_an_open_path_has_room_beside_a_pass() -> None:
    """As long as a pass is, or as a sample may be."""
    config, model = settings(train={"token_budget": 64}), build(CONFIGS["Llama"])
    found = plan(config, model, 1, gpu_bytes=BILLION)
    for longest, tokens in ((0, 64), (100, 100), (10, 64)):
        own = changed(config, vllm={"max_model_len": longest})
        bare = replace(found, path=0).room(own, 0)
        assert bare - found.room(own, 0) == found.path * tokens > 0
    text = found.text()
    assert f"; {found.path / 1e3:.3g} kB a token of the open path of a larger tree" in text


def test_small_parts_are_told_as_one_number() -> None:
    small = dict.fromkeys(("weights", "gradients", "published", "engine"), 1_530_000)
    found = MemoryPlan(small | {"activations": BILLION}, 0, 0, 1_530_000, 1_530_000, 512)
    assert found.text() == (
        "memory of a rank at the peak of a step, predicted: 1.01 to 1.51 GB (activations 1, the "
        "rest 0.00612) with train.token_budget = 512"
    )
    large = replace(found, loading=BILLION, host=2 * BILLION).text()
    assert large.endswith("= 512; 1 GB while it loads; 2 GB of the main rank's host")


# ---- what is sure not to fit


@pytest.mark.parametrize(
    ("vllm", "expected"),
    [
        ({"gpu_memory_utilization": 0.25}, 20 * BILLION),
        ({"kv_cache_gb": 10.0}, 2 * 1000 + 10 * 2**30),
        ({"kv_cache_gb": 10.0, "tensor_parallel_size": 2}, 1000 + 10 * 2**30),
    ],
)
def test_what_vllm_takes_of_the_gpu(vllm: dict[str, Any], expected: int) -> None:
    options = settings(rollout={"engine": "vllm"}, vllm=vllm)
    assert _vllm_bytes(options, 2000, GB_80) == expected


@pytest.mark.parametrize(
    ("num_ranks", "gpu_bytes", "options", "fits"),
    [
        (8, GB_80, {"vllm": {"gpu_memory_utilization": 0.4}}, True),
        (4, GB_80, {"rollout": {"engine": "vllm", "num_engine_ranks": 4}}, True),
        (1, GB_80, {"vllm": {"gpu_memory_utilization": 0.4}}, False),
        (1, GB_80, {"vllm": {"gpu_memory_utilization": 0.4}, "train": {"offload": "all"}}, True),
    ],
)
def test_the_shipped_configs_fit_where_their_comments_say(
    num_ranks: int, gpu_bytes: int, options: dict[str, Any], fits: bool
) -> None:
    with torch.device("meta"):
        shape = {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944}
        model = build(Qwen2Config(**shape, num_hidden_layers=28, **GROUPED))
    assert model.num_parameters() == pytest.approx(7.6e9, rel=0.01)
    config = settings(
        **{
            "model": {"dtype": "bfloat16"},
            "algorithm": {"kl_coef": 0.001},
            "rollout": {"engine": "vllm"},
            **options,
        }
    )
    with (
        contextlib.nullcontext()
        if fits
        else pytest.raises(UserError, match="before any activation")
    ):
        plan(config, model, num_ranks, gpu_bytes).check(config)


SURE = {"weights": 8, "gradients": 8, "moments": 16, "reference": 4, "published": 2}
SURE |= {"engine": 2, "beside": 1}
"""GB"""


@pytest.mark.parametrize(
    ("vllm", "sleeps", "needed"), [(0, False, 41), (5, False, 46), (5, True, 41), (12, True, 45)]
)
def test_what_is_needed_for_sure_is_compared_to_the_byte(
    vllm: int, sleeps: bool, needed: int
) -> None:
    """The parts that depend on the length of rows do not count; a vLLM that sleeps and the
    gradients are never there at the same time.
    """
    parts = {
        **{name: number * BILLION for name, number in SURE.items()},
        "gathered": 7 * BILLION,
        "activations": BILLION,
        "head": 1,
    }
    config = settings(rollout={"engine": "vllm"}, vllm={"sleep": sleeps})
    MemoryPlan(parts, vllm * BILLION, needed * BILLION).check(config)
    MemoryPlan(parts, vllm * BILLION, 0).check(config)  # no GPU, nothing to compare with
    with pytest.raises(UserError):
        MemoryPlan(parts, vllm * BILLION, needed * BILLION - 1).check(config)


def test_a_model_that_fits_in_a_step_and_not_while_it_loads_is_refused() -> None:
    """Beside a vLLM that only sleeps later."""
    parts = {name: number * BILLION for name, number in SURE.items()}
    config = settings(rollout={"engine": "vllm"}, vllm={"sleep": True})
    plan = MemoryPlan(parts, 8 * BILLION, 41 * BILLION, loading=33 * BILLION)
    plan.check(config)
    with pytest.raises(
        UserError, match=r"takes 33\.1 GB while the model is loaded, beside vLLM's 8:"
    ):
        MemoryPlan(parts, 8 * BILLION, 41 * BILLION, loading=33_100_000_000).check(config)


def test_a_refusal_names_the_numbers_the_keys_and_the_cures() -> None:
    parts = {
        **{name: number * BILLION for name, number in SURE.items()},
        "engine": 0,
        "beside": 0,
        "activations": BILLION,
    }
    config = settings(
        rollout={"engine": "vllm"},
        algorithm={"kl_coef": 0.001},
        vllm={"gpu_memory_utilization": 0.5},
    )
    with pytest.raises(UserError) as refusal:
        MemoryPlan(parts, 12 * BILLION, GB_24).check(config)
    assert str(refusal.value) == (
        "the GPU of a rank has 24 GB and training needs 50 GB before any activation (weights 8, "
        "gradients 8, moments 16, reference 4, "
        "published 2, vLLM 12): start more ranks, or algorithm.kl_coef = 0, or train.optimizer = "
        "'adamw_8bit', or train.offload = 'frozen', or train.offload = 'all', "
        "or vllm.gpu_memory_utilization < 0.5, or vllm.sleep = true"
    )
    with pytest.raises(UserError, match=r"or vllm.kv_cache_gb < 9.0, or vllm.sleep = true$"):
        MemoryPlan(parts, 12 * BILLION, GB_24).check(changed(config, vllm={"kv_cache_gb": 9.0}))
    done = settings(train={"optimizer": "adamw_8bit", "offload": "frozen"})
    with pytest.raises(UserError, match=r": start more ranks, or train.offload = 'all'$"):
        MemoryPlan(parts, 0, GB_24).check(done)
