"""The pure reducer of what the screens show: the next state from one message.

`apply(state, message, now)` is the whole of it: `now` is a reading of the monotonic clock, and everything kept is
bounded.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

from msgspec import structs

from trainctl.protocol.client.client import Connection
from trainctl.protocol.messages import (
    EVALUATED,
    METRICS,
    Alerts,
    Event,
    Generation,
    Heartbeat,
    History,
    HostReading,
    Live,
    NodeView,
    RankStep,
    RunView,
    Sample,
    Snapshot,
    StepCommitted,
)
from trainctl.tui.state import series, step_phases
from trainctl.tui.state.run_events import changed_step
from trainctl.tui.state.view_state import AgentLine, Arrived, Incoming, Seen, SeriesKey, ViewState

MAX_EVENTS, MAX_SAMPLES = 500, 200
_OF_EVALUATIONS = EVALUATED | {"eval_loss", "perplexity"}
MAX_SERIES = 256
RECENT_STEPS = 512
"""Steps of full resolution kept beside the whole run's windows."""
RECENT_PARTS = 16
"""Newest steps of which the run's row and each rank's phases are kept."""
RECENT_LAPS = 120
"""Newest steps of which each rank's parts are kept whatever changes."""
MAX_AGENTS = 64
K = TypeVar("K")
V = TypeVar("V")
_MAPPINGS = ("ranks", "parts", "laps", "agents", "hosts", "alerts", "windows", "recent")
"""Mappings of a state."""


def apply(state: ViewState, message: Incoming, now: float) -> ViewState:
    """Return the state after a message. One of another run, or already in it (same boot, seq at or below), changes
    nothing."""
    if isinstance(message, Connection):
        return structs.replace(state, connection=message)
    if isinstance(message, Snapshot):
        return _open(state, message, now)
    if isinstance(message, NodeView):  # of one that is not another's any more: its snapshot follows
        return state
    if isinstance(message, Heartbeat):
        heartbeat = Seen(message, now) if message.boot == state.boot else state.heartbeat
        return structs.replace(state, heard_at=now, heartbeat=heartbeat)
    if message.boot != state.boot or message.seq <= state.seq:
        return structs.replace(state, heard_at=now)
    return _live(structs.replace(state, heard_at=now, seq=message.seq), message, now)


def take(state: ViewState, node: str, message: Incoming, now: float) -> ViewState:
    """Return the state after a message of `node`'s agent, the one that conducts or another; an empty name is the one
    asked first. A snapshot says who conducts from here on."""
    main = state.node.node if state.node is not None else node
    if isinstance(message, Snapshot) or node in ("", main):
        return apply(state, message, now)
    return apply_other(state, node, message, now)


def take_all(state: ViewState, arrived: Iterable[Arrived]) -> ViewState:
    """Return the state after all that arrived, with each mapping copied once: that would be most of the work for many
    nodes."""
    state = structs.replace(state, **{name: _Draft(getattr(state, name)) for name in _MAPPINGS})
    for node, message, now in arrived:
        state = take(state, node, message, now)
    mappings = {name: getattr(state, name) for name in _MAPPINGS}
    return structs.replace(
        state, **{name: MappingProxyType(value) for name, value in mappings.items() if isinstance(value, _Draft)}
    )


class _Draft(dict[K, V]):
    """A mapping that nobody else sees yet, so that it may be changed."""


def _set(mapping: Mapping[K, V], changes: Mapping[K, V]) -> Mapping[K, V]:
    """Return the mapping with other values of some keys: a draft itself, of any other a changed copy."""
    if isinstance(mapping, _Draft):
        mapping.update(changes)
        return mapping
    return MappingProxyType({**mapping, **changes})


def apply_other(state: ViewState, node: str, message: Incoming, now: float) -> ViewState:
    """Return the state after a message of another node's agent: its line and its machine. The run is for the lead to
    tell."""
    line = state.agents.get(node)
    if line is None and len(state.agents) >= MAX_AGENTS:
        return state
    heard = replace(line or AgentLine(Connection("connected", now)), heard_at=now)
    match message:
        case Connection():
            heard = replace(line, connection=message) if line is not None else AgentLine(message)
        case NodeView():
            heard = replace(heard, node=message)
        case Heartbeat():
            heard = replace(heard, lag_seconds=message.loop_lag_seconds)
        case HostReading():
            state = structs.replace(state, hosts=_set(state.hosts, {node: Seen(message, now)}))
        case Alerts():
            if state.node is None or message.node != state.node.node:
                # What the agent that conducts has raised is its own to tell, and to end.
                state = structs.replace(state, alerts=_set(state.alerts, {message.node: message}))
        case Snapshot() | RunView() | StepCommitted() | RankStep() | Event() | Sample():
            pass
    return structs.replace(state, agents=_set(state.agents, {node: heard}))


