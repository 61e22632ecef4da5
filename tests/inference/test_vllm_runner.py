"""How vLLM is started, watched, updated and replaced, with a fake `AsyncLLM` in its place."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from threading import Event
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from flowtrain.config import Vllm
from flowtrain.inference.protocol import EngineError
from flowtrain.inference.vllm import engine as vllm_engine
from flowtrain.inference.vllm import runner as vllm_runner
from flowtrain.inference.vllm import updates as vllm_updates
from flowtrain.inference.vllm.engine import AdapterEngine, VllmEngine
from flowtrain.inference.vllm.process import VllmModel
from flowtrain.records import Call, FinishReason, Sampling, UserError, VersionSpan
from flowtrain.weights import StoreError
from flowtrain.weights.format.manifest import AdapterSpec

OPTIONS = Vllm()


class FakeLLM:
    """Samples as many tokens as asked for, each of them the version of its weights."""

    is_v2 = True

    def __init__(self) -> None:
        self.version = 0
        self.errored = False
        self.hangs = False
        self.is_shut_down = False
        self.errors: dict[str, Exception] = {}
        """By method: what it raises."""
        self.called: list[str] = []
        self.staged: dict[int, int] = {}
        self.adapters: dict[int, int] = {}
        """Version by LoRA id."""
        self.aborted: set[str] = set()
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.num_held = 0
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 280)
        self.output_processor = SimpleNamespace(request_states={})
        self.engine_core = SimpleNamespace(outputs_queue=asyncio.Queue())
        self.vllm_config = SimpleNamespace(use_v2_model_runner=self.is_v2)
        self.seeds: list[int | None] = []

    def kill(self) -> None:
        """Stand in for the process of vLLM."""
        self.errored = True

    async def generate(
        self, prompt: Any, params: Any, name: str, lora_request: Any
    ) -> AsyncIterator[Any]:
        self.seeds.append(params.seed)
        self.num_held += not self.go_on.is_set()
        while not self.go_on.is_set() and name not in self.aborted and not self.errored:
            await asyncio.sleep(0.005)
        if self.errored:
            raise RuntimeError("EngineDeadError")
        version = self.adapters[lora_request.number] if lora_request else self.version
        ids = [] if name in self.aborted else [version] * params.max_tokens
        logprobs = SimpleNamespace(logprobs=[-1.0] * len(ids), start_indices=range(len(ids)))
        reason = "abort" if name in self.aborted else "length"
        part = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=reason)
        yield SimpleNamespace(outputs=[part])

    async def abort(self, name: str) -> None:
        self.aborted.add(name)

    async def is_paused(self) -> bool:
        while self.hangs:
            await asyncio.sleep(0.01)
        return False

    async def collective_rpc(self, name: str, kwargs: Any = None) -> list[Any]:
        self.called.append(name)
        if name == "try_update":
            info = kwargs["update_info"]
            if name in self.errors and not info["stage"]:
                return [str(self.errors[name])]
            self.version = self.version if info["stage"] else info["version"]
            return [""]
        if name == "unadapted_layers":
            return [["model.layers.0.mlp.gate"] if name in self.errors else []]
        return [True] if name == "staged_weights" else [{"version": self.version, "weights_x": 1.0}]

    async def add_lora(self, request: Any) -> None:
        self.called.append("add_lora")
        if "add_lora" in self.errors:
            raise self.errors["add_lora"]
        self.adapters[request.number] = self.staged[request.number]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any, **options: Any) -> None:
            self.called.append(name)
            if name in self.errors:
                raise self.errors[name]

        return call

    def shutdown(self, timeout: float) -> None:
        self.is_shut_down = True


@pytest.fixture
def llms(monkeypatch: pytest.MonkeyPatch) -> list[FakeLLM]:
    """Every fake that was started, in order."""
    started: list[FakeLLM] = []

    def make(model: VllmModel, options: Vllm) -> FakeLLM:
        started.append(FakeLLM())
        return started[-1]

    def record(**fields: Any) -> SimpleNamespace:
        return SimpleNamespace(**fields)

    def fake(name: str, **members: Any) -> None:
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)

    fake("vllm", TokensPrompt=record, SamplingParams=record)
    fake("vllm.lora.request", LoRARequest=lambda _, number, path, **how: record(number=number))
    fake("vllm.sampling_params", RequestOutputKind=SimpleNamespace(DELTA=0, FINAL_ONLY=1))
    fake("vllm.distributed.weight_transfer.base", WeightTransferInitRequest=record)
    monkeypatch.setattr(vllm_engine, "check_installed", lambda: None)
    monkeypatch.setattr(vllm_runner, "_make_llm", make)
    monkeypatch.setattr(vllm_runner, "children", lambda: set(started))
    monkeypatch.setattr(vllm_runner, "_ABORT_S", 0.3)
    return started


@pytest.fixture
def engine(llms: list[FakeLLM]) -> Iterator[VllmEngine]:
    engine = start()
    yield engine
    engine.close()


def be_hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_runner, "LOAD_S", 1.0)
    monkeypatch.setattr(vllm_runner, "HANG_S", 1.0)


def start(options: Vllm = OPTIONS) -> VllmEngine:
    model = VllmModel("folder", "float32", max_tokens=64, stop_ids=frozenset({1}), store="store")
    return VllmEngine(model, tokenizer=None, options=options)


def sample(engine: VllmEngine, deadline_s: float = 60.0) -> Call:
    return asyncio.run(engine.generate((5, 6), Sampling(3, deadline_s=deadline_s)))


async def begun(llm: FakeLLM, num: int) -> None:
    """Wait until so many requests wait for `go_on`."""
    while llm.num_held < num:
        await asyncio.sleep(0.005)


def wait_for(is_so: Callable[[], bool]) -> None:
    while not is_so():
        time.sleep(0.005)


def test_it_samples_with_the_version_that_it_loaded(
    engine: VllmEngine, llms: list[FakeLLM]
) -> None:
    assert sample(engine).response_ids == (0, 0, 0)
    engine.load(4)
    done = sample(engine)
    assert (done.response_ids, done.finish_reason) == ((4, 4, 4), FinishReason.LENGTH)
    assert [span.version for span in done.spans] == [4] and engine.version == 4
    assert engine.metrics()["weights_x"] == 1.0 and engine.metrics()["engine_restarts"] == 0
    expected = ["init_weight_transfer_engine", "start_weight_update", "try_update"]
    assert llms[0].called[:3] == expected


def test_a_vllm_that_dies_is_replaced_by_one_of_the_same_version(
    engine: VllmEngine, llms: list[FakeLLM]
) -> None:
    engine.load(7)
    llms[0].go_on.clear()

    async def scenario() -> list[Call]:
        under_way = [
            asyncio.create_task(engine.generate((5,), Sampling(3, seed=seed))) for seed in range(3)
        ]
        await begun(llms[0], 3)
        llms[0].kill()
        return await asyncio.gather(*under_way)

    assert {done.response_ids for done in asyncio.run(scenario())} == {(7, 7, 7)}
    metrics = engine.metrics()
    assert (metrics["engine_restarts"], metrics["engine_requeued"]) == (1, 3)
    assert len(llms) == 2 and engine.version == 7
    wait_for(lambda: llms[0].is_shut_down)


def test_a_vllm_that_hangs_is_killed_and_replaced(
    llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    be_hasty(monkeypatch)
    engine = start()
    llms[0].hangs = True
    llms[0].go_on.clear()
    assert sample(engine).response_ids == (0, 0, 0)
    assert llms[0].errored and engine.metrics()["engine_restarts"] == 1
    engine.close()


def test_the_first_load_has_a_deadline_of_its_own(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_runner, "LOAD_S", 0.0)
    engine.load(4)
    assert engine.metrics()["engine_restarts"] == 0 and sample(engine).response_ids == (4, 4, 4)


def test_a_request_that_kills_vllm_twice_is_an_error(
    engine: VllmEngine, llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fatal(
        self: FakeLLM, prompt: Any, params: Any, name: str, lora_request: Any
    ) -> AsyncIterator[Any]:
        if prompt.prompt_token_ids == [5, 6]:
            self.kill()
            raise RuntimeError("EngineDeadError")
        part = SimpleNamespace(token_ids=[1], logprobs=None, finish_reason="length")
        yield SimpleNamespace(outputs=[part])

    monkeypatch.setattr(FakeLLM, "generate", fatal)
    monkeypatch.setattr(vllm_runner, "answer", lambda *args, **fields: None)
    with pytest.raises(EngineError, match="died twice over a prompt of 2 tokens"):
        sample(engine)
    wait_for(lambda: len(llms) == 3)


def test_a_load_that_fails_before_a_weight_changed_leaves_the_old_version(
    engine: VllmEngine, llms: list[FakeLLM]
) -> None:
    engine.load(2)
    llms[0].errors["try_update"] = RuntimeError("version 3 is not in the store")
    with pytest.raises(StoreError, match="vLLM stays at version 2: version 3 is not"):
        engine.load(3)
    assert engine.version == 2 and sample(engine).response_ids == (2, 2, 2) and len(llms) == 1


@pytest.mark.parametrize("problem", ["error", "timeout", "lost"])
def test_a_load_that_fails_otherwise_is_repeated_on_the_next_vllm(
    llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    if problem == "timeout":
        be_hasty(monkeypatch)
    engine = start()
    engine.load(2)
    if problem == "lost":  # the weights are neither those of before nor the new ones
        llms[0].errors["try_update"] = RuntimeError("a full load broke off")
        llms[0].version = None
    elif problem == "error":
        llms[0].errors["start_weight_update"] = RuntimeError("collective failed")
    else:
        monkeypatch.setattr(llms[0], "pause_generation", lambda **_: asyncio.sleep(30))
    engine.load(3)
    assert engine.metrics()["engine_restarts"] == 1 and sample(engine).response_ids == (3, 3, 3)
    assert len(llms) == 2 and llms[0].errored
    engine.close()


# ---- several policies, adapters of one model


@pytest.fixture
def adapters(
    llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, AdapterEngine]]:
    def read(updates: Any, version: int) -> Any:
        """Stand in for a store."""
        if "read" in updates.llm.errors:
            raise updates.llm.errors["read"]
        updates.llm.staged[updates.number] = version
        updates._path("staged").touch()
        return SimpleNamespace(metrics=lambda: {"weights_y": 1.0})

    monkeypatch.setattr(vllm_updates.AdapterUpdates, "_read", read)
    model = VllmModel(
        "folder",
        "float32",
        max_tokens=64,
        stop_ids=frozenset({1}),
        adapters=AdapterSpec(4, 8.0, {}),
        adapter_stores={"planner": "store", "verifier": "other", "refiner": ""},
    )
    engines = AdapterEngine.start(model, tokenizer=None, options=OPTIONS)
    yield engines
    for engine in engines.values():
        engine.close()


def ids_of(engines: dict[str, AdapterEngine]) -> dict[str, tuple[tuple[int, ...], int]]:
    """The first token of each policy, and the version that it is stamped with."""
    found = {}
    for name, engine in engines.items():
        done = asyncio.run(engine.generate((5, 6), Sampling(1)))
        found[name] = done.response_ids[0], done.spans[0].version
    return found


def test_each_policy_has_its_own_adapter_and_versions(
    adapters: dict[str, AdapterEngine], llms: list[FakeLLM]
) -> None:
    assert set(ids_of(adapters).values()) == {(0, 0)}, "the model alone, before the first load"
    adapters["planner"].load(4)
    adapters["verifier"].load(7)
    assert ids_of(adapters) == {"planner": (4, 4), "verifier": (7, 7), "refiner": (0, 0)}
    assert [engine.version for engine in adapters.values()] == [4, 7, 0]
    assert "weights_y" in adapters["planner"].metrics()
    assert "weights_y" not in adapters["refiner"].metrics()
    llms[0].kill()
    assert ids_of(adapters) == {"planner": (4, 4), "verifier": (7, 7), "refiner": (0, 0)}
    assert len(llms) == 2 and adapters["refiner"].metrics()["engine_restarts"] == 1


def test_a_request_that_began_before_the_first_adapter_is_not_stamped_with_it(
    adapters: dict[str, AdapterEngine], llms: list[FakeLLM]
) -> None:
    llms[0].go_on.clear()

    async def scenario() -> Call:
        request = asyncio.create_task(adapters["planner"].generate((5,), Sampling(3)))
        await begun(llms[0], 1)
        for version in (2, 3):
            await asyncio.to_thread(adapters["planner"].load, version)
        llms[0].go_on.set()
        return await request

    done = asyncio.run(scenario())
    assert done.response_ids == (0, 0, 0) and [span.version for span in done.spans] == [0]


def test_an_adapter_that_cannot_be_staged_leaves_the_version_before(
    adapters: dict[str, AdapterEngine], llms: list[FakeLLM]
) -> None:
    """And generation was never paused; one that fails later is repeated on the next vLLM."""
    adapters["planner"].load(2)
    llms[0].called.clear()
    llms[0].errors["read"] = StoreError("it is damaged")
    with pytest.raises(StoreError, match="vLLM stays at version 2: it is damaged"):
        adapters["planner"].load(3)
    assert adapters["planner"].version == 2 and "pause_generation" not in llms[0].called
    del llms[0].errors["read"]
    llms[0].errors["add_lora"] = RuntimeError("no memory")
    adapters["planner"].load(3)
    assert len(llms) == 2 and ids_of(adapters)["planner"] == (3, 3)


def test_a_layer_without_a_slot_is_refused(
    adapters: dict[str, AdapterEngine], llms: list[FakeLLM]
) -> None:
    llms[0].errors["unadapted_layers"] = RuntimeError()
    with pytest.raises(UserError, match=r"no LoRA slot for 'model\.layers\.0\.mlp\.gate'"):
        adapters["planner"].load(1)


def test_vllm_ends_with_the_last_of_its_policies(
    adapters: dict[str, AdapterEngine], llms: list[FakeLLM]
) -> None:
    for name in ("planner", "planner", "refiner"):
        adapters[name].close()
    assert not llms[0].is_shut_down
    adapters["verifier"].close()
    assert llms[0].is_shut_down


def test_a_deadline_is_kept(engine: VllmEngine, llms: list[FakeLLM]) -> None:
    llms[0].go_on.clear()
    done = sample(engine, deadline_s=0.1)
    assert (done.response_ids, done.finish_reason) == ((), FinishReason.DEADLINE)
    assert sample(engine, deadline_s=0.0).finish_reason is FinishReason.DEADLINE
    assert len(llms) == 1


def test_a_closed_engine_has_shut_vllm_down(llms: list[FakeLLM]) -> None:
    engine = start()
    engine.close()
    assert llms[0].is_shut_down and llms[0].errored


def test_an_engine_that_is_closed_while_vllm_starts_leaves_none_behind(
    engine: VllmEngine, llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, may_start = vllm_runner._make_llm, Event()

    def slow(model: VllmModel, options: Vllm) -> Any:
        assert may_start.wait(10)
        return make(model, options)

    monkeypatch.setattr(vllm_runner, "_make_llm", slow)
    engine.supervisor.replace(engine.supervisor.runner.result(), "it died")
    engine.close()
    may_start.set()
    wait_for(lambda: len(llms) == 2 and llms[1].is_shut_down and llms[1].errored)
    engine.supervisor.replace(engine.supervisor.runner.result(), "it died")
    assert engine.metrics()["engine_restarts"] == 1, "nothing is started after the end"


def test_an_engine_that_ends_while_it_starts_leaves_another_one_alone(
    engine: VllmEngine, llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its process already when the other one gets its own."""
    make = vllm_runner._make_llm

    def held(model: VllmModel, options: Vllm) -> Any:
        llm = make(model, options)
        if len(llms) == 2:
            llm.go_on.clear()  # its first token has to wait
        return llm

    monkeypatch.setattr(vllm_runner, "_make_llm", held)
    engine.supervisor.replace(engine.supervisor.runner.result(), "it died")
    wait_for(lambda: len(llms) == 2 and bool(llms[1].seeds))
    other = start()
    engine.close()
    llms[1].go_on.set()
    wait_for(lambda: llms[1].is_shut_down and llms[1].errored)
    assert not llms[2].errored and sample(other).response_ids == (0, 0, 0)
    other.close()


