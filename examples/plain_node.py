"""A rollout node in plain Python, for a dataflow and its trainers:  python examples/plain_node.py
http://127.0.0.1:8400 [--num_groups N]

It shows what another runtime has to do to take part (docs/dataflow.md), with nothing of flowtrain.
Its "model" is a script that guesses tokens; the rest is real: leases are renewed and given back,
groups are pushed until an answer comes, and FLOWTRAIN_TOKEN is the token.
"""

import argparse
import contextlib
import http.client
import math
import os
import random
import signal
import time
import urllib.error
import urllib.request
import uuid
import zlib

import msgspec

WORDS = ["Tool Name: Search\n", "Sub-Goal: capital of Chad\n", "Paris", "42"]


class Service:
    def __init__(self, url: str) -> None:
        self.url = url
        self.headers = {"Authorization": f"Bearer {os.environ.get('FLOWTRAIN_TOKEN', '')}"}

    def ask(self, method: str, **message):
        """Ask until there is an answer: a message that is sent twice has the effect of one. A
        refusal (HTTP 4xx) ends the node.
        """
        while True:
            request = urllib.request.Request(
                f"{self.url}/v6/{method}", msgspec.msgpack.encode(message), self.headers
            )
            try:
                with urllib.request.urlopen(request, timeout=30) as response:
                    return msgspec.msgpack.decode(response.read())
            except urllib.error.HTTPError as error:
                if error.code < 500 and error.code not in (408, 425, 429):
                    raise SystemExit(
                        f"{method}: {msgspec.msgpack.decode(error.read())['error']}"
                    ) from None
            except (OSError, http.client.HTTPException):
                pass  # it is away, or was cut
            time.sleep(random.uniform(0.2, 1.0))


def rollout(task: dict, seed: int, version: int) -> dict:
    """One turn. The sampled ids, their log-probs and the weight version of every token are what
    training is made of.
    """
    rng = random.Random(seed)
    begun = time.monotonic()
    ids = [rng.randrange(len(WORDS)) for _ in range(4)]
    call = {
        "prompt_ids": list(task["question"].encode()),
        "response_ids": ids,
        "logprobs": [-math.log(len(WORDS))] * 4,
        "spans": [{"start": 0, "end": 4, "version": version}],
        "finish_reason": "stop",
        "text": "".join(WORDS[i] for i in ids),
    }
    turn = {
        "calls": {"planner": call},
        "action": None,
        "verdict": "STOP",
        "seconds": time.monotonic() - begun,
    }
    answer = call["text"][-5:]
    score = {"reward": float(answer in task["answers"]), "scored_by": "exact"}
    return {
        "task": task,
        "turns": [turn],
        "answer": answer,
        "seconds": turn["seconds"],
        "seed": seed,
        **score,
    }


def work(service: Service, name: str, num_groups: int, at_once: int) -> None:
    me, held = {"node": name, "life": uuid.uuid4().hex}, {}
    joined = service.ask("join", **me)
    service.headers["Flowtrain-Run"] = joined["run"]
    try:
        while num_groups > 0:
            got = service.ask("lease", **me, num=min(num_groups, at_once), key=uuid.uuid4().hex)
            held = {lease["work_item"]: lease for lease in got["leases"]}
            renew_at = time.monotonic() + joined["lease_s"] / 3
            # Here a real node loads these weights from their store.
            version = got["policies"]["planner"]["version"] if held else 0
            while held:
                work_item, lease = next(iter(held.items()))
                rollouts = [
                    rollout(lease["task"], lease["seed"] + i, version)
                    for i in range(joined["group_size"])
                ]
                payload = zlib.compress(
                    msgspec.msgpack.encode({"index": lease["index"], "trajectories": rollouts})
                )
                push = {"work_item": work_item, "attempt": lease["attempt"], "payload": payload}
                status = service.ask("push", node=name, **push)["status"]
                print(f"work item {work_item}: {status}", flush=True)
                num_groups -= status == "committed"
                del held[work_item]
                if held and time.monotonic() > renew_at:
                    renew_at = time.monotonic() + joined["lease_s"] / 3
                    for lost in service.ask("renew", **me, work_items=leases(held))["lost"]:
                        held.pop(lost, None)
            if got["reason"] == "done":
                return
            time.sleep(got["retry_after_s"])
    finally:
        if held:
            service.ask("release", node=name, work_items=leases(held), reason="the node ends")


def leases(held: dict) -> list:
    return [(work_item, lease["attempt"]) for work_item, lease in held.items()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--name", default=f"plain-{os.getpid()}")
    parser.add_argument(
        "--num_groups", type=int, default=1 << 30, help="groups to push (default: no end)"
    )
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # a script's `&` has the former ignored
        signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        work(Service(options.url), options.name, options.num_groups, at_once=4)
