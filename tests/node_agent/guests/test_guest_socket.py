"""Training loops that attach over the agent's Unix socket: recorded once, and commanded, whatever is killed."""

import contextlib
import fcntl
import json
import os
import socket
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from tests.cluster.in_process import BlockingAgent, BlockingCluster
from tests.cluster.run_files import FOREVER, on
from tests.cluster.waits import wait_for_step
from tests.waiting import HANG_SECONDS, until

from trainctl.node_agent.guests import guest_socket
from trainctl.protocol import messages as m
from trainctl.protocol.record.reader import RecordReader

RUN = "ppo-1"
OFFERED = {"pause": "", "resume": "", "stop": "", "set-lr": "", "evaluate": "the loop gave no evaluate function"}


class Loop:
    """A training loop's connection, and what it remembers beyond that."""

    def __init__(self, agent: BlockingAgent, run: str = RUN, **attach: Any) -> None:
        self.agent = agent
        ranks = [{"rank": 0, "pid": os.getpid()}]
        self.attach = {"run": run, "name": "ppo", "started_at": time.time(), "ranks": ranks} | attach
        self.verbs: dict[str, str] = OFFERED
        self.orders: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        until(lambda: bool(path_of(self.agent)), what="the socket")
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(HANG_SECONDS)
        self.socket.connect(path_of(self.agent))
        self.file = self.socket.makefile("rb")
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.socket.close()

    def send(self, **line: Any) -> None:
        self.socket.sendall(json.dumps(line).encode() + b"\n")

    def hear(self, kind: str = "kept") -> dict[str, Any]:
        """Return the next line of a kind; orders that come before are kept."""
        while text := self.file.readline():
            line = json.loads(text)
            if line["type"] == "order":
                self.orders.append(line)
            if line["type"] == kind:
                return dict(line)
            assert line["type"] == "order", line
        raise EOFError

    def hello(self, **attach: Any) -> dict[str, Any]:
        self.send(type="hello", version=1, attach=self.attach | attach, verbs=self.verbs)
        return self.hear()

    def steps(self, first: int, last: int, *outcomes: dict[str, Any]) -> dict[str, Any]:
        self.send(type="steps", steps=[step(number) for number in range(first, last + 1)], outcomes=outcomes)
        return self.hear()


def step(number: int) -> dict[str, Any]:
    values = {"user:kl": "-inf"}
    return {"step": number, "committed_at": 1e9 + number, "step_seconds": 0.1, "loss": "nan", "values": values}


def path_of(agent: BlockingAgent) -> str:
    inner = agent.inner.agent
    return inner.guest_socket if inner is not None else ""


def recorded(agent: BlockingAgent, run: str = RUN) -> list[int]:
    with RecordReader(agent.run_paths(run)) as reader:
        return [one.step for one in reader.steps(0, 10_000)[0]]


def texts(agent: BlockingAgent, run: str = RUN) -> list[str]:
    with agent.client() as client:
        return [event.text for event in client.ask(m.EventsRequest, run, limit=200).events]


def state_of(agent: BlockingAgent, run: str = RUN) -> str:
    with agent.client() as client:
        return next((one.state for one in client.ask(m.RunsRequest).runs if one.run == run), "")


@contextlib.contextmanager
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing until it is killed."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as living:
        yield living
        living.kill()


def test_a_loop_attaches_is_recorded_and_ends(agent: BlockingAgent) -> None:
    with Loop(agent) as loop:
        mode = Path(path_of(agent)).stat()
        assert (stat.S_IMODE(mode.st_mode), mode.st_uid) == (0o600, os.getuid())
        assert loop.hello() == {"type": "kept", "step": 0, "event": 0}
        assert loop.steps(1, 30)["step"] == 30
        assert loop.steps(25, 31)["step"] == 31
        for number, newest in ((1, 1), (2, 2), (2, 2), (1, 2)):
            loop.send(type="event", text=f"epoch {number}", number=number, severity="good")
            assert loop.hear()["event"] == newest
        with agent.client() as client:
            shown = client.ask(m.SnapshotRequest, run=RUN)
            assert shown.run is not None
            assert (shown.run.kind, shown.run.step, dict(shown.run.verbs)) == ("guest", 31, OFFERED)
        loop.send(type="end", state="finished", reason="")
        assert loop.hear()["step"] == 31
    assert (state_of(agent), recorded(agent)) == ("finished", [*range(1, 32)])
    said = texts(agent)
    assert said.count("epoch 1") == said.count("epoch 2") == 1