def test_tokens_that_are_on_their_way_at_an_update_have_the_version_before(
    engine: VllmEngine, llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM had sampled them, but its front end has not handed them out yet."""
    (llm,) = llms
    llm.go_on.clear()
    count = [0]
    state = SimpleNamespace(
        external_req_id="1", detokenizer=SimpleNamespace(num_output_tokens=lambda: count[0])
    )
    llm.output_processor.request_states["1"] = state

    async def late(**_: Any) -> None:
        async def hand_out() -> None:
            await asyncio.sleep(0.05)
            count[0] = 2
            llm.engine_core.outputs_queue.get_nowait()

        llm.engine_core.outputs_queue.put_nowait("two tokens")
        tasks.append(asyncio.create_task(hand_out()))

    tasks: list[asyncio.Task[None]] = []
    monkeypatch.setattr(llm, "pause_generation", late)

    async def scenario() -> Call:
        request = asyncio.create_task(engine.generate((5,), Sampling(3)))
        await begun(llm, 1)
        await asyncio.to_thread(engine.load, 4)
        llm.go_on.set()
        return await request

    assert asyncio.run(scenario()).spans == (VersionSpan(0, 2, 0), VersionSpan(2, 3, 4))


def test_an_engine_that_sleeps_wakes_for_a_load_and_for_a_request(llms: list[FakeLLM]) -> None:
    """A frozen policy loads nothing."""
    engine = start(OPTIONS.model_copy(update={"sleep": True}))
    engine.sleep()
    engine.load(1)
    engine.sleep()
    assert sample(engine).response_ids == (1, 1, 1) and sample(engine).response_ids == (1, 1, 1)
    called = [name for name in llms[0].called if name in ("sleep", "wake_up")]
    assert called == ["sleep", "wake_up"] * 2
    engine.close()


def test_a_vllm_that_dies_asleep_is_replaced_when_it_is_needed(llms: list[FakeLLM]) -> None:
    """Not before, since the GPU is full of what is being trained."""
    engine = start(OPTIONS.model_copy(update={"sleep": True}))
    engine.load(1)
    engine.sleep()
    llms[0].errors["wake_up"] = RuntimeError("EngineDeadError")
    assert len(llms) == 1
    engine.load(2)
    assert len(llms) == 2 and sample(engine).response_ids == (2, 2, 2)
    engine.close()


@pytest.mark.parametrize(
    ("is_v2", "is_cpu", "invariant", "is_seeded"),
    [
        (True, False, "", True),
        (False, True, "", True),
        (False, False, "1", True),
        (False, False, "", False),
    ],
)
def test_a_seed_per_request_is_left_out_where_it_costs_a_kernel_per_request(
    llms: list[FakeLLM],
    monkeypatch: pytest.MonkeyPatch,
    is_v2: bool,
    is_cpu: bool,
    invariant: str,
    is_seeded: bool,
) -> None:
    monkeypatch.setattr(FakeLLM, "is_v2", is_v2)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
    model = VllmModel("folder", "float32", 64, frozenset({1}), is_cpu=is_cpu)
    engine = VllmEngine(model, tokenizer=None, options=OPTIONS)
    asyncio.run(engine.generate((5, 6), Sampling(3, seed=7)))
    assert llms[0].seeds[-1] == (7 if is_seeded else None)
    engine.close()


def test_start_errors_are_user_errors_or_explained(
    llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(error: Exception) -> Callable[..., None]:
        def make(model: VllmModel, options: Vllm) -> None:
            raise error

        return make

    cases = [
        (torch.OutOfMemoryError("out of memory"), UserError, "does not fit into memory"),
        (KeyError("strange"), RuntimeError, "vLLM did not start: KeyError: 'strange'"),
        (UserError("vLLM 0.1 is too old"), UserError, "vLLM 0.1 is too old"),
    ]
    for error, kind, message in cases:
        monkeypatch.setattr(vllm_runner, "_make_llm", fail(error))
        with pytest.raises(kind, match=message):
            start()
    monkeypatch.setattr(vllm_runner, "START_S", 0.1)
    monkeypatch.setattr(vllm_runner, "_make_llm", lambda model, options: time.sleep(0.5))
    with pytest.raises(UserError, match=r"not start within 0\.1 s"):
        start()


def test_start_errors_are_read_from_the_error_file(
    llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(model: VllmModel, options: Vllm) -> None:
        Path(os.environ["FLOWTRAIN_VLLM_ERRORS"]).write_text("RuntimeError: CPU attention of 16\n")
        raise RuntimeError("Engine core initialization failed")

    monkeypatch.setattr(vllm_runner, "_make_llm", make)
    with pytest.raises(UserError, match=r"tiny\.num_heads \(RuntimeError: CPU attention of 16\)"):
        start()


def test_spans_begin_after_all_that_was_sampled_before_the_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM hands it out a part at a time; here the first part that comes is of another policy."""
    counts = {"own": 1, "other": 1}
    states = {
        name: SimpleNamespace(
            external_req_id=name,
            detokenizer=SimpleNamespace(num_output_tokens=functools.partial(counts.get, name)),
        )
        for name in counts
    }
    llm = SimpleNamespace(
        output_processor=SimpleNamespace(request_states=states),
        engine_core=SimpleNamespace(outputs_queue=asyncio.Queue()),
    )
    weights = vllm_updates.Weights(labels={"own": [(3, 0)]})
    parts = iter(("other", "own"))

    async def next_part(_: float) -> None:
        if name := next(parts, ""):
            counts[name] += 1

    monkeypatch.setattr(vllm_updates.asyncio, "sleep", next_part)
    asyncio.run(weights.begin_spans(llm, 4))
    assert weights.labels == {"own": [(3, 0), (4, 2)]}
