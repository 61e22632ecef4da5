"""An endpoint that does not hold the policy is found out, and what it holds instead is named."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_servers import chat_server
from safetensors.torch import load_file, save_file
from starlette.responses import JSONResponse

from flowtrain.config import Lora
from flowtrain.inference import proof
from flowtrain.inference import prove as prove_command
from flowtrain.inference.proof import compare, prove
from flowtrain.inference.torch_engine import TorchEngine
from flowtrain.records import Sample
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.model import lora
from flowtrain.utils.event_loop import run_to_end


@dataclass
class FakeServer:
    """A FAKE of a server: it scores by a model in bf16, one sequence after another, or the whole
    batch at once, which rounds in another way.
    """

    path: str
    dtype: torch.dtype = torch.bfloat16

    async def score(
        self, samples: Sequence[Sample], temperature: float
    ) -> tuple[int, list[tuple[float, ...]]]:
        model = models.load_model(self.path, self.dtype, attn="eager")
        ids = torch.tensor([[*s.prompt_ids, *s.response_ids] for s in samples])
        with torch.inference_mode():
            logits = model(input_ids=ids).logits[:, :-1].float().log_softmax(-1)
        found = logits.gather(2, ids[:, 1:, None])[..., 0]
        return 0, [tuple(row) for row in found.tolist()]


def saved(model: Any, path: Path, tiny_path: str) -> str:
    """A folder of a model, with the tokenizer."""
    model.save_pretrained(path)
    models.load_tokenizer(tiny_path).save_pretrained(path)
    return str(path)


def moved(tiny_path: str, path: Path, size: float, seed: int = 0) -> str:
    """A later version, whose weights are `size` away, relative to each tensor's own."""
    model, rng = models.load_model(tiny_path, torch.float32), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=rng)
            parameter += size * float(parameter.std()) * noise
    return saved(model, path, tiny_path)


def adapted(tiny_path: str, path: Path, seed: int, size: float = 0.3) -> str:
    """A folder of an adapter on the tiny model; `size` 0: it does nothing."""
    model = models.load_model(tiny_path, torch.float32)
    lora.add_adapter(model, Lora(rank=4), tiny_path)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(size * torch.randn(parameter.shape, generator=rng))
    path.mkdir()
    save_file(lora.adapter_weights(model), path / lora.WEIGHTS)
    lora.save_config(model, path)
    models.load_tokenizer(tiny_path).save_pretrained(path)
    return str(path)


def asked(
    scorer: Any, path: str, dtype: torch.dtype = torch.bfloat16, **others: str
) -> proof.Proof:
    return run_to_end(prove(scorer, path, others, dtype, 64))


def test_a_server_of_the_policy_is_proven(tiny_path: str, tmp_path: Path) -> None:
    policy = moved(tiny_path, tmp_path / "policy", 0.3)
    found = asked(FakeServer(policy), policy, before=tiny_path)
    assert found.is_proven and not found.holds and not found.alike
    assert found.text().startswith("proven: it samples with the policy (")


def test_no_false_alarm_in_200_honest_checks(tiny_path: str, tmp_path: Path) -> None:
    """Other weights and other tokens each time; the server sums in another order, in bf16."""
    alarms, model = [], models.load_model(tiny_path, torch.float32)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for seed in range(200):
        rng = torch.Generator().manual_seed(seed)
        weights = {
            name: tensor + 0.2 * tensor.std() * torch.randn(tensor.shape, generator=rng)
            for name, tensor in start.items()
        }
        ids = torch.randint(5, 200, (2, 33), generator=rng)

        def told(
            dtype: torch.dtype, attention: str, parts: int, ids: Any = ids, weights: Any = weights
        ) -> torch.Tensor:
            model.set_attn_implementation(attention)
            model.to(torch.float32).load_state_dict(weights)
            with torch.inference_mode():
                logits = [model.to(dtype)(input_ids=own).logits for own in ids.chunk(parts)]
            found = torch.cat(logits)[:, :-1].double().log_softmax(-1)
            return found.gather(2, ids[:, 1:, None]).flatten()

        policy_T, rounded_T = told(torch.float32, "sdpa", 2), told(torch.bfloat16, "sdpa", 2)
        if not compare(told(torch.bfloat16, "eager", 1), policy_T, rounded_T, {}).is_proven:
            alarms.append(seed)
    assert alarms == []


FAULTS: dict[str, Callable[[str, Path], tuple[str, str, dict[str, str], str]]] = {}
"""(what is served, what it should be, other models by name, what is said)"""


def fault(make: Callable[[str, Path], tuple[str, str, dict[str, str], str]]) -> Any:
    FAULTS[make.__name__] = make
    return make


