"""Operator times: from the events of a Chrome trace to the longest operators of each phase. Pure.

The format is that of the Trace Event Format (complete events, ph "X", times in microseconds) with the categories and
arguments that torch's profiler writes: an operator is `cpu_op`, our phases are `user_annotation`, and a kernel names
the operator that launched it by `External id` and the call that launched it by `correlation`.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from trainctl.protocol.messages import OPERATORS_KEPT, PHASES, OperatorTime, PhaseProfile

_DEVICE = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
_LAUNCHES = frozenset(("cuda_runtime", "cuda_driver"))
_MICROSECOND = 1e-6
_NAME_CHARACTERS = 80


class TraceArgs(msgspec.Struct, frozen=True, gc=False, rename={"external_id": "External id"}):
    """The arguments that link events."""

    external_id: Any = None
    correlation: Any = None


class TraceEvent(msgspec.Struct, frozen=True):
    """One event of a trace, as far as it is needed here."""

    ph: str = ""
    cat: str | None = None
    name: str = ""
    ts: float = 0.0  # begin, in microseconds
    dur: float = 0.0  # duration, in microseconds
    pid: Any = None
    tid: Any = None
    args: TraceArgs = TraceArgs()


class Trace(msgspec.Struct, frozen=True):
    """A trace's file."""

    events: list[TraceEvent] = msgspec.field(name="traceEvents", default_factory=list)


@dataclass
class _Sums:
    calls: int = 0
    seconds: float = 0.0
    device_seconds: float = 0.0


@dataclass
class _Phase:
    seconds: float = 0.0
    device_seconds: float = 0.0
    operators: defaultdict[str, _Sums] = field(default_factory=lambda: defaultdict(_Sums))


class _Ranges:
    """The phases over time; they follow each other on one thread."""

    def __init__(self, events: Iterable[TraceEvent]) -> None:
        found = [event for event in events if event.cat == "user_annotation" and event.name in PHASES]
        self.all = sorted(found, key=lambda event: event.ts)
        self._begins = [event.ts for event in self.all]

    def at(self, time: float) -> str | None:
        """The phase at a time; None between phases."""
        place = bisect_right(self._begins, time) - 1
        event = self.all[place] if place >= 0 else None
        return event.name if event is not None and time < event.ts + event.dur else None


def phase_profiles(events: Sequence[TraceEvent]) -> tuple[PhaseProfile, ...]:
    """The phases of a trace in the order of a step, each with its OPERATORS_KEPT longest operators."""
    complete = [event for event in events if event.ph == "X"]
    ranges, phases = _Ranges(complete), defaultdict[str, _Phase](_Phase)
    for event in ranges.all:
        phases[event.name].seconds += event.dur * _MICROSECOND
    operators = [event for event in complete if event.cat == "cpu_op"]
    _add_operators(operators, ranges, phases)
    _add_kernels(complete, operators, ranges, phases)
    return tuple(_profile(name, phases[name]) for name in PHASES if name in phases)


def self_times(operators: Iterable[TraceEvent]) -> list[tuple[TraceEvent, float]]:
    """Each operator with its time less that of the operators that it called directly, in microseconds."""
    found, open_by_thread = list[list[Any]](), defaultdict[tuple[Any, Any], list[list[Any]]](list)
    for event in sorted(operators, key=lambda event: (event.ts, -event.dur)):
        stack = open_by_thread[event.pid, event.tid]
        while stack and event.ts >= stack[-1][0].ts + stack[-1][0].dur:
            stack.pop()
        if stack:
            stack[-1][1] -= event.dur
        stack.append([event, event.dur])
        found.append(stack[-1])
    return [(event, max(0.0, own)) for event, own in found]


def _add_operators(operators: Sequence[TraceEvent], ranges: _Ranges, phases: defaultdict[str, _Phase]) -> None:
    for event, own in self_times(operators):
        phase = ranges.at(event.ts)
        if phase is not None:
            sums = phases[phase].operators[event.name]
            sums.calls += 1
            sums.seconds += own * _MICROSECOND


def _add_kernels(
    events: Sequence[TraceEvent], operators: Sequence[TraceEvent], ranges: _Ranges, phases: defaultdict[str, _Phase]
) -> None:
    """A kernel belongs to the phase in which it was launched: the device runs it later."""
    launched = {event.args.correlation: event.ts for event in events if event.cat in _LAUNCHES}
    names = {event.args.external_id: event.name for event in operators}
    for event in events:
        phase = ranges.at(launched.get(event.args.correlation, event.ts)) if event.cat in _DEVICE else None
        if phase is not None:
            seconds = event.dur * _MICROSECOND
            phases[phase].device_seconds += seconds
            phases[phase].operators[names.get(event.args.external_id, event.name)].device_seconds += seconds


def _profile(name: str, phase: _Phase) -> PhaseProfile:
    longest = sorted(phase.operators.items(), key=lambda item: (-item[1].device_seconds, -item[1].seconds, item[0]))
    kept = [
        OperatorTime(operator[:_NAME_CHARACTERS], sums.calls, sums.seconds, sums.device_seconds)
        for operator, sums in longest[:OPERATORS_KEPT]
    ]
    return PhaseProfile(name, phase.seconds, phase.device_seconds, tuple(kept))
