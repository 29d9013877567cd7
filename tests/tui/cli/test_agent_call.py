"""The command line against peers that speak otherwise than an agent: one line, and the exit code of each end."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq
from tests.tui.support.cli_calls import assert_one_line, call, call_json
from tests.waiting import HANG_SECONDS
from tools.protocol_docs import examples

from trainctl.protocol.wire import codec
from trainctl.tui.cli import agent_call


@contextmanager
def peer(answer: bytes | None, snapshot: bytes | None = None) -> Iterator[str]:
    """Something that listens where an agent should and says `answer`, or nothing, to whatever it is asked; `snapshot`
    where it is asked for one, if that is given."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.RCVTIMEO, 100)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            try:
                identity, frame = router.recv_multipart()
            except zmq.Again:
                continue
            said = snapshot if snapshot is not None and b"snapshot" in frame else answer
            if said is not None:
                rid = codec.peek_rid(frame).encode()
                router.send_multipart([identity, said.replace(EXAMPLE_RID, rid)])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        over.set()
        thread.join(HANG_SECONDS)
        context.destroy(linger=0)


RUNS: Any = examples.EXAMPLES["agent to client"]["runs"]
EXAMPLE_RID: bytes = RUNS.rid.encode()
FRAME = codec.encode(RUNS)
NO_RUN = codec.encode(msgspec.structs.replace(examples.EXAMPLES["agent to client"]["snapshot"], run=None))


@pytest.mark.parametrize(
    ("answer", "code", "says"),
    [
        (
            FRAME.replace(b"\xa1v\x02", b"\xa1v\x01"),
            "version",
            "protocol version 1 is not supported; this program uses 2",
        ),
        (b"\xc1\x00garbage", "protocol", "not a msgpack message"),
        (
            codec.encode(examples.EXAMPLES["agent to client"]["history"]),
            "protocol",
            "expected Snapshot, received History",
        ),
        (None, "unreachable", "no answer from tcp://127.0.0.1:"),
    ],
)
def test_a_peer_that_is_not_right_is_exit_code_5(
    monkeypatch: pytest.MonkeyPatch, answer: bytes | None, code: str, says: str
) -> None:
    if answer is None:
        monkeypatch.setattr(agent_call, "ANSWER_SECONDS", 1.0)
    with peer(answer) as address:
        assert_one_line(call("ls", "--connect", address), 5, says)
        assert call_json("ls", "--connect", address, status=5)["error"]["code"] == code


def test_the_right_answer_is_shown() -> None:
    with peer(FRAME, NO_RUN) as address:
        assert "sft-1b-20261120-143107-9f3c  running  121/60,000" in call("ls", "--connect", address).stdout


@pytest.mark.parametrize(
    ("state", "status"), [("applied", 0), ("rejected", 3), ("failed", 3), ("conflict", 3), ("expired", 4)]
)
def test_each_end_of_a_command_has_its_exit_code(state: str, status: int) -> None:
    reply = msgspec.structs.replace(examples.EXAMPLES["agent to client"]["command-reply"], state=state, reason="so")
    with peer(codec.encode(reply)) as address:
        found = call_json("send", "pause", "--connect", address, status=status)
        assert found["state"] == state
        assert call("send", "pause", "--connect", address).returncode == status
