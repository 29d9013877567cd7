"""Each rank as the screens show it: its view, last step, own rate, wait and machine, and which one is waited for."""

from dataclasses import dataclass

from trainctl.protocol.analysis.straggler import waits
from trainctl.protocol.messages import GpuReading, HostReading, Metric, RankStep, RankView
from trainctl.tui.state import series
from trainctl.tui.state.view_state import Clock, Seen, ViewState
from trainctl.tui.text.run_lines import RATE_STEPS

FEW_STEPS = 4
"""Steps from which on something is said about a plan."""


def common_parts(state: ViewState) -> dict[int, RankStep]:
    """Return the newest step that all ranks which report have reported; empty where there is none."""
    parts = {rank: state.parts.get(rank, ()) for rank in (state.run.reporting if state.run else ())}
    if not parts or not all(parts.values()):
        return {}
    by_step = {rank: {part.step: part for part in own} for rank, own in parts.items()}
    step = max(set.intersection(*(set(own) for own in by_step.values())), default=None)
    return {rank: own[step] for rank, own in by_step.items()} if step is not None else {}


BAD_STATES = ("hung", "lost", "failed")
_OLD_SECONDS = 5.0
_HOST_SECONDS = 30.0
"""A machine's reading older than this says nothing of it any more."""


@dataclass(frozen=True)
class Row:
    """One rank with all that is known of it; `age` in seconds, of its last report, or of its state where it is out."""

    view: RankView
    place: int  # among the run's ranks by number: its colour and letter
    step: RankStep | None
    age: float | None
    old: bool
    host: HostReading | None
    host_old: bool
    own_rate: float | None
    own_rates: series.Window
    waited: float | None  # of sync, for slower ranks; unknown where ranks report different steps
    global_batch: int | None
    slowest_seconds: float | None
    slow_phase: str = ""  # the others wait for this rank, and this phase makes them
    selected: bool = False
    hot: bool = False  # its device runs at a lower clock than it did
    link: str = ""  # to its node's agent: up or silent; empty where there is none to speak of
    link_seconds: float | None = None  # since a silent one was heard
    members: tuple[int, ...] = ()  # of a row that stands for a node of several devices: the ranks that it shows
    open: bool = False  # such a row, with its ranks below it
    child: bool = False  # one of those ranks
    micro: tuple[int, int] | None = None  # such a row's passes, where those of all its ranks are alike

    @property
    def lost(self) -> bool:
        return self.view.state in BAD_STATES

    @property
    def out(self) -> bool:
        """Return whether it isn't in the group now, so that its last figures say nothing."""
        return self.view.is_silent

    @property
    def says_why(self) -> bool:
        """Return whether the why of its state is of more use than where its last step went."""
        return self.step is None or self.view.state == "late"

    @property
    def passes(self) -> tuple[int, int] | None:
        """Return micro-batch and how many of them its share takes; None where it has no share."""
        if self.members:
            return self.micro
        count, whole = self.view.micro_batch, self.view.share
        if not count or not whole or self.out:
            return None
        return min(count, whole), -(-whole // min(count, whole))

    @property
    def wait(self) -> float | None:
        """Return the seconds of waiting for slower ranks and for the plan."""
        return self.waited + self.step.phases.wait if self.step and self.waited is not None else None

    @property
    def gpu(self) -> GpuReading | None:
        """Return the rank's device where the host reads it."""
        return self.host.gpu_of(self.view.device) if self.host is not None else None

    def value_of(self, metric: Metric) -> float | None:
        """Return a metric of its last step, or of its machine's newest reading."""
        if metric.scope == "host":
            return metric.of_machine(self.host, self.gpu)
        return metric.of(self.step) if self.step is not None else None


def rows(state: ViewState, clock: Clock, selected: int | None = None) -> list[Row]:
    """Return one for each rank, in the order of their numbers; their steps are the same one where all have reported
    one."""
    run = state.run
    if run is None:
        return []
    common, slow, now = common_parts(state), run.straggler, clock.monotonic()
    due, silent = set(run.reporting), state.silent_for(now) is not None
    newest = {rank: common.get(rank, seen.value) for rank, seen in state.ranks.items() if rank in due}
    slowest = max((step.step_seconds for step in newest.values()), default=None)
    waited = waits(common)
    hot = {alert.rank for alert in state.open_alerts if alert.kind == "clock"}
    table = []
    for place, view in enumerate(sorted(run.ranks, key=lambda item: item.rank)):
        seen, host, out = state.ranks.get(view.rank), state.hosts.get(view.node), view.is_silent
        age = seen.age(now) if seen else None
        late = age is not None and age > max(_OLD_SECONDS, 3 * (slowest or 0.0))
        fresh = host is not None and (silent or host.age(now) <= _HOST_SECONDS)
        link, link_seconds = _link(state, view.node, now)
        row = Row(
            view=view,
            place=place,
            step=None if out else newest.get(view.rank),
            age=max(clock.wall() - view.since_at, 0.0) if out else age,
            old=silent or (run.state == "running" and late and not out),
            host=host.value if host and fresh else None,
            host_old=host is not None and host.age(now) > _OLD_SECONDS,
            own_rate=None if out else own_rate(state, view.rank, seen),
            own_rates=state.lately("own_tokens_per_second", view.rank),
            waited=waited.get(view.rank),
            global_batch=run.global_batch,
            slowest_seconds=slowest,
            slow_phase=slow.phase if slow and slow.rank == view.rank else "",
            selected=view.rank == selected,
            hot=view.rank in hot,
            link=link,
            link_seconds=link_seconds,
        )
        table.append(row)
    return table


def _link(state: ViewState, node: str, now: float) -> tuple[str, float | None]:
    if state.node is not None and state.node.node == node:
        quiet = state.silent_for(now)
    elif node in state.agents:
        quiet = state.agents[node].silent_for(now)
    else:
        return "", None
    return ("up" if quiet is None else "silent"), quiet


def own_rate(state: ViewState, rank: int, seen: Seen[RankStep] | None) -> float | None:
    """Return the tokens per second that the rank would reach alone: the median of its last steps."""
    if seen is None:
        return None
    return series.typical(state.lately("own_tokens_per_second", rank), RATE_STEPS) or seen.value.own_tokens_per_second


def _taking_part(state: ViewState) -> list[RankView]:
    ranks = state.run.ranks if state.run else ()
    return [view for view in ranks if view.state == "done" or not view.is_out]


def sum_of_own_rates(state: ViewState) -> float | None:
    """Return what the live ranks would do together if none waited; None unless all are known, as that of a hung one
    isn't."""
    live = _taking_part(state)
    rates = [own_rate(state, view.rank, state.ranks.get(view.rank)) for view in live if view.state != "hung"]
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known and len(known) == len(live) else None


def fleet_rate(state: ViewState) -> float | None:
    """Return the run's rate lately, by the present plan as soon as it has done a step; in its `rate_unit`."""
    rates = state.lately(state.run.rate_metric if state.run is not None else "tokens_per_second")
    return series.typical(series.tail(rates, state.plan_step), RATE_STEPS) or series.typical(rates, RATE_STEPS)


def efficiency(state: ViewState) -> float | None:
    """Return the fleet's rate over the sum of the live ranks' own, all by steps of the present plan; None before it has
    done a few, or while one is unknown, as the others' are to a node that doesn't conduct."""
    ranks = state.run.ranks if state.run else ()
    whole = state.run.global_batch if state.run is not None else None
    if whole is None or sum(view.share or 0 for view in ranks) < whole:
        return None
    live = _taking_part(state)
    own = [_by_plan(state, "own_tokens_per_second", view.rank) for view in live if view.state != "hung"]
    fleet, known = _by_plan(state, "tokens_per_second"), [rate for rate in own if rate]
    return fleet / sum(known) if fleet and known and len(known) == len(live) else None


def _by_plan(state: ViewState, metric: str, rank: int | None = None) -> float | None:
    window = series.tail(state.lately(metric, rank), state.plan_step)
    steps = len(window) * window.bucket_steps
    return series.typical(window, RATE_STEPS) if steps >= FEW_STEPS else None