def apply_history(state: ViewState, run: str, history: History) -> ViewState:
    """Return the state with the recent windows of `run` taken from a ranged reply, where they are finer than those it
    has."""
    if state.run is None or state.run.run != run:
        return state
    recent = dict(state.recent)
    for recorded in history.series:
        key = (recorded.metric, recorded.rank)
        made = _keep_recent(series.from_series(recorded, state.run.step, RECENT_STEPS))
        had = recent.get(key)
        if had is None or made.bucket_steps < had.bucket_steps:
            recent[key] = _with_newer(made, had)
    return structs.replace(state, recent=MappingProxyType(recent), revision=state.revision + 1)


def _with_newer(window: series.Window, had: series.Window | None) -> series.Window:
    """Append the steps that came live while the history was on its way."""
    if had is None:
        return window
    newer = series.tail(had, window.newest_step + 1)
    for step, value in zip(newer.first.tolist(), newer.last.tolist(), strict=True):
        window = series.add(window, step, value)
    return window


def _open(state: ViewState, snapshot: Snapshot, now: float) -> ViewState:
    """Return the state after a snapshot, which replaces all but the lines to agents and what others said; ages come
    from the agent's own clock."""

    def seen_at(at: float) -> float:
        return now - max(snapshot.at - at, 0.0)

    last = snapshot.last_step
    committed = now if last is None else seen_at(last.committed_at)
    newest = snapshot.run.step if snapshot.run else 0
    windows = {(item.metric, item.rank): series.from_series(item, newest) for item in snapshot.series[:MAX_SERIES]}
    host, main = snapshot.node.host, snapshot.node.node
    hosts = {node: seen for node, seen in state.hosts.items() if node in state.agents}
    own = state.agents.get(main)  # it was another's until now
    steps = MappingProxyType({step.rank: (step,) for step in snapshot.rank_steps})
    return structs.replace(
        state,
        connection=own.connection if own is not None else state.connection,
        agents=MappingProxyType({node: line for node, line in state.agents.items() if node != main}),
        heard_at=now,
        boot=snapshot.boot,
        seq=snapshot.seq,
        node=snapshot.node,
        run=snapshot.run,
        last_step=Seen(last, committed) if last else None,
        steps=(last,) if last else (),
        ranks=MappingProxyType({step.rank: Seen(step, committed) for step in snapshot.rank_steps}),
        parts=steps,
        laps=steps,
        peers=snapshot.peers,
        plan_step=changed_step(snapshot.events, snapshot.run.run if snapshot.run else ""),
        hosts=MappingProxyType({**hosts, host.node: Seen(host, seen_at(host.read_at))} if host else hosts),
        heartbeat=None,
        events=snapshot.events[-MAX_EVENTS:],
        samples=(),
        alerts=MappingProxyType(_alerts_after(state, snapshot)),
        windows=MappingProxyType(windows),
        recent=MappingProxyType(
            {key: _keep_recent(series.tail(own, newest - RECENT_STEPS + 1)) for key, own in windows.items()}
        ),
        revision=state.revision + 1,
    )


def _alerts_after(state: ViewState, snapshot: Snapshot) -> dict[str, Alerts]:
    """Keep what other agents have raised, and take all that the reporting one says now."""
    main = snapshot.node.node
    others = {node: told for node, told in state.alerts.items() if node in state.agents and node != main}
    return {**others, main: snapshot.alerts} if snapshot.alerts is not None else others


def _live(state: ViewState, message: Live, now: float) -> ViewState:
    match message:
        case RunView():
            return _run_changed(state, message)
        case HostReading():
            return structs.replace(state, hosts=_set(state.hosts, {message.node: Seen(message, now)}))
        case Alerts():
            return structs.replace(state, alerts=_set(state.alerts, {message.node: message}))
        case Event():
            return structs.replace(state, events=(*state.events, message)[-MAX_EVENTS:])
        case Sample():
            ours = _ours(state, message.run)
            return structs.replace(state, samples=(*state.samples, message)[-MAX_SAMPLES:]) if ours else state
        case StepCommitted():
            return _step(state, message, now) if _ours(state, message.run) else state
        case RankStep():
            return _rank_step(state, message, now) if _ours(state, message.run) else state


def _ours(state: ViewState, run: str) -> bool:
    return state.run is not None and state.run.run == run


