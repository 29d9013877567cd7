"""Telemetry: messages that an agent publishes about its run, its machine and its alerts."""

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from trainctl.protocol.config.alert_rules import AlertKind, AlertSeverity
from trainctl.protocol.config.objectives import PAIRS, SAMPLES
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
from trainctl.protocol.messages.metrics import METRICS, Metric, perplexity
from trainctl.protocol.messages.trainer import Compute, EvaluatedPair, Phases
from trainctl.protocol.messages.verbs import VERBS


def peak_bytes(values: Mapping[str, float]) -> float | None:
    """Return the peak of memory in a step from metrics by name; None where it isn't known."""
    return values.get("memory_peak_bytes")


def peak_or_held(values: Mapping[str, float]) -> float | None:
    """Return the peak of memory from metrics by name, or what was held where no peak is known."""
    return values.get("memory_peak_bytes", values.get("memory_bytes"))


TOKENS = "tokens"
"""The unit of the weight where each counted target weighs 1; the run's rate is then of all tokens processed."""


class BranchPoint(msgspec.Struct, frozen=True):
    """The checkpoint that a run started from."""

    run: Name  # run that wrote it
    step: Count  # its step
    cursor: Count = 0  # first sample position after that step


WRITING: Final = "writing the checkpoint"
"""Beginning of `RankView.why` while a rank writes one."""


class RankView(msgspec.Struct, frozen=True):
    """One rank as its lead sees it. `share` and `micro_batch` are None if a guest doesn't report them."""

    rank: Count
    node: str
    state: RankState  # late: slow; hung: silent or stuck; draining: leaves after this step
    since_at: float  # time when it entered this state, in Unix seconds
    share: Count | None  # number of samples that it processes in each global batch
    micro_batch: Count | None
    why: str = ""  # reason for the state, unless it is run
    backend: str | None = None
    device: str | None = None
    pid: Count | None = None
    compute: Compute | None = None  # precision and kernels; None: unknown
    passes: tuple[
        tuple[Count, float], ...
    ] = ()  # curve: pairs (micro-batch, seconds of a pass), ascending; in a snapshot, and live when it changes
    micro_set: Count | None = None  # micro-batch that is set: `micro_batch` is less if the share is; None: unknown
    micro_most: Count | None = (
        None  # largest micro-batch that an automatic split may choose; None: it keeps `micro_set`
    )
    machine: str = ""  # identifies the processors that it may use: equal for ranks that share them; empty: unknown
    cores: float = 0.0  # how many of them; 0: unknown

    @property
    def is_out(self) -> bool:
        """Return whether it has no part in the next step."""
        return self.state in ("lost", "rejoining", "failed", "drained", "done")

    @property
    def is_silent(self) -> bool:
        """Return whether it reports no steps."""
        return self.state in ("hung", "lost", "rejoining", "failed", "drained")

    @property
    def is_held(self) -> bool:
        """Return whether it stays out until it is admitted: one that is lost joins by itself once it is back."""
        return self.state in ("drained", "failed")


class Straggler(msgspec.Struct, frozen=True):
    """The rank that the others wait for, and the phase that makes it so."""

    rank: Count
    node: str
    phase: str  # data, forward or backward: the one that takes longest beside the others'
    excess_seconds: float  # of that phase in a step, over the others' median
    waited_seconds: float  # that the others' median waits in a step


class PolicyView(msgspec.Struct, frozen=True):
    """A policy of the run, with its mode."""

    name: str
    mode: PolicyMode


class RunCost(msgspec.Struct, frozen=True):
    """The cost of a run by its lead's cluster file. At a later time t it has cost `spent` + `per_hour` * hours from
    `at` to t."""

    currency: str  # of all amounts: a word or a sign
    spent: float  # cost up to `at` of the nodes that have a price
    at: float  # time in Unix seconds
    per_hour: float  # price of an hour of the nodes that now take part; 0: the run has ended
    unpriced: tuple[Name, ...] = ()  # nodes that took part but have no price, so their cost is missing


