"""`trainctl watch` and `events`: a run followed line by line. Steps and events come in order, what was missed while the
agent was away is fetched, and answers to sample prompts are shown as they come.
"""

import asyncio
import contextlib
import select
import sys
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trainctl.protocol.analysis import story
from trainctl.protocol.client.live_queue import Connection
from trainctl.protocol.errors import InvalidInputError, TrainctlError, UnreachableError
from trainctl.protocol.messages import (
    ACTIVE_RUN_STATES,
    ATTEND_SECONDS,
    Alerts,
    AttendRequest,
    Event,
    EventsRequest,
    Generation,
    Heartbeat,
    HostReading,
    NodeView,
    RankStep,
    RunView,
    Sample,
    Snapshot,
    SnapshotRequest,
    StepCommitted,
    StepPlan,
    StepsRequest,
)
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.wire.sockets import end_tasks
from trainctl.tui.cli import agent_call, output, runs, tables
from trainctl.tui.cli.options import ClusterFile, Connect, JsonLines, subcommands
from trainctl.tui.cli.runs import RunAtAgent
from trainctl.tui.state import run_events

if TYPE_CHECKING:
    from trainctl.protocol.client.client import Client
    from trainctl.protocol.client.cluster import Item

app = subcommands()
READER_SECONDS = 0.5
"""Time between looks at whether standard output has a reader."""
GONE = select.POLLERR | select.POLLHUP | select.POLLNVAL
STEPS_PAGE = 500
EVENTS_PAGE = 200
ALL_EVENTS = 10**9

Line = StepCommitted | Event | RunView | Sample


@dataclass(frozen=True)
class Restarted:
    """The agent is another process than before; what it recorded meanwhile follows."""

    state: Literal["restarted"] = "restarted"
    why: str = "its agent was restarted"


class RunCursor:
    """A follower's progress in one run: what is at or before it is not shown again."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.step = 0
        self.generation = Generation(0, 0)
        self.event = 0
        self.state: str | None = None

    def passes(self, item: Line) -> bool:
        """Return whether `item` is newer than the last one shown; if so, remember it as shown."""
        match item:
            case StepCommitted():
                if item.step <= self.step and item.generation <= self.generation:
                    return False
                self.step, self.generation = item.step, max(item.generation, self.generation)
            case Event():
                if item.run and item.id <= self.event:
                    return False
                self.event = max(self.event, item.id) if item.run else self.event
            case RunView():
                if item.state == self.state:
                    return False
                self.state = item.state
            case Sample():
                pass  # each is published once
        return True

    @property
    def ended(self) -> bool:
        return self.state is not None and self.state not in ACTIVE_RUN_STATES

    def gives_way_to(self, view: RunView) -> bool:
        """Return whether to switch to a different run. Switches to a guest run only after this one has ended."""
        return view.run != self.run and (view.kind == "hosted" or self.state not in ACTIVE_RUN_STATES)

    def skip_to(self, snapshot: Snapshot) -> None:
        """Treat everything in the snapshot as shown."""
        if snapshot.last_step is not None:
            self.passes(snapshot.last_step)
        self.event = max([self.event, *(event.id for event in snapshot.events)])


async def lines(
    client: "Client",
    *,
    run: str | None = None,
    since: Snapshot | None = None,
    from_start: bool = False,
    until_end: bool = False,
    after_event: int | None = None,
    everywhere: bool = False,
) -> AsyncIterator[Line | Connection | Restarted]:
    """News of `run` (default: whichever is active) as it comes, how the line to the agent is, and its restarts.

    A RunView comes when the run's state changes. `since` is an earlier snapshot of the run, after which all is news, in
    place of one taken now. `after_event` is the last event already shown; with `until_end` it stops once the run has
    ended; `everywhere` continues with another node's agent when that conducts. Raises UnreachableError if no agent
    answers at first; later it waits for one.
    """
    from trainctl.protocol.client.cluster import conducting  # ZeroMQ: not for `--help`

    first = await client.ask(SnapshotRequest, 0, run)
    place = RunCursor(run or (first.run.run if first.run is not None else ""))
    if not from_start:
        place.skip_to(since or first)
    if after_event is not None:
        place.event = after_event
    for view in _own_view(place, first):  # the attachment below may be of another run and never tell it
        yield view
    connection, boots = "connecting", {first.node.node: first.boot}
    attachment: AsyncGenerator[Item, None] = conducting(client) if everywhere else client.attach(0)
    own = client
    async with contextlib.aclosing(attachment), contextlib.AsyncExitStack() as opened:
        while not (until_end and place.ended):
            item = await anext(attachment)
            news: list[Line] = []
            match item:
                case Snapshot():
                    if item.node.node == first.node.node:
                        client = own
                        await opened.aclose()
                    elif item.node.address != client.address:
                        await opened.aclose()
                        client = await opened.enter_async_context(own.at(item.node.address))
                    if boots.setdefault(item.node.node, item.boot) != item.boot:
                        boots[item.node.node] = item.boot
                        yield Restarted()
                    if run is None and item.run is not None and item.run.run != place.run:
                        place = RunCursor(item.run.run)  # begun while nobody listened: all of it is news
                    news = [*await missed(client, place), *_own_view(place, item)]
                case StepCommitted() | Event() | RunView() | Sample():
                    if run is None and isinstance(item, RunView) and place.gives_way_to(item):
                        place = RunCursor(item.run)
                    news = [item] if _concerns(item, place.run) and place.passes(item) else []
                case Connection():
                    if item.state != connection:
                        connection = item.state
                        yield item
                case RankStep() | HostReading() | Heartbeat() | Alerts() | NodeView():
                    pass
            for piece in news:
                yield piece
        for piece in await missed(client, place):
            yield piece


async def missed(client: "Client", place: RunCursor) -> list[Line]:
    """Return the record's steps and events past `place`, in the order they happened; the place moves on.

    Steps that were repeated meanwhile are among them. Less than all if the agent goes away: a client that attaches
    again asks from the new place.
    """
    if not place.run:
        return []
    past: list[tuple[float, Line]] = []
    more, last, repeated_after = True, place.event, place.step
    with contextlib.suppress(UnreachableError):
        while more:
            events = await client.ask(EventsRequest, place.run, last, EVENTS_PAGE)
            for event in filter(place.passes, events.events):
                past.append((event.at, event))
                if event.step is not None and (event.generation or place.generation) > place.generation:
                    repeated_after = min(repeated_after, event.step)
            more = events.more and bool(events.events)
            last = events.events[-1].id if events.events else last
        more, last = True, repeated_after
        while more:
            steps = await client.ask(StepsRequest, place.run, last, STEPS_PAGE)
            past += [(step.committed_at, step) for step in steps.steps if place.passes(step)]
            more = steps.more and bool(steps.steps)
            last = steps.steps[-1].step if steps.steps else last
    return [item for _, item in sorted(past, key=lambda pair: pair[0])]


async def show(client: "Client", keep: Callable[[Line], bool], *, json: bool, **options: Any) -> RunView | None:
    """Print what `keep` keeps of `lines(**options)`; the run's last known state when it ends."""
    view: RunView | None = None
    async with attending(client), reader_watched():
        with output.read_to_its_end():
            async for item in lines(client, everywhere=True, **options):
                if isinstance(item, RunView):
                    view = item
                if isinstance(item, Connection | Restarted) or keep(item):
                    show_item(item, view, json=json)
    return view


