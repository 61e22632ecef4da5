"""Sparse deltas in real vLLM on a CPU: words and greedy outputs after each update, failures,
requests in flight, plans for TP 2 and 4.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flowkernels import LossSpec
from many_ranks import Meeting, ThreadRank
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from vllm_in_process import (
    NUM_TOKENS,
    PROMPTS,
    SMALL,
    Engine,
    change,
    engines,
    in_process,
    weights_of,
)

from flowtrain import _delta
from flowtrain.inference.vllm.plan import make_plan, prove
from flowtrain.inference.vllm.sharded_target import ShardedTarget
from flowtrain.records import Sampling, UserError
from flowtrain.trainer import sharding
from flowtrain.trainer.attention import registration as attention
from flowtrain.trainer.distributed import World
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.packing import pack, pack_rows
from flowtrain.trainer.trainer import OptimSpec, Trainer
from flowtrain.weights import (
    Publisher,
    PublishOptions,
    SnapshotPolicy,
    StoreError,
    WeightReader,
    WeightStore,
    pull,
)
from flowtrain.weights.format.manifest import digest_hex
from flowtrain.weights.load.target import HostTensors

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = {
    "Qwen3, tied head, query and key norms": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"tie_word_embeddings": True},
        torch.bfloat16,
    ),
    "Qwen2, biases": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"tie_word_embeddings": False, "hidden_size": 128},
        torch.bfloat16,
    ),
    "Llama, own head, fp32": (
        LlamaConfig,
        LlamaForCausalLM,
        {"tie_word_embeddings": False},
        torch.float32,
    ),
}
MIXTURE = "Qwen3-MoE, experts stacked"
MIXTURES = {
    MIXTURE: (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
        torch.bfloat16,
    )
}


@pytest.fixture(autouse=True, scope="module")
def vllm_here() -> Iterator[None]:
    with in_process():
        yield


@pytest.fixture
def open_engine() -> Iterator[Any]:
    with engines() as make:
        yield make


def new_model(family: str) -> PreTrainedModel:
    config, model, options, dtype = (FAMILIES | MIXTURES)[family]
    torch.manual_seed(0)
    made = model(config(**{**SMALL, **options})).to(dtype)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() == 1:  # biases of 0 and norms of 1 would hide where they go
                parameter.add_(torch.randn_like(parameter) * 0.1)
            assert parameter.abs().sum() > 0, name
    return made


@torch.inference_mode()
def greedy_of(model: PreTrainedModel) -> list[list[int]]:
    options = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
    return [
        model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in PROMPTS
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_twenty_updates_leave_words_and_outputs_of_each_version(
    store: WeightStore, tmp_path: Path, open_engine: Any, family: str
) -> None:
    model, publisher = new_model(family), Publisher(store)
    model.save_pretrained(tmp_path / "0")
    publisher.publish(weights_of(model), 0)
    engine = open_engine(tmp_path / "0", model.dtype)
    before = engine.rpc("compute_weight_checksums")
    engine.connect(store, verify_every=7)
    assert engine.rpc("compute_weight_checksums") == before, "what proved the plan was put back"
    assert isinstance(engine.transfer.reader._target, HostTensors), "in place, without a copy"
    assert engine.transfer.sharded.plan.dense == {}
    outputs = {}
    for version in range(1, 21):
        change(model, version)
        publisher.publish(weights_of(model), version)
        engine.update(version, stage=version % 2 == 0)
        assert engine.rpc("held_weights")["mode"] == ("snapshot" if version == 1 else "delta")
        assert engine.holds(store, version)
        outputs[version] = engine.greedy(version)
        if model.dtype == torch.float32:
            assert outputs[version] == greedy_of(model), version
        elif version in (11, 20):
            model.save_pretrained(tmp_path / str(version))
    assert len({str(found) for found in outputs.values()}) > 10, "or equal outputs would say little"
    for version in (11, 20) if model.dtype != torch.float32 else ():
        assert open_engine(tmp_path / str(version), model.dtype).greedy(version) == outputs[version]


@pytest.fixture(scope="module")
def at_work(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Engine, WeightStore, Publisher, PreTrainedModel]]:
    """An engine that was updated once; each test takes it from HEAD to the next version and leaves
    it there.
    """
    path = tmp_path_factory.mktemp("at_work")
    model, store = new_model("Qwen3, tied head, query and key norms"), WeightStore(path / "weights")
    publisher = Publisher(store, policy=SnapshotPolicy(max_deltas=1000))
    model.save_pretrained(path / "0")
    publisher.publish(weights_of(model), 1)
    engine = Engine(path / "0", model.dtype)
    engine.connect(store)
    engine.update(1)
    yield engine, store, publisher, model
    engine.close()


def test_a_second_name_of_the_tied_head_is_recognised(at_work: Any, tmp_path: Path) -> None:
    """vLLM does not load it, and complains when it comes alone."""
    engine, own_store, _, model = at_work
    connected, store = engine.transfer.__dict__.copy(), WeightStore(tmp_path / "weights")
    publisher = Publisher(store)
    for version in (1, 2):
        change(model, version)
        publisher.publish(
            {**weights_of(model), "lm_head.weight": model.lm_head.weight.clone()}, version
        )
    engine.connect(store)
    for version in (1, 2):
        engine.update(version)
        wanted = {
            name: digest_hex(digest) for name, digest in store.manifest(version).digests.items()
        }
        found = engine.rpc("digest_weights").items()
        assert found == wanted.items() - {("lm_head.weight", wanted["lm_head.weight"])}
    assert engine.rpc("held_weights")["mode"] == "delta"
    engine.transfer.__dict__.update(connected)
    engine.transfer.reader._manifest = None  # what it holds is of another store
    engine.update(int(own_store.head()))


def new_policy() -> PreTrainedModel:
    """In fp32, of the shape that is at work; takes packed rows."""
    policy = new_model("Qwen3, tied head, query and key norms").float()
    policy.set_attn_implementation(attention.NAME)
    return policy


@pytest.fixture
def trained(
    at_work: Any, tmp_path: Path
) -> Iterator[tuple[Engine, WeightStore, Publisher, PreTrainedModel]]:
    """The engine on a store of its own, at version 0 of a policy with fp32 master weights that
    computes in bf16.
    """
    engine, own_store, _, _ = at_work
    connected, store = engine.transfer.__dict__.copy(), WeightStore(tmp_path / "weights")
    policy = new_policy()
    with torch.no_grad():
        policy.get_input_embeddings().weight.mul_(
            0.15
        )  # the head too: logits of the size of a new model's, and their rounding with them
    sharding.shard(policy, World(0, 1, torch.device("cpu")), sharding.ShardSpec(torch.bfloat16))
    publisher = Publisher(store, PublishOptions(torch.bfloat16))
    publisher.publish(models.named_weights(policy), 0)
    engine.connect(store)
    engine.update(0)
    yield engine, store, publisher, policy
    engine.transfer.__dict__.update(connected)
    engine.transfer.reader._manifest = None
    engine.update(int(own_store.head()))


def trainer_of(policy: PreTrainedModel, lr: float, temperature: float = 1.0) -> Trainer:
    return Trainer(
        policy,
        World(0, 1, torch.device("cpu")),
        LossSpec("nll"),
        OptimSpec(lr=lr),
        temperature=temperature,
    )


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (20, 1.0), (20, 0.9)])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_in_bf16_the_trainer_agrees_with_the_sampler(
    trained: Any, temperature: float, top_k: int, top_p: float
) -> None:
    """Its own log-probs, through token trees and the loss's head, of what vLLM sampled."""
    engine, store, _, policy = trained
    exact = new_policy()
    exact.load_state_dict(pull(store, 0), strict=False)
    samples = engine.sample(Sampling(16, temperature, top_k, top_p), 96, version=0)
    rows = pack_rows(samples, 4)
    scorer = trainer_of(policy, 0.0, temperature)
    trainer_T, exact_T = (
        torch.cat([score.logprob_T for score in scorer.score(model, rows)])
        for model in (policy, exact)
    )
    sampler_T = torch.cat([row.sampler_logprob_T for row in rows])
    difference_T = trainer_T - sampler_T
    assert len(difference_T) == 96 * 16
    assert sampler_T.std() > 0.03, "or there would be little to disagree about"
    if top_k:
        masks = [sample.sampling_mask for sample in samples if sample.sampling_mask]
        counts = [count for mask in masks for count in mask.counts]
        assert max(counts) > top_k if top_p == 1 else min(counts) < top_k, (
            "of bf16 logits, some tie with the last that is kept"
        )
    assert 0 < difference_T.abs().mean() <= 0.005
    assert (difference_T.exp() - 1 - difference_T).mean() <= 2e-5
    assert difference_T.abs().mean() < 1.5 * (trainer_T - exact_T).abs().mean(), (
        "no more than what bf16 itself is off by"
    )


