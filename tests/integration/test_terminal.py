"""The program in a real terminal: tmux at the designed sizes, and what it must outlive."""

import contextlib
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from tests.asking import newest_events, run_of
from tests.cluster.waits import wait_for_step
from tests.integration.support.terminals import TRAINCTL, Terminal, needs_tmux
from tests.tui.support.recorded import run_view, snapshot
from tests.waiting import HANG_SECONDS

from trainctl.protocol import messages as m
from trainctl.protocol.errors import ProtocolError
from trainctl.protocol.messages import SnapshotRequest
from trainctl.protocol.messages.base import PROTOCOL_VERSION
from trainctl.protocol.wire import codec


@pytest.fixture
def running(live):
    """A live run of many small steps, and a client of its agent."""
    with live.client() as client:
        yield live, client


@pytest.mark.tier("test")
@needs_tmux
@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (120, 40)])
def test_b_changes_the_micro_batch_and_events_names_the_step(running, tmp_path, columns, lines):
    agent, client = running
    terminal = Terminal(tmp_path, columns, lines, f"{TRAINCTL} --connect {agent.address}")
    try:
        terminal.wait_for(r"RUNNING")
        terminal.wait_for(r"4×3")
        terminal.keys("b")
        terminal.wait_for(r"resize micro-batch")
        terminal.keys("BSpace", "2", "Enter")
        shown = terminal.wait_for(r"applied @ step [\d,]+")
        terminal.wait_gone(r"esc closes")
        terminal.wait_for(r"2×6")
        events = newest_events(client)
        resized = [event for event in events if event.verb == "resize-batch"][-1]
        assert (resized.before, resized.after) == ("4", "2")
        assert f"{resized.step:,}" in shown
        screen = terminal.wait_for(rf"micro-batch: .*@{resized.step:,}\b")  # there may be an older one
        assert all(len(line) <= columns for line in screen.splitlines())
        terminal.keys("q")
        assert terminal.exit_status() == "status=0"
        assert "continues" in terminal.wait_for(r"continues")
        wait_for_step(client, run_of(client).step + 5)
    finally:
        terminal.close()


@pytest.mark.tier("test")
@needs_tmux
def test_killing_the_terminal_changes_nothing_for_the_run(running, tmp_path):
    agent, client = running
    terminal = Terminal(tmp_path, 80, 24, f"{TRAINCTL} --connect {agent.address}")
    terminal.wait_for(r"RUNNING")
    (pid,) = agent.trainer_pids()
    program = terminal.program()
    terminal.close()
    assert not psutil.wait_procs([program], timeout=HANG_SECONDS)[1], "the program goes on without its terminal"
    step = run_of(client).step
    wait_for_step(client, step + 20)
    assert agent.trainer_pids() == [pid]
    assert run_of(client).generation == client.ask(SnapshotRequest, 0).last_step.generation


@pytest.mark.tier("test")
@needs_tmux
def test_the_screen_survives_its_agent(running, tmp_path):
    """The agent is killed and comes back: the screen says so meanwhile, answers keys, and goes on by itself."""
    agent, client = running
    before = run_of(client).generation
    terminal = Terminal(tmp_path, 120, 40, f"{TRAINCTL} --connect {agent.address}")
    try:
        terminal.wait_for(r"RUNNING")
        agent.kill()
        terminal.wait_for(r"(?i)silent|no message|no answer|WAITING FOR box.s AGENT")
        terminal.keys("?")
        terminal.wait_for(r"the rank's own speed")
        terminal.keys("Escape")
        terminal.wait_gone(r"the rank's own speed")
        agent.start()
        terminal.wait_for("|".join(rf"g1\.{n}\b" for n in range(before.n + 1, before.n + 9)))
        terminal.keys("q")
        assert terminal.exit_status() == "status=0"
    finally:
        terminal.close()


