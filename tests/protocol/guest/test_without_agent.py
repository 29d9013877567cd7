"""A loop whose agent is absent, silent or slow, or that ends without closing its run."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.protocol.support.line_server import LineServer
from tests.waiting import HANG_SECONDS, until

from trainctl import guest
from trainctl.guest import link

PROTOCOL = Path(__file__).parents[3] / "protocol"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LineServer]:
    """One that has not started yet."""
    with tempfile.TemporaryDirectory(prefix="tg-") as folder:
        monkeypatch.setenv("TRAINCTL_GUEST_SOCKET", f"{folder}/guests.sock")
        monkeypatch.setenv("TRAINCTL_GUEST_STATE", folder)
        monkeypatch.setattr(link, "ABSENT_SECONDS", 0.3)
        monkeypatch.setattr(link, "_RETRY_SECONDS", 0.1)
        server = LineServer(Path(folder, "guests.sock"))
        yield server
        server.stop()


def spooled(folder: Path) -> list[dict[str, Any]]:
    """The lines of the only spool file; none if there is no file."""
    files = [*(folder / "spool").glob("*.jsonl")]
    return [json.loads(text) for file in files for text in file.read_bytes().split(b"\n")[:-1]]


def steps_of(lines: list[dict[str, Any]]) -> list[int]:
    return [row["step"] for one in lines if one["type"] == "steps" for row in one["steps"]]


def test_an_agent_that_comes_late_gets_each_step_once(server: LineServer) -> None:
    with guest.attach("late") as loop:
        folder = server.path.parent
        until(lambda: loop.step(loss=1.0) is None or len(steps_of(spooled(folder))) > 3)
        lines = spooled(folder)
        assert lines[0]["type"] == "hello" and steps_of(lines) == [*range(1, len(steps_of(lines)) + 1)]
        server.start()
        until(lambda: loop.step(loss=1.0) is None or server.step > len(steps_of(lines)) + 3)
        last = loop._last
    assert [*server.rows] == [*range(1, last + 1)] and server.of("end")


def test_a_silent_agent_is_taken_for_absent_and_greeted_when_it_is_back(server: LineServer) -> None:
    server.start()
    with guest.attach("silent") as loop:
        until(lambda: loop.step() is None or server.step > 3)
        server.is_silent = True
        until(lambda: loop.step() is None or len(steps_of(spooled(server.path.parent))) > 3)
        greeted = len(server.of("hello"))
        server.is_silent = False
        server._send(server._connections[-1], type="kept", step=server.step, event=0)
        until(lambda: loop.step() is None or len(server.of("hello")) > greeted)
        before = server.step
        until(lambda: loop.step() is None or server.step > before + 3)
        last = loop._last
    assert [*server.rows] == [*range(1, last + 1)]


def test_at_the_end_the_rest_is_kept_for_the_next_agent(server: LineServer) -> None:
    began = time.monotonic()
    with guest.attach("alone") as loop:
        for _ in range(450):
            loop.step(loss=0.5)
        loop.note("hm")
    lines = spooled(server.path.parent)
    assert steps_of(lines) == [*range(1, 451)] and [one["type"] for one in lines][-1] == "end"
    assert [one["text"] for one in lines if one["type"] == "event"] == ["hm"]
    assert time.monotonic() - began < 30  # not the bar: it must end


def test_a_full_disk_is_said_once_and_loses_nothing_while_the_loop_runs(
    server: LineServer, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(server.path.parent, "spool").write_text("no folder")  # an OSError like that of a full disk
    with guest.attach("full") as loop:
        said = ""

        def is_said() -> bool:
            nonlocal said
            loop.step()
            said += capfd.readouterr().err
            return "steps wait in memory" in said

        until(is_said)
        server.start()
        until(lambda: loop.step() is None or server.step > 3)
        last = loop._last
    assert [*server.rows] == [*range(1, last + 1)]
    server.stop()
    with guest.attach("full") as loop:
        loop.step()
    said += capfd.readouterr().err
    assert said.count("steps wait in memory") == 1 and said.count("1 steps are lost: no agent answers") == 1


def test_a_pause_ends_when_no_agent_is_left(server: LineServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.start()
    monkeypatch.setattr(link, "PAUSE_SECONDS", 0.5)
    with guest.attach("paused") as loop:
        until(lambda: loop.step() is None or server.rows)
        server.order("pause")
        until(lambda: loop._arrived)
        server.is_silent = True
        assert loop.step() is False
    assert "goes on" in str(spooled(server.path.parent))


def test_a_pause_holds_the_loop_until_it_is_resumed(server: LineServer) -> None:
    server.start()
    with guest.attach("paused", checkpoint=lambda: ("none", "step-1")) as loop:
        until(lambda: loop.step() is None or server.rows)
        sent: list[str] = []
        pause = server.order("pause")
        until(lambda: loop._arrived)

        def go_on(orders: list[str]) -> None:
            assert server.outcome(pause)["state"] == "applied"
            orders.append(server.order("checkpoint"))
            assert server.outcome(orders[0])["after"] == "step-1"
            orders.append(server.order("resume"))

        server._begin(go_on, sent)
        step = loop._last + 1
        loop.step()
        assert server.outcome(sent[1])["step"] == step and loop._last == step
        loop.step()
        until(lambda: server.step == step + 1)
        assert server.rows[step + 1]["step_seconds"] < 1  # without the pause


LOOP = """
import os, sys, time
sys.path.insert(0, {protocol!r})
from trainctl import guest
from trainctl.guest import link
link.ABSENT_SECONDS = 0.2
run = guest.attach("child")
{body}
"""


def loop(body: str) -> "subprocess.Popen[str]":
    code = LOOP.format(protocol=str(PROTOCOL), body=body)
    return subprocess.Popen([sys.executable, "-c", code], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize(
    ("body", "status", "end"),
    [
        ("run.step(loss=1.0)", 0, ("finished", "")),
        ("run.step(loss=1.0); raise RuntimeError('out of memory')", 1, ("failed", "RuntimeError: out of memory")),
        ("with run:\n    run.step()\n    raise KeyboardInterrupt", -2, ("stopped", "interrupted")),
        ("with run:\n    run.step()\n    sys.exit(3)", 3, ("failed", "SystemExit: 3")),
    ],
)
def test_a_loop_that_does_not_close_its_run_is_closed(
    server: LineServer, body: str, status: int, end: tuple[str, str]
) -> None:
    server.start()
    process = loop(body)
    _, said = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == status, said
    (last,) = server.of("end")
    assert (last["state"], last["reason"]) == end and [*server.rows] == [1]


def test_a_killed_loop_leaves_what_was_written(server: LineServer) -> None:
    process = loop("while True: run.step(loss=1.0); time.sleep(0.001)")
    until(lambda: len(steps_of(spooled(server.path.parent))) > 50)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    steps = steps_of(spooled(server.path.parent))
    assert steps == [*range(1, len(steps) + 1)]


def test_a_forked_child_sends_nothing(server: LineServer) -> None:
    server.start()
    process = loop(
        "run.step(loss=1.0)\n"
        "if os.fork() == 0:\n"
        "    for _ in range(5): assert run.step(loss=2.0) is False\n"
        "    run.note('child'); run.close(); sys.exit(0)\n"
        "os.wait(); run.step(loss=1.0)"
    )
    _, said = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, said) == (0, "") and [*server.rows] == [1, 2]
    assert {row["loss"] for row in server.rows.values()} == {1.0} and len(server.of("end")) == 1
    assert not server.of("event") and len({one["attach"]["ranks"][0]["pid"] for one in server.of("hello")}) == 1


def test_an_end_in_the_middle_of_a_conversion_does_not_abort(server: LineServer) -> None:
    """A thread in a library that is stopped by the interpreter's end calls std::terminate."""
    pytest.importorskip("torch")
    process = loop("import torch\nx = torch.tensor(1.0)\nfor _ in range(200_000): run.step(loss=x, a=x, b=x, c=x)")
    _, said = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0, said


