"""A run's interventions and what its policies did, from its events: commands, plan changes, members, faults. Pure."""

from collections.abc import Callable, Sequence
from typing import Final

from trainctl.protocol.messages import Event, RunView
from trainctl.protocol.messages.events import (
    AlertCleared,
    AlertFailed,
    AlertRaised,
    CheckpointCopied,
    CheckpointFailed,
    CheckpointWritten,
    CommandApplied,
    CommandFailed,
    Evaluated,
    GenerationFormed,
    GenerationLeft,
    GlobalBatchChanged,
    LeadChanged,
    LearningRateChanged,
    MicroBatchChanged,
    NodeState,
    NodeStateChanged,
    NoteWritten,
    Notice,
    PolicyActed,
    PolicyAdvised,
    PolicyModeChanged,
    ProbePassed,
    Profiled,
    ProfileFailed,
    RankChanged,
    RecordState,
    RunBranched,
    RunStateChanged,
    Sampled,
    SampleFailed,
    SetupChanged,
    SharesChanged,
    SharesUnmeasured,
    StateShared,
    StepRetracted,
    StepSkipped,
    StepsStopped,
)
from trainctl.protocol.record.checkpoints import ParentCheckpoint
from trainctl.tui.report.run_facts import Intervention, InterventionKind, PolicyNote
from trainctl.tui.state import effects, run_events
from trainctl.tui.state.effects import Effect

POLICY: Final = "auto:"
"""The beginning of the author of a policy's command."""
_FAULTS: Final = frozenset({"failed", "hung", "ended", "out-of-memory", "not-admitted", "slow", "waited-for"})
"""States of a rank that are faults."""
_NO_FAULT: Final = frozenset({"in-touch", "moved", "trainer-back"})
"""States of a node that aren't."""
MOST_MEASURED: Final = 400
"""Newest changes whose effect is measured; each needs a query."""

Measure = Callable[[Event], Effect | None]
StepAt = Callable[[Event], int]


def kind_of(event: Event) -> InterventionKind | None:
    """Return what sort of intervention an event is; None if it changed nothing, or is only a report."""
    if event.outcome not in (None, "applied"):
        return None
    if event.verb == "rollback":
        return "rollback"
    match event.data:
        case SharesChanged(node=node, lost=lost, returned=back) if node or lost or back:
            return "membership"
        case SharesChanged() | MicroBatchChanged():
            return "split"
        case LearningRateChanged() | GlobalBatchChanged():
            return "settings"
        case LeadChanged() | NodeStateChanged():
            return "membership"
        case RunStateChanged(after="going back"):
            return "rollback"
        case RunStateChanged() | RunBranched() | SetupChanged():
            return "state"
        case CommandApplied() | PolicyModeChanged() | PolicyActed():
            return "command"
        case NoteWritten():
            return "note"
        case CheckpointWritten():
            return "checkpoint"
        case (
            RankChanged()
            | NodeState()
            | StepsStopped()
            | RecordState()
            | StepSkipped()
            | StepRetracted()
            | CheckpointFailed()
        ):
            return "fault" if is_fault(event) else None
        case (
            PolicyAdvised()
            | CommandFailed()
            | GenerationFormed()
            | GenerationLeft()
            | StateShared()
            | ProbePassed()
            | Evaluated()
            | Sampled()
            | SampleFailed()
            | SharesUnmeasured()
            | AlertRaised()
            | AlertCleared()
            | AlertFailed()
            | Notice()
            | CheckpointCopied()
            | Profiled()
            | ProfileFailed()
        ):
            return None


def is_fault(event: Event) -> bool:
    """Return whether it is something that went wrong, and not a consequence."""
    match event.data:
        case RankChanged(state=state):
            return state in _FAULTS
        case NodeState(state=state):
            return state not in _NO_FAULT
        case StepsStopped(lacking=lacking):
            return bool(lacking)
        case RecordState(problem=problem):
            return bool(problem)
        case StepSkipped() | StepRetracted() | CheckpointFailed():
            return True
        case (
            SharesChanged()
            | MicroBatchChanged()
            | LearningRateChanged()
            | GlobalBatchChanged()
            | LeadChanged()
            | RunStateChanged()
            | RunBranched()
            | NodeStateChanged()
            | PolicyModeChanged()
            | PolicyAdvised()
            | PolicyActed()
            | CommandApplied()
            | CommandFailed()
            | NoteWritten()
            | GenerationFormed()
            | GenerationLeft()
            | StateShared()
            | ProbePassed()
            | Evaluated()
            | Sampled()
            | SampleFailed()
            | CheckpointWritten()
            | SharesUnmeasured()
            | AlertRaised()
            | AlertCleared()
            | AlertFailed()
            | Notice()
            | SetupChanged()
            | CheckpointCopied()
            | Profiled()
            | ProfileFailed()
        ):
            return False


