"""`trainctl watch --json` at the head of a pipe: a line at once for all that happens, restarts told, a clean end."""

import asyncio
import contextlib
import json
import re
import signal
import threading
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.tui.support.cli_calls import DEADLINE_SECONDS, started
from tests.tui.support.guests import step_of, view_of
from tests.tui.support.scripted import Scripted, scripted
from tools.protocol_docs import examples

from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.client.client import Client
from trainctl.protocol.errors import UnreachableError
from trainctl.protocol.messages.events import NoteWritten
from trainctl.tui.cli import watch

SHOWN: dict[str, Any] = examples.EXAMPLES["published by an agent"]
VIEW, STEP, EVENT, SAMPLE = (SHOWN[kind] for kind in ("run-view", "step-committed", "event", "sample"))


class Run:
    """An agent's view of a run that is watched: its record, and the snapshot it gives."""

    def __init__(self) -> None:
        self.steps, self.events = [STEP], [EVENT]
        self.agent: Scripted | None = None
        self.asked: list[m.SnapshotRequest] = []
        self.is_attached = threading.Event()
        self.published: dict[int, m.Live] = {}  # what a gap is filled from

    def answer(self, request: m.ClientRequest) -> list[Any]:
        if isinstance(request, m.StepsRequest):
            self.is_attached.set()
            steps = tuple(step for step in self.steps if step.step > request.after_step)
            return [m.Steps(rid="", run=VIEW.run, steps=steps, more=False)]
        if isinstance(request, m.EventsRequest):
            events = tuple(event for event in self.events if event.id > request.after_id)
            return [m.Events(rid="", run=VIEW.run, events=events, more=False)]
        if isinstance(request, m.GapRequest):
            wanted = range(request.first_seq, request.last_seq + 1)
            lost = tuple(self.published[seq] for seq in wanted if seq in self.published)
            return [m.GapFill(rid="", complete=len(lost) == len(wanted), messages=lost)]
        if isinstance(request, m.AttendRequest):
            return [m.Viewers(rid="", viewers=())]
        if isinstance(request, m.SnapshotRequest):
            self.asked.append(request)
        view = msgspec.structs.replace(VIEW, step=self.steps[-1].step)
        return [self.agent.snapshot(run=view, last_step=self.steps[-1], events=tuple(self.events))]

    def publish(self, message: Any) -> None:
        """Also to a client whose subscription has not reached the agent yet."""
        seq = self.agent.seq + 1
        self.published[seq] = msgspec.structs.replace(message, boot=self.agent.boot, seq=seq)
        self.agent.publish(message)

    def commit(self, step: int) -> m.StepCommitted:
        self.steps.append(msgspec.structs.replace(STEP, step=step))
        return self.steps[-1]

    def happens(self, text: str) -> m.Event:
        self.events.append(msgspec.structs.replace(EVENT, id=self.events[-1].id + 1, data=NoteWritten(text), verb=None))
        return self.events[-1]


@pytest.fixture
def watched() -> Iterator[tuple[Run, Scripted]]:
    run = Run()
    with scripted(run.answer) as agent:
        run.agent = agent
        yield run, agent


DOCUMENTED = re.compile(r"^\| `([a-z-]+)` \| .* \| ((?:`\w+` ?)+) \|$", re.MULTILINE)


def test_the_lines_have_the_fields_that_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "scripting.md").read_text("utf-8")
    documented = {kind: set(fields.replace("`", "").split()) for kind, fields in DOCUMENTED.findall(page)}
    for item in (STEP, EVENT, VIEW, SAMPLE, watch.Restarted()):
        watch.show_item(item, None, json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line.pop("type"): {*line} for line in lines} == documented


def read(process: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


def test_a_guest_beside_the_hosted_run_is_watched_only_by_its_id(watched: tuple[Run, Scripted]) -> None:
    run, agent = watched
    beside = msgspec.structs.replace(view_of(VIEW), run="notebook-1")
    its_step = msgspec.structs.replace(step_of(STEP), run="notebook-1")
    with started("watch", "--json", "--connect", agent.address) as process:
        assert {read(process)["type"], read(process)["type"]} == {"run-view", "connection"}
        agent.publish(beside)
        agent.publish(its_step)
        agent.publish(run.commit(122))
        assert [(line["run"], line["step"]) for line in [read(process)]] == [(VIEW.run, 122)]
    with BlockingClient(agent.address) as client:
        attached = client.attach(0, "notebook-1")
        found = next(item for item in attached if isinstance(item, m.Snapshot))
        assert run.asked[-1].run == "notebook-1" and found.run is not None
        agent.publish(beside)
        agent.publish(its_step)
        heard = [next(item for item in attached if isinstance(item, m.RunView | m.StepCommitted)) for _ in range(2)]
        assert [(item.run, getattr(item, "loss", None)) for item in heard] == [("notebook-1", None)] * 2
        attached.close()  # type: ignore[attr-defined]


def test_a_line_for_all_that_happens_and_for_a_restart_of_the_agent(watched: tuple[Run, Scripted]) -> None:
    run, agent = watched
    with started("watch", "--json", "--connect", agent.address) as process:
        first, second = read(process), read(process)
        assert {first["type"], second["type"]} == {"run-view", "connection"}
        connected = first if first["type"] == "connection" else second
        assert (connected["state"], connected["why"]) == ("connected", "")
        agent.publish(run.commit(122))
        assert [(line["type"], line["step"]) for line in [read(process)]] == [("step-committed", 122)]
        agent.publish(run.happens("a note"))
        assert [(line["type"], line["text"]) for line in [read(process)]] == [("event", "a note")]
        run.commit(123)
        run.happens("said while it was away")
        agent.restart()
        assert [(line["type"], line["state"]) for line in [read(process)]] == [("connection", "restarted")]
        missed = [read(process), read(process)]
        assert {line["type"]: line.get("step") for line in missed}["step-committed"] == 123
        assert "said while it was away" in [line.get("text") for line in missed]
        agent.publish(run.commit(124))
        assert read(process)["step"] == 124
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=DEADLINE_SECONDS) == ("", "")
    assert process.returncode == 130


