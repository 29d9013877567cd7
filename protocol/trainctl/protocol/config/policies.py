"""Policies: what a run decides by itself, and what a run file may set of each."""

import dataclasses
from typing import Annotated, ClassVar, Final, Literal

import msgspec
from msgspec import Meta

from trainctl.protocol.errors import InvalidInputError

# Thresholds of the loss curve that alerts, policies and detectors begin with: each number stands once.
SPIKE_MADS: Final = 6.0
"""Distance above the trend that makes a spike, in units of the scatter (scaled MAD)."""
SPIKE_PERCENT: Final = 5.0
"""Least distance above the trend in percent of it, for curves that hardly scatter."""
SPIKE_STEPS: Final = 3
"""Steps in a row that make a spike."""
BACK_STEPS: Final = 50
"""Steps after which a spike whose loss has not come back is stuck."""
TREND_STEPS: Final = 200
"""Steps over which a loss that diverges must rise."""
PAST_STEPS: Final = 100
"""Steps in a row at which its level must be far above the best."""
DIVERGED_MADS: Final = 3.0
"""Distance above the best level, in units of the scatter (scaled MAD) at the best."""
CLIP_STEPS: Final = 100
"""Steps whose median clip scale is judged."""
CLIP_SCALE: Final = 0.01
"""Median clip scale below which clipping holds training back."""

PolicyName = Literal[
    "out-of-memory",
    "replays",
    "first-shares",
    "rebalance",
    "non-finite",
    "micro-batch",
    "plateau",
    "early-stop",
    "spike",
    "divergence",
    "drain",
]
PolicyMode = Literal["off", "advise", "on"]
"""Off: it does nothing. Advise: an event names the command that it would send. On: it sends the command."""
AUTHOR: Final = "auto:"
"""Author of a policy's commands: this and the policy's name."""


@dataclasses.dataclass(frozen=True)
class PolicyEntry:
    """A policy's description, and the mode in which it begins."""

    default: PolicyMode
    summary: str
    yields_to: tuple[str, ...] = ()
    """Verbs by which a person decides instead; from then on the policy only advises."""
    changes_curve: bool = False
    """True if the commands that it sends change the loss curve."""


POLICIES: Final[dict[PolicyName, PolicyEntry]] = {
    "out-of-memory": PolicyEntry("on", "a trainer that ran out of memory restarts with half its micro-batch"),
    "replays": PolicyEntry("on", "a rank that had to split a micro-batch keeps the smaller size"),
    "first-shares": PolicyEntry("on", "a short measurement sets the shares that the run file doesn't", ("rebalance",)),
    "rebalance": PolicyEntry("on", "samples move to the ranks that are fast now", ("rebalance",)),
    "non-finite": PolicyEntry("on", "steps in a row that aren't finite pause the run, after a checkpoint"),
    "micro-batch": PolicyEntry("on", "a rank's peak memory stays below a part of its cap", ("resize-batch",)),
    "plateau": PolicyEntry("off", "a held-out loss that stops improving lowers the learning rate", ("set-lr",), True),
    "early-stop": PolicyEntry("off", "a held-out loss that stops improving for long ends the run", (), True),
    "spike": PolicyEntry("advise", "a spike that doesn't come back takes the run back before it", ("rollback",), True),
    "divergence": PolicyEntry("advise", "a loss that keeps rising lowers the learning rate", ("set-lr",), True),
    "drain": PolicyEntry("advise", "a node that makes steps longer leaves the group", ("drain", "admit")),
}
"""Every policy. Only those that don't affect the loss curve are on by default."""
HELD_OUT_POLICIES: Final[tuple[PolicyName, ...]] = ("plateau", "early-stop")
"""Policies that need evaluations."""


def policies_that_yield(verb: str, *, auto: bool, is_new: bool) -> tuple[PolicyName, ...]:
    """Return the policies that only advise once a person has sent a command: those that would have decided it. `auto`:
    the command leaves it to the program, as they do. `is_new`: the run has no step yet."""
    decided = () if auto else tuple(name for name, entry in POLICIES.items() if verb in entry.yields_to)
    return tuple(name for name in decided if is_new or name != "first-shares")


class PolicyTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[policy.NAME]` of a run file. A policy with settings of its own has a type derived from this."""

    mode: PolicyMode | None = None  # None: the policy's default


class RebalanceTable(PolicyTable, frozen=True):
    """`[policy.rebalance]`: when samples move to the ranks that are fast now."""

    gain: Annotated[float, Meta(gt=0, le=10)] = 0.05  # least part by which steps must get faster
    windows: Annotated[int, Meta(ge=1, le=1000)] = 3  # windows of 8 steps in a row that must show the gain
    at_once: Annotated[float, Meta(gt=0, le=10)] = 0.1  # gain that is taken without further windows
    quiet_steps: Annotated[int, Meta(ge=1, le=2**40)] = 20  # after a split, before it is judged


class NonFiniteTable(PolicyTable, frozen=True):
    """`[policy.non-finite]`: when steps that aren't finite pause the run."""

    steps: Annotated[int, Meta(ge=1, le=1000)] = 3  # in a row that were not finite


class MicroBatchTable(PolicyTable, frozen=True):
    """`[policy.micro-batch]`: how a rank's peak memory is kept below a part of its cap."""

    target: Annotated[float, Meta(gt=0, le=1)] = 0.9  # part of the cap that peaks may take; above it, it shrinks
    low: Annotated[float, Meta(ge=0, le=1)] = 0.72  # part of the cap below which it may grow
    shrink: Annotated[float, Meta(gt=0, lt=1)] = 0.8  # factor, at least one sample less
    grow: Annotated[float, Meta(gt=1, le=4)] = 1.2  # factor, at least one sample more
    least: Annotated[int, Meta(ge=1, le=2**20)] = 1  # samples
    most: Annotated[int, Meta(ge=0, le=2**20)] = 0  # samples; 0: the rank's share
    window: Annotated[int, Meta(ge=1, le=1000)] = 10  # steps whose mean peak counts
    barred_steps: Annotated[int, Meta(ge=0, le=2**40)] = 500  # for which a size that ran out of memory isn't tried
    up: PolicyMode = "advise"  # of larger ones: advised where it had been larger; on: sent while there is room


class PlateauTable(PolicyTable, frozen=True):
    """`[policy.plateau]`: when a held-out loss that stops improving lowers the learning rate."""

    patience: Annotated[int, Meta(ge=1, le=100_000)] = 5  # evaluations in a row without improvement
    improvement: Annotated[float, Meta(ge=0, lt=1)] = 1e-4  # least one that counts, relative to the best loss
    factor: Annotated[float, Meta(gt=0, lt=1)] = 0.5  # of the rest of the learning-rate schedule
    cooldown: Annotated[int, Meta(ge=0, le=100_000)] = 2  # evaluations after a cut that don't count
    min_rate: Annotated[float, Meta(ge=0, le=100)] = 0.0  # learning rate below which it doesn't cut


class EarlyStopTable(PolicyTable, frozen=True):
    """`[policy.early-stop]`: when a held-out loss that stops improving ends the run."""

    patience: Annotated[int, Meta(ge=1, le=100_000)] = 10  # evaluations in a row without improvement
    improvement: Annotated[float, Meta(ge=0, lt=1)] = 1e-4  # least one that counts, relative to the best loss


class SpikeTable(PolicyTable, frozen=True, omit_defaults=True):
    """`[policy.spike]`: when a loss spike takes the run back."""

    mads: Annotated[float, Meta(ge=1, le=1000)] | None = None  # instead of alerts.loss_spike_mads, for alerts too
    steps: Annotated[int, Meta(ge=1, le=10_000)] | None = None  # instead of alerts.loss_spike_steps, for alerts too
    recover_steps: Annotated[int, Meta(ge=1, le=100_000)] = BACK_STEPS  # steps within which it may come back by itself
    min_back: Annotated[int, Meta(ge=0, le=2**40)] = 100  # steps that the run goes back at least
    skip_batches: Annotated[int, Meta(ge=0, le=1_000_000)] = 200  # global batches, at least to the spike; 0: none
    max_times: Annotated[int, Meta(ge=1, le=1000)] = 2  # a run


class DivergenceTable(PolicyTable, frozen=True, omit_defaults=True):
    """`[policy.divergence]`: when a loss that keeps rising lowers the learning rate."""

    mads: Annotated[float, Meta(ge=1, le=1000)] | None = None  # instead of alerts.diverged_mads, for alerts too
    steps: Annotated[int, Meta(ge=2, le=100_000)] = TREND_STEPS  # over which the loss must rise
    past_steps: Annotated[int, Meta(ge=1, le=100_000)] = PAST_STEPS  # in a row at which it must be far above
    factor: Annotated[float, Meta(gt=0, lt=1)] = 0.5  # of the rest of the learning-rate schedule
    quiet_steps: Annotated[int, Meta(ge=1, le=2**40)] = 500  # between two times


class DrainTable(PolicyTable, frozen=True):
    """`[policy.drain]`: when a node that makes steps longer leaves the group."""

    steps: Annotated[int, Meta(ge=1, le=2**40)] = 100  # in a row that must show it
    gain: Annotated[float, Meta(ge=0, le=10)] = 0.05  # least part by which the node makes steps longer
    move_seconds: Annotated[float, Meta(ge=0, le=1e9)] = 60.0  # what a drain costs; as much must be lost until the end


class PolicyTables(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, rename="kebab"
):
    """`[policy]` of a run file: a table for each policy, under its name."""

    keys_are_names: ClassVar[bool] = True
    out_of_memory: PolicyTable = PolicyTable()
    replays: PolicyTable = PolicyTable()
    first_shares: PolicyTable = PolicyTable()
    rebalance: RebalanceTable = RebalanceTable()
    non_finite: NonFiniteTable = NonFiniteTable()
    micro_batch: MicroBatchTable = MicroBatchTable()
    plateau: PlateauTable = PlateauTable()
    early_stop: EarlyStopTable = EarlyStopTable()
    spike: SpikeTable = SpikeTable()
    divergence: DivergenceTable = DivergenceTable()
    drain: DrainTable = DrainTable()

    def of(self, name: PolicyName) -> PolicyTable:
        """The table of a policy."""
        table: PolicyTable = getattr(self, name.replace("-", "_"))
        return table


def impatience(tables: PolicyTables, plateau: PolicyMode, early_stop: PolicyMode) -> str:
    """Return what is wrong with these two modes together: a run must not end before a lower rate could help it. Empty
    if nothing is."""
    least, patience = tables.plateau.patience, tables.early_stop.patience
    if "off" in (plateau, early_stop) or patience > least:
        return ""
    return f"{patience} must be above policy.plateau.patience = {least}: the run would end before its rate is lowered"


def check_policies(tables: PolicyTables, where: str) -> None:
    """Raise InvalidInputError, naming the field, where a policy's settings contradict each other."""
    micro = tables.micro_batch
    if micro.low >= micro.target:
        problem = f"{micro.low:g} must be below policy.micro-batch.target = {micro.target:g}"
        raise InvalidInputError(f"{where}: policy.micro-batch.low", problem)
    plateau, early_stop = (tables.of(name).mode or POLICIES[name].default for name in HELD_OUT_POLICIES)
    if problem := impatience(tables, plateau, early_stop):
        raise InvalidInputError(f"{where}: policy.early-stop.patience", problem)
    if micro.most and micro.most < micro.least:
        problem = f"{micro.most} must be at least policy.micro-batch.least = {micro.least}, or 0"
        raise InvalidInputError(f"{where}: policy.micro-batch.most", problem)
