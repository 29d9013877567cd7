"""Tests of what anyone may do to an agent's sockets, and what others notice of it: mutated frames, huge ones, floods,
silence.

Latencies are printed; only the soak, which has the machine for itself, holds them to their limits.
"""

import contextlib
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.support import rawzmtp
from tests.integration.support.narrow import DESCRIPTORS, Keyed, Narrow, answers, flood, warmed
from tests.node_agent.support.processes import ENVIRONMENT, python
from tests.tiers import is_soak, scale
from tests.waiting import HANG_SECONDS, slowness

from trainctl.protocol.messages import FactsRequest, RunsRequest
from trainctl.protocol.record.schema import open_for_reading

FRAMES = scale("frames")
EVENTS = scale("events")
IS_SOAK = is_soak()
IDLE = 600
VIEWERS = scale("connections of a viewer")
HANDSHAKES = min(20_000, max(300, FRAMES // 10))
HUGE = 300_000_000
SOCKETS = {
    "requests": ("DEALER", "client to agent"), "peers": ("DEALER", "lead to follower"),
    "live": ("SUB", "agent to client"), "trainers": ("DEALER", "trainer to agent"),
}  # fmt: skip
SESSIONS = {
    "operator": ("requests", "DEALER", "client to agent"), "viewer": ("requests", "DEALER", "client to agent"),
    "node": ("requests", "DEALER", "lead to follower"), "listener": ("live", "SUB", "agent to client"),
}  # fmt: skip


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Narrow]:
    agent = Narrow(tmp_path_factory.mktemp("narrow") / "state")
    agent.start()
    yield from warmed(agent)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Narrow]:
    folder = tmp_path_factory.mktemp("keyed")
    agent = Keyed(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINCTL_KEYS", str(folder / "keys"))
        agent.start()
    yield from warmed(agent)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", SOCKETS)
def test_mutated_frames(narrow: Narrow, name: str) -> None:
    kind, talk = SOCKETS[name]
    flooded = flood(narrow, narrow.socket(name), kind, talk, str(FRAMES), "1")
    print(f"\n{name}: {flooded}")
    assert flooded.told["sent"] == FRAMES
    assert flooded.growth_megabytes < 10
    assert flooded.p99_seconds < 0.05 or not IS_SOAK


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("who", SESSIONS)
def test_mutated_frames_of_who_has_a_key(keyed: Keyed, who: str) -> None:
    name, kind, talk = SESSIONS[who]
    role, before = who if who != "listener" else "viewer", commands(keyed)
    session = keyed.session_of(role)
    flood(keyed, keyed.socket(name), kind, talk, "1000", "1", *session)  # loads what only such frames need
    flooded = flood(keyed, keyed.socket(name), kind, talk, str(FRAMES), "1", *session)
    print(f"\n{who}: {flooded}")
    assert name == "live" or flooded.told["answers"] > FRAMES / 2, "they are heard"
    assert (commands(keyed) > before) == (who == "operator")
    assert flooded.growth_megabytes < 10
    assert flooded.p99_seconds < 0.05 or not IS_SOAK


def commands(agent: Narrow) -> int:
    """Return how many an agent has taken."""
    with contextlib.closing(open_for_reading(agent.directory / "agent.db")) as record:
        return int(record.execute("SELECT count(*) FROM commands").fetchone()[0])


@pytest.mark.parametrize("name", ["requests", "live", "trainers"])
@pytest.mark.parametrize("flags", [0, rawzmtp.COMMAND], ids=["message", "handshake"])
def test_a_huge_frame(narrow: Narrow, name: str, flags: int) -> None:
    address, before = narrow.socket(name), narrow.megabytes
    if flags:
        made = rawzmtp.connect(address)
        made.sendall(rawzmtp.greeting())
    else:
        made = rawzmtp.shaken(address, SOCKETS[name][0].encode())
    with made:
        made.sendall(rawzmtp.header(HUGE, flags=flags))
        taken = rawzmtp.stream(made, HUGE)
    assert taken < HUGE / 10, "it hangs up"
    assert narrow.megabytes - before < 20
    narrow.check()


@pytest.mark.parametrize("kind", ["narrow", "keyed"])
def test_idle_connections_at_the_limit_of_descriptors(kind: str, request: pytest.FixtureRequest) -> None:
    idle, narrow = [], request.getfixturevalue(kind)
    with narrow.client() as old, contextlib.ExitStack() as stack:
        answers(old)
        where = narrow.address.removeprefix("tcp://").rsplit(":", 1)
        for _ in range(IDLE):
            made = stack.enter_context(socket.socket())
            made.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                made.connect((where[0], int(where[1])))
            idle.append(made)
        began = time.monotonic()
        with narrow.client() as new:
            answers(new)
        served = time.monotonic() - began
        assert answers(old) < 20 * slowness(), "who was there before is served all the while"
        print(f"\n{kind}: {IDLE} idle connections, {DESCRIPTORS} descriptors: a client was served in {served:.2f} s")
        narrow.check()
    assert served < (3 if IS_SOAK else 15) * slowness()


def test_nonsense_in_the_place_of_a_handshake_with_keys(keyed: Narrow) -> None:
    chance, before, said = random.Random(3), keyed.megabytes, 0
    with keyed.client() as client:
        for number in range(HANDSHAKES):
            with (
                contextlib.suppress(OSError),
                rawzmtp.connect(keyed.socket("live" if number % 3 == 0 else "requests")) as made,
            ):
                made.sendall(rawzmtp.greeting(chance.choice((b"CURVE", b"CURVE", b"NULL", b"PLAIN", b"\xff" * 20))))
                name = chance.choice((b"HELLO", b"INITIATE", b"READY", b"MESSAGE", b"ERROR", b"\xff"))
                body = bytes([len(name)]) + name + chance.randbytes(chance.choice((0, 9, 194, 194, 250, 400)))
                made.sendall(rawzmtp.header(len(body), flags=chance.choice((0, rawzmtp.COMMAND))) + body)
                said += 1
            if number % 50 == 0:
                answers(client)
        answers(client)
    assert said > HANDSHAKES / 2
    assert keyed.megabytes - before < 10
    keyed.check()


def test_who_floods_and_hangs_up_harms_nobody(narrow: Narrow) -> None:
    """With more waiting than the socket takes libzmq 4.3.5 aborts when a heartbeat is due on the connection."""
    made = [rawzmtp.shaken(narrow.address) for _ in range(8)]
    for one in made:
        one.settimeout(0.2)
        rawzmtp.stream(one, 1_000_000, b"\x00\x03abc" * 13_000)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    for one in made:
        one.close()
    time.sleep(1.2)  # longer than between two heartbeats
    with narrow.client() as client:
        answers(client)
    narrow.check()


def test_a_peer_that_promised_heartbeats_and_is_silent_is_dropped(narrow: Narrow) -> None:
    with rawzmtp.shaken(narrow.address) as made:
        made.sendall(bytes([rawzmtp.COMMAND, 7]) + b"\x04PING" + struct.pack(">H", 10))  # tenths of a second
        made.settimeout(20)
        said = b""
        while piece := made.recv(4096):
            said += piece
    assert b"\x04PONG" in said


VIEWER = """
    import sys, zmq
    from pathlib import Path
    from tools.protocol_docs import examples
    from trainctl.protocol import messages as m
    from trainctl.protocol.security.keys import KeyFolder
    from trainctl.protocol.wire import codec, sockets

    address, folder, server, count = sys.argv[1:]
    context, own = zmq.Context(), KeyFolder(Path(folder)).user()
    context.set(zmq.MAX_SOCKETS, 2048)
    frames = [codec.encode(m.SnapshotRequest(rid=str(number), columns=120)) for number in range(40)]
    frames += [codec.encode(m.FactsRequest(rid="facts")), bytes(60_000)]
    made = []
    for _ in range(int(count)):
        socket = sockets.new_socket(context, zmq.DEALER)
        sockets.secure_client(socket, own, server)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.connect(address)
        made.append(socket)
    sent, is_full = 0, False
    while True:
        for socket in made:
            try:
                socket.send(frames[sent % len(frames)], zmq.DONTWAIT)
                sent += 1
            except zmq.Again:
                pass
        if sent > 40 * len(frames) and not is_full:
            is_full = True
            print(sent, flush=True)
"""


@pytest.mark.tier("test")
@pytest.mark.timeout(900)
def test_one_viewer_with_full_pipelines_keeps_no_operator_waiting(tmp_path: Path) -> None:
    """It reads no answer, and has more connections than anyone needs."""
    agent = Keyed(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINCTL_KEYS", str(tmp_path / "keys"))
        agent.start()
    try:
        with agent.client() as operator:
            for _ in range(20):
                operator.ask(FactsRequest)
                operator.send("pause", {})
            before = agent.peak_megabytes
            flooding = python(VIEWER, agent.address, *agent.session_of("viewer"), str(VIEWERS))
            try:
                assert flooding.stdout is not None and flooding.stdout.readline(), "the pipelines are full"
                seconds = []
                for _ in range(50):
                    begun = time.monotonic()
                    assert operator.send("pause", {}).state == "rejected", "there is no run"
                    operator.ask(RunsRequest)
                    seconds.append(time.monotonic() - begun)
                    time.sleep(0.05)
                begun = time.monotonic()
                with agent.client() as new:
                    new.ask(RunsRequest)
                served = time.monotonic() - begun
            finally:
                flooding.kill()
                flooding.communicate()
            agent.check()
            peak = agent.peak_megabytes
    finally:
        agent.clean_up()
    print(
        f"\n{VIEWERS} connections of a viewer: a command is answered in {max(seconds):.3f} s at most, "
        f"{sorted(seconds)[25]:.3f} s in the median, a new client in {served:.2f} s; "
        f"peak of memory {before:.0f} -> {peak:.0f} MB"
    )
    assert not IS_SOAK or max(*seconds, served) < slowness()
    assert peak < 1.5 * before


SUBSCRIBER = """
    import sys, zmq
    from trainctl.protocol.wire import sockets

    socket = sockets.new_socket(zmq.Context(), zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(sys.argv[1])
    while True:
        socket.recv_multipart()
        print("heard", flush=True)
"""
PUBLISHER = """
    import os, sys, time, psutil, zmq
    from trainctl.node_agent.transport.publisher import Publisher
    from trainctl.protocol.wire import sockets
    from tools.protocol_docs import examples

    socket = sockets.new_socket(zmq.Context(), zmq.XPUB)
    print(f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}", flush=True)
    publisher, event = Publisher(socket, "b" * 16), examples.EXAMPLES["published by an agent"]["event"]
    me = psutil.Process()
    while sys.stdin.readline() == "again\\n":
        publisher.publish(event)
    before = me.memory_info().rss
    for number in range(int(sys.argv[1])):
        publisher.publish(event)
        if number % 1000 == 0:
            time.sleep(0)
    print((me.memory_info().rss - before) / 1e6, flush=True)
"""


@pytest.mark.timeout(900)
def test_a_stopped_subscriber_costs_the_publisher_little() -> None:
    publisher = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PUBLISHER), str(EVENTS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env=ENVIRONMENT,
    )  # fmt: skip
    assert publisher.stdout is not None and publisher.stdin is not None
    subscriber = python(SUBSCRIBER, publisher.stdout.readline().strip())
    assert subscriber.stdout is not None
    try:
        deadline = time.monotonic() + HANG_SECONDS
        while not select.select([subscriber.stdout], [], [], 0)[0]:
            assert time.monotonic() < deadline
            publisher.stdin.write("again\n")
            publisher.stdin.flush()
            time.sleep(0.05)
        subscriber.send_signal(signal.SIGSTOP)
        publisher.stdin.close()
        growth = float(publisher.stdout.readline())
    finally:
        for process in (subscriber, publisher):
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    print(f"\na stopped subscriber and {EVENTS:,} events: memory {growth:+.1f} MB")
    assert growth < 20