@pytest.mark.parametrize("options", [("--json",), ()], ids=" ".join)
def test_it_goes_on_after_each_message_that_an_agent_publishes(
    watched: tuple[Run, Scripted], options: tuple[str, ...]
) -> None:
    run, agent = watched
    shown = {
        "step-committed": msgspec.structs.replace(STEP, step=122),
        "event": msgspec.structs.replace(EVENT, id=EVENT.id + 1, data=NoteWritten("a note"), verb=None),
        "run-view": msgspec.structs.replace(VIEW, state="paused"),
        "sample": msgspec.structs.replace(SAMPLE, run=VIEW.run),
    }
    kinds = {kind.__struct_config__.tag for kind in m.TOPICS} - {"heartbeat"}  # the agent sends those by itself
    with started("watch", *options, "--connect", agent.address) as process:
        assert run.is_attached.wait(DEADLINE_SECONDS)
        for kind in sorted(kinds):
            run.publish(shown.get(kind, SHOWN[kind]))
        run.publish(run.commit(123))
        lines: list[str] = []
        while not any("step 123" in line or '"step":123' in line for line in lines):
            lines.append(process.stdout.readline())
            assert lines[-1], process.communicate(timeout=DEADLINE_SECONDS)
    if options:
        assert {json.loads(line)["type"] for line in lines} - {"connection"} == {*shown}
    else:
        for said in ("step 122", "a note", f"→ {SAMPLE.answer.strip()}"):
            assert said in "".join(lines)


@pytest.mark.parametrize("words", [("watch", "--json"), ("events", "-f", "-n", "1", "--json")], ids=" ".join)
def test_the_reader_gone_it_ends_with_nothing_to_write(watched: tuple[Run, Scripted], words: tuple[str, ...]) -> None:
    _, agent = watched
    with started(*words, "--connect", agent.address) as process:
        for _ in range(2):
            assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(DEADLINE_SECONDS) == 141


async def test_steps_that_were_repeated_while_nobody_listened_are_among_those_missed(
    watched: tuple[Run, Scripted],
) -> None:
    run, agent = watched
    place = watch.RunCursor(VIEW.run)
    place.passes(msgspec.structs.replace(STEP, step=125))
    place.passes(EVENT)
    again = STEP.generation.next()
    resumed = msgspec.structs.replace(run.happens("resumed from step 122"), step=122, generation=again)
    run.events[-1] = resumed
    run.steps += [msgspec.structs.replace(STEP, step=step, generation=again) for step in range(123, 127)]
    async with Client(agent.address) as client:
        seen = await watch.missed(client, place)
    assert [item.step for item in seen if isinstance(item, m.StepCommitted)] == [123, 124, 125, 126]
    assert resumed in seen


async def test_after_changes_of_the_lead_one_connection_is_open_beside_the_own(watched: tuple[Run, Scripted]) -> None:
    agent = watched[1]
    addresses = (agent.address, "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", agent.address)
    counts = []

    class Changing(Client):
        async def attach(self, _: int) -> AsyncGenerator[Any, None]:
            for number, address in enumerate(addresses):
                snapshot = agent.snapshot(run=msgspec.structs.replace(VIEW, run=f"run-{number}"))
                name = snapshot.node.node if address == agent.address else f"other-{number}"
                node = msgspec.structs.replace(snapshot.node, node=name, address=address)
                yield msgspec.structs.replace(snapshot, node=node)
                counts.append(sum(task.get_name() == "trainctl-client-receive" for task in asyncio.all_tasks()))
            raise UnreachableError("the end")

    with contextlib.suppress(UnreachableError):
        async with Changing(agent.address, timeout_seconds=0.1) as client:
            async for _ in watch.lines(client):
                pass
    assert counts == [1, 2, 2, 1]