class RunView(Message, tag="run-view", frozen=True):
    """One run as its lead sees it. Published on every change except a committed step. `steps`, `global_batch`,
    `cursor` and `learning_rate` are None if a guest doesn't report them."""

    run: Name
    name: str
    state: RunState
    lead: str  # node that leads the run
    engine: str
    generation: Generation
    step: Count  # last committed step
    steps: Count | None  # total number of steps
    plan_version: Count
    global_batch: Count | None
    samples: Count | None  # samples per epoch; None: no trainer is ready yet
    cursor: Count | None
    learning_rate: float | None
    started_at: float
    ranks: tuple[RankView, ...]
    directory: str
    eval_loss: float | None = None
    eval_step: Count | None = None
    reason: str = ""  # reason why it failed or stopped
    mixed: bool = False  # whether its live ranks use different backends
    kind: RunKind = "hosted"  # hosted: trained by this program; guest: attached itself; exec: a watched command
    verbs: tuple[
        tuple[Name, str], ...
    ] = ()  # pairs (verb, refusal reason or empty); only hosted runs accept other verbs
    policies: tuple[PolicyView, ...] = ()  # policies; empty: unknown, for example on a follower
    weight_unit: str = TOKENS  # unit of the weight that divides the loss, for example tokens or pairs
    loss_unit: str = "nats per token"
    eval_values: tuple[tuple[Name, float], ...] = ()  # pairs (metric, value) of the newest evaluation
    cost: RunCost | None = None  # cost so far; None: none of its nodes has a price
    skipped: tuple[tuple[Count, Count], ...] = ()  # pairs (first position, number): not trained on, by a rollback
    simulated: bool = False  # whether nothing was trained: ranks, times and losses are simulated
    branch: BranchPoint | None = None  # checkpoint of another run that it started from; None: it started at step 0
    straggler: Straggler | None = None  # by the ranks' last steps; None: the ranks don't wait for one
    boot: str = ""
    seq: Count = 0

    def without_passes_of(self, before: "RunView") -> "RunView":
        """Return the view for those who have seen `before`, without the curves that were the same in it."""
        known = {view.rank: view.passes for view in before.ranks}
        ranks = tuple(
            msgspec.structs.replace(view, passes=()) if view.passes and known.get(view.rank) == view.passes else view
            for view in self.ranks
        )
        return msgspec.structs.replace(self, ranks=ranks)

    def with_passes_of(self, before: "RunView | None") -> "RunView":
        """Return the view with the curves of `before`, of the same trainers, where it has none itself."""
        if before is None or before.run != self.run:
            return self
        known = {(view.rank, view.pid): view.passes for view in before.ranks}
        ranks = tuple(
            msgspec.structs.replace(view, passes=known.get((view.rank, view.pid), ())) if not view.passes else view
            for view in self.ranks
        )
        return msgspec.structs.replace(self, ranks=ranks)

    @property
    def live_ranks(self) -> tuple[RankView, ...]:
        """The ranks that take part, by number."""
        return tuple(sorted((view for view in self.ranks if not view.is_out), key=lambda view: view.rank))

    @property
    def reporting(self) -> list[int]:
        """The ranks that report their steps, or did to the run's end."""
        return sorted(view.rank for view in self.ranks if not view.is_silent)

    def trained(self, cursor: int | None) -> int | None:
        """The number of positions before `cursor` that this run trained on: all since it started but those skipped;
        None if it is."""
        if cursor is None:
            return None
        first = self.branch.cursor if self.branch is not None else 0
        skipped = (max(0, min(start + count, cursor) - max(start, first)) for start, count in self.skipped)
        return cursor - first - sum(skipped)

    @property
    def rate_unit(self) -> str:
        """Return the unit of the run's rate: `tokens/s`."""
        return f"{self.weight_unit}/s"

    @property
    def sample_unit(self) -> str:
        """Return what the samples of its batches are called."""
        return PAIRS if self.weight_unit == PAIRS else SAMPLES

    @property
    def rate_metric(self) -> str:
        """The metric of a step that is the run's rate."""
        return "tokens_per_second" if self.weight_unit == TOKENS else "weight_per_second"

    @property
    def perplexity(self) -> float | None:
        """Return the perplexity of the newest evaluation; None without one, or if the loss is in another unit than nats
        per token."""
        return perplexity(self.eval_loss, self.loss_unit)

    def unit_of(self, metric: Metric) -> str:
        """Return the unit of a metric, by what the run is trained for."""
        if metric.unit == METRICS["loss"].unit:
            return self.loss_unit
        is_rate = metric.name == self.rate_metric  # the weight of other runs is of tokens too, and not their rate
        return self.rate_unit if is_rate else metric.unit

    def takes_over(self, shown: "RunView") -> bool:
        """Return whether who watches `shown`, and has chosen no run, continues with this one."""
        return self.state in ACTIVE_RUN_STATES and (self.kind == "hosted" or shown.state not in ACTIVE_RUN_STATES)

    def why_not(self, verb: str) -> str:
        """Return why the run does not take a verb; empty if it does."""
        if verb in VERBS and VERBS[verb].for_any_run:
            return ""
        return dict(self.verbs).get(verb, "" if self.kind == "hosted" else "a different program trains this run")


