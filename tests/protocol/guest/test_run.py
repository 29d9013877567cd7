"""A loop in this process, attached to a line server."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.protocol.support.line_server import LineServer
from tests.waiting import until

from trainctl import guest


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LineServer]:
    with tempfile.TemporaryDirectory(prefix="tg-") as folder:
        monkeypatch.setenv("TRAINCTL_GUEST_SOCKET", f"{folder}/guests.sock")
        monkeypatch.setenv("TRAINCTL_GUEST_STATE", folder)
        server = LineServer(Path(folder, "guests.sock")).start()
        yield server
        server.stop()


@pytest.fixture
def run(server: LineServer) -> Iterator[guest.Run]:
    run = guest.attach("ppo", steps=100, checkpoint=lambda: None)
    yield run
    run.close()


def test_steps_are_recorded_with_their_values(server: LineServer, run: guest.Run) -> None:
    for _ in range(5):
        assert run.step(loss=0.5, samples=8, tokens=512, lr=1e-3, kl=float("inf"), grad_norm=2.0) is False
    assert guest.attach() is run
    run.close()
    assert [*server.rows] == [1, 2, 3, 4, 5] and server.repeated == 0
    row = server.rows[5]
    assert (row["loss"], row["samples"], row["tokens"], row["learning_rate"], row["grad_norm"]) == (
        0.5,
        8,
        512,
        1e-3,
        2,
    )
    assert row["values"] == {"user:kl": "inf"} and row["step_seconds"] >= 0
    (hello,) = [one for one in server.of("hello") if one["verbs"]["checkpoint"] == ""][:1]
    assert (
        hello["version"] == 1 and hello["attach"]["name"] == "ppo" and hello["attach"]["ranks"][0]["pid"] == os.getpid()
    )
    assert server.of("end") == [{"type": "end", "state": "finished", "reason": ""}]


def test_numbers_and_reasons_of_any_kind_leave_the_run_described(server: LineServer) -> None:
    class Number:  # as those of NumPy: json can't write it
        def __index__(self) -> int:
            return 7

    run = guest.attach("a\udcff", steps=Number(), loss_unit=None)  # type: ignore[arg-type]
    run.offer("set-lr", why="x" * 5000)
    run.step(2**63)
    run.step(loss=1.0)
    run.close()
    hello = server.of("hello")[-1]
    assert hello["attach"]["steps"] == 7 and hello["attach"]["name"] == "a?" and len(hello["verbs"]["set-lr"]) == 1000
    assert [*server.rows] == [1]


def test_what_a_loop_offers_is_said_once_however_often_it_attaches(server: LineServer, run: guest.Run) -> None:
    def step() -> None:
        guest.attach(checkpoint=lambda: None)
        run.step()

    step()
    until(lambda: 1 in server.rows, what="the first step")
    said = len(server.of("hello"))
    for number in range(2, 6):
        step()
        until(lambda number=number: number in server.rows, what="the step")
    assert len(server.of("hello")) == said
    run.offer("evaluate", lambda: {})
    until(lambda: server.of("hello")[-1]["verbs"]["evaluate"] == "", what="the new verb")


def test_orders_are_carried_out_between_steps(server: LineServer, run: guest.Run) -> None:
    saved = []
    run.offer("checkpoint", lambda: saved.append(1))
    until(lambda: run.step() is None or server.rows)
    done = server.order("checkpoint")
    until(lambda: run.step() is None or saved)
    outcome = server.outcome(done)
    assert outcome["state"] == "applied" and outcome["step"] in server.rows
    server.order("checkpoint", done)  # an id that was sent twice
    assert until(lambda: [one for one in server.outcomes() if one["id"] == done][1:])[0] == outcome and saved == [1]
    unknown = server.order("rebalance", auto=True)
    until(lambda: run.step() is None or any(one["id"] == unknown for one in server.outcomes()))
    assert server.outcome(unknown)["state"] == "rejected"
    stop = server.order("stop")
    until(run.step)
    assert server.outcome(stop)["state"] == "applied" and saved == [1, 1]
    run.close()
    assert server.of("end")[-1]["state"] == "stopped"


def test_a_stop_without_a_checkpoint_function_is_refused(server: LineServer, run: guest.Run) -> None:
    run.offer("checkpoint", None, why="nothing to save")
    until(lambda: run.step() is None or server.rows)
    stop = server.order("stop")
    until(lambda: run.step() is None or server.outcomes())
    assert server.outcome(stop)["state"] == "rejected" and "checkpoint=false" in server.outcome(stop)["reason"]
    stop = server.order("stop", checkpoint=False)
    until(run.step)


def test_an_agent_that_was_killed_gets_each_step_once(server: LineServer, run: guest.Run) -> None:
    for _ in range(5):
        before = server.step
        until(lambda: run.step() is None or server.step > before + 3)  # noqa: B023
        server.stop()
        for _ in range(20):
            run.step()
        server.start()
    until(lambda: run.step() is None or server.step > before + 30)
    run.close()
    assert [*server.rows] == [*range(1, server.step + 1)]


def test_a_loop_that_goes_back_retracts_later_steps(server: LineServer, run: guest.Run) -> None:
    for n in (1, 2, 3, 4, 2, 3):
        run.step(n, loss=float(n))
    run.close()
    assert [one["attach"].get("after_step") for one in server.of("hello")][-1] == 1
    assert server.step == 3 and [row["step"] for one in server.of("steps") for row in one["steps"]] == [
        1,
        2,
        3,
        4,
        2,
        3,
    ]
