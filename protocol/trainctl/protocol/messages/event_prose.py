"""Event texts: the only place that turns an event's data into text, for screens, logs, hooks and exports."""

from collections.abc import Iterable, Mapping
from typing import Final

from trainctl.protocol.messages.events import (
    AlertCleared,
    AlertFailed,
    AlertRaised,
    AnyEvent,
    Change,
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
    Pairs,
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

ARROW: Final = " → "


def text(data: AnyEvent, verb: str | None = None, outcome: str | None = None) -> str:
    """One line without step, time and author. `verb` and `outcome` belong to the event's command, if any."""
    title, said = _title(data, verb, outcome), brief(data)
    return f"{title}: {said}" if title and said else title or said


def _title(data: AnyEvent, verb: str | None, outcome: str | None) -> str:
    """The part before the colon; may be empty."""
    match data:
        case SharesChanged(lost="", returned="", node=node) if node:
            return f"{'admitted' if data.after.get(node) else 'drained'} {node}"
        case SharesChanged(lost="", returned=""):
            return "rebalanced"
        case MicroBatchChanged():
            return "micro-batch"
        case LearningRateChanged():
            return "learning rate"
        case GlobalBatchChanged():
            return "global batch"
        case NodeStateChanged(node=node):
            return node
        case PolicyModeChanged(name=name) | PolicyAdvised(name=name) | PolicyActed(name=name):
            return f"policy {name}"
        case CommandApplied(node=node):
            return " ".join(word for word in (verb, node) if word)
        case CommandFailed(node=node):
            return " ".join(word for word in (verb, node, outcome) if word)
        case CheckpointWritten():
            return ""
        case (
            SharesChanged()
            | LeadChanged()
            | RunStateChanged()
            | RunBranched()
            | NoteWritten()
            | GenerationFormed()
            | GenerationLeft()
            | StepSkipped()
            | StepRetracted()
            | StepsStopped()
            | StateShared()
            | ProbePassed()
            | Evaluated()
            | Sampled()
            | SampleFailed()
            | CheckpointFailed()
            | RankChanged()
            | SharesUnmeasured()
            | NodeState()
            | AlertRaised()
            | AlertCleared()
            | AlertFailed()
            | RecordState()
            | Notice()
            | SetupChanged()
            | CheckpointCopied()
            | Profiled()
            | ProfileFailed()
        ):
            return verb or ""


def brief(data: AnyEvent) -> str:
    """Return an event in words without its verb and outcome, for tables that show them in their own columns."""
    match data:
        case SharesChanged():
            return _shares(data)
        case MicroBatchChanged(cause=cause):
            return f"{_sizes_changed(data.before, data.after)}{_why(cause)}"
        case LearningRateChanged():
            rest = "constant" if data.schedule == "set" else "scaled"
            return f"{_rate(data.before)}{ARROW}{_rate(data.after)} {rest}{_why(data.cause)}"
        case GlobalBatchChanged():
            rate = "scaled with it" if data.schedule == "scale" else "unchanged"
            return f"{data.before}{ARROW}{data.after}, learning rate {rate}{_why(data.cause)}"
        case LeadChanged():
            term = f" (term {data.term}, previously {data.before})" if data.term else ""
            return f"{data.after} now leads the run{term}"
        case RunStateChanged():
            return _run_state(data)
        case RunBranched(parent=parent, step=step, branch=branch):
            return f"{branch} branches off {parent} at step {step:,}"
        case NodeStateChanged():
            return f"{data.before}{ARROW}{data.after}"
        case PolicyModeChanged(before=before, after=after, cause=cause):
            return f"{before}{ARROW}{after}{_why(cause)}" if before != after else f"{after}, unchanged"
        case PolicyAdvised(command=command, reason=reason):
            return f"advises {command}{_why(reason)}" if command else reason
        case PolicyActed(command=command, reason=reason):
            return f"sends {command}{_why(reason)}"
        case CommandApplied(result=result):
            return result
        case CommandFailed(reason=reason, field=field):
            return f"{field}: {reason}" if field else reason
        case GenerationFormed():
            return _formed(data)
        case GenerationLeft(generation=generation, reason=reason):
            return f"{generation} left: {reason}"
        case StepSkipped(reason=reason):
            return f"step {data.step} skipped its update: {reason}"
        case StepRetracted(step=step):
            return f"step {step} retracted and repeated: only ranks that were lost had completed it"
        case StepsStopped(lacking=lacking):
            return f"training is waiting: {lacking}" if lacking else "enough nodes are reachable: training continues"
        case StateShared():
            where = f", on {data.rank}" if data.rank else ""
            return f"all ranks synced to {data.source}'s weights; largest drift {data.drift:.2g}{where}"
        case ProbePassed():
            who = f"{data.rank} and {data.other} (tolerance {data.tolerance:g}, {data.tokens} tokens)"
            most = f"a token's log-probability differs by at most {data.difference:.2g}"
            return f"probe passed: {most} between {who}; took {seconds(data.seconds)}"
        case Evaluated(loss=loss, seconds=took_seconds):
            took = f", took {took_seconds:.3g} s" if took_seconds is not None else ""
            return f"held-out loss {loss:.4f}{took}"
        case Sampled():
            said = "answered 1 prompt" if data.prompts == 1 else f"answered {data.prompts} prompts"
            return f"{data.node} {said}: {data.tokens} tokens, took {seconds(data.seconds)}"
        case SampleFailed(node=node, reason=reason):
            return f"no answer from {node}: {reason}"
        case Profiled():
            return _profiled(data)
        case ProfileFailed(node=node, reason=reason):
            return f"no profile from {node}: {reason}"
        case CheckpointWritten():
            return f"checkpoint step-{data.step}{checkpoint_cost(data)}"
        case CheckpointFailed(node=node, reason=reason):
            return f"no checkpoint on {node}: {reason}"
        case CheckpointCopied(step=step, to=to, problem=problem) if problem:
            return f"{data.node} couldn't copy step-{step} to {to}: {problem}; the next checkpoint will be copied"
        case CheckpointCopied(step=step, to=to):
            return f"{data.node} copied step-{step} to {to}, took {seconds(data.seconds)}"
        case SetupChanged(step=step, changes=changes):
            what = f"step {step:,} was made with another setup: {'; '.join(changes)}"
            return f"{what}. The loss continues within the data type's tolerance, not bit for bit"
        case RankChanged():
            return _rank(data)
        case SharesUnmeasured(nodes=nodes):
            return f"initial shares stay even: no measured rate for {', '.join(nodes)}"
        case NodeState():
            return _node(data)
        case AlertRaised(node=node, text=said):
            return f"{node} {said}" if node else said
        case AlertCleared():
            return _cleared(data)
        case RecordState(problem=problem):
            return problem or "recording works again"
        case NoteWritten(text=said) | Notice(text=said) | AlertFailed(text=said):
            return said


def before_after(data: AnyEvent) -> tuple[str, str] | None:
    """Return what a change found and what it left, as short texts; None for what changes nothing."""
    if not isinstance(data, Change):
        return None
    match data:
        case SharesChanged(before=before, after=after):
            return _by_node(before), _by_node(after)
        case MicroBatchChanged(before=before, after=after):
            return _sizes(before), _sizes(after)
        case LearningRateChanged():
            was = f"{_rate(data.before)} constant" if data.was_constant else _rate(data.before)
            if data.before == data.after and (data.was_constant or data.schedule == "scale"):
                return was, was
            return was, f"{_rate(data.after)} {'constant' if data.schedule == 'set' else 'scaled'}"
        case GlobalBatchChanged():
            rate = "scaled with it" if data.schedule == "scale" else "unchanged"
            same = data.before == data.after
            return str(data.before), str(data.after) if same else f"{data.after}, learning rate {rate}"
        case LeadChanged(before=before, after=after, term=term):
            return f"{before} leads", f"{after} leads, term {term}"
        case RunStateChanged(before=before, after=after):
            return (before, after) if before else None
        case NodeStateChanged(node=node, before=before, after=after):
            return f"{node} {before}", f"{node} {after}"
        case PolicyModeChanged(name=name, before=before, after=after):
            return f"{name} {before}", f"{name} {after}"


def result(data: AnyEvent) -> tuple[str | None, str | None]:
    """`before` and `after` as a command's reply and an export have them; of an alert its id."""
    change = before_after(data)
    if change is not None:
        return change
    match data:
        case CommandApplied(result=done):
            return None, done or None
        case Evaluated(loss=loss):
            return None, f"loss {loss:.4f}"
        case Sampled(answer=answer, prompts=prompts):
            return None, answer or f"{prompts} answers"
        case CheckpointWritten(step=step):
            return None, f"step-{step}"
        case ProbePassed(difference=difference):
            return None, f"{difference:.2g}"
        case AlertRaised(id=id) | AlertCleared(id=id) | AlertFailed(id=id):
            return None, id or None
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
            | CommandFailed()
            | NoteWritten()
            | GenerationFormed()
            | GenerationLeft()
            | StepSkipped()
            | StepRetracted()
            | StepsStopped()
            | StateShared()
            | SampleFailed()
            | CheckpointFailed()
            | RankChanged()
            | SharesUnmeasured()
            | NodeState()
            | RecordState()
            | Notice()
            | SetupChanged()
            | CheckpointCopied()
            | Profiled()
            | ProfileFailed()
        ):
            return None, None


