"""Links do to packets what their shapes say, and a dataflow whose node is cut off loses nothing."""

from __future__ import annotations

import math
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from fake_groups import joined, lease, ledger, planner, push
from http_servers import running

from bench.emulated_network import Lane, Network, Shape, obstacle
from flowtrain.dataflow.client import Client
from flowtrain.dataflow.contract import Lease
from flowtrain.dataflow.service import Service

TOKEN = "secret"
PACKET = bytes(1000)
real = pytest.mark.skipif(bool(problem := obstacle()), reason=problem or "there is none")


def passed(lane: Lane, until: float) -> list[float]:
    """When packets arrive, in steps of a millisecond."""
    steps = range(round(1000 * until) + 1)
    return [step / 1000 for step in steps for _ in lane.arrived(step / 1000 + 1e-9)]


def test_a_delay_holds_every_packet_back_and_keeps_the_order() -> None:
    lane = Lane(Shape(delay_s=0.15), seed=0)
    for number in range(3):
        lane.send(bytes([number]), 0.01 * number)
    assert lane.next_s == 0.15 and list(lane.arrived(0.149)) == []
    assert [packet[0] for packet, _ in lane.arrived(0.2)] == [0, 1, 2]
    assert lane.next_s == math.inf


def test_a_rate_spaces_packets_out_and_a_full_queue_drops() -> None:
    """Packets wait for 0.305 s at most: a packet on the wire, and 30 of 10 ms behind it."""
    lane = Lane(Shape(delay_s=0.1, bytes_per_s=100_000, queue_s=0.305), seed=0)
    for _ in range(50):
        lane.send(PACKET, 0.0)
    assert lane.counts == {"passed": 31, "no room": 19, "bytes": 31_000}
    assert passed(lane, 1.0) == pytest.approx([0.11 + 0.01 * n for n in range(31)], abs=0.0011)
    lane.send(PACKET, 5.0)
    assert lane.next_s == pytest.approx(5.11), "the queue was empty again"


@pytest.mark.parametrize("loss", [0.0, 0.01, 0.3])
def test_so_many_packets_are_lost(loss: float) -> None:
    lane = Lane(Shape(loss=loss), seed=1)
    for _ in range(100_000):
        lane.send(b"", 0.0)
    assert lane.counts["lost"] / 1e5 == pytest.approx(loss, rel=0.1)
    assert lane.counts["lost"] + lane.counts["passed"] == 100_000


def test_a_partition_swallows_what_is_sent_and_what_is_on_the_way() -> None:
    lane = Lane(Shape(delay_s=0.1), seed=0)
    lane.send(PACKET, 0.0)
    lane.is_cut = True
    lane.send(PACKET, 0.05)
    assert list(lane.arrived(0.2)) == [] and lane.counts["cut"] == 2
    lane.is_cut = False
    lane.send(PACKET, 0.3)
    assert len(list(lane.arrived(0.5))) == 1


@real
def test_tcp_meets_the_delay_and_the_losses() -> None:
    """A handshake takes a round trip, and so does an answer; what is lost comes again."""
    shape = Shape(delay_s=0.05, loss=0.02)
    with closing(Network.open(shape, 2, seed=1)) as network:
        hub, _, node = network.hub, *network.nodes
        with hub.entered():
            listener = socket.create_server((hub.address, 9000))

        def echo() -> None:
            served, _ = listener.accept()
            with served:
                while data := served.recv(1 << 16):
                    served.sendall(data)

        thread = threading.Thread(target=echo)
        thread.start()
        began = time.monotonic()
        with node.entered(), socket.create_connection((hub.address, 9000), 20) as asked:
            assert time.monotonic() - began > 0.1
            sent = bytes(range(256)) * 800
            threading.Thread(target=asked.sendall, args=(sent,)).start()
            found = b""
            while len(found) < len(sent):
                found += asked.recv(1 << 16)
            assert found == sent and time.monotonic() - began > 0.2
        thread.join(20)
        listener.close()
        assert network.up[0].counts["passed"] == 0, "the other node has a link of its own"
        assert network.counts["lost"] > 0 and network.counts["bytes"] > 2 * len(sent)


@real
def test_a_node_that_was_cut_off_pushes_what_it_has_once_it_is_back(tmp_path: Path) -> None:
    """One of its leases has gone to another node meanwhile, which has pushed; another has run out
    and waits: the first group is a duplicate, the second counts, each once.
    """
    opened = ledger(tmp_path / "ledger.db", lease_s=0.3)
    with (
        closing(opened),
        closing(Network.open(Shape(delay_s=0.01, loss=0.01), 2, seed=3)) as network,
        ThreadPoolExecutor(2) as threads,
        ExitStack() as opening,
    ):
        hub, (near, far) = network.hub, network.nodes
        with hub.entered():
            service = Service(opened, opened.run, TOKEN)
            url = opening.enter_context(running(service, 8400, host=hub.address))
        with near.entered():
            stays = opening.enter_context(Client(url, TOKEN, wait_s=60.0, attempt_s=1.0))
        with far.entered():
            cut = opening.enter_context(Client(url, TOKEN, wait_s=60.0, attempt_s=1.0))
        opened.register(planner())
        joined(stays, "stays"), joined(cut, "cut")
        one, two = lease(cut, 2, "cut")
        network.cut([1], True)
        answers = [threads.submit(push, cut, each, node="cut") for each in (one, two)]
        taken: list[Lease] = []
        while one.work_item not in [each.work_item for each in taken]:
            taken = lease(stays, 1, "stays")
        assert push(stays, taken[0], node="stays") == "committed"
        assert not any(answer.done() for answer in answers)
        network.cut([1], False)
        first, second = (answer.result(30) for answer in answers)
        # An attempt that was given up may still arrive; the one after it is then told "duplicate".
        assert first == "duplicate" and second in ("committed", "duplicate")
        audit = opened.audit()
        assert audit.problems == () and audit.counts["committed"] == 2
        assert network.counts["cut"] > 0
