"""What a model behind an endpoint says of prompts: its numbers, asked for once; hostile replies."""

from __future__ import annotations

import asyncio
import json
import math
from array import array
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
from chat_servers import chat_server
from hypothesis import given, settings
from hypothesis import strategies as st
from prompt_servers import prompt_server, told
from starlette.responses import JSONResponse

from flowtrain.config import Chat
from flowtrain.inference.endpoint import Endpoint
from flowtrain.inference.endpoint_scorer import EndpointScorer, _most, _own, _parse
from flowtrain.inference.protocol import EngineError
from flowtrain.records import Sample
from flowtrain.records.checks import MIN_LOGPROB
from flowtrain.trainer.model import loading as models
from flowtrain.utils.event_loop import run_to_end

VOCAB = 50


def sample(prompt: tuple[int, ...], response: tuple[int, ...]) -> Sample:
    nothing = (0.0,) * len(response)
    return Sample(prompt, response, nothing, nothing, nothing)


@contextmanager
def scorer_of(base_url: str, timeout_s: float = 20.0, **changes: Any) -> Iterator[EndpointScorer]:
    options = {"model": "big", "base_url": base_url, "api_key_env": "", "max_retries": 0}
    chat = Chat.model_validate(options | changes)
    with closing(Endpoint("teacher", chat)) as endpoint:
        yield EndpointScorer(endpoint, "big", timeout_s)


def test_it_tells_what_its_model_says_and_reads_what_begins_alike_once(tiny_path: str) -> None:
    """A turn that goes on from another is asked for with it, and so is one that is there twice."""
    model = models.load_model(tiny_path, torch.float32, attn="sdpa")
    first, other = sample((5, 6, 7), (8, 9)), sample((5, 6), (7, 3))
    longer = sample((5, 6, 7, 8, 9, 11), (12,))
    samples = [longer, first, other, first]
    vocab = model.config.vocab_size
    with prompt_server(model) as server, scorer_of(server.base_url) as scorer:
        _, own = run_to_end(scorer.score(samples, 1.0))
        found = run_to_end(scorer.likeliest(samples, 4, vocab))
    prompts = [body["prompt"] for body in server.asked]
    assert sorted(prompts[:2]) == [[5, 6, 7, 3], [5, 6, 7, 8, 9, 11, 12]]
    assert len(prompts) == 4 and {body["model"] for body in server.asked} == {"big"}
    assert [body["prompt_logprobs"] for body in server.asked] == [0, 0, 4, 4]
    for sent, own_T, likeliest in zip(samples, own, found, strict=True):
        ids = torch.tensor([*sent.prompt_ids, *sent.response_ids])
        with torch.inference_mode():
            logits = model(input_ids=ids[None, :-1]).logits[0, len(sent.prompt_ids) - 1 :]
        logprobs = logits.float().log_softmax(-1)
        truth = logprobs.gather(1, torch.tensor(sent.response_ids)[:, None])[:, 0]
        assert own_T == pytest.approx(truth.tolist(), abs=1e-5)
        best = logprobs.topk(4)
        assert likeliest.ids == array("i", best.indices.flatten().tolist())
        assert likeliest.logprobs.tolist() == pytest.approx(
            best.values.flatten().tolist(), abs=1e-5
        )


def test_a_reply_may_be_as_long_as_what_was_asked_for() -> None:
    """Longer than those of chats, and no longer."""
    place, sizes = {str(n): {"logprob": -3.0} for n in range(10)}, iter((9 * 2**20, 10 * 2**20))

    def served(body: dict[str, Any]) -> JSONResponse:
        entries = [None, *[place] * (len(body["prompt"]) - 1)]
        padding = "x" * (next(sizes) - len(json.dumps(entries, separators=(",", ":"))))
        return JSONResponse({"choices": [{"prompt_logprobs": entries, "padding": padding}]})

    asked = [sample((5,), (7,) * 3000)]  # 3001 * 11 * 256 + 2^20 bytes: 9.06 MiB
    with chat_server(served) as server, scorer_of(server.base_url) as scorer:
        (found,) = run_to_end(scorer.likeliest(asked, 10, VOCAB))
        assert len(found.ids) == 30_000
        with pytest.raises(EngineError, match="it sent"):
            run_to_end(scorer.likeliest(asked, 10, VOCAB))


def test_a_request_has_its_time_from_its_turn_on(tiny_path: str) -> None:
    """Many wait for few; a step's requests take longer than one may."""
    model = models.load_model(tiny_path, torch.float32, attn="sdpa")

    async def slowly() -> None:
        await asyncio.sleep(0.1)

    served = chat_server(lambda body: JSONResponse(told(model, body)), wait=slowly)
    with served as server, scorer_of(server.base_url, 0.7, max_concurrency=1) as scorer:
        _, found = run_to_end(scorer.score([sample((5, n), (7,)) for n in range(10)], 1.0))
    assert len(found) == len(server.asked) == 10 and server.most == 1


