"""Telemetry: what an agent publishes about its run, its machine and its alerts."""

from collections.abc import Mapping

import msgspec

from trainctl.protocol.config.alert_rules import AlertKind, AlertSeverity
from trainctl.protocol.config.policies import PolicyMode
from trainctl.protocol.messages import event_prose
from trainctl.protocol.messages.base import (
    ACTIVE_RUN_STATES,
    CommandState,
    Count,
    Generation,
    Message,
    Name,
    RankState,
    RunKind,
    RunState,
    Severity,
    Values,
)
from trainctl.protocol.messages.events import AnyEvent, Category, Notice, SharesChanged
from trainctl.protocol.messages.metrics import METRICS, Metric
from trainctl.protocol.messages.trainer import Compute, Phases
from trainctl.protocol.messages.verbs import VERBS


def peak_or_held(values: Mapping[str, float]) -> float | None:
    """Of metrics by name, the peak of memory, or what was held where no peak is known."""
    return values.get("memory_peak_bytes", values.get("memory_bytes"))


TOKENS = "tokens"
"""The unit of the weight where each counted target weighs 1; the run's rate is then of all tokens processed."""


class RankView(msgspec.Struct, frozen=True):
    """One rank as the lead knows it. `share` and `micro_batch` are None if a guest did not give them."""

    rank: Count
    node: str
    state: RankState  # late: slow; hung: silent, or makes no progress; draining: leaves after this step
    since_at: float  # Unix seconds, when it entered this state
    share: Count | None  # samples of each global batch that it works through
    micro_batch: Count | None
    why: str = ""  # reason for a state other than run
    backend: str | None = None
    device: str | None = None
    pid: Count | None = None
    compute: Compute | None = None  # None: not known yet


class PolicyView(msgspec.Struct, frozen=True):
    """A policy of the run and its mode."""

    name: str
    mode: PolicyMode


class RunView(Message, tag="run-view", frozen=True):
    """One run as its lead knows it; published at each change except a committed step. `steps`, `global_batch`, `cursor`
    and `learning_rate` are None only for a guest that did not give them."""

    run: Name
    name: str
    state: RunState
    lead: str  # name of the node that leads it
    engine: str
    generation: Generation
    step: Count  # number of the last committed step
    steps: Count | None  # steps in all
    plan_version: Count
    global_batch: Count | None
    samples: Count | None  # of one epoch; None: no trainer is ready yet
    cursor: Count | None
    learning_rate: float | None
    started_at: float
    ranks: tuple[RankView, ...]
    directory: str
    eval_loss: float | None = None
    eval_step: Count | None = None
    reason: str = ""  # why it failed or stopped
    mixed: bool = False  # whether its live ranks have different backends
    recording: bool = False  # whether it is played from a recording, without trainers; it takes no commands
    kind: RunKind = "hosted"  # hosted: this program's trainers; guest: a loop that attached itself; exec: a command
    verbs: tuple[tuple[Name, str], ...] = ()  # (verb, why it is refused; empty: it is taken). Others: taken if hosted
    policies: tuple[PolicyView, ...] = ()  # empty: not known, as on a node that doesn't lead the run
    weight_unit: str = TOKENS  # unit of the weight, what the loss is divided by: tokens, pairs
    loss_unit: str = "nats per token"
    boot: str = ""
    seq: Count = 0

    @property
    def rate_unit(self) -> str:
        """Of the run's rate: `tokens/s`."""
        return f"{self.weight_unit}/s"

    @property
    def rate_metric(self) -> str:
        """The metric of a step that is the run's rate."""
        return "tokens_per_second" if self.weight_unit == TOKENS else "weight_per_second"

    def unit_of(self, metric: Metric) -> str:
        """Of a metric, by what the run is trained for."""
        if metric.unit == METRICS["loss"].unit:
            return self.loss_unit
        is_rate = metric.name == self.rate_metric  # the weight of other runs is of tokens too, and not their rate
        return self.rate_unit if is_rate else metric.unit

    def takes_over(self, shown: "RunView") -> bool:
        """Whether who watches `shown`, and has chosen no run, continues with this one."""
        return self.state in ACTIVE_RUN_STATES and (self.kind == "hosted" or shown.state not in ACTIVE_RUN_STATES)

    def why_not(self, verb: str) -> str:
        """Why the run does not take a verb; empty if it does."""
        if self.recording:
            return "" if verb == "start-run" else "a recording takes no commands"
        if verb in VERBS and VERBS[verb].for_any_run:
            return ""
        return dict(self.verbs).get(verb, "" if self.kind == "hosted" else "another program trains it")


