"""The progress of a mirror: kept in a file beside what it wrote, so that another run of it goes on from there."""

import contextlib
import fcntl
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.files.durable_files import write_file
from trainctl.protocol.messages import Event, Generation

EVENTS_KEPT = 1000


class Span(msgspec.Struct, frozen=True):
    """Steps from `first` on were committed in `generation`."""

    first: int
    generation: Generation


class CopiedEvent(msgspec.Struct, frozen=True):
    """An event that was mirrored, at a step of the target."""

    id: int
    at: float
    step: int


class MirrorProgress(msgspec.Struct, frozen=True):
    """All that a mirror must know to go on."""

    run: str
    target: str
    step: int = 0  # last one mirrored
    spans: tuple[Span, ...] = ()
    events: tuple[CopiedEvent, ...] = ()  # the newest
    text_step: int = -1  # of the target's last text
    evaluations: dict[int, float | None] = {}  # mirrored, by step; None: it was no number
    samples: dict[int, int] = {}  # mirrored answers of the model: row of the last one by step
    attempt: int = 1  # grows whenever steps that were mirrored are retracted
    rows: int = 0  # written in all
    sessions: tuple[str, ...] = ()  # whole folders of a target that has one a session

    @property
    def event(self) -> int:
        """Id of the last event mirrored."""
        return self.events[-1].id if self.events else 0

    def generation_of(self, step: int) -> Generation | None:
        """Return the generation in which a step was committed when it was mirrored."""
        return next((span.generation for span in reversed(self.spans) if span.first <= step), None)

    def stepped(self, step: int, generation: Generation) -> "MirrorProgress":
        """After one more step."""
        new = not self.spans or self.spans[-1].generation != generation
        spans = (*self.spans, Span(step, generation)) if new else self.spans
        return msgspec.structs.replace(self, step=step, spans=spans, rows=self.rows + 1)

    def evaluated(self, step: int, loss: float) -> "MirrorProgress":
        known = {**self.evaluations, step: loss if math.isfinite(loss) else None}
        return msgspec.structs.replace(self, evaluations=known, rows=self.rows + 1)

    def has_evaluation(self, step: int, loss: float) -> bool:
        """Return whether just this loss was mirrored."""
        return step in self.evaluations and self.evaluations[step] == (loss if math.isfinite(loss) else None)

    @property
    def sample_row(self) -> int:
        """Row of the last answer mirrored."""
        return max(self.samples.values(), default=0)

    def sampled(self, step: int, row: int) -> "MirrorProgress":
        """After a step's answers."""
        return msgspec.structs.replace(self, samples={**self.samples, step: row}, rows=self.rows + 1)

    def texted(self, step: int, events: Sequence[Event]) -> "MirrorProgress":
        """After a text of these events."""
        told = (*self.events, *(CopiedEvent(event.id, event.at, step) for event in events))[-EVENTS_KEPT:]
        return msgspec.structs.replace(self, events=told, text_step=step, rows=self.rows + 1)

    def back_to(self, step: int) -> "MirrorProgress":
        """Before the steps after `step`, which were retracted."""
        return msgspec.structs.replace(
            self,
            step=step,
            spans=tuple(span for span in self.spans if span.first <= step),
            attempt=self.attempt + 1,
            evaluations={at: loss for at, loss in self.evaluations.items() if at <= step},
        )

    def without_later_texts(self) -> "MirrorProgress":
        """Return the progress of a target that has dropped what was written after the last step: those events are
        written again."""
        kept = tuple(told for told in self.events if told.step <= self.step)
        samples = {step: row for step, row in self.samples.items() if step <= self.step}
        return msgspec.structs.replace(self, events=kept, samples=samples, text_step=min(self.text_step, self.step))

    def finished(self, session: str) -> "MirrorProgress":
        """Return the progress with one more session that is whole, if it has a name."""
        return msgspec.structs.replace(self, sessions=(*self.sessions, session)) if session else self

    def without_events_after(self, id: int) -> "MirrorProgress":
        """Return the progress with the events above `id` to be reported again: others have taken their numbers."""
        return msgspec.structs.replace(self, events=tuple(told for told in self.events if told.id <= id))


class MirrorProgressFile:
    """The place on disk, of one mirror at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self, run: str, target: str) -> MirrorProgress:
        """Return a place at the run's beginning if there is none. Raises InvalidInputError for a file that is none."""
        if not self.path.is_file():
            return MirrorProgress(run, target)
        try:
            found = msgspec.json.decode(self.path.read_bytes(), type=MirrorProgress)
        except (OSError, msgspec.MsgspecError) as error:
            raise InvalidInputError(str(self.path), f"not a mirror's progress file: {error}") from None
        if (found.run, found.target) != (run, target):
            raise InvalidInputError(
                str(self.path), f"belongs to run {found.run} in {found.target}; use a different --output"
            )
        return found

    def save(self, place: MirrorProgress) -> None:
        """Whole or not at all."""
        write_file(self.path, msgspec.json.encode(place))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While no other mirror may write there. Raises InvalidInputError if one does."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = self.path.with_suffix(".lock").open("w")
        except OSError as error:
            raise InvalidInputError("--output", f"{self.path.parent}: {error.strerror}") from None
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InvalidInputError(
                    "--output",
                    f"{self.path.parent}: another mirror is writing there; stop it, or use a different --output",
                ) from None
            yield