def test_what_is_no_line_of_a_loop_is_refused_with_one_line(
    agent: BlockingAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text, reason in (
        (b"GET / HTTP/1.0\r\n", "not a line of a training loop"),
        (b'{"type":"steps"}\n', "a connection begins with hello"),
        (b'{"type":"hello","version":1,"attach":{"run":"../x"}}\n', "run"),
        (b'{"type":"hello","version":9,"attach":{}}\n', "Object missing required field"),
        (b"x" * 3 * 1024 * 1024, "longer than"),
    ):
        with Loop(agent) as loop:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                loop.socket.sendall(text)
            refused = loop.hear("refused")
            assert reason in refused["reason"] and refused["final"] is True
            with contextlib.suppress(ConnectionResetError):  # it had sent more than was read
                assert loop.file.readline() == b""
    monkeypatch.setattr(guest_socket, "BURST_LINES", 20)
    monkeypatch.setattr(guest_socket, "LINES_PER_SECOND", 1)
    with Loop(agent) as loop:
        loop.hello()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            loop.socket.sendall(b'{"type":"steps"}\n' * 100)
        kept = 0
        while (line := json.loads(loop.file.readline()))["type"] == "kept":
            kept += 1
        assert kept < 21 and (line["type"], line["final"]) == ("refused", False)


def test_a_command_is_carried_out_by_the_loop_and_ends_with_its_step(agent: BlockingAgent) -> None:
    with Loop(agent) as loop, agent.client() as client:
        loop.hello()
        loop.steps(1, 3)
        dry = client.ask(m.DryRunRequest, "set-lr", RUN, {"value": 0.5})
        assert (dry.refused, dry.before, dry.step) == ("", None, None)  # the loop has not told its rate
        refused = client.ask(m.DryRunRequest, "stop", RUN, {})
        assert "add checkpoint=false" in refused.refused
        assert client.send("evaluate", {}, run=RUN).reason.endswith("the loop gave no evaluate function")
        accepted = client.send("set-lr", {"value": 0.5}, run=RUN, wait="accepted")
        assert accepted.state == "accepted"
        order = loop.hear("order")
        assert (order["verb"], order["args"], order["id"]) == (
            "set-lr",
            {"value": 0.5, "schedule": "scale"},
            accepted.id,
        )
        outcome = {"id": order["id"], "state": "applied", "step": 4, "before": 0.1, "after": 0.5}
        assert loop.steps(4, 4, outcome)["step"] == 4
        reply = client.send("set-lr", {"value": 0.5}, run=RUN, id=accepted.id)
        assert (reply.state, reply.step, reply.before, reply.after) == ("applied", 4, "0.1", "0.5 scaled")
        for verb, state in (("pause", "paused"), ("resume", "running")):
            accepted = client.send(verb, {}, run=RUN, wait="accepted")
            loop.steps(1, 0, {"id": loop.hear("order")["id"], "state": "applied", "step": 4})
            view = client.ask(m.SnapshotRequest, 0, RUN).run
            assert view is not None and view.state == state
        client.send("pause", {}, run=RUN, wait="accepted")
        loop.steps(1, 0, {"id": loop.hear("order")["id"], "state": "rejected", "reason": "it is too late"})
        accepted = client.send("stop", {"checkpoint": False}, run=RUN, wait="accepted")
        loop.hear("order")
        loop.send(type="end", state="failed", reason="out of memory")
        loop.hear()
        ended = client.send("stop", {"checkpoint": False}, run=RUN, id=accepted.id)
        assert (ended.state, ended.reason) == ("failed", "the run ended before the command took effect")
        late = client.send("pause", {}, run=RUN)
        assert (late.state, late.reason) == ("rejected", f"{RUN} has ended, so pause can't act on it")
    assert any("it is too late" in text for text in texts(agent))


def test_one_id_sent_101_times_over_five_kills_has_one_outcome(agent: BlockingAgent) -> None:
    """The loop carries the order out in the second agent's life, and the third one to the fifth die before they hear
    of it."""
    id, heard = str(uuid.uuid4()), 0
    outcome = {"id": id, "state": "applied", "step": 1, "before": 1, "after": 0.5}
    for life in range(6):
        with Loop(agent) as loop, agent.client() as client:
            loop.hello()
            for _ in range(17 if life < 5 else 16):
                client.send("set-lr", {"value": 0.5}, run=RUN, id=id, wait="accepted")
            assert loop.hear("order")["id"] == id
            heard += 1
            if life == 1:
                loop.steps(1, 1)
            if life == 5:
                loop.steps(1, 1, outcome)
                loop.steps(1, 1, outcome)
        if life < 5:
            agent.kill()
            agent.start()
    assert heard == 6
    with agent.client() as client:
        reply = client.send("set-lr", {"value": 0.5}, run=RUN, id=id)
        assert (reply.state, reply.step, reply.after) == ("applied", 1, "0.5 scaled")
        assert client.send("set-lr", {"value": 0.6}, run=RUN, id=id, wait="accepted").state == "conflict"
        events = client.ask(m.EventsRequest, RUN, limit=200).events
    assert [event.outcome for event in events if event.command == id] == ["applied"]


@pytest.mark.parametrize("node", ["alpha", "beta"])  # the lead of the hosted run, and a follower
def test_beside_a_hosted_run_a_command_survives_a_kill_and_is_that_of_its_own_run(
    cluster: BlockingCluster, run_config: Any, node: str
) -> None:
    with cluster.client() as client:
        config = run_config(run__steps=FOREVER, nodes=on("alpha", "beta"))
        client.send("start-run", {"config": config})
        wait_for_step(client, 1)
    agent = cluster[node]
    with Loop(agent) as loop, agent.client() as client:
        loop.hello()
        sent = client.send("set-lr", {"value": 0.5}, run=RUN, wait="accepted")
        assert loop.hear("order")["id"] == sent.id
    agent.kill()
    agent.start()
    with Loop(agent) as loop, agent.client() as client:
        loop.hello()
        assert loop.hear("order")["id"] == sent.id
        loop.steps(1, 1, {"id": sent.id, "state": "applied", "step": 1})
        reply = client.send("set-lr", {"value": 0.5}, run=RUN, id=sent.id)
        assert (reply.state, reply.step, reply.run) == ("applied", 1, RUN)
        loop.send(type="end", state="finished")
        loop.hear()
        assert "has ended" in client.send("pause", {}, run=RUN).reason


def test_a_run_whose_process_is_killed_fails_at_once(agent: BlockingAgent) -> None:
    with process() as living, process() as other:
        with Loop(agent, ranks=[{"rank": 0, "pid": living.pid}]) as loop:
            loop.hello()
            loop.steps(1, 2)
            living.kill()
            living.wait()
            loop.steps(3, 3)  # it was on its way
        began = time.monotonic()
        until(lambda: state_of(agent) == "failed", what="the failure")
        assert time.monotonic() - began < 2
        ranks = (m.GuestRank(0, pid=other.pid), m.GuestRank(1, node="elsewhere", pid=other.pid))
        with agent.client() as client:  # over the network too
            client.attach_run("net-1", "net", ranks)
            other.kill()
            other.wait()
            began = time.monotonic()
            until(lambda: state_of(agent, "net-1") == "failed", what="the failure")
            assert time.monotonic() - began < 2
    assert recorded(agent) == [1, 2, 3]


def test_a_rank_whose_process_is_gone_fails_alone_as_long_as_others_live(agent: BlockingAgent) -> None:
    with process() as first, process() as second, agent.client() as client:
        client.attach_run(RUN, "ppo", (m.GuestRank(0, pid=first.pid), m.GuestRank(1, pid=second.pid)))

        def ranks() -> list[str]:
            view = client.ask(m.SnapshotRequest, 0, RUN).run
            assert view is not None
            return [view.state, *(rank.state for rank in view.ranks)]

        first.kill()
        first.wait()
        until(lambda: ranks() == ["running", "failed", "run"], what="the rank")
        client.run_steps(RUN)  # the other one speaks
        assert ranks() == ["running", "failed", "run"]
        second.kill()
        second.wait()
        until(lambda: ranks() == ["failed", "failed", "failed"], what="the run")


def test_a_run_that_an_agent_takes_up_again_is_followed_by_its_process(agent: BlockingAgent) -> None:
    with process() as living:
        with Loop(agent, ranks=[{"rank": 0, "pid": living.pid}]) as loop:
            loop.hello()
        agent.kill()
        living.kill()
        living.wait()
        agent.start()
        until(lambda: state_of(agent) == "failed", what="the failure")


def test_a_watched_command_lives_until_its_own_connection_says_so(agent: BlockingAgent) -> None:
    with Loop(agent, kind="exec") as command, Loop(agent, kind="exec") as inside:
        command.verbs = {"stop": "", "pause": "no loop"}
        command.hello()
        inside.hello()
        inside.steps(1, 5)

        def view() -> m.RunView:
            with agent.client() as client:
                shown = client.ask(m.SnapshotRequest, 0, RUN).run
                assert shown is not None
                return shown

        assert view().why_not("pause") == "" and view().why_not("stop") == ""
        inside.send(type="end", state="finished", reason="")
        assert inside.hear()["step"] == 5
        assert (view().state, view().why_not("pause"), view().why_not("stop")) == ("running", "no loop", "")
        with Loop(agent, kind="exec") as again:
            again.hello()
            again.steps(6, 7)
            command.send(type="event", text="exit status 3", number=1)
            command.hear()
            command.send(type="end", state="failed", reason="exit status 3")
            command.hear()
        until(lambda: state_of(agent) == "failed", what="the end")
    assert recorded(agent) == [*range(1, 8)]


def test_a_watched_command_whose_loop_was_stopped_is_stopped_whatever_its_exit_status(agent: BlockingAgent) -> None:
    with Loop(agent, kind="exec") as command, Loop(agent, kind="exec") as inside:
        command.hello()
        inside.hello()
        inside.send(type="end", state="stopped", reason="interrupted")
        inside.hear()
        command.send(type="end", state="failed", reason="exit status 1")
        command.hear()
    assert state_of(agent) == "stopped"


def lines(*parts: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(part).encode() + b"\n" for part in parts)


def test_what_a_loop_left_without_an_agent_is_recorded_once(agent: BlockingAgent) -> None:
    agent.stop()
    with process() as gone:
        pass
    spool = agent.directory.parent / "spool"
    spool.mkdir()
    attach = {"run": RUN, "name": "ppo", "started_at": 1.0, "ranks": [{"rank": 0, "pid": gone.pid}]}
    hello = {"type": "hello", "version": 1, "attach": attach}
    batches = [
        {"type": "steps", "steps": [step(number) for number in range(first, first + 200)]}
        for first in range(1, 1000, 200)
    ]
    event, end = {"type": "event", "text": "half", "number": 1}, {"type": "end", "state": "finished"}
    file = spool / f"{RUN}.jsonl"
    file.write_bytes(lines(hello, *batches, event) + b'{"type":"ste\n' + lines(hello, batches[-1], event, end))
    other = spool / "other-1.jsonl"
    other.write_bytes(lines(hello | {"socket": "/tmp/another.sock"}))
    held = spool / "held-1.jsonl"
    held.write_bytes(lines(hello | {"attach": attach | {"run": "held-1"}}))
    with held.open() as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        agent.start()
        until(lambda: state_of(agent) == "finished", what="the run")
        until(lambda: not file.exists(), what="the file to go")
        assert recorded(agent) == [*range(1, 1001)]
        assert texts(agent).count("half") == 1 and any("can't be read" in text for text in texts(agent))
        assert other.exists() and held.exists() and state_of(agent, "held-1") == ""
        fcntl.flock(writing, fcntl.LOCK_UN)
    until(lambda: state_of(agent, "held-1") == "failed", what="the run whose loop was killed")


def test_a_loop_s_file_is_read_before_its_hello_is_answered(agent: BlockingAgent) -> None:
    with Loop(agent) as loop:
        hello = {"type": "hello", "version": 1, "attach": loop.attach}
        spool = agent.directory.parent / "spool"
        spool.mkdir(exist_ok=True)
        (spool / f"{RUN}.jsonl").write_bytes(lines(hello, {"type": "steps", "steps": [step(1), step(2)]}))
        assert loop.hello()["step"] == 2
        assert not (spool / f"{RUN}.jsonl").exists()
        assert loop.hello(after_step=1)["step"] == 1
        assert loop.steps(2, 3)["step"] == 3
        with agent.client() as client:
            view = client.ask(m.SnapshotRequest, 0, RUN).run
            assert view is not None and view.generation == m.Generation(1, 2)


CONNECT_AND_END = """
import socket, sys
to_agent, to_test = socket.socket(socket.AF_UNIX), socket.socket(fileno=int(sys.argv[2]))
to_agent.connect(sys.argv[1])
socket.send_fds(to_test, [b"x"], [to_agent.fileno()])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux names the process of a connection")
def test_a_run_whose_process_was_gone_when_its_hello_was_read_fails_at_once(agent: BlockingAgent) -> None:
    until(lambda: bool(path_of(agent)), what="the socket")
    here, there = socket.socketpair()
    with here, there:
        command = [sys.executable, "-c", CONNECT_AND_END, path_of(agent), str(there.fileno())]
        with subprocess.Popen(command, pass_fds=[there.fileno()]) as process:
            _, (descriptor,), _, _ = socket.recv_fds(here, 1, 1)
        with socket.socket(fileno=descriptor) as connection:
            attach = {"run": RUN, "name": "ppo", "started_at": 1.0, "ranks": [{"rank": 0, "pid": process.pid}]}
            connection.sendall(lines({"type": "hello", "version": 1, "attach": attach}))
    until(lambda: state_of(agent) == "failed", what="the failure")


def test_a_hello_that_is_read_after_the_end_in_its_loop_s_file_does_not_begin_the_run_again(
    agent: BlockingAgent,
) -> None:
    with Loop(agent) as loop:
        hello = {"type": "hello", "version": 1, "attach": loop.attach}
        spool = agent.directory.parent / "spool"
        spool.mkdir(exist_ok=True)
        end = {"type": "end", "state": "finished"}
        (spool / f"{RUN}.jsonl").write_bytes(lines(hello, {"type": "steps", "steps": [step(1)]}, end))
        loop.hello()
        assert state_of(agent) == "finished"
    assert recorded(agent) == [1]
    with Loop(agent) as again:  # a later process goes on with the run
        again.hello()
        assert state_of(agent) == "running"
