"""Mixtures of experts: a tree is its samples one by one, whoever chose the experts."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import sampled
from flowkernels import LossSpec, policy_loss
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import fork, launch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from bench.families import build, config_of
from flowtrain.config import Lora
from flowtrain.inference.torch_engine import TorchEngine
from flowtrain.records import Routes, Sample, UserError
from flowtrain.records.checks import routes_problem
from flowtrain.trainer import sharding
from flowtrain.trainer.attention import registration as attention
from flowtrain.trainer.attention.flex import padded
from flowtrain.trainer.cost import ForwardCost
from flowtrain.trainer.distributed import World
from flowtrain.trainer.loss import equip, row_loss, score_row
from flowtrain.trainer.model import experts
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.model.lora import add_adapter
from flowtrain.trainer.packing import PackedRow, pack_row, pack_rows
from flowtrain.trainer.setup import simulation
from flowtrain.trainer.setup.simulation import activations
from flowtrain.trainer.step_metrics import StepMetrics
from flowtrain.trainer.trainer import OptimSpec, Trainer
from flowtrain.utils.commands import end_process
from flowtrain.weights import Publisher, PublishOptions, WeightStore

_FEW = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_FEW, "norm_topk_prob": True},
    "olmoe": {**_FEW, "num_experts_per_tok": 3},
    "glm4_moe": {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.7,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
        "head_dim": 8,
    },
    "gpt_oss": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "sliding_window": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
"""Tiny configs; all have two layers with a router."""
LAYERS = 2
ROUTER = ("mlp.gate.weight", "mlp.router.weight")


def config(family: str, **more: Any) -> PreTrainedConfig:
    return config_of(family, FAMILIES[family] | more)


def trained(config: PreTrainedConfig) -> PreTrainedModel:
    """The model as it is trained, with attention over trees, and routers that replay."""
    model = _biased(build(config))
    model.set_attn_implementation(attention.NAME)
    equip(model)
    experts.equip(model)
    return model.train()


def _biased(model: PreTrainedModel) -> PreTrainedModel:
    rng = torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=rng))
    return model


def sample(prompt: Sequence[int], response: Sequence[int], seed: int = 0) -> Sample:
    rng = torch.Generator().manual_seed(seed)
    num = len(response)
    logprobs = (-4.6 + 0.2 * torch.randn(num, generator=rng)).tolist()
    advantages = torch.randn(num, generator=rng).tolist()
    return Sample(
        tuple(prompt), tuple(response), tuple(logprobs), tuple(advantages), (0.5 + seed,) * num
    )


def routed(samples: Sequence[Sample], num_experts: int, num_chosen: int) -> list[Sample]:
    """Give samples experts at random, the same where they begin alike."""

    def experts_of(path: tuple[int, ...]) -> list[int]:
        seed = int.from_bytes(hashlib.sha256(repr(path).encode()).digest()[:4])
        rng = torch.Generator().manual_seed(seed)
        layers = [torch.randperm(num_experts, generator=rng)[:num_chosen] for _ in range(LAYERS)]
        return torch.cat(layers).tolist()

    found = []
    for each in samples:
        ids = each.prompt_ids + each.response_ids[:-1]
        words = [x for end in range(1, len(ids) + 1) for x in experts_of(ids[:end])]
        found.append(replace(each, routes=Routes(bytes(words), LAYERS, num_chosen)))
    return found


ids = st.lists(st.integers(3, 5), min_size=1, max_size=6)
trees = st.lists(st.tuples(ids, ids), min_size=1, max_size=5)


# ---- the truth: transformers' eager experts and attention, a sample at a time


def one_by_one(
    model: PreTrainedModel, samples: Sequence[Sample], form: experts.Form
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients; samples with routes are read along them."""
    given: list[Tensor] = []

    def follow(router: Any, inputs: Any, out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not given:
            return out
        chosen = given.pop(0)
        scores = out[0].float()
        if form.score == "softmax of chosen":
            weights = scores.gather(1, chosen).softmax(-1)
        else:
            scores = scores.softmax(-1) if form.score == "softmax" else scores.sigmoid()
            weights = scores.gather(1, chosen)
            if router.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            weights = weights * getattr(router, "routed_scaling_factor", 1.0)
        return out[0], weights, chosen

    hooks = [r.register_forward_hook(follow) for r in experts.find_routers(model)]
    total = torch.zeros(())
    for each in samples:
        row = pack_row([each])
        if each.routes is not None:
            words = torch.tensor(list(each.routes.experts)).view(-1, LAYERS, each.routes.num_chosen)
            given[:] = words.unbind(1)
        logits = model(input_ids=row.input_ids_N[None], use_cache=False).logits[0]
        total = (
            total
            + policy_loss(
                logits[row.target_row_T],
                row.target_ids_T,
                spec=LossSpec(),
                advantage_T=row.advantage_T,
                weight_T=row.loss_weight_T,
                old_logprob_T=row.old_logprob_T,
            ).loss
        )
    total = total / sum(sum(each.loss_weights) for each in samples)
    total.backward()
    for hook in hooks:
        hook.remove()
    return total.item(), gradients(model)


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def in_rows(model: PreTrainedModel, rows: Sequence[PackedRow]) -> tuple[float, dict[str, Tensor]]:
    total, scale = 0.0, 1 / sum(float(row.loss_weight_T.sum()) for row in rows)
    for row in rows:
        with experts.replaying(model, row.routes_NLC):
            loss = row_loss(model, row, LossSpec(), scale, 1.0).loss
            loss.backward()
        total += loss.item()
    return total, gradients(model)


def in_walk(model: PreTrainedModel, row: PackedRow, budget: int) -> tuple[float, dict[str, Tensor]]:
    world = World(0, 1, torch.device("cpu"))
    trainer = Trainer(model, world, LossSpec(), OptimSpec(lr=1.0), token_budget=budget)
    loss = trainer.forward_backward([row], float(row.loss_weight_T.sum()), StepMetrics())
    return loss.item(), gradients(model)


def assert_equal(ours: tuple[float, dict], truth: tuple[float, dict]) -> None:
    assert ours[0] == pytest.approx(truth[0], rel=1e-5, abs=1e-5)
    assert ours[1].keys() == truth[1].keys()
    largest = max(float(g.abs().max()) for g in truth[1].values())
    for name, gradient in truth[1].items():
        difference = float((ours[1][name] - gradient).abs().max())
        assert difference <= 1e-5 * max(1.0, largest), name


MODELS: dict[str, tuple[PreTrainedModel, PreTrainedModel]] = {}


def both(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """(ours, transformers')"""
    if family not in MODELS:
        MODELS[family] = trained(config(family)), _biased(build(config(family)))
        MODELS[family][1].set_experts_implementation("eager")
    return MODELS[family]


@pytest.mark.parametrize("is_replayed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shapes=trees)
def test_a_tree_is_its_samples_one_by_one(
    family: str, is_replayed: bool, shapes: list[tuple[list[int], list[int]]]
) -> None:
    """Loss and all gradients; replayed routes are none that a router would choose."""
    ours, plain = both(family)
    form = experts.routers(ours)[0].form
    samples = [sample(*shape, seed) for seed, shape in enumerate(shapes)]
    if is_replayed:
        samples = routed(samples, form.num_experts, form.num_chosen)
    truth = one_by_one(plain, samples, form)
    assert_equal(in_rows(ours, [pack_row(samples)]), truth)
    assert_equal(in_walk(ours, pack_row(samples), 3), truth)
    assert_equal(in_rows(ours, pack_rows(samples, 4)), truth)
    assert_equal(in_rows(ours, [pack_row(samples, share=False)]), truth)


# ---- replay


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_replay_of_a_pass_s_own_routes_changes_no_bit(
    family: str, dtype: torch.dtype, recompute: bool
) -> None:
    model = trained(config(family)).to(dtype)
    if recompute:
        sharding.recompute_layers(model)
    row = pack_row([sample((3, 4, 5, 6), (7, 8, 9)), sample((3, 4, 5), (8, 8)), sample((9,), (3,))])
    loss, own = in_rows(model, [row])
    found = experts.chosen(experts.routers(model))
    assert found.dtype == torch.uint8
    replayed_loss, replayed = in_rows(model, [replace(row, routes_NLC=found)])
    assert replayed_loss == loss and own.keys() == replayed.keys()
    for name, gradient in own.items():
        assert torch.equal(gradient, replayed[name]), name
    assert any(float(g.abs().max()) > 0 for n, g in own.items() if n.endswith(ROUTER))


def test_routes_are_given_back_when_a_pass_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained(config("qwen3_moe"))
    row = pack_row(routed([sample((3, 4), (5, 6))], 6, 2))
    monkeypatch.setattr(model, "forward", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        score_row(model, row, 1.0)
    assert all(router.given_NC is None for router in experts.routers(model))


def test_padded_tokens_take_their_own_experts() -> None:
    """As rows on a GPU have them, behind the routes that are given."""
    model = trained(config("olmoe"))
    (one,) = routed([sample((3, 4, 5), (6, 7))], 6, 3)
    row = pack_row([one])
    longer = padded(row)
    assert len(longer.input_ids_N) == 128 and len(longer.routes_NLC) == 4
    assert_equal(in_rows(model, [longer]), in_rows(model, [row]))


def test_compiled_layers_replay() -> None:
    row = pack_row(routed([sample((3, 4, 5), (6, 7)), sample((3, 4), (6,))], 6, 2))
    plain, compiled = trained(config("qwen3_moe")), trained(config("qwen3_moe"))
    sharding.compile_layers(compiled, "aot_eager")
    assert_equal(in_rows(compiled, [row]), in_rows(plain, [row]))


# ---- packing


def test_a_row_keeps_the_routes_of_the_first_sample_and_counts_conflicts() -> None:
    first, second = sample((3, 4), (5, 6)), sample((3, 4), (5, 7, 8))
    one = Routes(bytes([0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]), 2, 2)
    other = Routes(bytes([1, 0, 3, 2, 4, 0, 0, 1, 2, 3, 4, 5, 9, 9, 9, 9]), 2, 2)
    third, alike = sample((3, 4), (5, 9, 8)), replace(one, experts=one.experts + bytes(4))
    each = zip((first, second, third), (one, other, alike), strict=True)
    row = pack_row([replace(sample, routes=routes) for sample, routes in each])
    assert row.input_ids_N.tolist() == [3, 4, 5, 7, 9]
    assert row.routes_NLC.flatten().tolist() == [*one.experts, 9, 9, 9, 9, 0, 0, 0, 0]
    assert row.num_route_conflicts == 1, "the order of a token's experts means nothing"
    alone = pack_row([replace(second, routes=other)])
    assert alone.num_route_conflicts == 0
    assert alone.routes_NLC.flatten().tolist() == list(other.experts)
    assert pack_row([replace(first, routes=one), second]).routes_NLC is None
    assert pack_row([replace(first, routes=one), second]).num_route_conflicts == 0
    wide = Routes(
        torch.tensor([300, 1, 2, 3, 4, 5], dtype=torch.int16).numpy().tobytes(), 1, 2, True
    )
    routes_NLC = pack_row([replace(first, routes=wide)]).routes_NLC
    assert routes_NLC.dtype == torch.int16 and routes_NLC[0, 0, 0] == 300


# ---- which routers are understood


def router_of(family: str, **options: Any) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(family, options), dtype=torch.bfloat16)


FORMS = {
    "qwen3_moe": (
        {**_FEW, "norm_topk_prob": False},
        experts.Form("softmax", False, 1.0, False, 6, 2),
    ),
    "olmoe": ({**_FEW, "norm_topk_prob": True}, experts.Form("softmax", True, 1.0, False, 6, 2)),
    "mixtral": ({"num_local_experts": 4}, experts.Form("softmax", True, 1.0, True, 4, 2)),
    "glm4_moe": (FAMILIES["glm4_moe"], experts.Form("sigmoid", True, 1.7, False, 6, 2)),
    "gpt_oss": (
        {"num_local_experts": 300, "num_experts_per_tok": 4},
        experts.Form("softmax of chosen", True, 1.0, False, 300, 4),
    ),
}


@pytest.mark.parametrize("family", FORMS)
def test_routers_are_known_by_their_bits(family: str) -> None:
    options, form = FORMS[family]
    model = router_of(family, **options)
    assert experts.form_of(experts.find_routers(model)) == form
    assert experts.problem(model) == ""
    assert form.is_wide == (family == "gpt_oss")


@pytest.mark.parametrize(
    ("family", "problem"),
    [
        ("granitemoe", "GraniteMoeTopKRouter uses unsupported expert weights"),
        ("minimax_m2", "MiniMaxM2TopKRouter uses unsupported expert weights"),
        ("doge", "transformers does not name its routers"),
        ("longcat_flash", "its experts do not support grouped matrix products"),
    ],
)
def test_other_routers_are_refused(family: str, problem: str) -> None:
    assert experts.problem(router_of(family)) == problem


def test_adapters_of_experts_are_refused() -> None:
    with pytest.raises(UserError, match=r"'gate_up_proj' is not a linear layer .* q_proj, v_proj"):
        add_adapter(trained(config("olmoe")), Lora(rank=2, targets=["gate_up_proj"]), "BASE")


# ---- cost and memory


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_costs_the_experts_that_read_it(family: str) -> None:
    model = trained(config(family))
    layers = dict(model.get_decoder().layers.named_parameters())
    stacked = {name for name in layers if ".experts." in name}
    assert len(stacked) == (4 if family == "gpt_oss" else 2) * LAYERS
    share = FAMILIES[family]["num_experts_per_tok"] / 6
    expected = sum(p.numel() * (share if n in stacked else 1) for n, p in layers.items())
    assert ForwardCost.of(model).per_token == pytest.approx(2 * expected)


@pytest.mark.parametrize(("dtype", "recompute"), [(torch.float32, False), (torch.bfloat16, True)])
def test_memory_of_a_mixture_with_dense_layers_is_planned(
    dtype: torch.dtype, recompute: bool
) -> None:
    """Two points make a line, which meets the count of all layers."""
    shape = config("glm4_moe", num_hidden_layers=5, first_k_dense_replace=2)
    planned = activations(shape, dtype, 64, recompute)
    how = {"layers": [*range(5)], "lora": None, "fused": True}
    counted = simulation._simulate(shape, dtype, 64, recompute, **how)
    assert planned == pytest.approx(counted, rel=0.01)
    assert 0 < planned[0] <= planned[1]


# ---- the sampler


class Skewed(experts.ReplayedRouter):
    """A sampler's router that takes other experts than the trainer's would, with its own scores."""

    def forward(self, hidden_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_NE, _, chosen_NC = super().forward(hidden_ND)
        chosen_NC = (chosen_NC + 1) % self.form.num_experts
        self.chosen_NC = chosen_NC.byte()
        return logits_NE, self.form.weights(logits_NE, chosen_NC), chosen_NC


def engine_of(family: str, tokenizer: Any) -> TorchEngine:
    model = trained(config(family, vocab_size=280))
    return TorchEngine(model, tokenizer, store=None)


PROMPTS = [(5, 6, 7, 8), (5, 6), (5, 9, 6), (5, 6, 7, 8)]


def mismatch(model: PreTrainedModel, samples: Sequence[Sample]) -> float:
    row = pack_row(samples)
    return float((score_row(model, row, 1.0).logprob_T - row.sampler_logprob_T).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_records_what_the_trainer_would_choose(family: str, tiny_path: str) -> None:
    engine = engine_of(family, models.load_tokenizer(tiny_path))
    samples = sampled(engine, PROMPTS, 2)
    for each in samples:
        assert not routes_problem(each, (LAYERS, FAMILIES[family]["num_experts_per_tok"], 6))
    row = pack_row(samples)
    model = trained(config(family, vocab_size=280))
    assert mismatch(model, samples) < 1e-5
    score_row(model, replace(row, routes_NLC=None), 1.0)
    own = experts.chosen(experts.routers(model))
    assert torch.equal(own.sort(-1).values, row.routes_NLC.sort(-1).values)
    assert row.num_route_conflicts == 0 < row.num_unshared_tokens - len(row.input_ids_N)
    version, scores = asyncio.run(engine.score(samples, 1.0))
    assert version == 0
    for each, score in zip(samples, scores, strict=True):
        assert score == pytest.approx(each.logprobs, abs=1e-5)
    engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_replay_takes_the_mismatch_of_other_routes_away(family: str, tiny_path: str) -> None:
    engine = engine_of(family, models.load_tokenizer(tiny_path))
    for router in experts.routers(engine._model):
        router.__class__ = type("Skewed", (Skewed, type(router)), {})
    samples = sampled(engine, PROMPTS, 2)
    engine.close()
    model = trained(config(family, vocab_size=280))
    assert mismatch(model, samples) < 1e-5
    assert mismatch(model, [replace(s, routes=None) for s in samples]) > 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_engine_loads_all_tensors_of_a_version(
    dtype: torch.dtype, tiny_path: str, tmp_path: Path
) -> None:
    """Also a router's correction bias, which is a buffer, and what transformers keeps in fp32."""
    tokenizer, path = models.load_tokenizer(tiny_path), tmp_path / "model"
    source = _biased(build(config("glm4_moe", vocab_size=280)))
    models.export(source, tokenizer, models.full_weights(source), path)
    weights = {n: w + 0.5 * w.abs().amax() for n, w in models.full_weights(source).items()}
    store = WeightStore(tmp_path / "weights")
    Publisher(store, PublishOptions(dtype)).publish(weights, 1)
    model = models.load_model(str(path), dtype, attn="sdpa")
    TorchEngine(model, tokenizer, store).load(1)
    assert sum(name.endswith("e_score_correction_bias") for name in weights) == LAYERS
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name].to(dtype)), name


def test_mxfp4_is_dequantised_while_it_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By E2M1's table, two values a byte, times powers of two."""
    sizes = {"num_local_experts": 3, "num_experts_per_tok": 2, "hidden_size": 64, "head_dim": 16}
    shape = config_of("gpt_oss", sizes)
    shape.intermediate_size = 32
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    weights, expected = model.state_dict(), {}
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    rng = torch.Generator().manual_seed(0)
    for name in [name for name, w in weights.items() if w.dim() == 3]:
        num, size_in, size_out = weights.pop(name).shape
        blocks = torch.randint(256, (num, size_out, size_in // 32, 16), generator=rng)
        scales = torch.randint(124, 130, blocks.shape[:3], generator=rng)
        values = torch.stack([table[blocks & 15], table[blocks >> 4]], -1).flatten(3)
        expected[name] = (values * 2.0 ** (scales - 127)[..., None]).flatten(2).mT
        weights |= {f"{name}_blocks": blocks.byte(), f"{name}_scales": scales.byte()}
    shape.quantization_config = {"quant_method": "mxfp4"}
    shape.architectures = ["GptOssForCausalLM"]
    shape.save_pretrained(tmp_path)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = models.load_model(str(tmp_path), torch.float32)
    for name, values in expected.items():
        assert torch.equal(loaded.state_dict()[name].float(), values), name
    assert not hasattr(loaded.config, "quantization_config")
    assert "mxfp4 weights, which are dequantised" in caplog.text


# ---- the trainer, alone and on several ranks


RANKED = {
    "qwen3_moe": ({"num_experts": 3}, {}),  # more experts on one rank than on the other
    "glm4_moe": ({}, {"recompute": True}),
}


def a_step(family: str, world: World, rows: Sequence[PackedRow], **optim: Any) -> Any:
    """(trainer, metrics) of an optimizer step in layers that are sharded one by one."""
    shape, how = RANKED[family]
    model = _biased(build(config(family, **shape)))
    model = sharding.shard(model, world, sharding.ShardSpec(torch.float32, **how))
    spec = OptimSpec(lr=1e-2, grad_clip=0.0, **optim)
    trainer = Trainer(model, world, LossSpec(), spec)
    return trainer, trainer.step([rows[world.rank :: world.size]])


def two_rows(family: str) -> list[PackedRow]:
    num_experts = RANKED[family][0].get("num_experts", 6)
    shapes = [((3, 4, 5), (6, 7)), ((3, 4), (6, 8, 9)), ((9, 8), (7, 6, 5)), ((9,), (3,))]
    samples = routed([sample(*each, n) for n, each in enumerate(shapes)], num_experts, 2)
    return [pack_row(samples[:2]), pack_row(samples[2:])]


def run(out: str) -> None:
    """Run the part of every rank."""
    torch.set_num_threads(1)
    sharding._SMALL = 0
    world = World.join("cpu", timeout_s=120)
    for family in RANKED:
        trainer, metrics = a_step(family, world, two_rows(family))
        weights = models.full_weights(trainer.model)
        if world.is_main:
            save_file(weights, Path(out) / f"{family}.{world.size}.safetensors")
            (Path(out) / f"{family}.{world.size}.json").write_text(json.dumps(metrics))
    end_process(0)


@pytest.mark.dist
def test_ranks_train_what_one_rank_trains(tmp_path: Path) -> None:
    """To the bit; of four ranks two have no row, and one no expert of three."""
    launch(__file__, [(size, (str(tmp_path),)) for size in (1, 2, 4)])
    for family in RANKED:
        one, *more = (load_file(tmp_path / f"{family}.{n}.safetensors") for n in (1, 2, 4))
        start = build(config(family, **RANKED[family][0])).state_dict()
        for name, weight in one.items():
            assert all(torch.equal(weight, each[name]) for each in more), name
            assert name.endswith("bias") or not torch.equal(weight, start[name]), name
        told = [json.loads((tmp_path / f"{family}.{n}.json").read_text()) for n in (1, 2, 4)]
        routes = [{k: each[k] for k in each if k[:5] in ("route", "exper")} for each in told]
        assert routes[0] == routes[1] == routes[2] and routes[0]["routes_replayed"] == 1


def test_metrics_of_routes(alone: World, caplog: pytest.LogCaptureFixture) -> None:
    first, second = two_rows("qwen3_moe")
    _, replayed = a_step("qwen3_moe", alone, [first, second])
    count_LE = torch.zeros(LAYERS, 3)
    for row in (first, second):
        for layer in range(LAYERS):
            count_LE[layer] += row.routes_NLC[:, layer].flatten().bincount(minlength=3)
    load = count_LE.amax(1) / count_LE.mean(1)
    assert replayed["expert_load_max"] == pytest.approx(float(load.max()))
    assert replayed["expert_dead_share"] == float((count_LE == 0).float().mean())
    assert replayed["routes_replayed"] == 1 and replayed["route_conflict_share"] == 0
    assert 0 <= replayed["routes_equal_min"] <= replayed["routes_equal"] < 1
    assert not caplog.records

    _, own = a_step("qwen3_moe", alone, [first, second], replays_routes=False)
    assert own["routes_replayed"] == 0 < own["routes_equal"] < 1
    assert own["expert_load_max"] != replayed["expert_load_max"]

    bare = replace(second, routes_NLC=None)
    clashing = replace(first, num_route_conflicts=1)
    _, mixed = a_step("qwen3_moe", alone, [clashing, bare])
    num_tokens = len(first.input_ids_N), len(second.input_ids_N)
    assert mixed["routes_replayed"] == num_tokens[0] / sum(num_tokens)
    assert mixed["route_conflict_share"] == 1 / (first.num_unshared_tokens - num_tokens[0])
    found = [r.message for r in caplog.records]
    assert found == ["rows without routes of the sampler are routed by the policy itself"]
    _, none = a_step("qwen3_moe", alone, [bare])
    assert "routes_equal" not in none and none["routes_replayed"] == 0
    assert len(caplog.records) == 2, "said where no row has any, too"


def test_a_policy_has_no_kl_to_itself_along_routes_that_it_would_not_take(alone: World) -> None:
    """The reference reads along the same routes."""
    model = _biased(build(config("olmoe")))
    model = sharding.shard(model, alone, sharding.ShardSpec(torch.float32))
    reference = sharding.shard(
        _biased(build(config("olmoe"))), alone, sharding.ShardSpec(torch.float32)
    )
    row = pack_row(routed([sample((3, 4, 5), (6, 7)), sample((3, 4), (6, 8))], 6, 3))
    spec = LossSpec(kl_coef=0.1)
    for replays in (True, False):
        optim = OptimSpec(lr=1e-9, rescore=True, replays_routes=replays)
        trainer = Trainer(model, alone, spec, optim, reference=reference)
        metrics = trainer.step([[row]])
        assert metrics["kl_ref"] == pytest.approx(0, abs=1e-9)
        assert metrics["ratio_min"] == metrics["ratio_max"] == 1


if __name__ == "__main__":
    fork(run)
