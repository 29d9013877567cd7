"""The agent's alerts around a real session and record: kept, published, restored, acknowledged, muted, ended."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from tests.node_agent.support.loaded_session import LoadedSession
from tests.node_agent.support.records import part, step

from trainctl.node_agent.alerts.hooks import HookCall, Hooks
from trainctl.node_agent.alerts.service import AlertService
from trainctl.node_agent.planning.durable import TRACE_STEPS, Profiling
from trainctl.node_agent.transport.publisher import Publisher
from trainctl.protocol import messages as m
from trainctl.protocol.config.alert_rules import AlertHooks, AlertsTable
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import verbs
from trainctl.protocol.record.paths import RunPaths

HOOKS = AlertHooks(command=(sys.executable,))


class Agent:
    """An service, the session that it watches, and what is published."""

    def __init__(self, paths: RunPaths, context: zmq.Context[Any]) -> None:
        self.published: list[m.Live] = []
        publisher = Publisher(context.socket(zmq.XPUB), "b" * 16)
        self.told = LoadedSession(paths, publisher)
        self.service = AlertService("a", HOOKS, publisher)
        publisher.listeners.insert(0, self.published.append)
        self.publisher, self.session = publisher, self.told.session
        self.service.watch(self.session, {})

    def commit(self, loss: float) -> None:
        """A step as the session would publish it, and a look after it."""
        self.publisher.publish(msgspec.structs.replace(step(1, loss=loss), run="sim", values={}))
        self.service.watch(self.session, {})

    def obey(self, verb: str, node: str | None = None, **args: Any) -> Any:
        command = m.Command(rid="r", id="0" * 36, verb=verb, args=args, by="anna", node=node)
        return self.service.obey(command, verbs.check(verb, args, node))  # type: ignore[arg-type]

    @property
    def open(self) -> list[m.AlertView]:
        view = self.service.view
        return list(view.alerts) if view is not None else []

    def events(self) -> list[tuple[str, str | None]]:
        kept = self.session.recorder.last_state().events
        return [(event.severity, event.after) for event in kept if event.kind == "alert"]


def _full_disk() -> m.HostReading:
    return m.HostReading(
        node="a", read_at=0.0, cpu_percent=None, memory_used_bytes=None, memory_total_bytes=None, disk_free_bytes=1
    )


@pytest.fixture
def made(tmp_path: Path) -> Any:
    (tmp_path / "run-1").mkdir()
    context = zmq.Context()
    agents: list[Agent] = []

    def make() -> Agent:
        agents.append(Agent(RunPaths(tmp_path / "run-1"), context))
        return agents[-1]

    yield make
    for agent in agents:
        agent.session.close()
    context.destroy(linger=0)


def test_an_alert_outlives_its_agent_with_who_has_seen_it(made: Any) -> None:
    first = made()
    first.commit(math.nan)
    (alert,) = first.open
    assert alert.id == "nonfinite"
    assert [type(message) for message in first.published[-2:]] == [m.Event, m.Alerts]
    assert first.obey("acknowledge", id="nonfinite").state == "applied"
    assert first.obey("mute", "a", kind="memory", minutes=5.0).after == "memory for 5 min"
    first.session.close()
    second = made()
    assert second.open == first.open
    assert second.open[0].acknowledged_by == "anna"
    assert second.service.view.mutes == first.service.view.mutes
    second.commit(math.nan)
    assert second.events() == [("error", "nonfinite")]
    second.service.ended(second.session)
    assert second.open == []
    assert second.events() == [("error", "nonfinite")]  # that the run has ended is an event of its own
    assert second.published[-1].alerts == ()
    second.session.close()
    third = made()
    assert third.open == []
    third.session.close()


def test_a_step_that_a_profiler_slows_raises_nothing(made: Any) -> None:
    agent = made()
    agent.session.conductor.shared.persist(profiling={1: Profiling(seq=1, last_step=7)})
    for number, held in ((7, 0), (8 + TRACE_STEPS, 1)):
        values = {"memory_bytes": 99.0, "memory_cap_bytes": 100.0}
        agent.publisher.publish(msgspec.structs.replace(part(number), run="sim", node="a", values=values))
        assert agent.service._evaluator.held == held
    agent.session.close()


def test_a_muted_kind_is_kept_and_calls_nobody(made: Any) -> None:
    agent = made()
    agent.obey("mute", kind="nonfinite")
    agent.commit(math.nan)
    assert agent.open[0].muted
    assert agent.events() == [("error", "nonfinite")]
    assert agent.service.hooks.waiting == 0
    agent.obey("mute", kind="nonfinite", minutes=0.0)
    assert not agent.open[0].muted
    assert agent.service.view.mutes == ()
    agent.session.close()


def test_what_cannot_be_acknowledged_or_muted_is_named(made: Any) -> None:
    agent = made()
    agent.commit(math.nan)
    assert agent.service.hooks.waiting == 1
    with pytest.raises(InvalidInputError, match="no open alert 'disk:a'; the open alerts are nonfinite"):
        agent.obey("acknowledge", id="disk:a")
    with pytest.raises(InvalidInputError, match="no node 'd' in this run"):
        agent.obey("mute", "d", kind="disk")
    agent.session.close()
    idle = AlertService("a", AlertHooks(), agent.publisher)
    with pytest.raises(InvalidInputError, match="'sim' is not active; no run is active"):
        idle.obey(m.Command(rid="r", id="0" * 36, verb="mute", run="sim"), verbs.Mute(kind="disk"))


def test_a_follower_tells_of_its_lead_alone_and_forgets_it_with_the_run(made: Any) -> None:
    agent = made()
    service = agent.service
    service.follow("sim", "sim", AlertsTable(), "b", 11.0)
    agent.publisher.publish(_full_disk())
    assert [alert.id for alert in agent.open] == ["lead-silent:a"]
    assert service.knows(m.Command(rid="r", id="0" * 36, verb="acknowledge", args={"id": "lead-silent:a"}))
    assert agent.obey("acknowledge", id="lead-silent:a").step is None
    assert agent.open[0].acknowledged_by == "anna"
    service.watch(None, {})
    assert agent.open == []
    assert agent.published[-1].alerts == ()
    agent.session.close()


def test_between_the_end_of_conducting_and_the_next_look_nothing_goes_into_the_record(made: Any) -> None:
    """As when another agent has just taken the run over, and machines go on telling how they are."""
    first = made()
    first.commit(math.nan)
    known = first.events()
    first.session.close()
    first.service.read(_full_disk())
    assert first.obey("mute", kind="memory", minutes=5.0).step is None
    assert first.obey("acknowledge", id="nonfinite").state == "applied"
    first.service._hook_turned("a hook failed")
    first.service.watch(None, {})
    assert first.open == []
    assert made().events() == known


async def test_a_hook_that_fails_is_told_of_without_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken, context = tmp_path / "broken", zmq.Context()
    publisher = Publisher(context.socket(zmq.XPUB), "b" * 16)
    service = AlertService("a", AlertHooks(command=("sh", "-c", f"echo no route >&2; test ! -e {broken}")), publisher)
    broken.touch()
    (outcome,) = await service.test_hooks("r1")
    assert (await service.test_hooks("r1"))[0] is outcome, "a request that is repeated calls nothing again"
    assert outcome == m.HookOutcome("command", "sh exited with 1: no route")
    assert service.view.hook_problem == "alert command failed: sh exited with 1: no route"
    assert service.view.hook_problem in caplog.text
    broken.unlink()
    assert await service.test_hooks("r2") == (m.HookOutcome("command", ""),)
    assert service.view.hook_problem == ""
    context.destroy(linger=0)


@pytest.mark.parametrize("on", [HOOKS.on, ("failed",), ()])
def test_hooks_are_called_when_a_run_is_paused_and_when_it_ends_by_itself(
    made: Any, monkeypatch: pytest.MonkeyPatch, on: Any
) -> None:
    agent = made()
    calls: list[HookCall] = []
    hooks = Hooks(AlertHooks(command=HOOKS.command, on=on), lambda _: None)
    monkeypatch.setattr(hooks._queue, "put_nowait", calls.append)
    agent.service.hooks = hooks
    view = msgspec.structs.replace(agent.session.view, lead="a", reason="")
    for state, reason in (
        ("running", ""), ("pausing", ""), ("paused", ""), ("paused", ""), ("running", ""), ("failed", "no rank left"),
        ("starting", ""), ("running", ""), ("finished", ""), ("finished", ""), ("starting", ""), ("stopped", ""),
    ):  # fmt: skip
        agent.publisher.publish(msgspec.structs.replace(view, state=state, reason=reason))
    assert [call.event for call in calls] == [event for event in ("paused", "failed", "finished") if event in on]
    assert all(call.run == view.run and call.alert is None for call in calls)
    assert all(call.text.endswith(": no rank left") for call in calls if call.event == "failed")
    calls.clear()
    for state in ("running", "finished"):
        agent.publisher.publish(msgspec.structs.replace(view, run="other", lead="b", state=state))
    assert not calls, "its lead calls"


class Clock:
    """Both of the service's clocks, moved by hand: between two readings of a machine a second passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        clocks = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        monkeypatch.setattr("trainctl.node_agent.alerts.service.time", clocks)

    def second(self, agent: Agent, session: Any, reading: m.HostReading) -> None:
        self.now += 1.0
        agent.publisher.publish(reading)
        agent.service.watch(session, {})