def show_item(item: Line | Connection | Restarted, view: RunView | None, *, json: bool) -> None:
    """Print one line. With `json`, it has the format in docs/scripting.md; without it, a run's state prints nothing."""
    match item:
        case StepCommitted():
            output.emit(item) if json else output.say(tables.step_line(item, view))
        case Event():
            output.emit(run_events.event_fields(item)) if json else output.say(tables.event_line(item))
        case Sample():
            output.emit(item) if json else output.say(tables.sample_line(item))
        case RunView():
            if json:  # else its events say it in words
                output.emit(item)
        case Connection() | Restarted():
            _show_connection(item, json=json)


@contextlib.asynccontextmanager
async def attending(client: "Client") -> AsyncIterator[None]:
    """Others see within that somebody watches."""
    task = asyncio.create_task(_attend(client), name="trainctl-attend")
    try:
        yield
    finally:
        await end_tasks([task])


async def _attend(client: "Client") -> None:
    viewer = uuid.uuid4().hex
    while True:
        with contextlib.suppress(TrainctlError):
            await client.ask(AttendRequest, viewer, client.by[:64], read_only=True)
        await asyncio.sleep(ATTEND_SECONDS)


async def show_events(client: "Client", run: str | None, last: int, *, follow: bool, json: bool) -> int:
    """Print the newest `last` events, and those to come if asked: lines, or JSON (one object, or one a line)."""
    page = await client.ask(EventsRequest, run, limit=last, newest=True) if last else None
    found = page.events if page is not None else ()
    if json and not follow:
        output.emit_ok(
            run=page.run if page is not None else run, events=[run_events.event_fields(event) for event in found]
        )
        return 0
    for event in found:
        output.emit(run_events.event_fields(event)) if json else output.say(tables.event_line(event))
    if follow:
        after = max((event.id for event in found), default=None)
        await show(client, lambda item: isinstance(item, Event), json=json, run=run, after_event=after)
    elif not found:
        output.tell("no events")
    return 0


