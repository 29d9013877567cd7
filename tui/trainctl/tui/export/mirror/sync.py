"""The mirror itself: reads what is new of a run, a page at a time, and hands it to a target; changes nothing else.

A committed step is mirrored once another follows it, or the run has ended, or it has stood for a while: until then
other ranks' parts of it come in, and it is what a lost rank may have taken with it.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, takewhile
from typing import Protocol

from trainctl.protocol.messages import ACTIVE_RUN_STATES, Event, RunView, StepCommitted
from trainctl.tui.export.mirror.metrics import Point, Text, answer_line, line, of_evaluation, of_step, prefixes
from trainctl.tui.export.mirror.progress import MirrorProgress
from trainctl.tui.export.mirror.run_source import PAGE, RunSource

SETTLED_SECONDS = 5.0
"""After so long a step that none follows is mirrored too."""
LATE_EVALUATION_STEPS = 2000
"""Steps behind the last one among which an evaluation is still looked for."""


class MirrorTarget(Protocol):
    """A viewer's files or service that a run is mirrored to. `number` counts everything that was written, over all
    sessions."""

    name: str
    forgets: bool  # whether going back drops what was written at the steps after
    at_end: bool  # whether it has what it was given only once it is closed

    def back(self, step: int) -> None: ...
    def point(self, point: Point, number: int, attempt: int) -> None: ...
    def evaluation(self, step: int, values: Mapping[str, float], at: float, number: int) -> None: ...
    def text(self, text: Text, number: int) -> None: ...
    def flush(self) -> None: ...
    def close(self, *, failed: bool) -> str:
        """Write all; `failed`: the run did. The session's name, if it has one."""
        ...


class Mirror:
    """One run and one target; `place` is how far it has come."""

    def __init__(
        self,
        source: RunSource,
        target: MirrorTarget,
        place: MirrorProgress,
        *,
        keep: Callable[[MirrorProgress], None],
        stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`keep` is given each place once it is flushed; `stop` is asked between pages; `clock`: Unix seconds."""
        self.place = place.without_later_texts() if target.forgets else place
        self._source, self._target, self._keep, self._stop, self._clock = source, target, keep, stop, clock
        self.has_ended = False
        self._view: RunView | None = None

    def catch_up(self, *, whole: bool) -> str | None:
        """Mirror what is new; the run's state, if it is known. `whole`: also a last step that isn't settled."""
        view = self._view = self._source.view()
        ended = view is not None and view.state not in ACTIVE_RUN_STATES
        self._go_back()
        more = True
        while more and not self._stop():
            before = self.place
            more = self._page(whole=whole or ended)
            if self.place != before:
                self._target.flush()
                self._keep(self.place)
        self.has_ended = ended
        return view.state if view is not None else None

    # ------------------------------------------------------------ what no longer stands

    def _go_back(self) -> None:
        stands = standing(self._source, self.place)
        if stands < self.place.step:
            self._target.back(stands)
            self.place = self.place.back_to(stands)
            if self._target.forgets:
                self.place = self.place.without_later_texts()
        known = self.place.events
        kept = next((told.id for told in reversed(known) if self._has(told.id, told.at)), 0)
        if known and kept != known[-1].id:
            self.place = self.place.without_events_after(kept)

    def _has(self, id: int, at: float) -> bool:
        """Return whether the record's event of that id is the one that was mirrored."""
        return any((event.id, event.at) == (id, at) for event in self._source.events(id - 1, 1))

    # ------------------------------------------------------------ what is new

    def _page(self, *, whole: bool) -> bool:
        """Up to a page of steps, and what belongs to them; whether there may be more."""
        steps, more = self._source.steps(self.place.step)
        if not more and not whole:
            steps = steps if steps and self._clock() - steps[-1].committed_at > SETTLED_SECONDS else steps[:-1]
        began_after = self.place.step
        if steps:
            self._points(steps)
        self._evaluations(min(began_after, max(0, self.place.step - LATE_EVALUATION_STEPS)))
        self._samples()
        return self._texts(whole=whole and not more) or (more and bool(steps))

    def _points(self, steps: Sequence[StepCommitted]) -> None:
        by_rank = prefixes(self._source.nodes())
        parts = self._source.parts([step.step for step in steps])
        by_step = {step: tuple(found) for step, found in groupby(parts, key=lambda part: part.step)}
        for step in steps:
            point = of_step(step, by_step.get(step.step, ()), by_rank, self._view)
            self._target.point(point, self.place.rows, self.place.attempt)
            self.place = self.place.stepped(step.step, step.generation)

    def _evaluations(self, after: int) -> None:
        found = self._source.evaluations(after, self.place.step)
        for step, one in sorted(found.items(), key=lambda item: item[0]):
            if not self.place.has_evaluation(step, one.loss):
                at = self._clock() if one.at is None else one.at
                values = of_evaluation(one.loss, self._view, one.values)
                self._target.evaluation(step, values, at, self.place.rows)
                self.place = self.place.evaluated(step, one.loss)

    def _samples(self) -> None:
        """The answers of mirrored steps: one text for each time that the model was asked."""
        before = None
        while self.place != before and not self._stop():
            before = self.place
            found, last_row = self._source.samples(self.place.sample_row)
            row = last_row - len(found)
            for at, group in ((at, tuple(group)) for at, group in groupby(found, key=lambda sample: sample.at)):
                row += len(group)
                if group[0].step > self.place.step:
                    return
                text = Text(group[0].step, at, "\n".join(map(answer_line, group)), "samples")
                self._target.text(text, self.place.rows)
                self.place = self.place.sampled(group[0].step, row)

    def _texts(self, *, whole: bool) -> bool:
        """Write the events of mirrored steps; those of the last step wait a while for more. Return whether a page was
        full."""
        last, settled_at = self.place.step, self._clock() - SETTLED_SECONDS

        def is_ready(event: Event) -> bool:
            step = event.step or 0
            return whole or step < last or (step == last and event.at < settled_at)

        ready = list(takewhile(is_ready, self._source.events(self.place.event)))
        for step, events in _by_step(ready, self.place.text_step):
            text = Text(step, events[-1].at, "\n".join(map(line, events)))
            self._target.text(text, self.place.rows)
            self.place = self.place.texted(step, events)
        return len(ready) == PAGE


def standing(source: RunSource, place: MirrorProgress) -> int:
    """Return the newest step that was mirrored and still stands as it was; 0 if none does."""
    newest, _ = source.steps(place.step - 1, 1) if place.step else ((), False)
    if newest and (newest[0].step, newest[0].generation) == (place.step, place.generation_of(place.step)):
        return place.step
    high, width = place.step, PAGE
    while high > 0:
        low = max(0, high - width)
        stands, any_there = 0, False
        while steps := [step for step in source.steps(max(low, stands), PAGE)[0] if step.step <= high]:
            any_there = True
            found = [step.step for step in steps if place.generation_of(step.step) == step.generation]
            if not found:
                break
            stands = found[-1]
        if stands:
            return stands
        high, width = low, PAGE if any_there else 2 * width  # steps' numbers may be any distance apart
    return 0


def _by_step(events: Sequence[Event], text_step: int) -> Iterator[tuple[int, list[Event]]]:
    """Events in groups at rising steps above the last text's, in their order: one that comes late stands where it came,
    and its line names its own step."""
    group: list[Event] = []
    at = -1
    for event in events:
        own = max(event.step or 0, text_step + 1, at)
        if group and own > at:
            yield at, group
            group = []
        at = own
        group.append(event)
    if group:
        yield at, group