def test_no_value_stops_the_loop(server: LineServer) -> None:
    class Hostile:
        requires_grad = True

        @property
        def _version(self) -> int:
            raise ValueError("no")

    server.start()
    with guest.attach("hostile") as loop:
        for n in ("x", -1, 0, object()):
            assert loop.step(n, loss=Hostile()) is False  # type: ignore[arg-type]
        assert loop.step(loss=Hostile(), kl=[], lr="?", tokens=-5) is False
        loop.step(loss=2.0)
        last = loop._last
    assert server.step == last and server.rows[last]["loss"] == 2.0
    assert any("not recorded" in one["text"] for one in server.of("event"))


def test_a_run_that_is_refused_keeps_no_values(server: LineServer, capfd: pytest.CaptureFixture[str]) -> None:
    server.start()
    with guest.attach("refused", optimizer=object()) as loop:
        until(lambda: loop.step() is None or server.rows)
        server._send(server._connections[-1], type="refused", reason="no such version", final=True)
        until(lambda: loop.step() is None or "no such version" in capfd.readouterr().err)
        for _ in range(100):
            loop.step(loss=1.0)
        until(lambda: not loop._link.items)


def test_no_argument_stops_the_loop(server: LineServer) -> None:
    server.start()
    hostile: dict[str, Any] = {"run": 7, "steps": "many", "loss_unit": None, "optimizer": [], "checkpoint": None}
    with guest.attach(object(), **hostile) as loop:  # type: ignore[arg-type]
        loop.step(loss=1.0)
    assert loop.id == "7" and server.of("hello")[0]["attach"]["steps"] is None and [*server.rows] == [1]