def test_a_full_disk_is_told_of_once_before_in_and_after_a_run(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, clock = made(), Clock(monkeypatch)
    agent.service.watch(None, {})
    for _ in range(5):
        clock.second(agent, None, msgspec.structs.replace(_full_disk(), node="b"))  # another machine's
    assert agent.open == []
    for _ in range(5):
        clock.second(agent, None, _full_disk())
    (alert,) = agent.open
    attached = msgspec.structs.replace(agent.session.view, run="mine", kind="guest")
    agent.service.watch_guests([attached])
    assert agent.service.view_of_guest("mine").alerts == (alert,), "an attached run hides nothing"
    agent.service.guest_left(attached)
    for _ in range(5):
        clock.second(agent, agent.session, _full_disk())
    assert agent.open == [alert]
    assert agent.events() == [("warning", "disk:a")]
    agent.commit(math.nan)
    agent.service.ended(agent.session)
    assert agent.events()[-2:] == [("error", "nonfinite"), ("warning", "disk:a")]  # open ones are reported again
    assert agent.open == [alert]
    for session in (agent.session, None, None, None, None):
        clock.second(agent, session, _full_disk())
    assert agent.open == [alert]
    assert len(agent.events()) == 3
    assert agent.service.hooks.waiting == 3  # raised: the disk, the loss; cleared: the loss
    for _ in range(40):
        clock.second(agent, None, msgspec.structs.replace(_full_disk(), disk_free_bytes=10**12))
    assert agent.open == []
    agent.session.close()
