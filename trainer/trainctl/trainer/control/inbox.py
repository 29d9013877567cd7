"""The main thread's inbox, filled by the control thread."""

from dataclasses import dataclass

from trainctl.protocol import messages as m
from trainctl.protocol.errors import TrainctlError
from trainctl.trainer.collective.group import Group, ReducerGroup


@dataclass(frozen=True)
class Joined:
    """A generation has been formed: plans that follow reduce over this group. A rank that it was formed without gets
    none."""

    generation: m.Generation
    group: Group


@dataclass(frozen=True)
class Joining:
    """A generation is being formed, and this rank's reducer has begun to join."""

    form: m.Form
    group: ReducerGroup


@dataclass(frozen=True)
class Orphaned:
    """The agent has been gone for longer than the run file allows."""

    seconds: float


@dataclass(frozen=True)
class Signalled:
    """A signal ends this process."""

    reason: str


@dataclass(frozen=True)
class Broken:
    """The control thread, or the thread that reads a growing file, cannot continue."""

    error: TrainctlError


Order = m.StepPlan | Joined | Joining | m.Fence | m.Leave | Orphaned | Signalled | Broken
