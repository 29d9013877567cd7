"""TensorBoard as a mirror's target: event files of one run, written by tensorboardX, complete at every flush.

Steps that were retracted are purged by the format's own means, a session that starts at a step: TensorBoard then shows
nothing that was written at that step or a later one before.
"""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainctl.protocol.errors import InvalidInputError, installing
from trainctl.tui.export.mirror.metrics import EVALUATION_LOSS, Point, Text, flat


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """tensorboardX imports torch where it is installed: seconds and 300 MB, of which scalars need nothing."""
    hidden = "torch" not in sys.modules
    if hidden:
        # The import system's own way to say that it isn't there.
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules["torch"]


try:
    with _without_torch():
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary
except ImportError:
    problem = f"tensorboard needs tensorboardX; {installing('tensorboard')}"
    raise InvalidInputError("--to", problem) from None


class TensorBoard:
    """A new event file in `folder`, after those of earlier sessions; `step` is the last one that they hold for sure."""

    name = "tensorboard"
    forgets, at_end = True, False

    def __init__(self, folder: Path, step: int) -> None:
        # The writer's own names count seconds: two sessions in one would be one file, and the first lost.
        number = len(list(folder.glob("events.out.tfevents.*")))
        self._writer = EventsWriter(str(folder / "events"), f".{number:06d}")
        self._is_first = number == 0
        self.back(step)  # also in the first session: only from the second start on does TensorBoard purge

    def describe(self, config: Mapping[str, Any], at: float) -> None:
        """The run's settings, as hyperparameters and as text, in the first session."""
        settings = flat(config)
        if not self._is_first:
            return
        for part in summary.hparams(settings, {"train/loss": 0.0, EVALUATION_LOSS: 0.0}):
            self._write(0, at, part)
        rows = "\n".join(f"| {name} | {value} |" for name, value in settings.items())
        self._write(0, at, summary.text("settings", f"| setting | value |\n| --- | --- |\n{rows}"))

    def back(self, step: int) -> None:
        """Purge what was written at the steps after."""
        self._writer.write_event(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def point(self, point: Point, number: int, attempt: int) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
        self._write(point.step, point.at, Summary(value=values))

    def evaluation(self, step: int, values: Mapping[str, float], at: float, number: int) -> None:
        written = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step, at, Summary(value=written))

    def text(self, text: Text, number: int) -> None:
        lines = "\n".join(f"- {line}" for line in text.text.splitlines())
        self._write(text.step, text.at, summary.text(text.kind, lines))

    def flush(self) -> None:
        self._writer.flush()

    def close(self, *, failed: bool) -> str:
        self._writer.close()
        return ""

    def _write(self, step: int, at: float, made: Any) -> None:
        self._writer.write_event(Event(step=step, wall_time=at, summary=made))
