"""A run's interventions and what its policies did, from its events: commands, plan changes, members, faults. Pure."""

from collections.abc import Callable, Sequence
from typing import Final

from trainctl.protocol import messages as m
from trainctl.protocol.messages import events as e
from trainctl.protocol.record.checkpoints import ParentCheckpoint
from trainctl.tui.report.run_facts import Intervention, InterventionKind, PolicyNote
from trainctl.tui.state import effects, run_events
from trainctl.tui.state.effects import Effect
from trainctl.tui.text.glyphs import UNICODE

POLICY: Final = "auto:"
"""What the author of a policy's command begins with."""
_FAULTS: Final = frozenset({"failed", "hung", "ended", "out-of-memory", "not-admitted", "slow", "waited-for"})
"""States of a rank that are faults."""
_NO_FAULT: Final = frozenset({"in-touch", "moved", "trainer-back"})
"""States of a node that aren't."""
MOST_MEASURED: Final = 400
"""Newest changes whose effect is measured; each needs a query."""

Measure = Callable[[m.Event], Effect | None]
StepAt = Callable[[m.Event], int]


def kind_of(event: m.Event) -> InterventionKind | None:
    """What sort of intervention an event is; None if it changed nothing, or is only a report."""
    if event.outcome not in (None, "applied"):
        return None
    if event.verb == "rollback":
        return "rollback"
    match event.data:
        case e.SharesChanged(node=node, lost=lost, returned=back) if node or lost or back:
            return "membership"
        case e.SharesChanged() | e.MicroBatchChanged():
            return "split"
        case e.LearningRateChanged() | e.GlobalBatchChanged():
            return "settings"
        case e.LeadChanged() | e.NodeStateChanged():
            return "membership"
        case e.RunStateChanged(after="going back"):
            return "rollback"
        case e.RunStateChanged() | e.RunBranched() | e.SetupChanged():
            return "state"
        case e.CommandApplied() | e.PolicyModeChanged() | e.PolicyActed():
            return "command"
        case e.NoteWritten():
            return "note"
        case e.CheckpointWritten():
            return "checkpoint"
        case (
            e.RankChanged() | e.NodeState() | e.StepsStopped() | e.RecordState() | e.StepSkipped() | e.StepRetracted()
            | e.CheckpointFailed()
        ):  # fmt: skip
            return "fault" if is_fault(event) else None
        case (
            e.PolicyAdvised() | e.CommandFailed() | e.GenerationFormed() | e.GenerationLeft() | e.StateShared()
            | e.ProbePassed() | e.Evaluated() | e.Sampled() | e.SampleFailed() | e.SharesUnmeasured()
            | e.AlertRaised() | e.AlertCleared() | e.AlertFailed() | e.Notice() | e.CheckpointCopied() | e.Profiled()
            | e.ProfileFailed()
        ):  # fmt: skip
            return None


def is_fault(event: m.Event) -> bool:
    """Whether it is something that went wrong, and not a consequence."""
    match event.data:
        case e.RankChanged(state=state):
            return state in _FAULTS
        case e.NodeState(state=state):
            return state not in _NO_FAULT
        case e.StepsStopped(lacking=lacking):
            return bool(lacking)
        case e.RecordState(problem=problem):
            return bool(problem)
        case e.StepSkipped() | e.StepRetracted() | e.CheckpointFailed():
            return True
        case (
            e.SharesChanged() | e.MicroBatchChanged() | e.LearningRateChanged() | e.GlobalBatchChanged()
            | e.LeadChanged() | e.RunStateChanged() | e.RunBranched() | e.NodeStateChanged() | e.PolicyModeChanged()
            | e.PolicyAdvised() | e.PolicyActed() | e.CommandApplied() | e.CommandFailed() | e.NoteWritten()
            | e.GenerationFormed() | e.GenerationLeft() | e.StateShared() | e.ProbePassed() | e.Evaluated()
            | e.Sampled() | e.SampleFailed() | e.CheckpointWritten() | e.SharesUnmeasured() | e.AlertRaised()
            | e.AlertCleared() | e.AlertFailed() | e.Notice() | e.SetupChanged() | e.CheckpointCopied() | e.Profiled()
            | e.ProfileFailed()
        ):  # fmt: skip
            return False


def interventions(events: Sequence[m.Event], step_at: StepAt, measure: Measure) -> list[Intervention]:
    """All of a run, oldest first. `step_at`: the step of an event; `measure`: the effect of one that changes the run's
    rate."""
    found = [(event, kind) for event in _once(events) if (kind := kind_of(event)) is not None]
    texts = skipped_texts(events)
    changes = [event.id for event, _ in found if run_events.changes_speed(event)]
    measured = frozenset(changes[-MOST_MEASURED:])
    return [
        Intervention(
            kind, step_at(event), event.at, event.by, texts.get(event.id) or event.text, event.id,
            _words(event, measure) if event.id in measured else "",
        )
        for event, kind in found if texts.get(event.id) != ""
    ]  # fmt: skip


def skipped_texts(events: Sequence[m.Event]) -> dict[int, str]:
    """The text of steps in a row that skipped their update for the same reason, by the event of the first one; the
    other ones' text is empty."""
    rows: list[list[tuple[m.Event, e.StepSkipped]]] = []
    for event in events:
        if not isinstance(event.data, e.StepSkipped):
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


def _once(events: Sequence[m.Event]) -> list[m.Event]:
    """Without events that a command's own event says again, such as a change of the lead."""
    asked = {(event.step, event.data) for event in events if event.verb is not None and _is_lead(event)}
    return [event for event in events if event.verb is not None or not _is_lead(event)
            or (event.step, event.data) not in asked]  # fmt: skip


def _is_lead(event: m.Event) -> bool:
    return isinstance(event.data, e.LeadChanged)


def policy_notes(events: Sequence[m.Event], step_at: StepAt, measure: Measure) -> list[PolicyNote]:
    """What each policy sent and advised, oldest first."""
    made = []
    for event in events:
        match event.data:
            case e.PolicyAdvised(name=name):
                made.append(PolicyNote(name, step_at(event), event.at, event.text, acted=False, effect=""))
            case e.PolicyActed(name=name):
                made.append(PolicyNote(name, step_at(event), event.at, event.text, acted=True, effect=""))
            case _ if event.by.startswith(POLICY) and event.verb is not None:
                name, ended = event.by.removeprefix(POLICY), event.outcome in (None, "applied")
                text = event.text if ended else f"{event.text} ({event.outcome})"
                words = _words(event, measure) if ended else "not applied"
                made.append(PolicyNote(name, step_at(event), event.at, text, acted=True, effect=words))
    return made


def _words(event: m.Event, measure: Measure) -> str:
    speed = run_events.changes_speed(event)
    return effects.figures(measure(event) if speed else None, event, UNICODE)


def lineage(view: m.RunView | None, events: Sequence[m.Event], by_files: ParentCheckpoint | None) -> list[str]:
    """Where the run comes from and what came of it, in words, oldest first. `by_files`: what it branched off by its
    checkpoints, if the record lacks that."""
    made = []
    parent = (view.branch if view is not None else None) or by_files
    if parent is not None:
        made.append(f"it started from {parent.run} at step {parent.step:,}")
    for event in events:
        match event.data:
            case e.RunBranched(branch=branch) if view is None or branch != view.run:
                made.append(run_events.event_words(event))
            case e.RunStateChanged(after="resumed" | "going back") | e.SetupChanged() | e.LeadChanged():
                made.append(run_events.event_words(event))
            case _:
                pass
    return made