def interventions(events: Sequence[Event], step_at: StepAt, measure: Measure) -> list[Intervention]:
    """Return all of a run, oldest first. `step_at`: the step of an event; `measure`: the effect of one that changes the
    run's rate."""
    found = [(event, kind) for event in _once(events) if (kind := kind_of(event)) is not None]
    texts = skipped_texts(events)
    changes = [event.id for event, _ in found if run_events.changes_speed(event)]
    measured = frozenset(changes[-MOST_MEASURED:])
    return [
        Intervention(
            kind,
            step_at(event),
            event.at,
            event.by,
            texts.get(event.id) or event.text,
            event.id,
            _words(event, measure) if event.id in measured else "",
        )
        for event, kind in found
        if texts.get(event.id) != ""
    ]


def skipped_texts(events: Sequence[Event]) -> dict[int, str]:
    """Return the text of steps in a row that skipped their update for the same reason, by the event of the first one;
    the other ones' text is empty."""
    rows: list[list[tuple[Event, StepSkipped]]] = []
    for event in events:
        if not isinstance(event.data, StepSkipped):
            continue
        last = rows[-1][-1][1] if rows else None
        if last is not None and (last.step + 1, last.reason) == (event.data.step, event.data.reason):
            rows[-1].append((event, event.data))
        else:
            rows.append([(event, event.data)])
    found = {event.id: "" for row in rows for event, _ in row}
    for row in rows:
        (event, first), (_, last) = row[0], row[-1]
        several = f"steps {first.step:,} to {last.step:,} skipped their update: {first.reason}"
        found[event.id] = several if len(row) > 1 else event.text
    return found


def _once(events: Sequence[Event]) -> list[Event]:
    """Leave out events that a command's own event says again, such as a change of the lead."""
    asked = {(event.step, event.data) for event in events if event.verb is not None and _is_lead(event)}
    return [
        event
        for event in events
        if event.verb is not None or not _is_lead(event) or (event.step, event.data) not in asked
    ]


def _is_lead(event: Event) -> bool:
    return isinstance(event.data, LeadChanged)


def policy_notes(events: Sequence[Event], step_at: StepAt, measure: Measure) -> list[PolicyNote]:
    """Return what each policy sent and advised, oldest first."""
    made = []
    for event in events:
        match event.data:
            case PolicyAdvised(name=name):
                made.append(PolicyNote(name, step_at(event), event.at, event.text, acted=False, effect=""))
            case PolicyActed(name=name):
                made.append(PolicyNote(name, step_at(event), event.at, event.text, acted=True, effect=""))
            case _ if event.by.startswith(POLICY) and event.verb is not None:
                name, ended = event.by.removeprefix(POLICY), event.outcome in (None, "applied")
                text = event.text if ended else f"{event.text} ({event.outcome})"
                words = _words(event, measure) if ended else "not applied"
                made.append(PolicyNote(name, step_at(event), event.at, text, acted=True, effect=words))
    return made


def _words(event: Event, measure: Measure) -> str:
    speed = run_events.changes_speed(event)
    return effects.figures(measure(event) if speed else None, event)


def lineage(view: RunView | None, events: Sequence[Event], by_files: ParentCheckpoint | None) -> list[str]:
    """Return where the run comes from and what came of it, in words, oldest first. `by_files`: what it branched off by
    its checkpoints, if the record lacks that."""
    made = []
    parent = (view.branch if view is not None else None) or by_files
    if parent is not None:
        made.append(f"it started from {parent.run} at step {parent.step:,}")
    for event in events:
        match event.data:
            case RunBranched(branch=branch) if view is None or branch != view.run:
                made.append(run_events.event_words(event))
            case RunStateChanged(after="resumed" | "going back") | SetupChanged() | LeadChanged():
                made.append(run_events.event_words(event))
            case _:
                pass
    return made
