"""What the control thread does with orders to fence and form, at the other end of a real socket."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq

from trainctl.protocol import codec
from trainctl.protocol import messages as m
from trainctl.protocol.paths import RunPaths
from trainctl.protocol.sockets import new_socket
from trainctl.protocol.statuspage import StatusWriter
from trainctl.trainer.backend import Backend
from trainctl.trainer.control import Control, Joined
from trainctl.trainer.group import Solo, Tail
from trainctl.trainer.ledger import Ledger
from trainctl.trainer.runtime import Trainer
from trainctl.trainer.step import Identity

FIRST, SECOND, THIRD = (m.Generation(1, n) for n in (1, 2, 3))
DEADLINE_SECONDS = 30.0
WHO = Identity("r", "here", 0)
M = TypeVar("M", bound=m.Message)


class Line:
    """A control thread, and the agent's end of its socket."""

    def __init__(self, control: Control, socket: "zmq.Socket[bytes]") -> None:
        self.control, self._socket = control, socket
        self._trainer = b""  # who sent the last message

    def tell(self, *orders: m.ToTrainer) -> None:
        for order in orders:
            self._socket.send_multipart([self._trainer, codec.encode(order)])

    def hear(self, kind: type[M]) -> M:
        """The next message but heartbeats, which must be of a kind."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while self._socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            self._trainer, frame = self._socket.recv_multipart()
            message = codec.decode_answer(frame)
            if isinstance(message, kind):
                return message
            assert isinstance(message, m.Alive), message
        raise AssertionError(f"no {kind.__name__} within {DEADLINE_SECONDS:.0f} s")


@pytest.fixture
def ledger() -> Ledger:
    made = Ledger()
    made.load(0, 0)
    return made


@pytest.fixture
def line(tmp_path: Path, ledger: Ledger) -> Iterator[Line]:
    context = zmq.Context()
    socket = new_socket(context, zmq.ROUTER)
    status = StatusWriter(tmp_path / "rank-0.status", os.getpid())
    with tempfile.TemporaryDirectory(prefix="tt-", dir="/tmp") as folder:
        socket.bind(f"ipc://{folder}/a")
        with Control(WHO, f"ipc://{folder}/a", ledger, status) as control:
            made = Line(control, socket)
            made.hear(m.Alive)
            yield made
        socket.close()
    context.term()
    status.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def form(generation: m.Generation) -> m.Form:
    return m.Form(run="r", generation=generation, engine="none", ranks=(0,))


def fence(generation: m.Generation) -> m.Fence:
    return m.Fence(run="r", generation=generation)


def test_an_outdated_fence_is_dropped_without_an_answer(
    line: Line, ledger: Ledger, capfd: pytest.CaptureFixture[str]
) -> None:
    line.tell(form(SECOND))
    line.hear(m.Formed)
    line.tell(fence(FIRST), form(SECOND))
    assert line.hear(m.Formed).generation == SECOND, "no Fenced comes before"
    assert ledger.formed == SECOND
    assert "dropped a fence of the agent: g1.1 is older than g1.2" in capfd.readouterr().err


def test_a_fence_of_the_formed_generation_is_answered_and_leaves_it(line: Line, ledger: Ledger) -> None:
    line.tell(form(SECOND))
    line.hear(m.Formed)
    line.tell(fence(SECOND))
    assert line.hear(m.Fenced).generation == SECOND
    assert ledger.formed is None


def test_a_fence_that_an_update_delays_is_forgotten_when_a_group_is_formed_after_it(line: Line, ledger: Ledger) -> None:
    """Answered after the Form, it would leave the generation that the agent counts on."""
    line.tell(form(FIRST))
    line.hear(m.Formed)
    with ledger.exclusive(FIRST):
        line.tell(fence(SECOND))
        wait_for(lambda: line.control._pending_fence is not None)
        line.tell(form(SECOND))
        wait_for(lambda: line.control._pending_fence is None)
    assert line.hear(m.Formed).generation == SECOND
    assert ledger.formed == SECOND


def test_the_group_that_was_formed_is_the_one_that_plans_reduce_over(
    new_rig: Callable[..., Any], line: Line, tmp_path: Path
) -> None:
    """The order that the control thread queues brings the group, and the trainer's executor takes it."""
    line.tell(form(FIRST))
    line.hear(m.Formed)
    joined = line.control.orders.get(timeout=DEADLINE_SECONDS)
    assert joined == Joined(FIRST, joined.group)
    assert isinstance(joined.group, Solo)

    reduced: list[float] = []

    class Counting(Solo):
        def all_reduce(self, backend: Backend, tail: Tail) -> Tail:
            reduced.append(tail.weight)
            return tail

    rig = new_rig("torch")
    status = StatusWriter(tmp_path / "rank-9.status", os.getpid())
    rig.ledger.last_seq = 0
    trainer = Trainer(WHO, rig.config, RunPaths(tmp_path), rig.backend, rig.dataset, rig.ledger, status, line.control)
    for order in (Joined(FIRST, Counting()), rig.plan(1, 4), m.Leave(run="r", reason="the test is over")):
        line.control.orders.put(order)
    trainer.serve()
    assert reduced == [240.0]
    status.close()