def checkpoint_cost(written: CheckpointWritten) -> str:
    """`, 82.1 MB, loop paused 14 ms`; empty where it isn't known."""
    size = f", {written.size_bytes / 1e6:,.1f} MB" if written.size_bytes is not None else ""
    pause = f", loop paused {written.loop_seconds * 1e3:,.0f} ms" if written.loop_seconds is not None else ""
    return size + pause


def _shares(data: SharesChanged) -> str:
    moved = _moved(data.before, data.after)
    if data.lost:
        return f"{data.lost} is {'refused' if data.refused else 'lost'}: {data.cause}; {moved}"
    if data.returned:
        return f"{data.returned} rejoins: {moved}"
    sizes = _sizes_changed(data.micro_before, data.micro_after)
    return f"{moved}{f'; micro-batch {sizes}' if sizes else ''}{_why(data.cause)}"


def _moved(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Return the shares by node that are other than they were."""
    parts = [
        f"{node} {before.get(node, 0)}{ARROW}{after.get(node, 0)}"
        for node in {**before, **after}
        if before.get(node, 0) != after.get(node, 0)
    ]
    return ", ".join(parts) or "all shares unchanged"


def _sizes_changed(before: Pairs, after: Pairs) -> str:
    """Return each rank's sizes; of several with the same ones only the nodes."""
    parts: dict[str, list[str]] = {}
    for (node, size_before), (_, size_after) in zip(before, after, strict=False):
        nodes = parts.setdefault(
            f"{size_before}{ARROW}{size_after}" if size_before != size_after else f"{size_after}, unchanged", []
        )
        nodes += [node] if node not in nodes else []
    return "; ".join(f"{', '.join(nodes)} {change}".strip() for change, nodes in parts.items())


def _profiled(data: Profiled) -> str:
    first, last = f"{data.first_step:,}", f"{data.last_step:,}"
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    cost = f"{data.size_bytes / 1e6:,.1f} MB, loop paused {data.loop_seconds * 1e3:,.0f} ms"
    return f"{data.node} profiled {steps}: {cost}{f'; {data.lacks}' if data.lacks else ''}"


def seconds(value: float) -> str:
    """Return a duration: `3.06 s`, `41 ms`, `75 s`; below half a millisecond `0.42 ms`."""
    if 0 < value <= 0.0005:
        return f"{1000 * value:.2g} ms"
    if value < 0.0995:
        return f"{1000 * value:.0f} ms"
    return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s" if value < 99.5 else f"{value:,.0f} s"


def rank_label(node: str, rank: int, nodes: Iterable[str]) -> str:
    """Return a rank as people name it: its node, or node:rank where several of the ranks' `nodes` are this one."""
    return f"{node}:{rank}" if sum(other == node for other in nodes) > 1 else node


def _run_state(data: RunStateChanged) -> str:
    if data.before:
        return f"{data.before}{ARROW}{data.after}"
    match data.after:
        case "going back":
            return f"{data.reason}: going back to the newest checkpoint"
        case "resumed":
            return data.reason
        case "stopped" if data.reason and data.step is None:
            return f"stopped anyway: {data.reason}"
        case _:
            at = f" at step {data.step:,}" if data.step is not None else ""
            return f"{data.after}{at}: {data.reason}" if data.reason else f"{data.after}{at}"


def _rank(data: RankChanged) -> str:
    who, several = ", ".join(data.ranks), len(data.ranks) > 1
    match data.state:
        case "restarted":
            return f"{who}'s trainer restarts, attempt {data.detail}"
        case "failed":
            return f"{who} failed: {data.detail}"
        case "hung":
            return f"{who}'s trainer {data.detail} while loading and is killed"
        case "slow":
            return f"{who} {'have not finished their' if several else 'has not finished its'} part of {data.detail}"
        case "waited-for":
            return f"{who}, the last rank with the run's state, is {data.detail}"
        case "not-admitted":
            return f"{who} cannot rejoin: {data.detail}"
        case "ended":
            return f"{who} is drained; its trainer {data.detail}"
        case "out-of-memory":
            return f"{who} ran out of memory at a micro-batch of 1: {data.detail}"


def _formed(data: GenerationFormed) -> str:
    said = f"{data.generation} formed, {data.count} rank{'s' if data.count != 1 else ''}"
    said += f" by {data.engine}" if data.engine != "none" else ""
    said += f"; {', '.join(data.behind)} synced from {data.source}" if data.source else ""
    return said + (f"; the ranks waited {seconds(data.waited_seconds)}" if data.waited_seconds is not None else "")


def _node(data: NodeState) -> str:
    match data.state:
        case "silent":
            return f"{data.node}'s agent is silent: {data.detail}"
        case "in-touch":
            return f"{data.node}'s agent is connected"
        case "moved":
            return f"{data.node}'s agent is now at {data.detail}"
        case "slept":
            return f"{data.node} slept for {data.detail}"
        case "trainer-back":
            return f"reconnected to {data.node}'s trainer"


def _cleared(data: AlertCleared) -> str:
    lasted = ""
    if data.seconds is not None:
        minutes = data.seconds / 60
        lasted = f" after {minutes:.0f} min" if minutes >= 1 else f" after {data.seconds:.0f} s"
    return f"{data.node} {data.alert} cleared{lasted}".strip()


def _rate(value: float) -> str:
    """A learning rate, to seven digits: 1.62e-4, 0.003, 0."""
    if not 0 < abs(value) < 1e-3:
        return f"{value:.7g}"
    digits, _, exponent = f"{value:.6e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"


def _by_node(shares: Mapping[str, int]) -> str:
    return " ".join(f"{node}={share}" for node, share in shares.items())


def _sizes(sizes: Pairs) -> str:
    """One rank's micro-batch as a number; several with their nodes."""
    return str(sizes[0][1]) if len(sizes) == 1 else " ".join(f"{node}={size}" for node, size in sizes)


def _why(cause: str) -> str:
    return f" ({cause})" if cause else ""
