"""Real vLLM, behind its own server and in our engine, is found out when it does not hold the
policy. Both run in bf16; the server holds several adapters, as `vllm serve --enable-lora` does.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
import torch
from engines_under_way import loud_model
from ports import free_port
from safetensors.torch import load_file
from test_proof import FAULTS, adapted, asked

from flowtrain.config import Chat, Lora, Vllm
from flowtrain.inference import prove as prove_command
from flowtrain.inference.endpoint import Endpoint
from flowtrain.inference.endpoint_scorer import EndpointScorer
from flowtrain.inference.factory import ModelSpec
from flowtrain.inference.proof import compare, fixed_samples, log_probs
from flowtrain.inference.protocol import Scorer
from flowtrain.inference.vllm.engine import AdapterEngine
from flowtrain.inference.vllm.process import VllmModel, cpu_environment
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.model import lora
from flowtrain.utils.event_loop import run_to_end
from flowtrain.weights import Publisher, WeightStore

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
START_S = 600
NUM_CHECKS = 20
"""Honest checks of a model, each of 64 other tokens."""

Serve = Callable[[str], Scorer]
"""Serves a folder, the base or an adapter on it, and returns what tells log-probs by it."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("base")
    tokenizer, model = loud_model(scale=0.3)
    models.export(model, tokenizer, models.full_weights(model), path)
    return str(path)


@pytest.fixture(scope="module")
def server(base: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a `vllm serve`, which takes adapters while it runs."""
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    words = ["-m", "vllm.entrypoints.openai.api_server"]
    words += ["--model", base, "--served-model-name", "base"]
    words += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
    words += ["--max-model-len", "64", "--max-num-seqs", "64", "--enforce-eager"]
    words += ["--kv-cache-memory-bytes", str(2**27)]
    words += ["--enable-lora", "--max-lora-rank", "8"]
    variables = {**os.environ, **cpu_environment(1), "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with log.open("w") as file:
        vllm = subprocess.Popen([sys.executable, *words], env=variables, stdout=file, stderr=file)
    try:
        end = time.monotonic() + START_S
        while not is_healthy(f"http://127.0.0.1:{port}/health"):
            assert vllm.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        vllm.terminate()
        vllm.wait(60)


def is_healthy(url: str) -> bool:
    try:
        return httpx2.get(url).status_code == 200
    except httpx2.TransportError:
        return False


def served(url: str, path: str, name: str) -> str:
    """The name under which the server holds a folder; an adapter takes the place of one before."""
    if not lora.is_adapter(path):
        return "base"
    body = {"lora_name": name, "lora_path": path, "load_inplace": True}
    answer = httpx2.post(f"{url}/load_lora_adapter", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return name


@pytest.fixture
def by_server(server: str) -> Iterator[Serve]:
    chat = Chat(model="base", base_url=server, api_key_env="", max_concurrency=1)
    endpoint = Endpoint("proof", chat)
    yield lambda path: EndpointScorer(endpoint, served(server, path, "policy"), 60)
    endpoint.close()


@pytest.fixture(scope="module")
def by_engine(base: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Our engine of an adapter, which comes from a store, and of the base without it."""
    store = WeightStore(tmp_path_factory.mktemp("run") / "weights")
    model, tokenizer = models.load_model(base, torch.bfloat16), models.load_tokenizer(base)
    spec = ModelSpec.of("model.path", base, tokenizer, model)
    vllm_model = VllmModel(
        source=base,
        dtype="bfloat16",
        max_tokens=64,
        stop_ids=frozenset(),
        adapters=spec.adapters(Lora(rank=4), torch.float32),
        adapter_stores={"policy": str(store.root), "base": ""},
        environment=cpu_environment(1),
    )
    engines = AdapterEngine.start(vllm_model, tokenizer, Vllm(kv_cache_gb=0.125))
    publisher, versions = Publisher(store), itertools.count()

    def serve(path: str) -> Scorer:
        if not lora.is_adapter(path):
            return engines["base"]
        version = next(versions)
        publisher.publish(load_file(Path(path) / lora.WEIGHTS), version)
        engines["policy"].load(version)
        return engines["policy"]

    yield serve
    for engine in engines.values():
        engine.close()


@pytest.fixture(params=["server", "engine"])
def serve(request: pytest.FixtureRequest) -> Serve:
    found: Serve = request.getfixturevalue(f"by_{request.param}")
    return found


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found_and_named(base: str, tmp_path: Path, serve: Serve, name: str) -> None:
    held, policy, others, words = FAULTS[name](base, tmp_path)
    found = asked(serve(held), policy, **others)
    assert not found.is_proven
    assert words in found.text() and found.text().startswith("not the policy")


@pytest.mark.parametrize("is_adapter", [False, True], ids=["base", "adapter"])
def test_honest_checks_raise_no_alarm(
    base: str, tmp_path: Path, serve: Serve, is_adapter: bool
) -> None:
    """The adapter is in a slot of its own there, and merged into its base here."""
    policy = adapted(base, tmp_path / "a", 0) if is_adapter else base
    samples = fixed_samples(models.load_tokenizer(base), 64 * NUM_CHECKS)
    _, told = run_to_end(serve(policy).score(samples, 1.0))
    served_T = torch.tensor([x for each in told for x in each], dtype=torch.float64)
    policy_T = log_probs(policy, samples, torch.float32)
    rounded_T = log_probs(policy, samples, torch.bfloat16)
    checks = zip(*(x.chunk(NUM_CHECKS) for x in (served_T, policy_T, rounded_T)), strict=True)
    found = [compare(*each, {}) for each in checks]
    assert [each.text() for each in found if not each.is_proven] == []


def test_the_command_on_a_server_whose_adapter_is_replaced(
    base: str, server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = (adapted(base, tmp_path / name, n) for n, name in enumerate("ab"))
    command = [server, "--model", "policy", "--policy", after, "--other", f"step 1={before}"]
    command += ["--tokens", "1024"]  # sequences that would share a step of vLLM
    served(server, before, "policy")
    assert prove_command.main(command) == 1
    assert "it samples with step 1 (" in capsys.readouterr().out
    served(server, after, "policy")
    assert prove_command.main(command) == 0
    assert capsys.readouterr().out.startswith("proven: it samples with the policy (")
