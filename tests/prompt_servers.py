"""A model behind HTTP that tells log-probs of prompts, in the form of vLLM's server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from chat_servers import ChatServer, chat_server
from starlette.responses import JSONResponse
from transformers import PreTrainedModel

from flowtrain.trainer.model import loading as models


def told(model: PreTrainedModel, body: dict[str, Any]) -> dict[str, Any]:
    """The reply to a request: at each token of the prompt its own log-prob, and those of the
    likeliest tokens, as many as `prompt_logprobs` says.
    """
    ids, num = body["prompt"], body["prompt_logprobs"]
    assert (body["max_tokens"], body["temperature"]) == (1, 0)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids[:-1]]), use_cache=False).logits[0].float()
    logprobs = logits.log_softmax(-1)
    named = torch.cat([torch.tensor(ids[1:])[:, None], logprobs.topk(num).indices], 1)
    values = logprobs.gather(1, named).tolist()
    entries: list[Any] = [None]
    for tokens, row in zip(named.tolist(), values, strict=True):
        pairs = zip(tokens, row, strict=True)
        entries.append({str(token): {"logprob": x, "decoded_token": "?"} for token, x in pairs})
    usage = {"prompt_tokens": len(ids), "completion_tokens": 1}
    return {"choices": [{"text": "", "prompt_logprobs": entries}], "usage": usage}


@contextlib.contextmanager
def prompt_server(model: PreTrainedModel | str) -> Iterator[ChatServer]:
    """Serve a model, or one of a folder in fp32."""
    if isinstance(model, str):
        model = models.load_model(model, torch.float32, attn="sdpa")
    with chat_server(lambda body: JSONResponse(told(model, body))) as server:
        yield server