class StrangeAgent:
    """Stands where an agent would, and answers every request by its `manner`."""

    def __init__(self) -> None:
        self.manner = "garbage"
        self._context = zmq.Context()
        self._control, self._live = self._context.socket(zmq.ROUTER), self._context.socket(zmq.PUB)
        for socket in (self._control, self._live):
            socket.setsockopt(zmq.LINGER, 0)
        self._ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (self._control, self._live)]
        self.address = f"tcp://127.0.0.1:{self._ports[0]}"
        self._control.unbind(self.address)
        self._random, self._ended = random.Random(7), threading.Event()
        self._thread = threading.Thread(target=self._serve, name="strange-agent")

    def start(self) -> None:
        """Begins to listen, where nobody did."""
        deadline = time.monotonic() + HANG_SECONDS
        while True:  # the port is given back by another thread
            try:
                self._control.bind(self.address)
            except zmq.ZMQError:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            else:
                break
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(10)
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        seq = 0
        while not self._ended.is_set():
            if self._control.poll(100):
                identity, *frames = self._control.recv_multipart()
                with contextlib.suppress(ProtocolError):
                    request = codec.decode_control(frames[-1])
                    self._control.send_multipart([identity, *self._answer(request)])
            if self.manner == "garbage":
                self._live.send_multipart(self._garbage())
            elif self.manner == "good":
                seq += 1
                self._live.send_multipart(self._garbage() if seq % 2 else [b"beat", codec.encode(self._beat())])

    def _garbage(self) -> list[bytes]:
        pick = self._random.randrange(5)
        noise = self._random.randbytes(self._random.randrange(300))
        plain: Any = {
            "type": self._random.choice(["snapshot", "viewers", "beat", 7]),
            "v": PROTOCOL_VERSION,
            "rid": [],
            "seq": -1,
        }
        return [noise, noise] if pick == 0 else [noise] * pick if pick < 4 else [msgspec.msgpack.encode(plain)]

    def _answer(self, request: m.ClientRequest) -> list[bytes]:
        if self.manner == "garbage":
            return self._garbage()
        reply = codec.encode(self._reply(request))
        if self.manner == "version":
            return [msgspec.msgpack.encode({**msgspec.msgpack.decode(reply), "v": 99})]
        return [reply]

    def _reply(self, request: m.ClientRequest) -> m.AgentReply:
        if isinstance(request, m.SnapshotRequest):
            shown = snapshot(run_view(4, step=18_240, steps=60_000))
            node = msgspec.structs.replace(
                shown.node, address=self.address, live_address=f"tcp://127.0.0.1:{self._ports[1]}"
            )
            return msgspec.structs.replace(shown, rid=request.rid, node=node, peers=())
        if isinstance(request, m.AttendRequest):
            return m.Viewers(rid=request.rid, viewers=(m.Viewer(by="anna\x1b[2J", since_at=0.0),))
        return m.Refusal(rid=request.rid, code="busy", text="another time")

    def _beat(self) -> m.Heartbeat:
        shown = snapshot(None)
        return m.Heartbeat(
            node=shown.node.node, at=0.0, step_age_seconds=None, loop_lag_seconds=0.0, boot=shown.boot, seq=shown.seq
        )


@pytest.fixture
def agent() -> Iterator[StrangeAgent]:
    made = StrangeAgent()
    yield made
    made.close()


@needs_tmux
def test_it_outlives_all_of_it_and_leaves_a_clean_terminal(agent: StrangeAgent, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, 80, 24, f"COLUMNS=80 LINES=24 {TRAINCTL} --connect {agent.address}")
    try:
        terminal.wait_for(r"no agent")
        agent.start()
        terminal.wait_for(rf"{agent.address}: .*")
        agent.manner = "version"
        terminal.wait_for(r"this program uses \d")
        terminal.keys("0")
        terminal.wait_for(r"runs")
        terminal.keys("1")
        agent.manner = "good"
        terminal.wait_for(r"RUNNING")
        storm(terminal)
        paste(terminal)
        terminal.program().send_signal(signal.SIGHUP)
        assert terminal.exit_status() == "status=0"
        screen = terminal.wait_for(r"reattach with")
        assert "Traceback" not in screen
        assert terminal.is_clean()
    finally:
        terminal.close()


def storm(terminal: Terminal) -> None:
    """Sizes that follow each other faster than they can be drawn, and the smallest and the largest of them."""
    sizes = random.Random(3)
    for _ in range(40):
        terminal.resize(sizes.randrange(10, 300), sizes.randrange(3, 100))
    terminal.resize(20, 5)
    terminal.wait_for(r"needs 60x15: 20x5")
    terminal.resize(400, 120)
    screen = terminal.wait_for(r"2 attached: anna")
    assert all(len(line) <= 400 for line in screen.splitlines())
    assert "forge" in screen
    terminal.resize(80, 24)
    terminal.wait_for(r"q detach")


def paste(terminal: Terminal) -> None:
    """On a screen, where its letters are no keys; into the `:` line, where it is text; into a dialog."""
    rubbish = "xqy\x07\ty\r\nstop\nπ漢\u202e" * 20
    terminal.paste(rubbish)
    terminal.keys(":")
    terminal.wait_for(r"a verb as on the command line")
    terminal.paste(rubbish)
    terminal.wait_for(r"unknown verb")
    terminal.keys("Escape")
    terminal.wait_for(r"q detach")
    terminal.keys("b")
    terminal.wait_for(r"resize micro-batch")
    terminal.paste("9" * 2000)
    terminal.wait_for(r"micro: ")
    terminal.keys("Escape")
    terminal.wait_for(r"q detach")
