"""What the fleet table knows of each rank: its view, last step, own rate, wait and machine, with their ages."""

from dataclasses import dataclass

from trainctl.protocol import messages as m
from trainctl.tui.state import rank_speed, stragglers
from trainctl.tui.state import series as s
from trainctl.tui.state.clock import Clock
from trainctl.tui.state.view_state import Seen, ViewState
from trainctl.tui.text.figure_names import RATE_STEPS

BAD_STATES = ("hung", "lost", "failed")
_OLD_SECONDS = 5.0
_HOST_SECONDS = 30.0
"""A machine's reading older than this says nothing of it any more."""


@dataclass(frozen=True)
class Row:
    """One rank with all that is known of it; `age` in seconds, of its last report, or of its state where it is out."""

    view: m.RankView
    place: int  # among the run's ranks by number: its colour and letter
    step: m.RankStep | None
    age: float | None
    old: bool
    host: m.HostReading | None
    host_old: bool
    own_rate: float | None
    own_rates: s.Window
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
        """Whether it isn't in the group now, so that its last figures say nothing."""
        return self.view.state in rank_speed.SILENT_STATES

    @property
    def says_why(self) -> bool:
        """Whether the why of its state is of more use than where its last step went."""
        return self.step is None or self.view.state == "late"

    @property
    def passes(self) -> tuple[int, int] | None:
        """Micro-batch and how many of them its share takes; None where it has no share."""
        if self.members:
            return self.micro
        count, whole = self.view.micro_batch, self.view.share
        if not count or not whole or self.out:
            return None
        return min(count, whole), -(-whole // min(count, whole))

    @property
    def wait(self) -> float | None:
        """For slower ranks and for the plan."""
        return self.waited + self.step.phases.wait if self.step and self.waited is not None else None

    @property
    def gpu(self) -> m.GpuReading | None:
        """The rank's device where the host reads it."""
        return self.host.gpu_of(self.view.device) if self.host is not None else None

    def value_of(self, metric: m.Metric) -> float | None:
        """A metric of its last step, or of its machine's newest reading."""
        if metric.scope == "host":
            return metric.of_machine(self.host, self.gpu)
        return metric.of(self.step) if self.step is not None else None


def rows(state: ViewState, clock: Clock, selected: int | None = None) -> list[Row]:
    """One for each rank, in the order of their numbers; their steps are the same one where all have reported one."""
    run = state.run
    if run is None:
        return []
    common, slow = stragglers.common_parts(state), stragglers.named_straggler(state)
    due = set(rank_speed.reporting(run))
    known = {rank: common.get(rank, seen.value) for rank, seen in state.ranks.items() if rank in due}
    slowest = max((step.step_seconds for step in known.values()), default=None)
    waits = rank_speed.waits(common)
    hot = {alert.rank for alert in state.open_alerts if alert.kind == "clock"}
    views = sorted(run.ranks, key=lambda item: item.rank)
    return [
        _row(
            state, clock, view, place, known.get(view.rank), slowest, waits.get(view.rank),
            slow.phase if slow and slow.rank == view.rank else "", view.rank == selected, view.rank in hot,
        )
        for place, view in enumerate(views)
    ]  # fmt: skip


def _row(
    state: ViewState, clock: Clock, view: m.RankView, place: int, step: m.RankStep | None, slowest: float | None,
    waited: float | None, slow_phase: str, selected: bool, hot: bool,
) -> Row:  # fmt: skip
    assert state.run is not None
    now = clock.monotonic()
    silent = state.silent_for(now) is not None
    seen, host = state.ranks.get(view.rank), state.hosts.get(view.node)
    out = view.state in rank_speed.SILENT_STATES
    age = seen.age(now) if seen else None
    late = age is not None and age > max(_OLD_SECONDS, 3 * (slowest or 0.0))
    link, link_seconds = _link(state, view.node, now)
    fresh = host is not None and (silent or host.age(now) <= _HOST_SECONDS)
    return Row(
        view=view, place=place, step=None if out else step,
        age=max(clock.wall() - view.since_at, 0.0) if out else age,
        old=silent or (state.run.state == "running" and late and not out),
        host=host.value if host and fresh else None, host_old=host is not None and host.age(now) > _OLD_SECONDS,
        own_rate=None if out else own_rate(state, view.rank, seen),
        own_rates=state.lately("own_tokens_per_second", view.rank),
        waited=waited, global_batch=state.run.global_batch, slowest_seconds=slowest, slow_phase=slow_phase,
        selected=selected, hot=hot, link=link, link_seconds=link_seconds,
    )  # fmt: skip


def _link(state: ViewState, node: str, now: float) -> tuple[str, float | None]:
    """How the line to a node's agent is, and for how long it has been silent."""
    if state.node is not None and state.node.node == node:
        quiet = state.silent_for(now)
    elif node in state.agents:
        quiet = state.agents[node].silent_for(now)
    else:
        return "", None
    return ("up" if quiet is None else "silent"), quiet


def own_rate(state: ViewState, rank: int, seen: Seen[m.RankStep] | None) -> float | None:
    """Tokens per second the rank would reach alone: the median of its last steps."""
    if seen is None:
        return None
    return s.typical(state.lately("own_tokens_per_second", rank), RATE_STEPS) or seen.value.own_tokens_per_second


def _taking_part(state: ViewState) -> list[m.RankView]:
    """The ranks that take part, or did to the run's end."""
    ranks = state.run.ranks if state.run else ()
    return [view for view in ranks if view.state == "done" or view.state not in rank_speed.OUT_STATES]


def sum_of_own_rates(state: ViewState) -> float | None:
    """What the live ranks would do together if none waited; None unless all are known, as that of a hung one isn't."""
    live = _taking_part(state)
    rates = [own_rate(state, view.rank, state.ranks.get(view.rank)) for view in live if view.state != "hung"]
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known and len(known) == len(live) else None


def fleet_rate(state: ViewState) -> float | None:
    """The run's rate lately, by the present plan as soon as it has done a step; in its `rate_unit`."""
    rates = state.lately(state.run.rate_metric if state.run is not None else "tokens_per_second")
    return s.typical(s.tail(rates, state.plan_step), RATE_STEPS) or s.typical(rates, RATE_STEPS)


def efficiency(state: ViewState) -> float | None:
    """The fleet's rate over the sum of the live ranks' own, all by steps of the present plan; None before it has done
    a few, or while one is unknown, as the others' are to a node that doesn't conduct."""
    ranks = state.run.ranks if state.run else ()
    whole = state.run.global_batch if state.run is not None else None
    if whole is None or sum(view.share or 0 for view in ranks) < whole:
        return None
    live = _taking_part(state)
    own = [_by_plan(state, "own_tokens_per_second", view.rank) for view in live if view.state != "hung"]
    fleet, known = _by_plan(state, "tokens_per_second"), [rate for rate in own if rate]
    return fleet / sum(known) if fleet and known and len(known) == len(live) else None


def _by_plan(state: ViewState, metric: str, rank: int | None = None) -> float | None:
    window = s.tail(state.lately(metric, rank), state.plan_step)
    steps = len(window) * window.bucket_steps
    return s.typical(window, RATE_STEPS) if steps >= rank_speed.FEW_STEPS else None