# ---- hostile replies

OWN: dict[str, Any] = {"7": {"logprob": -1.0}}
BAD_OWN: dict[str, Any] = {
    "a list": [],
    "nothing": None,
    "another token": {"8": {"logprob": -1.0}},
    "a number": {"7": -1.0},
    "no log-prob": {"7": {}},
    "a text": {"7": {"logprob": "-1"}},
    "above 0": {"7": {"logprob": 0.5}},
    "not a number": {"7": {"logprob": math.nan}},
    "infinite": {"7": {"logprob": -math.inf}},
    "a huge integer": {"7": {"logprob": 10**400}},
}
BAD_MOST: dict[str, Any] = {
    "a list": [[7, -1.0], [8, -2.0]],
    "nothing": None,
    "too few": OWN,
    "too many": {str(n): {"logprob": -3.0} for n in range(4)},
    "an id of a larger vocabulary": OWN | {"50": {"logprob": -2.0}},
    "a negative id": OWN | {"-1": {"logprob": -2.0}},
    "an id in another spelling": OWN | {"07": {"logprob": -2.0}},
    "digits of another script": OWN | {"٣": {"logprob": -2.0}},
    "a word": OWN | {"token_id:8": {"logprob": -2.0}},
    "an id of many digits": OWN | {"9" * 4000: {"logprob": -2.0}},
    "above 0": OWN | {"8": {"logprob": 0.5}},
    "not a number": OWN | {"8": {"logprob": math.nan}},
    "infinite": OWN | {"8": {"logprob": -math.inf}},
    "no log-prob": OWN | {"8": {"rank": 1}},
    "more than all": OWN | {"8": {"logprob": -0.1}, "9": {"logprob": -1.0}},
}


@pytest.mark.parametrize("place", BAD_OWN.values(), ids=BAD_OWN)
def test_a_place_without_its_own_log_prob_is_an_error(place: Any) -> None:
    with pytest.raises(EngineError, match="without a log-prob of token 7 where it stands"):
        _own(place, 7)


@pytest.mark.parametrize("place", BAD_MOST.values(), ids=BAD_MOST)
def test_a_place_without_likeliest_tokens_is_an_error(place: Any) -> None:
    with pytest.raises(EngineError, match="where token 7 stands") as refused:
        _most(place, 7, 2, VOCAB)
    assert len(str(refused.value)) < 200


def test_what_rounding_does_is_taken() -> None:
    """And a token that a server calls impossible is very unlikely."""
    assert _own({"7": {"logprob": 0.0009}}, 7) == 0.0
    for impossible in (-9999.0, -(10**400)):
        assert _own({"7": {"logprob": impossible}}, 7) == MIN_LOGPROB
    place = {"7": {"logprob": -9999.0}, "3": {"logprob": -8.0}, "9": {"logprob": 0.0005}}
    assert _most(place, 7, 2, VOCAB) == [(9, 0.0), (3, -8.0)]
    assert _most(place, 7, 3, VOCAB)[2] == (7, MIN_LOGPROB)


NUMBERS = st.integers(-(10**320), 1) | st.floats(max_value=0.1) | st.sampled_from([None, "-1", []])
ENTRIES = st.dictionaries(st.sampled_from(["logprob", "rank"]), NUMBERS, min_size=1)
NAMES = st.integers(-1, 60).map(str) | st.sampled_from(["07", "7 ", "", "x"])
PLACES = st.dictionaries(NAMES, ENTRIES, max_size=4) | st.sampled_from([None, 3, "x", [], {"7": 1}])
BODIES = st.sampled_from([None, 1, [], {}, {"choices": []}, {"choices": [{"prompt_logprobs": {}}]}])


@settings(derandomize=True, deadline=None, max_examples=300)
@given(PLACES, BODIES, st.integers(0, 3))
def test_any_reply_is_an_error_or_within_bounds(place: Any, body: Any, num: int) -> None:
    ids = (5, 6, 7)
    shaped = {"choices": [{"prompt_logprobs": [None, None, place]}]}

    def bounded(values: list[float]) -> bool:
        return all(MIN_LOGPROB <= value <= 0 for value in values)

    for reply in (body, shaped):
        content = json.dumps(reply).encode()
        try:
            own, *_ = _parse(content, ids, 2, _own)
            assert len(own) == 1 and bounded(own)
        except EngineError:
            pass
        try:
            places, *_ = _parse(content, ids, 2, lambda at, token: _most(at, token, num, VOCAB))
            (place,) = places
            assert len({token for token, _ in place}) == len(place) == num
            assert all(0 <= token < VOCAB for token, _ in place)
            assert bounded([value for _, value in place])
        except EngineError:
            pass
