r"""Start a run on a Ray cluster, with as many rollout nodes as its trainer needs.

    ray job submit --working-dir . -- python -m deploy.ray.pool --ranks 8 --nodes 4:64 \
        --node "--rollout.engine vllm" --database postgresql://flow@db/flow \
        --config configs/agentflow-7b.toml --run.dir /shared/run

Ray starts processes, restarts them and finds machines for them, and does nothing else: the service
of the dataflow is an actor on the machine of this program, the trainer's ranks are Ray Train's, and
each node is an actor with a GPU. Tasks, groups, batches and weights go the way that they go without
Ray. A rank that dies takes the others along; all begin again from the newest checkpoint, so run.dir
is on a file system that all machines share, and nodes read the weights there unless
--dataflow.store names another place. How many nodes there are the service tells
(flowtrain/rollouts/pool_size.py); an autoscaler brings machines for those that wait for a GPU.

Options that are not listed below are those of python -m flowtrain.train.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ray
import torch.distributed as dist
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from examples.node_pool import Controller
from flowtrain.records import UserError
from flowtrain.rollouts.client import Client
from flowtrain.rollouts.contract import Refused, Unavailable
from flowtrain.utils.net.serving import TOKEN_VARIABLE

NAMESPACE = "flowtrain"
"""Namespace of the actors `service` and `node-N`."""
_GRACE_S = 30.0
"""Seconds that a process has after SIGTERM: a node gives its leases back."""
_ANSWER_S = 10.0
_USERS_MISTAKE = 2
_PR_SET_PDEATHSIG = 1


def _run(words: Sequence[str], token: str, end_by: int, **variables: str) -> Any:
    """Start a command of flowtrain that gets the signal `end_by` when this thread's process dies,
    which Ray may kill at any time.
    """
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        env={**os.environ, TOKEN_VARIABLE: token, **variables},
        preexec_fn=lambda: ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, end_by),
    )


@ray.remote
class Process:
    """A command on a machine of the cluster, as long as this actor lives."""

    def __init__(self, words: Sequence[str], token: str) -> None:
        self._process = _run(words, token, signal.SIGTERM)

    def host(self) -> str:
        return str(ray.util.get_node_ip_address())

    def code(self) -> int | None:
        """Return how the command ended; None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