def _run_changed(state: ViewState, view: RunView) -> ViewState:
    """Return the state after another view of a run. A run that starts takes the screen, a guest only from one that has
    ended; one that has ended elsewhere doesn't."""
    if state.run is None or (view.run != state.run.run and view.takes_over(state.run)):
        return structs.replace(
            state,
            run=view,
            last_step=None,
            steps=(),
            ranks=MappingProxyType({}),
            parts=MappingProxyType({}),
            laps=MappingProxyType({}),
            plan_step=0,
            samples=(),
            windows=MappingProxyType({}),
            recent=MappingProxyType({}),
            revision=state.revision + 1,
        )
    if view.run != state.run.run:
        return state
    view = view.with_passes_of(state.run)
    if view.step < state.run.step:
        state = _without_undone(state, view.step)
    state = structs.replace(state, run=view)
    if view.eval_loss is not None and view.eval_step is not None:
        known = state.windows.get(("eval_loss", None))
        bucket = view.eval_step // known.bucket_steps * known.bucket_steps if known is not None else -1
        if known is None or bucket not in known.first:
            found = {"eval_loss": view.eval_loss, "perplexity": view.perplexity, **dict(view.eval_values)}
            values: dict[SeriesKey, float] = {(name, None): one for name, one in found.items() if one is not None}
            return _record(state, view.eval_step, values)
    return state


def _without_undone(state: ViewState, step: int) -> ViewState:
    """Return the state without evaluations of later steps: the run has gone back, and no other point takes their place
    until the next evaluation."""
    of_evaluations = {key: key[0] in _OF_EVALUATIONS for key in state.windows}
    windows = {key: series.head(window, step) for key, window in state.windows.items() if of_evaluations[key]}
    recent = {key: series.head(window, step) for key, window in state.recent.items() if of_evaluations.get(key)}
    return structs.replace(
        state, windows=_set(state.windows, windows), recent=_set(state.recent, recent), revision=state.revision + 1
    )


def _step(state: ViewState, step: StepCommitted, now: float) -> ViewState:
    assert state.run is not None
    run = state.run
    if step.generation >= run.generation:
        run = _with_step(run, step)
    found = {metric.name: metric.of(step) for metric in METRICS.values() if metric.scope == "run" and metric.drawn}
    values: dict[SeriesKey, float] = {(name, None): value for name, value in found.items() if value is not None}
    if (last := state.last_step) is not None and _made_by(last.value) != _made_by(step):
        state = structs.replace(state, plan_step=step.step)
    steps = (*state.steps, step)[-RECENT_PARTS:]
    return _record(structs.replace(state, run=run, last_step=Seen(step, now), steps=steps), step.step, values)


def _made_by(step: StepCommitted) -> tuple[int, Generation]:
    return step.plan_version, step.generation


def _with_step(run: RunView, step: StepCommitted) -> RunView:
    """Return the run moved on by a step: no RunView is published at each one."""
    return structs.replace(
        run,
        step=step.step,
        cursor=step.cursor,
        learning_rate=step.learning_rate,
        global_batch=step.global_batch,
        plan_version=max(run.plan_version, step.plan_version),
        generation=step.generation,
    )


def _rank_step(state: ViewState, step: RankStep, now: float) -> ViewState:
    values: dict[SeriesKey, float] = {}
    if (busy_seconds := step.phases.timed_busy) is not None:
        values["busy_seconds", step.rank] = busy_seconds
    own = step.own_tokens_per_second
    if own is not None:
        values["own_tokens_per_second", step.rank] = own
    if step_phases.COMPILE_METRIC in step.values:
        values[step_phases.COMPILE_METRIC, step.rank] = step.values[step_phases.COMPILE_METRIC]
    ranks = _set(state.ranks, {step.rank: Seen(step, now)})
    known = state.parts.get(step.rank, ())
    if known and known[-1].micro_batch != step.micro_batch:
        known = ()  # another micro-batch, another speed
    parts = _set(state.parts, {step.rank: (*known, step)[-RECENT_PARTS:]})
    laps = _set(state.laps, {step.rank: (*state.laps.get(step.rank, ()), step)[-RECENT_LAPS:]})
    state = structs.replace(state, ranks=ranks, parts=parts, laps=laps)
    return _record(state, step.step, values)


def _record(state: ViewState, step: int, values: Mapping[SeriesKey, float]) -> ViewState:
    windows: dict[SeriesKey, series.Window] = {}
    recent: dict[SeriesKey, series.Window] = {}
    for key, value in values.items():
        known = state.windows.get(key)
        if known is None and len(state.windows.keys() | windows.keys()) >= MAX_SERIES:
            continue
        windows[key] = series.add(known or series.empty(), step, value)
        recent[key] = _keep_recent(series.add(state.recent.get(key) or series.empty(2 * RECENT_STEPS), step, value))
    return structs.replace(
        state, windows=_set(state.windows, windows), recent=_set(state.recent, recent), revision=state.revision + 1
    )


def _keep_recent(window: series.Window) -> series.Window:
    """Drop the oldest in pages, so that what is drawn from it doesn't scroll with each step."""
    if window.capacity != 2 * RECENT_STEPS:
        window = replace(window, capacity=2 * RECENT_STEPS)
    return series.tail(window, window.newest_step - RECENT_STEPS + 1) if len(window) >= 2 * RECENT_STEPS else window