class StepCommitted(Message, tag="step-committed", frozen=True):
    """The run has committed a step. Values that a guest doesn't report are None."""

    run: Name
    generation: Generation
    step: Count
    committed_at: float
    loss: float | None  # weighted mean loss, in nats per unit of weight
    weight: float | None  # weight that divides the loss, in the run's `weight_unit`
    samples: Count
    learning_rate: float | None
    grad_norm: float | None  # gradient norm before clipping
    cursor: Count | None  # first sample position after the step
    global_batch: Count | None
    plan_version: Count
    step_seconds: float  # time since the previous commit, excluding pauses
    tokens_total: float  # tokens processed since the run began; of a guest 0: unknown
    tokens: Count | None = None  # tokens processed by all ranks, including tokens without a loss but no padding
    weight_total: float | None = None  # total weight since the run began
    seconds_total: float | None = None  # duration of all steps since the run began, excluding pauses
    skipped: str | None = None
    values: Values = msgspec.field(default_factory=dict)  # metrics without a field, by name
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
        """Return the part's seconds per sample; None without samples."""
        return self.step_seconds / self.samples if self.samples else None


class RankStep(Message, tag="rank-step", frozen=True):
    """One rank's part of a committed step. `micro_batch` is None if a guest doesn't report it."""

    run: Name
    generation: Generation
    step: Count
    rank: Count
    node: str
    tokens: float  # tokens processed, including tokens without a loss but no padding; of a guest 0: unknown
    samples: Count
    micro_batch: Count | None
    replays: Count
    step_seconds: float
    phases: Phases
    weight: float | None = None  # weight of its share; None: unknown
    values: Values = msgspec.field(default_factory=dict)  # metrics without a field, by name
    boot: str = ""
    seq: Count = 0

    @property
    def own_tokens_per_second(self) -> float | None:
        """Return what the rank would do alone: tokens / (data + forward + backward); None if either is not known."""
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
        """Return what the step needed of memory: its peak, or what was held after it where no peak is known."""
        return peak_or_held(self.values)


ClockLimit = Literal["thermal", "power", "hardware"]
CLOCK_LIMITED_BY: Final[dict[ClockLimit, str]] = {
    "thermal": "heat",
    "power": "its power cap",
    "hardware": "its hardware",
}
"""Causes of a lowered device clock, in words."""


class GpuProcess(msgspec.Struct, frozen=True):
    """A process of another program on a device; None: not available."""

    pid: Count
    name: str  # of its program
    user: str  # who runs it
    memory_bytes: Count | None = None  # device memory that it holds


class GpuReading(msgspec.Struct, frozen=True):
    """Readings of one device; None: not available."""

    name: str
    utilization_percent: float | None = None
    clock_mhz: float | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    memory_used_bytes: Count | None = None
    memory_total_bytes: Count | None = None
    clock_limits: tuple[ClockLimit, ...] = ()  # causes that lower its clock now; empty: none, or unknown
    others: tuple[GpuProcess, ...] = ()  # processes of other programs on it; empty: none, or unknown


class ProcessReading(msgspec.Struct, frozen=True):
    """One of this program's processes on a node."""

    pid: Count
    role: str  # agent, keeper, trainer, reducer, standby or helper
    rank: Count | None = None
    cpu_percent: float | None = None  # percentage of one processor, since the last reading
    memory_bytes: Count | None = None  # resident memory


class Sample(Message, tag="sample", frozen=True):
    """The model's answer to one prompt, as it was after a step."""

    run: Name
    step: Count  # last committed step
    at: float  # time when the rank had answered all prompts; with `number`, it identifies the answer
    number: Count  # the prompt's place in its list
    prompt: str  # the prompt's text, at most 1,000 bytes; of messages: the last one's content
    answer: str  # the answer, at most 4,000 bytes
    tokens: Count  # number of tokens in the answer, including the end token
    ended: bool  # whether the model ended its answer; false: it reached `max_tokens`
    seconds: float  # time that the answer took
    loss: float | None  # loss of the step; None: unknown
    eval_loss: float | None  # held-out loss, if it was measured after the same step
    max_tokens: Count  # most tokens that were allowed
    temperature: float  # 0: always the likeliest token
    top_p: float  # tokens were drawn from the likeliest ones with this total probability
    seed: Count  # seed of the random numbers
    node: str  # node whose rank answered
    by: str  # who asked: a user, or `auto` for the run file's schedule
    boot: str = ""
    seq: Count = 0


