"""Effects of changes on the fleet's rate, as measured: medians over the steps before and after, also of what policies
did.

Only throughput is attributed: shares, micro-batches and members change it at once, while a loss goes on changing by
itself, so that no difference of it could honestly be laid to a command.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from trainctl.protocol.messages import Asker, Event, EventsRequest, HistoryRequest, Policies, PoliciesRequest
from trainctl.tui.state import run_events, series
from trainctl.tui.text.formatting import rate

EFFECT_STEPS = 20
"""Steps before and after a change over which its effect is measured."""
LEAST_STEPS = 5
_RATE = "tokens_per_second"
_COARSEST = 2
"""Steps a bucket at most, for a median of them to say something."""


@dataclass(frozen=True)
class Effect:
    """Medians of tokens/s of so many undisturbed steps on each side; None with fewer than 5 of them."""

    before: float | None
    after: float | None
    steps_before: int
    steps_after: int

    @property
    def change(self) -> float | None:
        """Return relative: 0.26 is 26 % faster."""
        return self.after / self.before - 1 if self.before and self.after else None


def measured(rates: series.Window, events: Sequence[Event], event: Event) -> Effect | None:
    """Return the effect of an event on a window of tokens/s; None where it changed nothing, or the window is too
    coarse."""
    if event.step is None or rates.bucket_steps > _COARSEST or not run_events.took_effect(event):
        return None
    first, last = _undisturbed(events, event, event.step)
    before, after = _values(rates, first, event.step - 1), _values(rates, event.step, last)
    return Effect(_median(before), _median(after), len(before), len(after))


def _undisturbed(events: Sequence[Event], event: Event, step: int) -> tuple[int, int]:
    """Return first and last step around the event's up to which it alone changed the plan."""
    others = [
        other.step
        for other in events
        if other.id != event.id and other.step is not None and run_events.changes_speed(other)
    ]
    first = max([step - EFFECT_STEPS, *(other for other in others if other <= step)])
    last = min([step + EFFECT_STEPS - 1, *(other - 1 for other in others if other >= step)])
    return first, last


def _values(rates: series.Window, first: int, last: int) -> list[float]:
    window = series.tail(rates, first)
    values = window.last[window.first <= last]
    found: list[float] = values[np.isfinite(values)].tolist()
    return found


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if len(values) >= LEAST_STEPS else None


def covered(rates: series.Window, step: int) -> bool:
    """Return whether a window reaches back to all that an effect at `step` is measured from, step by step."""
    return bool(len(rates)) and rates.bucket_steps <= _COARSEST and int(rates.first[0]) <= max(step - EFFECT_STEPS, 1)


async def in_record(client: Asker, run: str, events: Sequence[Event], event: Event) -> Effect | None:
    """Return the effect of an event at a step, measured on the record; None where it changed nothing. `events`: what
    may have disturbed it. Raises what the client raises."""
    step = event.step or 0
    first, last = max(step - EFFECT_STEPS, 1), step + EFFECT_STEPS - 1
    history = await client.ask(HistoryRequest, run, (_RATE,), first, last, 2 * EFFECT_STEPS)
    window = next((series.from_series(sery, last) for sery in history.series if sery.metric == _RATE), None)
    return measured(window, events, event) if window is not None else None


def figures(effect: Effect | None, event: Event) -> str:
    """Return the effect with its figures, or why there are none."""
    if not run_events.changes_speed(event):
        return "not measured: it doesn't change the speed, and a change in loss can't be attributed to one command"
    if effect is None:
        return "not measured: the individual steps aren't available"
    if effect.change is None:
        side, steps = ("before", effect.steps_before) if effect.before is None else ("after", effect.steps_after)
        return f"not measured: it needs {LEAST_STEPS} undisturbed steps {side} the change, and there are only {steps}"
    values = f"{rate(effect.before)} → {rate(effect.after)} tokens/s"
    return f"{values}, {100 * effect.change:+.1f} % (medians of {effect.steps_before} and {effect.steps_after} steps)"


NEWEST_EVENTS = 500
"""Newest events of the run in which disturbances of an effect are looked for."""


@dataclass(frozen=True)
class PolicyReport:
    """An answer of the agent, and what was measured."""

    told: Policies
    events: tuple[Event, ...] = ()  # the run's newest, oldest first
    measured: Mapping[int, Effect] = field(default_factory=dict)  # by event id, of commands that change speed


async def policy_report(client: Asker, run: str | None, before: PolicyReport | None = None) -> PolicyReport:
    """Return the report of now; effects that were complete `before` aren't measured again. Raises TrainctlError if the
    run isn't active."""
    told = await client.ask(PoliciesRequest, run)
    actions = [event for policy in told.policies for event in policy.actions]
    events = (await client.ask(EventsRequest, told.run, limit=NEWEST_EVENTS, newest=True)).events
    found = dict(before.measured) if before is not None and before.told.run == told.run else {}
    complete = {id for id, effect in found.items() if effect.steps_after >= EFFECT_STEPS}
    for event in actions:
        if run_events.changes_speed(event) and event.id not in complete:
            effect = await in_record(client, told.run, events, event)
            found |= {event.id: effect} if effect is not None else {}
    return PolicyReport(told, events, found)
