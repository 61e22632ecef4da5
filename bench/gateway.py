"""What the gateway costs:  python -m bench.gateway [--full] [--json F]

--in-flight rollouts are under way at a time, each a conversation of four turns with tools, whose
last prompt has about 2,000 tokens: once by each wire. The programs are in a process of their own
(`bench/gateway_clients.py`); the engine is SIMULATED: it answers --engine-s seconds after it was
asked, always, with text and a call that are at hand, and takes no core.

"steady": the rollouts begin at times drawn at random, so that calls come as they do to a gateway
whose cores have time to spare. What the gateway adds to a call is the time that its client waits,
less that of the engine. So an event loop that is late to take the answer counts as the gateway's,
as do HTTP, the sockets, and the client's own part of either. "saturated": the engine takes no time,
so that all rollouts always wait, and the rate is that of one process. CPU time is that of the
gateway's process: all of its threads, the rollouts' own begin and end, and the simulated engine.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import selectors
import statistics
import time
from collections.abc import Sequence
from typing import Any

from bench.gateway_clients import TURNS, WIRES, Clients
from bench.measure import Table, new_parser
from bench.simulated_chat import make_context
from flowtrain.agents.gateway.agent import GatewayAgent
from flowtrain.records import Task


def main(argv: Sequence[str] | None = None) -> None:
    parser = new_parser(__doc__, rollouts=2048)
    add = parser.add_argument
    add("--wires", nargs="+", choices=list(WIRES), default=list(WIRES), help="APIs of vendors")
    add("--in-flight", type=int, default=256, help="rollouts at a time")
    add("--rollouts", type=int, default=512, help="of each wire and load")
    add("--engine-s", type=float, default=4.0, help="seconds of the simulated engine per call")
    args = parser.parse_args(argv)
    loads = {"steady": args.engine_s, "saturated": 0.0}
    table = Table(args.json)

    async def measure() -> None:
        clients = Clients()
        for (load, engine_s), wire in itertools.product(loads.items(), args.wires):
            row = await case(clients, wire, engine_s, args.in_flight, args.rollouts)
            table.add({"wire": wire, "load": load, **row})
        clients.end()

    # Its timers are no whole milliseconds: an engine that answers wakes a loop at once, and one
    # that is simulated should.
    loop = lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())  # noqa: E731
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(measure())


async def case(
    clients: Clients, wire: str, engine_s: float, in_flight: int, num_rollouts: int
) -> dict[str, Any]:
    """Measure a wire under a load."""
    context, engine = make_context()
    engine.seconds = engine_s
    agent = GatewayAgent(context)
    program: Any = clients
    agent._program = program  # in place of a command: it plays the programs of all rollouts
    clients.wire, clients.seconds = wire, []
    numbers, drawn = iter(range(num_rollouts)), random.Random(0)

    async def slot(wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        for number in numbers:
            trajectory = await agent.run(Task(str(number), "", ("",)), number)
            if trajectory.error or len(trajectory.turns) != TURNS:
                raise SystemExit(f"a rollout failed: {trajectory.error or trajectory.truncated}")

    began, cpu_s = time.monotonic(), time.process_time()
    ramp_s = TURNS * engine_s
    await asyncio.gather(*(slot(drawn.uniform(0.0, ramp_s)) for _ in range(in_flight)))
    seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu_s
    agent.close()
    assert engine.num_calls == len(clients.seconds)
    return {
        "in_flight": in_flight,
        "simulated_engine_s": engine_s,
        "longest_prompt": engine.longest,
        "calls": len(clients.seconds),
        "calls_per_s": len(clients.seconds) / seconds,
        "cpu_ms": 1e3 * cpu_s / len(clients.seconds),
        "busy": cpu_s / seconds,
        "added_p50_ms": 1e3 * (statistics.median(clients.seconds) - engine_s),
    }


if __name__ == "__main__":
    main()