def test_ten_updates_at_learning_rate_0_change_nothing(trained: Any) -> None:
    """Words and log-probs stay those of version 0; the same steps at another rate move both."""
    engine, store, publisher, policy = trained
    start, first = store.manifest(0).digests, engine.sample(Sampling(16), 8, version=0)
    for version in range(1, 12):
        trainer = trainer_of(policy, 0.0 if version < 11 else 1e-3)
        trainer.step(pack(engine.sample(Sampling(16), 8, version - 1), 1, 400))
        publisher.publish(models.named_weights(policy), version)
        engine.update(version)
        assert engine.holds(store, version)
        is_as_before = (
            store.manifest(version).digests == start,
            engine.sample(Sampling(16), 8, version) == first,
        )
        assert is_as_before == ((True, True) if version < 11 else (False, False))


def publish_next(at_work: Any) -> int:
    _, store, publisher, model = at_work
    version = int(store.head()) + 1
    change(model, 1000 + version)
    publisher.publish(weights_of(model), version)
    return version


def file_of(store: WeightStore, version: int) -> Path:
    (file,) = store.manifest(version).delta_files[version - 1]
    return store.folder(version) / file.name


def test_a_corrupted_delta_is_refused_and_the_engine_goes_on(at_work: Any) -> None:
    engine, store, _, _ = at_work
    version = publish_next(at_work)
    path = file_of(store, version)
    good = path.read_bytes()
    path.write_bytes(good[:200] + bytes([good[200] ^ 1]) + good[201:])
    before = engine.greedy(version - 1)
    with pytest.raises(StoreError, match="does not have the checksum of its manifest"):
        engine.update(version, stage=True)
    assert engine.holds(store, version - 1) and engine.greedy(version - 1) == before
    path.write_bytes(good)
    engine.update(version)
    assert engine.holds(store, version)


