"""A pair of sockets where an agent's should be, which speak the protocol and say what a test has them say."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq
from tests.waiting import HANG_SECONDS
from tools.protocol_docs import examples

from trainctl.protocol import messages as m
from trainctl.protocol.wire import codec

Answer = Callable[[m.ClientRequest], list[m.AgentReply | bytes]]
SNAPSHOT: Any = examples.EXAMPLES["agent to client"]["snapshot"]
BEAT: Any = examples.EXAMPLES["published by an agent"]["heartbeat"]
BEAT_SECONDS = 0.2


class Scripted:
    """Answers each request by `answer`, beats, and publishes what it is given, all as one boot of an agent."""

    def __init__(self, answer: Answer) -> None:
        self.heard: list[m.Command] = []
        self.boot, self.seq = SNAPSHOT.boot, 0
        self._answer = answer
        self._over = threading.Event()
        self._to_publish: queue.Queue[m.Live] = queue.Queue()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.RCVTIMEO, 20)
        self._live = self._context.socket(zmq.PUB)
        self.address = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self.live_address = f"tcp://127.0.0.1:{self._live.bind_to_random_port('tcp://127.0.0.1')}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def snapshot(self, **fields: Any) -> m.Snapshot:
        """One of this agent, of no run unless one is given."""
        node = msgspec.structs.replace(SNAPSHOT.node, address=self.address, live_address=self.live_address)
        wanted = {"run": None, "last_step": None, "events": (), "boot": self.boot, "seq": self.seq, "node": node}
        found: m.Snapshot = msgspec.structs.replace(SNAPSHOT, **{**wanted, **fields})
        return found

    def publish(self, message: m.Live) -> None:
        """Under the next number."""
        self.seq += 1
        self._to_publish.put(msgspec.structs.replace(message, boot=self.boot, seq=self.seq))

    def restart(self) -> None:
        """As after a restart: another boot, numbered from the beginning."""
        self.boot, self.seq = f"{self.boot}+", 0

    def stop(self) -> None:
        self._over.set()
        self._thread.join(HANG_SECONDS)
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        beaten = 0.0
        while not self._over.is_set():
            if time.monotonic() - beaten > BEAT_SECONDS:
                beaten = time.monotonic()
                self._say(
                    msgspec.structs.replace(BEAT, boot=self.boot, seq=self.seq if self._to_publish.empty() else 0)
                )
            while not self._to_publish.empty():
                self._say(self._to_publish.get())
            self._answer_one()

    def _say(self, message: m.Live | m.Heartbeat) -> None:
        self._live.send_multipart([m.TOPICS[type(message)], codec.encode(message)])

    def _answer_one(self) -> None:
        try:
            identity, frame = self._router.recv_multipart()
        except zmq.Again:
            return
        request = codec.decode_control(frame)
        if isinstance(request, m.Command):
            self.heard.append(request)
        for reply in self._answer(request):
            raw = reply if isinstance(reply, bytes) else codec.encode(msgspec.structs.replace(reply, rid=request.rid))
            self._router.send_multipart([identity, raw])


@contextmanager
def scripted(answer: Answer) -> Iterator[Scripted]:
    agent = Scripted(answer)
    try:
        yield agent
    finally:
        agent.stop()