class HeldOutPairs(msgspec.Struct, frozen=True):
    """Some held-out pairs as an evaluation found them: the first ones and the ten with the lowest margins."""

    step: Count  # last committed step
    at: float  # time of the evaluation
    pairs: tuple[EvaluatedPair, ...]  # in ascending order of their index


class HostReading(Message, tag="host-reading", frozen=True):
    """Readings of the machine, once per second; None: not available."""

    node: str
    read_at: float
    cpu_percent: float | None
    memory_used_bytes: Count | None
    memory_total_bytes: Count | None
    disk_free_bytes: Count | None  # free space on the disk that stores the runs
    disk_total_bytes: Count | None = None
    load_1min: float | None = None
    temperature_celsius: float | None = None
    gpus: tuple[GpuReading, ...] = ()
    processes: tuple[ProcessReading, ...] = ()  # processes of this program; not recorded
    energy_joules: float | None = None  # energy that its devices used since `energy_since_at`; None: no power readings
    energy_since_at: float | None = None  # time when the run began on this node; None: no run yet
    energy_gap_seconds: float = 0.0  # time since then without power readings
    values: Values = msgspec.field(default_factory=dict)  # metrics without a field, by name
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
    """A recorded event."""

    id: Count  # event number; it grows within a run's record
    at: float
    severity: Severity
    by: str  # cause: a user, a node, `auto`, or `auto:` with a policy name
    data: AnyEvent  # description of what happened
    run: str = ""
    step: Count | None = None
    generation: Generation | None = None
    command: str | None = None  # ID of the command that caused it; None: none
    verb: str | None = None  # verb of that command, or of an equivalent command
    outcome: CommandState | None = None
    undoes: str | None = None  # ID of the command, or number of the event, that this event undoes
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
        """Return what it found, if it changed something."""
        return event_prose.result(self.data)[0]

    @property
    def after(self) -> str | None:
        """Return what it left, or what a command made."""
        return event_prose.result(self.data)[1]


class Heartbeat(Message, tag="heartbeat", frozen=True):
    """Sent once per second. `seq` is the last sequence number published before it, so clients notice a lost message."""

    node: str
    at: float
    step_age_seconds: float | None  # time since the last commit; None: no run is running
    loop_lag_seconds: float  # delay of the last timer in the agent's event loop
    boot: str = ""
    seq: Count = 0


class AlertView(msgspec.Struct, frozen=True):
    """An open alert: raised and not yet cleared."""

    id: Name  # kind, node and rank, such as memory:studio:0; the same if raised again
    kind: AlertKind
    severity: AlertSeverity
    text: str  # description of the problem, with the cause if known
    raised_at: float
    node: str = ""  # affected node; empty: the whole run
    rank: Count | None = None
    step: Count | None = None  # last committed step when it was raised
    facts: tuple[str, ...] = ()  # phases and readings at that time, one line each
    acknowledged_by: str | None = None
    muted: bool = False  # whether its kind is currently muted


class MuteView(msgspec.Struct, frozen=True):
    """A muted alert kind: still recorded, but no hook is called."""

    kind: AlertKind
    node: str | None  # node name; None: all nodes
    until_at: float
    by: str


class Alerts(Message, tag="alerts", frozen=True):
    """All open alerts of an agent, oldest first. Published when one is raised, cleared, acknowledged or muted."""

    node: str  # node whose agent raised them
    alerts: tuple[AlertView, ...] = ()
    mutes: tuple[MuteView, ...] = ()
    hook_problem: str = ""  # what is wrong with each alert hook now; empty: nothing
    boot: str = ""
    seq: Count = 0


Live = RunView | StepCommitted | RankStep | HostReading | Event | Alerts | Sample
"""Messages that are published with a sequence number."""

TOPICS: dict[type[Message], bytes] = {
    RunView: b"run",
    StepCommitted: b"step",
    RankStep: b"rank",
    HostReading: b"host",
    Event: b"event",
    Alerts: b"alert",
    Sample: b"sample",
    Heartbeat: b"beat",
}
"""First frame of a published message, by the type of the second."""