class StepCommitted(Message, tag="step-committed", frozen=True):
    """The run has committed a step. Values that a guest did not give are None."""

    run: Name
    generation: Generation
    step: Count
    committed_at: float
    loss: float | None  # weighted mean, nats per unit of weight
    weight: float | None  # what the loss is divided by, in the run's `weight_unit`
    samples: Count
    learning_rate: float | None
    grad_norm: float | None  # before clipping
    cursor: Count | None  # first position after the step
    global_batch: Count | None
    plan_version: Count
    step_seconds: float  # since the commit before it, pauses excluded
    tokens_total: float  # processed since the run began
    tokens: Count | None = None  # processed by all ranks: those without a loss count, padding doesn't
    weight_total: float | None = None  # since the run began
    seconds_total: float | None = None  # of all steps since the run began, pauses excluded
    skipped: str | None = None
    values: Values = msgspec.field(default_factory=dict)  # metrics that have no field of their own, by name
    boot: str = ""
    seq: Count = 0

    @property
    def samples_per_second(self) -> float | None:
        """Samples of the step / its seconds; None if no time passed, or they are not known."""
        return self.samples / self.step_seconds if self.samples and self.step_seconds > 0 else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of the step / its seconds; None if no time passed, or they were not counted."""
        return self.tokens / self.step_seconds if self.tokens is not None and self.step_seconds > 0 else None

    @property
    def weight_per_second(self) -> float | None:
        """Weight of the step / its seconds; None if no time passed, or it has no weight."""
        return self.weight / self.step_seconds if self.weight is not None and self.step_seconds > 0 else None

    @property
    def steps_per_second(self) -> float | None:
        """1 / its seconds; None if no time passed."""
        return 1 / self.step_seconds if self.step_seconds > 0 else None

    @property
    def seconds_per_sample(self) -> float | None:
        """Its seconds / its samples; None without samples."""
        return self.step_seconds / self.samples if self.samples else None


class RankStep(Message, tag="rank-step", frozen=True):
    """One rank's part of a committed step; `micro_batch` is None if a guest did not give it."""

    run: Name
    generation: Generation
    step: Count
    rank: Count
    node: str
    tokens: float  # processed: those without a loss count, padding doesn't
    samples: Count
    micro_batch: Count | None
    replays: Count
    step_seconds: float
    phases: Phases
    weight: float | None = None  # weight of its share; None: not known
    values: Values = msgspec.field(default_factory=dict)  # metrics that have no field of their own, by name
    boot: str = ""
    seq: Count = 0

    @property
    def own_tokens_per_second(self) -> float | None:
        """What the rank would do alone: tokens / (data + forward + backward); None if either is not known."""
        busy_seconds = self.phases.busy
        return self.tokens / busy_seconds if self.tokens and busy_seconds > 0 else None

    @property
    def memory_bytes(self) -> float | None:
        """Held by the trainer on its device after the step."""
        return self.values.get("memory_bytes")

    @property
    def memory_cap_bytes(self) -> float | None:
        """Most that it may hold."""
        return self.values.get("memory_cap_bytes")

    @property
    def peak_or_held_bytes(self) -> float | None:
        """What the step needed of memory: its peak, or what was held after it where no peak is known."""
        return peak_or_held(self.values)


SCRIPTED_DEVICE = "scripted"
"""Name of a device whose readings are invented by a played recording."""


class GpuReading(msgspec.Struct, frozen=True):
    """Readings of one device; None: could not be read."""

    name: str
    utilization_percent: float | None = None
    clock_mhz: float | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    memory_used_bytes: Count | None = None
    memory_total_bytes: Count | None = None


class ProcessReading(msgspec.Struct, frozen=True):
    """One of this program's processes on a node."""

    pid: Count
    role: str  # agent, keeper, trainer, reducer, standby, helper
    rank: Count | None = None
    cpu_percent: float | None = None  # of one processor, since the last reading
    memory_bytes: Count | None = None  # resident memory