@fault
def a_stale_version(tiny: str, path: Path) -> tuple[str, str, dict[str, str], str]:
    return tiny, moved(tiny, path / "new", 0.02), {"before": tiny}, "it samples with before ("


@fault
def a_swapped_adapter(tiny: str, path: Path) -> tuple[str, str, dict[str, str], str]:
    own, other = (adapted(tiny, path / name, n) for n, name in enumerate("ab"))
    return other, own, {"other": other}, "it samples with other ("


@fault
def a_dropped_adapter(tiny: str, path: Path) -> tuple[str, str, dict[str, str], str]:
    return tiny, adapted(tiny, path / "a", 0), {}, "samples with the base without the adapter ("


@fault
def a_zeroed_adapter(tiny: str, path: Path) -> tuple[str, str, dict[str, str], str]:
    zero = adapted(tiny, path / "zero", 0, size=0.0)
    return zero, adapted(tiny, path / "a", 0), {}, "samples with the base without the adapter ("


@fault
def a_delayed_adapter(tiny: str, path: Path) -> tuple[str, str, dict[str, str], str]:
    before, own = adapted(tiny, path / "a", 0), adapted(tiny, path / "b", 0, size=0.33)
    return before, own, {"step 1": before}, "it samples with step 1 ("


@fault
def a_wrong_layout(tiny: str, path: Path) -> tuple[str, str, dict[str, str], str]:
    """The rows of one projection in another order."""
    own = moved(tiny, path / "own", 0.0)
    weights = load_file(Path(own) / "model.safetensors")
    name = next(n for n in weights if n.endswith("q_proj.weight"))
    save_file({**weights, name: weights[name].roll(1, 0)}, Path(own) / "model.safetensors")
    return tiny, own, {"before": moved(tiny, path / "before", 0.3)}, "nor any other model"


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("engine", ["server", "torch engine"])
def test_faults_are_found_and_named(tiny_path: str, tmp_path: Path, name: str, engine: str) -> None:
    served, policy, others, words = FAULTS[name](tiny_path, tmp_path)
    if engine == "server":
        found = asked(FakeServer(served), policy, **others)
    else:
        model = models.load_model(served, torch.float32)
        own = TorchEngine(model, models.load_tokenizer(tiny_path), None)
        found = asked(own, policy, torch.float32, **others)
        own.close()
    assert not found.is_proven
    assert words in found.text() and found.text().startswith("not the policy")


def test_models_that_rounding_hides_are_said_to_be_alike(tiny_path: str, tmp_path: Path) -> None:
    policy = moved(tiny_path, tmp_path / "policy", 1e-5)
    found = asked(FakeServer(policy), policy, before=tiny_path)
    assert found.is_proven and found.alike == ("before",)
    assert found.text().endswith("these tokens cannot tell it from before")


@contextmanager
def vllm_like(path: str) -> Iterator[str]:
    """A FAKE of vLLM's server over HTTP that tells log-probs of prompts."""
    model = models.load_model(path, torch.bfloat16, attn="sdpa")

    def served(body: dict[str, Any]) -> JSONResponse:
        ids = body["prompt"]
        with torch.inference_mode():
            logprobs = model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
        told = [{str(t): {"logprob": float(logprobs[i, t])}} for i, t in enumerate(ids[1:])]
        usage = {"prompt_tokens": len(ids), "completion_tokens": 1}
        return JSONResponse({"choices": [{"prompt_logprobs": [None, *told]}], "usage": usage})

    with chat_server(served) as server:
        yield server.base_url


def test_the_command(tiny_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = moved(tiny_path, tmp_path / "policy", 0.1)
    with vllm_like(policy) as url:
        assert prove_command.main([url, "--model", "p", "--policy", policy]) == 0
        assert capsys.readouterr().out.startswith("proven: ")
        wrong = [url, "--model", "p", "--policy", tiny_path, "--other", f"step 3={policy}"]
        assert prove_command.main(wrong) == 1
        assert "it samples with step 3 (" in capsys.readouterr().out
        assert prove_command.main([url, "--model", "p", "--policy", str(tmp_path)]) == 2
    assert prove_command.main([url, "--model", "p", "--policy", policy, "--timeout", "1"]) == 2
    for arguments in (["--other", "x"], ["--tokens", "0"]):
        with pytest.raises(SystemExit):
            prove_command.main([url, "--model", "p", "--policy", policy, *arguments])


def test_the_tokens_are_always_the_same_and_ordinary(tiny_path: str) -> None:
    tokenizer = models.load_tokenizer(tiny_path)
    random.seed(5)
    first, again = (proof.fixed_samples(tokenizer, 64) for _ in range(2))
    assert first == again
    drawn = [x for s in first for x in (*s.prompt_ids, *s.response_ids)]
    assert sum(len(s.response_ids) for s in first) == 64
    assert not set(drawn) & set(tokenizer.all_special_ids)
