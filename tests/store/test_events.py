"""Residency events over real sockets: framing, replay, gaps, nodes that start again, and rubbish."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic, sleep

import msgpack
import pytest
import zmq

from blend.config import ResidencySource
from blend.errors import InvalidInput, TierUnavailable
from blend.store.events import END, TOPIC, ResidencyPublisher, ResidencySubscriber, pack, unpack
from blend.store.key import ObjectKey
from blend.store.residency import Event, ResidencyIndex

KEYS = [ObjectKey(f"{number:040x}", "plain") for number in range(2000)]


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = monotonic() + seconds
    while not condition():
        assert monotonic() < end, f"not within {seconds} s"
        sleep(0.01)


def source(publisher: ResidencyPublisher) -> ResidencySource:
    return ResidencySource(publisher.address, publisher.replay_address)


def count(index: ResidencyIndex, node: str) -> int:
    return next((found.objects for found in index.best(KEYS) if found.node == node), 0)


def test_several_nodes_and_one_index() -> None:
    index = ResidencyIndex()
    with ResidencyPublisher("a") as a, ResidencyPublisher("b") as b:
        a.on_stored(KEYS[0], "host", 100)  # before anybody listens: comes by replay
        with ResidencySubscriber(index, [source(a), source(b)]):
            for key in KEYS[1:300]:
                a.on_stored(key, "host", 100)
                b.on_stored(key, "disk", 50)
            b.on_removed(KEYS[1], "disk")
            wait_for(lambda: count(index, "a") == 300 and count(index, "b") == 298)
        assert (a.dropped, b.dropped) == (0, 0)
    assert [found.node for found in index.best([KEYS[0], KEYS[1]])] == ["a"]


def test_messages_are_framed_as_vllm_frames_its_events() -> None:
    with ResidencyPublisher("node") as publisher, zmq.Context() as context, context.socket(zmq.SUB) as listener:
        listener.subscribe(b"")
        listener.connect(publisher.address)
        while not listener.poll(50):
            publisher.on_stored(KEYS[0], "host", 7)
        topic, number, payload = listener.recv_multipart()
        assert topic == TOPIC
        assert len(number) == 8
        moment, node, run, events = msgpack.unpackb(payload)
        assert moment > 0
        assert (node, run) == ("node", publisher.run)
        assert events[0] == ["stored", str(KEYS[0]), "host", 7]
        after = int.from_bytes(number, "big")
        with context.socket(zmq.DEALER) as replay:
            replay.connect(publisher.replay_address)
            replay.send_multipart([b"", b"rubbish"])  # ignored
            replay.send_multipart([b"", (0).to_bytes(8, "big")])
            numbers = []
            while True:
                _, seen, data = replay.recv_multipart()
                if seen == END:
                    assert data == b""
                    break
                numbers.append(int.from_bytes(seen, "big"))
        assert numbers[: after + 1] == list(range(after + 1))


def test_what_is_missing_is_asked_for() -> None:
    index = ResidencyIndex()
    with zmq.Context() as context, context.socket(zmq.PUB) as live, context.socket(zmq.ROUTER) as replay:
        live.linger = replay.linger = 0
        addresses = ResidencySource(
            *(f"tcp://127.0.0.1:{sock.bind_to_random_port('tcp://127.0.0.1')}" for sock in (live, replay))
        )
        messages = [pack(0.0, "n", "run", [Event("stored", KEYS[number], "host", 1)]) for number in range(10)]
        asked: list[int] = []

        def answer() -> None:
            while len(asked) < 2 and replay.poll(20_000):
                identity, _, start = replay.recv_multipart()
                asked.append(int.from_bytes(start, "big"))
                if len(asked) == 2:  # the first is the request at the start, when there is nothing
                    for number in range(asked[-1], 9):
                        replay.send_multipart([identity, b"", number.to_bytes(8, "big"), messages[number]])
                replay.send_multipart([identity, b"", END, b""])

        thread = threading.Thread(target=answer, name="replay")
        thread.start()
        with ResidencySubscriber(index, [addresses]) as subscriber:
            wait_for(lambda: len(asked) == 1)
            while count(index, "n") < 1:  # until the subscription has arrived
                live.send_multipart([TOPIC, (0).to_bytes(8, "big"), messages[0]])
                sleep(0.02)
            live.send_multipart([TOPIC, (9).to_bytes(8, "big"), messages[9]])
            wait_for(lambda: count(index, "n") == 10)
            assert subscriber.gaps == 1
        thread.join()
        assert asked == [0, 1]


def test_a_node_that_starts_again_is_forgotten_first() -> None:
    index = ResidencyIndex()
    first = ResidencyPublisher("a")
    with ResidencySubscriber(index, [source(first)]):
        first.on_stored(KEYS[0], "host", 1)
        first.on_stored(KEYS[1], "host", 1)
        wait_for(lambda: count(index, "a") == 2)
        addresses = first.address, first.replay_address
        first.close()
        with ResidencyPublisher("a", *addresses) as second:

            def told() -> bool:
                second.on_stored(KEYS[2], "host", 1)
                return bool(index.best([KEYS[2]]))

            wait_for(told)
            wait_for(lambda: count(index, "a") == 1)


def test_rubbish_is_counted_and_left() -> None:
    index = ResidencyIndex()
    with zmq.Context() as context, context.socket(zmq.PUB) as live:
        live.linger = 0
        port = live.bind_to_random_port("tcp://127.0.0.1")
        good = pack(0.0, "n", "run", [Event("stored", KEYS[0], "host", 1)])
        with ResidencySubscriber(index, [ResidencySource(f"tcp://127.0.0.1:{port}")]) as subscriber:
            while count(index, "n") < 1:
                live.send_multipart([TOPIC, bytes(8), good])
                sleep(0.02)
            for frames in ([TOPIC], [TOPIC, b"short", good], [TOPIC, bytes(8), b"\xc1"], [TOPIC, bytes(8), good[:-3]]):
                live.send_multipart(frames)
            wait_for(lambda: subscriber.malformed == 4)
            live.send_multipart(
                [TOPIC, (1).to_bytes(8, "big"), pack(0.0, "n", "run", [Event("removed", KEYS[0], "host")])]
            )
            wait_for(lambda: count(index, "n") == 0)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        [0.0, "n", "run"],
        [0.0, "n", "run", [["stored", "key", "host", 1]]],
        [0.0, "n", "run", [["stored", str(KEYS[0]), "host", -1]]],
        [0.0, "n", "run", [["stored", str(KEYS[0]), "host", True]]],
        [0.0, "n", "run", [["moved", str(KEYS[0]), "host", 1]]],
        [0.0, "n", "run", [["stored", 5, "host", 1]]],
        [0.0, "", "run", []],
        [0.0, "n" * 300, "run", []],
        [0.0, 5, "run", []],
        [0.0, "n", "run", [["stored", str(KEYS[0]), "", 1]]],
        [0.0, "n", "run", 5],
    ],
)
def test_payloads_are_checked(value: object) -> None:
    with pytest.raises(InvalidInput, match="events"):
        unpack(msgpack.packb(value))


def test_a_payload_is_bounded() -> None:
    with pytest.raises(InvalidInput, match="bytes"):
        unpack(bytes(2 << 20))


def test_publishing_is_local_unless_told_and_never_waits() -> None:
    publisher = ResidencyPublisher("a", waiting=5)
    try:
        assert publisher.address.startswith("tcp://127.0.0.1:")
        assert publisher.replay_address.startswith("tcp://127.0.0.1:")
        with pytest.raises(TierUnavailable, match="bound"):
            ResidencyPublisher("b", publisher.address)
        for key in KEYS:
            publisher.on_stored(key, "host", 1)
        assert publisher.dropped > 0
    finally:
        publisher.close()
        publisher.close()
    assert not any(thread.name.startswith("blend-events") for thread in threading.enumerate())
    with pytest.raises(InvalidInput, match="node"):
        ResidencyPublisher("")