class HostReading(Message, tag="host-reading", frozen=True):
    """Readings of the machine, at 1 Hz; None: could not be read."""

    node: str
    read_at: float
    cpu_percent: float | None
    memory_used_bytes: Count | None
    memory_total_bytes: Count | None
    disk_free_bytes: Count | None  # free space on the disk that holds the runs
    disk_total_bytes: Count | None = None
    load_1min: float | None = None
    temperature_celsius: float | None = None
    gpus: tuple[GpuReading, ...] = ()
    processes: tuple[ProcessReading, ...] = ()  # this program's processes; not recorded
    energy_joules: float | None = None  # drawn by its devices since `energy_since_at`; None: no power was read
    energy_since_at: float | None = None  # when the run began on this node; None: no run yet
    energy_gap_seconds: float = 0.0  # time since then in which no power was read
    values: Values = msgspec.field(default_factory=dict)  # metrics that have no field of their own, by name
    boot: str = ""
    seq: Count = 0

    def gpu_of(self, device: str | None) -> GpuReading | None:
        """A rank's device among this machine's: by the index in `cuda:1`, else the first; None for a CPU."""
        if not self.gpus or (device or "").startswith("cpu"):
            return None
        digits = (device or "").partition("cuda:")[2].split()
        index = int(digits[0]) if digits and digits[0].isdigit() else 0
        return self.gpus[index] if index < len(self.gpus) else None


class Event(Message, tag="event", frozen=True):
    """Something that happened; it is recorded."""

    id: Count  # number of the event; grows within a run's record
    at: float
    severity: Severity
    by: str  # who or what caused it: a user, `auto`, `auto:` and a policy's name, a node
    data: AnyEvent  # what happened
    run: str = ""
    step: Count | None = None
    generation: Generation | None = None
    command: str | None = None  # id of the command that caused it; None: none did
    verb: str | None = None  # verb of that command, or of the command that would do the same
    outcome: CommandState | None = None
    undoes: str | None = None  # the command, or the number of the event, that this one undoes
    boot: str = ""
    seq: Count = 0

    @property
    def kind(self) -> Category:
        """The group that filters and tables put it in."""
        match self.data:
            case _ if self.outcome is not None:
                return "command"
            case SharesChanged(refused=True):
                return "probe"
            case Notice(of=category):
                return category
            case _:
                return self.data.category

    @property
    def text(self) -> str:
        """One line of words, without step, time and author."""
        return event_prose.text(self.data, self.verb if self.outcome is not None else None, self.outcome)

    @property
    def before(self) -> str | None:
        """What it found, if it changed something."""
        return event_prose.result(self.data)[0]

    @property
    def after(self) -> str | None:
        """What it left, or what a command made."""
        return event_prose.result(self.data)[1]


class Heartbeat(Message, tag="heartbeat", frozen=True):
    """Sent at 1 Hz; `seq` is the last sequence number published before it, so a lost message shows."""

    node: str
    at: float
    step_age_seconds: float | None  # since the last commit of a running run; None: no run is running
    loop_lag_seconds: float  # how late the agent's event loop ran its last timer
    boot: str = ""
    seq: Count = 0


class AlertView(msgspec.Struct, frozen=True):
    """An alert that has been raised and not cleared."""

    id: Name  # kind, node and rank: disk:studio, memory:studio:0; the same if it is raised again
    kind: AlertKind
    severity: AlertSeverity
    text: str  # what is wrong, and the cause if it is known
    raised_at: float
    node: str = ""  # empty: the run as a whole
    rank: Count | None = None
    step: Count | None = None  # last committed step when it was raised
    facts: tuple[str, ...] = ()  # phases and readings at that time, one per line
    acknowledged_by: str | None = None
    muted: bool = False  # whether a mute of its kind is in effect


class MuteView(msgspec.Struct, frozen=True):
    """A kind of alert that is muted: recorded, but no hook is called."""

    kind: AlertKind
    node: str | None  # None: any node
    until_at: float
    by: str


class Alerts(Message, tag="alerts", frozen=True):
    """All open alerts of an agent, oldest first; published whenever one is raised, cleared, acknowledged or muted."""

    node: str  # the node whose agent raised them
    alerts: tuple[AlertView, ...] = ()
    mutes: tuple[MuteView, ...] = ()
    boot: str = ""
    seq: Count = 0


Live = RunView | StepCommitted | RankStep | HostReading | Event | Alerts
"""Messages that are published with a sequence number."""

TOPICS: dict[type[Message], bytes] = {
    RunView: b"run", StepCommitted: b"step", RankStep: b"rank", HostReading: b"host", Event: b"event",
    Alerts: b"alert", Heartbeat: b"beat",
}  # fmt: skip
"""First frame of a published message, by the type of the second."""