def test_weights_that_something_else_changed_are_replaced_by_a_snapshot(at_work: Any) -> None:
    engine, store, _, _ = at_work
    old = pull(store, int(store.head()))
    version = publish_next(at_work)
    new, name = pull(store, version), "model.layers.1.mlp.down_proj.weight"
    at = int((old[name] != new[name]).flatten().nonzero()[0])
    engine.transfer.sharded.plan.views[name][0].live()[at] += 1
    assert not engine.holds(store, version - 1)
    engine.update(version)
    report = engine.rpc("held_weights")
    assert report["mode"] == "snapshot"
    assert "not its base, or were damaged" in report["reason"]
    assert engine.holds(store, version)


def test_an_exception_in_the_middle_leaves_the_old_version(
    at_work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, store, _, _ = at_work
    version = publish_next(at_work)
    before = engine.greedy(version - 1)

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no memory for the update")

    with monkeypatch.context() as patch:
        patch.setattr(_delta, "apply_rounds", fail)
        with pytest.raises(MemoryError, match="no memory for the update"):
            engine.update(version)
    assert engine.holds(store, version - 1) and engine.greedy(version - 1) == before
    engine.update(version)
    assert engine.holds(store, version)


def test_strided_views_do_what_the_reader_does_in_place(at_work: Any) -> None:
    """As a device or several ranks would have it."""
    engine, store, _, _ = at_work
    transfer, version = engine.transfer, int(store.head())
    direct = transfer.reader
    transfer.reader = WeightReader(store, transfer.sharded)
    engine.update(version)
    for _ in range(3):
        version = publish_next(at_work)
        engine.update(version)
        assert engine.rpc("held_weights")["mode"] == "delta" and engine.holds(store, version)
    transfer.reader = direct
    version = publish_next(at_work)
    engine.update(
        version
    )  # it believes in the version before those three, so its deltas do not fit
    assert engine.rpc("held_weights")["mode"] == "snapshot" and engine.holds(store, version)


class OfOwners(SimpleHTTPRequestHandler):
    """Serves files to those who have the token."""

    def do_GET(self) -> None:
        if self.headers.get("Authorization") == "Bearer the-token-of-the-server":
            super().do_GET()
        else:
            self.send_error(401)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def test_a_store_behind_a_url_is_fetched_from_while_the_engine_serves(
    at_work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWTRAIN_TOKEN", "the-token-of-the-server")
    engine, store, _, _ = at_work
    connected = engine.transfer.__dict__.copy()
    handler = functools.partial(OfOwners, directory=str(store.root))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        engine.rpc(
            "init_weight_transfer_engine",
            init_info={"location": f"http://127.0.0.1:{server.server_port}"},
        )
        engine.update(int(store.head()))
        for _ in range(2):
            version = publish_next(at_work)
            engine.update(version, stage=True)
            assert engine.rpc("held_weights")["mode"] == "delta" and engine.holds(store, version)
        server.shutdown()
    engine.transfer.shutdown()
    engine.transfer.__dict__.update(connected)
    engine.transfer.reader._manifest = None
    engine.update(version)


def test_wrong_calls_name_their_cure(at_work: Any, tmp_path: Path) -> None:
    engine, store, _, _ = at_work
    with pytest.raises(StoreError, match="version 999 is not in"):
        engine.update(999)
    assert engine.holds(store, int(store.head()))
    connected = engine.transfer.__dict__.copy()
    for location, message in (
        (tmp_path / "nowhere", "must be the folder or the URL of a weight store"),
        (tmp_path, "is empty; publish a version"),
    ):
        with pytest.raises(UserError, match=message):
            engine.rpc("init_weight_transfer_engine", init_info={"location": str(location)})
    with pytest.raises(ValueError, match="Invalid init_info for SparseDeltaEngine"):
        engine.rpc("init_weight_transfer_engine", init_info={"folder": "x"})
    del engine.transfer.reader
    told = "init_weight_transfer_engine must be called before start_weight_update"
    with pytest.raises(UserError, match=told):
        engine.update(1)
    engine.transfer.__dict__.update(connected)


def test_a_parameter_that_is_no_plain_copy_is_named(
    at_work: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine, store, _, model = at_work
    name = "model.norm.weight"
    transfer = engine.transfer
    connected = engine.transfer.__dict__.copy()
    norm = transfer.model.model.norm.weight

    def half(parameter: Tensor, loaded: Tensor) -> None:
        parameter.data[:32].copy_(loaded[:32])

    def doubled(parameter: Tensor, loaded: Tensor) -> None:
        parameter.data.copy_(loaded * 2)

    norm.weight_loader = half
    told = f"{name}': the ranks together do not hold each of its words once"
    with pytest.raises(ValueError, match=told):
        engine.connect(store)
    norm.weight_loader = doubled
    with caplog.at_level("WARNING", logger="flowtrain"):
        engine.connect(store)
    assert f"'{name}' is loaded whole at every update, through the model's loader" in caplog.text
    assert transfer.sharded.plan.dense.keys() == {name}
    assert isinstance(transfer.reader._target, ShardedTarget)
    for _ in range(3):
        version = publish_next(at_work)
        engine.update(version)
        assert engine.holds(store, version) and torch.equal(norm.data, weights_of(model)[name] * 2)
    assert engine.rpc("held_weights")["mode"] == "delta"
    del norm.weight_loader
    transfer.__dict__.update(connected)


def test_a_model_of_another_kind_is_refused_by_name(at_work: Any, tmp_path: Path) -> None:
    engine, _, _, _ = at_work
    connected = engine.transfer.__dict__.copy()
    other = WeightStore(tmp_path / "weights")
    Publisher(other).publish(weights_of(new_model("Qwen2, biases")), 1)
    told = r"the model's loader does not take 'lm_head.weight' \(bfloat16 \(300, 128\)\)"
    with pytest.raises(ValueError, match=told):
        engine.connect(other)
    from flowtrain.inference.vllm.plugin import refuse_unsupported

    for name, message in {
        "use_mla": "latent attention",
        "quantization": "quantised models",
        "lora_config": "enable_lora",
    }.items():
        model = SimpleNamespace(use_mla=False, quantization=None)
        config = SimpleNamespace(model_config=model, lora_config=None)
        setattr(config if name == "lora_config" else model, name, "set")
        with pytest.raises(UserError, match=message):
            refuse_unsupported(engine.transfer.model, config)
    assert engine.transfer.__dict__ == connected


def test_another_version_of_vllm_is_named_before_it_packs(
    at_work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import utils

    engine, _, _, _ = at_work
    monkeypatch.setattr(vllm, "__version_tuple__", (0, 99, 0))
    with (
        set_current_vllm_config(engine.transfer.vllm_config),
        pytest.raises(RuntimeError, match=r"is not known to this flowtrain; install vLLM 0\.25 to"),
    ):
        utils.dispatch_cpu_unquantized_gemm(torch.nn.Linear(32, 32), remove_weight=True)


# ---- requests in flight, in vLLM's own processes


@pytest.fixture
def entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an installed flowtrain has it, for the processes that vLLM starts."""
    info = tmp_path / "site" / "flowtrain_entry-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flowtrain-entry\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nflowtrain = flowtrain.inference.vllm.plugin:register\n"
    )
    paths = [
        str(tmp_path / "site"),
        str(ROOT),
        str(ROOT / "kernels"),
        os.environ.get("PYTHONPATH", ""),
    ]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.syspath_prepend(paths[0])  # a spawned process gets this one's path
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.delenv("VLLM_PLUGINS")


def test_the_entry_point_is_declared() -> None:
    import tomllib

    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        "vllm.general_plugins"
    ]
    assert points == {"flowtrain": "flowtrain.inference.vllm.plugin:register"}


def test_a_request_in_flight_goes_on_across_updates_and_failures(
    store: WeightStore, tmp_path: Path, entry_point: None
) -> None:
    model, publisher = new_model("Qwen3, tied head, query and key norms"), Publisher(store)
    model.save_pretrained(tmp_path / "0")
    publisher.publish(weights_of(model), 1)
    versions = asyncio.run(_serve(store, tmp_path / "0", model, publisher))
    assert versions == ["default", "2", "3"]


async def _serve(
    store: WeightStore, path: Path, model: PreTrainedModel, publisher: Publisher
) -> list[str]:
    """The versions of the spans of a request that ran across two updates, one of which failed at
    first.
    """
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.base import (
        WeightTransferInitRequest,
        WeightTransferUpdateRequest,
    )
    from vllm.v1.engine.async_llm import AsyncLLM

    options = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "dtype": "bfloat16",
    }
    transfer = WeightTransferConfig(backend="sparse_delta")
    extension = "flowtrain.inference.vllm.plugin.WeightReports"
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            str(path), weight_transfer_config=transfer, worker_extension_cls=extension, **options
        )
    )
    try:
        await llm.init_weight_transfer_engine(
            WeightTransferInitRequest({"location": str(store.root)})
        )
        arrived, last = [], None
        reached = {40: asyncio.Event(), 120: asyncio.Event()}

        async def run() -> None:
            nonlocal last
            # So many that it is still under way when the updates are late.
            sampling = SamplingParams(
                max_tokens=1000, temperature=0, ignore_eos=True, detokenize=False
            )
            async for last in llm.generate(
                {"prompt_token_ids": [1, 2, 3], "cache_salt": "1"}, sampling, "one"
            ):
                arrived.append(len(last.outputs[0].token_ids))
                for number, event in reached.items():
                    if arrived[-1] >= number:
                        event.set()

        async def update(version: int) -> None:
            await llm.start_weight_update()
            await llm.update_weights(
                WeightTransferUpdateRequest({"version": version, "stage": True})
            )
            await llm.pause_generation(mode="keep", clear_cache=False)
            try:
                await llm.update_weights(WeightTransferUpdateRequest({"version": version}))
                await llm.finish_weight_update(weight_version=str(version))
            finally:
                await llm.resume_generation()

        request = asyncio.create_task(run())
        for version, number in ((2, 40), (3, 120)):
            change(model, version)
            publisher.publish(weights_of(model), version)
            await asyncio.wait_for(reached[number].wait(), 60)
            if version == 3:
                file_of(store, 3).rename(tmp := path / "away")
                with pytest.raises(Exception, match="is missing, though the manifest names it"):
                    await update(3)
                (held,) = await llm.collective_rpc("held_weights")
                assert held["version"] == 2 and await llm.get_weight_version() == "2"
                tmp.rename(
                    file_of_missing := store.folder(3) / store.manifest(3).delta_files[2][0].name
                )
                assert file_of_missing.exists()
            await update(version)
            (digests,) = await llm.collective_rpc("digest_weights")
            wanted = store.manifest(version).digests
            assert digests == {name: digest_hex(digest) for name, digest in wanted.items()}
        await asyncio.wait_for(request, 200)
        assert last is not None and len(last.outputs[0].token_ids) == 1000
        return [span.version for span in last.outputs[0].weight_versions]
    finally:
        llm.shutdown()


# ---- tensor parallel plans against vLLM's own sharding code, all ranks in this process


class FakeGroup:
    """The methods that vLLM's layers ask of their tensor parallel group, on the rank of the asking
    thread.
    """

    def __init__(self, size: int) -> None:
        self.world_size, self.here = size, threading.local()

    @property
    def rank_in_group(self) -> int:
        return int(getattr(self.here, "rank", 0))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", [*FAMILIES, MIXTURE])
def test_plans_for_several_ranks_agree_with_the_sharding_of_vllm(
    store: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, size: int
) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
        parallel_state,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    trained, publisher = new_model(family), Publisher(store)
    trained.save_pretrained(tmp_path / "hf")
    loaded: dict[int, dict[str, Tensor]] = {}
    for version in range(1, 5):
        change(trained, version)
        publisher.publish(weights_of(trained), version)
        loaded[version] = {
            name: tensor.detach().clone() for name, tensor in weights_of(trained).items()
        }
    dtype = str(trained.dtype).removeprefix("torch.")
    config = EngineArgs(
        str(tmp_path / "hf"), dtype=dtype, skip_tokenizer_init=True, enforce_eager=True
    ).create_engine_config()
    group, meeting = FakeGroup(size), Meeting(size)

    def build(rank: int) -> Any:
        group.here.rank = rank
        config.compilation_config.static_forward_context.clear()
        return initialize_model(config)

    def run(rank: int, model: Any, rival: Any) -> list[str]:
        group.here.rank = rank
        ranks, tensors = ThreadRank(rank, meeting), [*model.parameters(), *model.buffers()]
        model.load_weights(loaded[1].items())
        plan = make_plan(store.manifest(1).layout, model.load_weights, tensors, ranks)
        prove(plan, model.load_weights, tensors, ranks)
        assert not plan.dense
        reader = WeightReader(
            store, ShardedTarget(plan, ranks, lambda found: model.load_weights(found.items()))
        )
        modes = []
        for version in range(1, 5):
            modes.append(reader.load(version).mode)
            rival.load_weights(loaded[version].items())
            theirs = dict(rival.named_parameters())
            assert all(
                torch.equal(ours, theirs[name]) for name, ours in model.named_parameters()
            ), f"rank {rank}, version {version}"
            assert reader.damaged() == []
        return modes

    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{tmp_path / 'meet'}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        monkeypatch.setattr(parallel_state, "_TP", group)
        monkeypatch.setattr(config.parallel_config, "tensor_parallel_size", size)
        before = torch.get_default_dtype()
        torch.set_default_dtype(trained.dtype)
        try:
            models = [(build(rank), build(rank)) for rank in range(size)]
        finally:
            torch.set_default_dtype(before)
        for pair in models:
            for model in pair:
                for parameter in model.parameters():
                    parameter.data.zero_()  # padding of one is that of the other
        with ThreadPoolExecutor(size) as pool:
            waiting = [pool.submit(run, rank, *pair) for rank, pair in enumerate(models)]
            seen = [done.result() for done in waiting]
            assert seen == [["snapshot", "delta", "delta", "delta"]] * size
    monkeypatch.undo()
    cleanup_dist_env_and_memory()
