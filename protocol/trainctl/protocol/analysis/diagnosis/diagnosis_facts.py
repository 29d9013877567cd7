"""What a diagnosis is made from: plain values, of a live run or of a record. What isn't known is None or absent."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainctl.protocol import messages as m
from trainctl.protocol.calibration.profile import ProfileSummary
from trainctl.protocol.config.run_tables import RunFile


@dataclass(frozen=True)
class LiveFacts:
    """What only the run's agent knows; a record doesn't have it."""

    view: m.RunView  # as it is now
    alerts: tuple[m.AlertView, ...] = ()  # open ones
    profiles: Mapping[int, ProfileSummary] = field(default_factory=dict)  # calibrations by rank
    readings: Mapping[str, tuple[m.HostReading, ...]] = field(default_factory=dict)  # by node, oldest first, of the
    # last minute or more; they are used instead of the record's from the first of them on
    step_age_seconds: float | None = None  # since the last commit, without pauses
    doing: str = "train"  # kind of the newest plan


@dataclass(frozen=True, kw_only=True)
class DiagnosisFacts:
    """One run at one time. Steps, parts, events and readings are oldest first."""

    at: float  # Unix seconds: now, or the time of the last fact in a record
    is_live: bool = False  # False: read from a record, where nothing changes any more
    view: m.RunView | None = None  # ranks with node, state, share, micro-batch, device, precision and curve; state
    # and reason say whether the run is paused, or waits for data
    config: RunFile | None = None  # as it was started: precision, checkpointing, packing, prefetch ...
    steps: tuple[m.StepCommitted, ...] = ()  # the newest ones that stand
    parts: tuple[m.RankStep, ...] = ()  # the ranks' parts of these steps: phases, samples, memory, metrics by name
    readings: Mapping[str, tuple[m.HostReading, ...]] = field(default_factory=dict)  # by node
    events: tuple[m.Event, ...] = ()
    alerts: tuple[m.AlertView, ...] = ()
    profiles: Mapping[int, ProfileSummary] = field(default_factory=dict)  # calibrations by rank, with their links
    checkpoint_step: int | None = None  # of the newest complete checkpoint; None: there is none, or it isn't known
    step_age_seconds: float | None = None  # live: since the last commit, without pauses
    doing: str = "train"  # live: kind of the newest plan