class Nodes:
    """The nodes as actors, for `Controller`. After `close` none of them runs."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        """`make` starts the actor of the node with that number."""
        self._make = make
        self._actors: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._actors)

    def reap(self) -> None:
        """Forget the nodes that have ended. Those that Ray starts again, or has no machine for yet,
        count as there.
        """
        answers = {number: actor.code.remote() for number, actor in self._actors.items()}
        for number, answer in answers.items():
            try:
                code = ray.get(answer, timeout=_ANSWER_S)
            except ActorDiedError as error:
                code = str(error).splitlines()[0]
            except (RayActorError, GetTimeoutError):
                continue
            if code is not None:
                print(f"node-{number} has ended: {code}", file=sys.stderr, flush=True)
                ray.kill(self._actors.pop(number))

    def resize(self, num: int) -> None:
        """Start missing nodes, or end those with the highest numbers."""
        while len(self._actors) < num:
            number = next(number for number in range(num) if number not in self._actors)
            self._actors[number] = self._make(number)
        last = [self._actors.pop(number) for number in sorted(self._actors)[num:]]
        ray.wait([actor.end.remote() for actor in last], num_returns=len(last), timeout=_GRACE_S)
        for actor in last:
            ray.kill(actor)

    def close(self) -> None:
        self.resize(0)


def rank(given: Mapping[str, Any]) -> int:
    """Train as one rank, in a process of its own: Ray calls this on a thread, where no signal
    arrives. Its process group tells the ranks where theirs meet. Returns the process's exit code.
    """
    place = [""]
    if dist.get_rank() == 0:
        with socket.socket() as found:
            found.bind(("", 0))
            place = [f"{ray.util.get_node_ip_address()} {found.getsockname()[1]}"]
    dist.broadcast_object_list(place)
    host, port = place[0].split()
    process = _run(
        ["flowtrain.train", *given["words"]],
        given["token"],
        signal.SIGKILL,  # a rank without its peers would wait for them while others take its place
        MASTER_ADDR=host,
        MASTER_PORT=port,
    )
    code = process.wait()
    if code not in (0, _USERS_MISTAKE):
        raise RuntimeError(f"rank {dist.get_rank()} ended with code {code}")
    return code


def control(url: str, token: str, controller: Controller, every_s: float, ended: Any) -> None:
    """Resize the pool until training is done, or `ended` is set."""
    with Client(url, token, wait_s=_ANSWER_S) as client:
        while not ended.is_set():
            try:
                if not controller.look(client.status()):
                    return
            except (Unavailable, Refused) as error:
                print(f"{error}; the pool stays as it is", file=sys.stderr, flush=True)
            ended.wait(every_s)


def run(options: argparse.Namespace, words: Sequence[str]) -> int:
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
    start = partial(Process.options, namespace=NAMESPACE, max_restarts=-1)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    serve = ("flowtrain.rollouts", "serve", "--database", options.database)
    service = start(name="service", num_cpus=0, scheduling_strategy=here).remote(
        [*serve, "--host", "0.0.0.0", "--port", str(options.port), *words], token
    )
    url = f"http://{ray.get(service.host.remote())}:{options.port}"
    uses_gpu = not options.cpu

    def make_node(number: int) -> Any:
        own = ("--dataflow", url, "--name", f"node-{number}", *shlex.split(options.node))
        resources = {"num_gpus": 1} if uses_gpu else {"num_cpus": 1}
        return start(name=f"node-{number}", **resources).remote(
            ["flowtrain.rollouts.node", *own], token
        )

    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # paths of a run are relative to the job's folder
    nodes, ended = Nodes(make_node), threading.Event()
    given = (url, token, Controller(nodes, *options.nodes), options.every, ended)
    thread = threading.Thread(target=control, args=given, daemon=True)
    trainer = TorchTrainer(
        rank,
        train_loop_config={
            "words": [*words, "--run.resume", "auto", "--dataflow.url", url],
            "token": token,
        },
        torch_config=TorchConfig("gloo"),
        scaling_config=ScalingConfig(num_workers=options.ranks, use_gpu=uses_gpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=options.max_failures)),
    )
    thread.start()
    try:
        return int(trainer.fit().return_value)
    finally:
        ended.set()
        thread.join()
        nodes.close()
        ray.wait([service.end.remote()], timeout=_GRACE_S)
        ray.kill(service)


def _bounds(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    try:
        found = int(low), int(high or low)
    except ValueError:
        found = 0, 0
    if not 1 <= found[0] <= found[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is no N, and no LEAST:MOST")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.ray.pool",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = partial(parser.add_argument, metavar="N")
    add("--database", required=True, metavar="WHERE", help="postgresql://..., or an SQLite file")
    add("--ranks", type=int, default=1, help="ranks of the trainer, a GPU each (default: 1)")
    text = "fewest and most nodes, a GPU each (default: 1:8)"
    add("--nodes", type=_bounds, default=(1, 8), metavar="LEAST:MOST", help=text)
    add(
        "--node", default="", metavar="OPTIONS", help="options of python -m flowtrain.rollouts.node"
    )
    add("--max-failures", type=int, default=20, help="times that ranks begin again (default: 20)")
    add("--every", type=float, default=30.0, metavar="S", help="between two looks (default: 30)")
    add("--port", type=int, default=8400, help="of the service (default: 8400)")
    parser.add_argument("--cpu", action="store_true", help="ranks and nodes take a CPU each")
    options, words = parser.parse_known_args(arguments)
    try:
        return run(options, words)
    except UserError as error:
        print(f"deploy.ray.pool: {error}", file=sys.stderr)
        return _USERS_MISTAKE


if __name__ == "__main__":
    sys.exit(main())
