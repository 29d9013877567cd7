"""Commands to a real agent that is killed (SIGKILL) while it has them: one outcome each, applied once or not at all.

The same command is sent five times for each kill.
"""

import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from tests.asking import newest_events, run_of
from tests.cluster.waits import wait_for_step
from tests.integration.conftest import AgentProcess, keep_processes
from tests.tiers import scale
from tests.waiting import HANG_SECONDS, PATIENT_MILLISECONDS, until

from trainctl.node_agent.records.keys import DURABLE_KEY
from trainctl.protocol import messages as m
from trainctl.protocol.client.client import make_command
from trainctl.protocol.record.schema import open_for_reading
from trainctl.protocol.wire import codec, sockets
from trainctl.protocol.wire.codec import decode_order

KILLS = scale("agent kills")
KILLS_BESIDE, SENDS = max(2, KILLS // 20), 5 * max(10, KILLS)


class Asker:
    """A raw connection, so that what is sent isn't awaited."""

    def __init__(self, agent: AgentProcess) -> None:
        self._context = zmq.Context()
        self._socket = sockets.new_socket(self._context, zmq.DEALER)
        self._socket.connect(agent.address)
        assert self._socket.poll(PATIENT_MILLISECONDS, zmq.POLLOUT)

    def __enter__(self) -> "Asker":
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def send(self, command: m.Command) -> None:
        self._socket.send(codec.encode(command))

    def replies(self, milliseconds: int = 0) -> Iterator[m.CommandReply]:
        while self._socket.poll(milliseconds):
            reply = codec.decode_reply(self._socket.recv())
            if isinstance(reply, m.CommandReply):
                yield reply


def state_of(agent: AgentProcess, id: str) -> str | None:
    """Return the state of a command, by the agent's book."""
    book = open_for_reading(agent.directory / "agent.db")
    try:
        row = book.execute("SELECT state FROM commands WHERE id = ?", (id,)).fetchone()
        return row[0] if row else None
    finally:
        book.close()


def journaled(agent: AgentProcess, id: str) -> None:
    """Return as soon as the agent's book has a command: a step may be over before a pause is."""
    deadline = time.monotonic() + HANG_SECONDS
    while state_of(agent, id) is None:
        assert time.monotonic() < deadline, "the command's journaling"


def planned_steps(agent: AgentProcess, newest: int = -1) -> dict[str, set[int]]:
    """By command, the steps whose plans carry it; of the `newest` plans alone, of all if negative."""
    record, found = open_for_reading(agent.run_paths(agent.lasting).record), dict[str, set[int]]()
    try:
        query = "SELECT body FROM plans WHERE kind = 'train' ORDER BY term DESC, n DESC, seq DESC LIMIT ?"
        for (body,) in record.execute(query, (newest,)):
            plan = decode_order(body)
            assert isinstance(plan, m.StepPlan)
            for id in plan.commands:
                found.setdefault(id, set()).add(plan.step)
        return found
    finally:
        record.close()


def is_carried(agent: AgentProcess, id: str) -> bool:
    """Return whether the run's settings have taken a command up, which are kept just before the plan that carries
    it."""
    record = open_for_reading(agent.run_paths(agent.lasting).record)
    try:
        (kept,) = record.execute("SELECT value FROM meta WHERE key = ?", (DURABLE_KEY,)).fetchone()
        return id in json.loads(kept)["carried"]
    finally:
        record.close()


def last_step(agent: AgentProcess) -> int:
    """Return the last step that the record holds."""
    record = open_for_reading(agent.run_paths(agent.lasting).record)
    try:
        return int(record.execute("SELECT coalesce(max(step), 0) FROM steps").fetchone()[0])
    finally:
        record.close()


def struck(agent: AgentProcess, id: str) -> str:
    """Return how far a command had come when the agent was killed: between journal and apply in all but the last of
    these."""
    if state_of(agent, id) != "accepted":
        return "applied"
    steps = planned_steps(agent, newest=16).get(id)
    if steps is None:
        return "in the settings, its plan not journaled" if is_carried(agent, id) else "in the agent's book, on no plan"
    return "on a plan that was journaled" if max(steps) > last_step(agent) else "its step recorded, its outcome not"


def restart(agent: AgentProcess) -> None:
    agent.kill()
    agent.start()
    keep_processes()
    with agent.client() as client:  # a trainer that never meets an agent leaves after a while
        run = run_of(client)
        assert run is not None
        wait_for_step(client, run.step + 1)


def edit(number: int) -> m.Command:
    return make_command("set-lr", {"value": 1e-3 + number * 1e-7, "schedule": "set"}, by="tester", ttl_seconds=600)


@pytest.mark.timeout(7200)
def test_kills_between_journal_and_apply(live: AgentProcess) -> None:
    """The killer looks at the agent's book, and strikes at once when the command is in it; every second comes by
    chance a little later."""
    chance, between, phases = random.Random(7), 0, Counter[str]()
    before = version(live)
    commands: list[m.Command] = []
    while between < KILLS:
        assert len(commands) < 4 * KILLS + 8, f"only {between} kills met a command between journal and apply"
        command = edit(len(commands))
        commands.append(command)
        with Asker(live) as asker:
            asker.send(command)
            journaled(live, command.id)
            if len(commands) % 2 == 0:
                time.sleep(chance.uniform(0, 0.03))
            assert live.process is not None
            live.process.kill()
            live.process.wait(HANG_SECONDS)
        phase = struck(live, command.id)
        phases[phase] += 1
        between += phase != "applied"
        restart(live)
    with live.client() as client:
        ends = [client.send("set-lr", command.args, id=command.id) for command in commands]
    steps = planned_steps(live)
    assert [end.state for end in ends] == ["applied"] * len(ends)
    assert [steps[end.id] for end in ends] == [{end.step} for end in ends]
    assert version(live) == before + len(commands), "each makes one version of the plan"
    print(f"\n{len(commands)} commands, {between} kills between journal and apply: each applied once")
    print("\n".join(f"{count:5} {phase}" for phase, count in phases.most_common()))


@pytest.mark.timeout(3600)
def test_the_same_id_again_and_again_across_kills(live: AgentProcess) -> None:
    before, command, told = version(live), edit(9999), list[m.CommandReply]()
    each = SENDS // (KILLS_BESIDE + 1)
    for turn in range(KILLS_BESIDE + 1):
        with Asker(live) as asker:
            for _ in range(each if turn else each + SENDS % (KILLS_BESIDE + 1)):
                asker.send(command)
                told += asker.replies()
            if turn < KILLS_BESIDE:
                restart(live)
            else:
                until(lambda asker=asker: state_of(live, command.id) == "applied", 30)
                asker.send(command)
                told += itertools.islice((r for r in asker.replies(PATIENT_MILLISECONDS) if r.state != "accepted"), 1)
                told += asker.replies(500)  # others, if there are any
    ended = {(reply.state, reply.step, reply.plan_version) for reply in told if reply.state != "accepted"}
    assert len(ended) == 1 and ended.pop()[0] == "applied"
    with live.client() as client:
        other = client.send("set-lr", {"value": 5e-4, "schedule": "set"}, id=command.id)
    assert (other.state, other.field) == ("conflict", "id")
    assert version(live) == before + 1
    print(f"\nthe same id {SENDS + 1} times across {KILLS_BESIDE} kills: {len(told)} replies, one outcome")


def test_commands_for_an_older_plan_are_refused_and_recorded_whatever_generation_comes(live: AgentProcess) -> None:
    with live.client() as client:
        seen = version(live)
        assert client.send("set-lr", {"value": 2e-4, "schedule": "set"}, if_plan=seen).state == "applied"
        old = client.send("set-lr", {"value": 1e-4, "schedule": "set"}, if_plan=seen)
    assert (old.state, old.field) == ("rejected", "if_plan")
    restart(live)  # the next generation
    with live.client() as client:
        again = client.send("set-lr", {"value": 1e-4, "schedule": "set"}, if_plan=seen, id=old.id)
        late = client.send("set-lr", {"value": 1e-4, "schedule": "set"}, if_plan=seen)
    assert (again.state, again.reason) == (old.state, old.reason)
    assert (late.state, late.field) == ("rejected", "if_plan")
    assert version(live) == seen + 1
    assert recorded(live, old.id, late.id) == ["rejected", "rejected"]


def test_a_command_whose_time_is_up_while_no_agent_runs_is_refused_and_recorded(live: AgentProcess) -> None:
    for number in range(60):
        command = msgspec.structs.replace(edit(20_000 + number), ttl_seconds=0.25)
        with Asker(live) as asker:
            asker.send(command)
            journaled(live, command.id)
            assert live.process is not None
            live.process.kill()
            live.process.wait(HANG_SECONDS)
        waits = struck(live, command.id) == "in the agent's book, on no plan"
        if waits:
            time.sleep(command.ttl_seconds)
        restart(live)
        if waits:
            break
    assert waits, "no kill met a command on no plan"
    assert recorded(live, command.id) == ["expired"]
    assert command.id not in planned_steps(live)


def recorded(agent: AgentProcess, *ids: str) -> list[str | None]:
    """Return how commands have ended, by the agent's book and the run's events alike."""
    with agent.client() as client:
        told = {event.command: event.outcome for event in newest_events(client) if event.command}
    states = [state_of(agent, id) for id in ids]
    assert [told.get(id) for id in ids] == states
    return states


def version(agent: AgentProcess) -> int:
    with agent.client() as client:
        run = run_of(client)
    assert run is not None
    return run.plan_version