def show_story(directory: Path, about: str, *, json: bool) -> int:
    """Print what a run's record says about one command, rank or step. Raises InvalidInputError if that is nothing."""
    from trainctl.protocol.record.reader import RecordReader

    with RecordReader(RunPaths(directory)) as reader:
        view, step = reader.view(), story.step_of(about)
        plans = reader.plans(step=step, command=about if step is None else None)
        nodes = {rank.rank: rank.node for rank in view.ranks} if view is not None else {}
        chapters = story.tell(reader.events(limit=ALL_EVENTS)[0], about, nodes, [plan for _, plan in plans])
        steps = [row for step in chapters.steps for row in reader.steps(step - 1, 1)[0] if row.step == step]
        before = {row.step: row.plan_version for step in chapters.steps for row in reader.steps(step - 2, 1)[0]}
        run = reader.run
    if not (chapters.events or steps or chapters.plans):
        raise InvalidInputError("--story", f"nothing is recorded about {about}")
    plans = tuple((at, plan) for at, plan in plans if plan in chapters.plans)
    if json:
        events = [run_events.event_fields(event) for event in chapters.events]
        output.emit_ok(run=run, story=about, events=events, steps=steps, plans=[_plan_fields(*plan) for plan in plans])
        return 0
    lines = [(event.at, tables.event_line(event)) for event in chapters.events]
    lines += [(at, tables.plan_line(at, plan)) for at, plan in plans]
    for row in steps:
        was = before.get(row.step - 1, row.plan_version)
        version = f"v{was}→v{row.plan_version}" if was != row.plan_version else f"v{was}"
        lines.append((row.committed_at, f"{tables.step_line(row)}  plan {version}"))
    for _, line in sorted(lines, key=lambda line: line[0]):
        output.say(line)
    return 0


def _plan_fields(at: float, plan: StepPlan) -> dict[str, Any]:
    names = ("generation", "seq", "kind", "step", "plan_version", "commands")
    return {"at": at, **{name: getattr(plan, name) for name in names}}


def _own_view(place: RunCursor, snapshot: Snapshot) -> list[Line]:
    view = snapshot.run
    return [view] if view is not None and view.run == place.run and place.passes(view) else []


def _concerns(item: Line, run: str) -> bool:
    return item.run == run or (isinstance(item, Event) and not item.run)


def _show_connection(item: Connection | Restarted, *, json: bool) -> None:
    if json:
        output.emit({"type": "connection", "state": item.state, "why": item.why, "at": time.time()})
        return
    match item.state:
        case "silent":
            output.tell(f"agent silent: {item.why}; waiting for it")
        case "restarted":
            output.tell("agent restarted; the lines that it recorded in the meantime follow")
        case "connecting" | "connected":
            pass


# ---------------------------------------------------------------- the reader of standard output


@contextlib.asynccontextmanager
async def reader_watched() -> AsyncIterator[None]:
    """Raise BrokenPipeError from the block once nobody can read standard output any more."""
    task, descriptor = asyncio.current_task(), _descriptor()
    assert task is not None
    if descriptor is None:
        yield
        return
    watch = asyncio.create_task(_until_gone(descriptor), name="trainctl-reader")
    watch.add_done_callback(lambda done: None if done.cancelled() else task.cancel())
    try:
        yield
    except asyncio.CancelledError:
        if watch.done() and task.uncancel() == 0:
            raise BrokenPipeError from None
        raise
    finally:
        watch.cancel()


async def _until_gone(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, 0)
    while True:
        if any(state & GONE for _, state in poll.poll(0)):
            return
        await asyncio.sleep(READER_SECONDS)


def _descriptor() -> int | None:
    """Return standard output's descriptor, or None where it is no file of the system's."""
    try:
        return sys.stdout.fileno()
    except (OSError, ValueError):
        return None


# ---------------------------------------------------------------- the subcommands


@app.command()
def watch(
    ctx: typer.Context,
    run: RunAtAgent = None,
    connect: Connect = None,
    cluster: ClusterFile = None,
    json: JsonLines = False,
) -> int:
    """Print each committed step and event as it happens, until Ctrl-C."""
    at = runs.at_agent(ctx, connect, cluster, run)
    agent_call.call(at.address, lambda client: show(client, lambda item: True, json=json, run=at.run), lead=run is None)
    return 0


@app.command()
def events(
    ctx: typer.Context,
    run: RunAtAgent = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new events.")] = False,
    last: Annotated[int, typer.Option("--last", "-n", min=0, max=500, help="Number of newest events to print.")] = 100,
    connect: Connect = None,
    about: Annotated[
        str | None,
        typer.Option("--story", metavar="ID", help=f"Print what became of one of these: {story.FORMS}."),
    ] = None,
    cluster: ClusterFile = None,
    json: JsonLines = False,
) -> int:
    """Print a run's events: commands, checkpoints, evaluations, faults."""
    if about is not None and follow:
        raise InvalidInputError("--story", "can't be followed; leave out --follow")
    if about is not None:
        with runs.record_of(ctx, run or _present(ctx, connect, cluster), connect, cluster) as directory:
            return show_story(directory, about, json=json)
    at = runs.at_agent(ctx, connect, cluster, run)
    return agent_call.call(
        at.address, lambda client: show_events(client, at.run, last, follow=follow, json=json), lead=run is None
    )


def _present(ctx: typer.Context, connect: str | None, cluster: Path | None) -> str:
    """Return the id of the active run, or of the newest. Raises what `runs.at_agent` raises."""
    at = runs.at_agent(ctx, connect, cluster)
    view = agent_call.call(at.address, lambda client: client.ask(SnapshotRequest, 0), lead=True).run
    return view.run if view is not None else runs.LAST
