"""The record of a simulated run in the replay's screens, while the simulator still writes it."""

import contextlib
import dataclasses
from pathlib import Path

from trainctl.protocol import messages as m
from trainctl.tui.app import launch
from trainctl.tui.replay.replay_app import ReplayApp
from trainctl.tui.replay.replay_source import ReplaySource


class GrowingSource(ReplaySource):
    """Its end moves on until the run has ended; played up to the end it waits there for more."""

    def _advance(self, seconds: float) -> list[m.Live | m.Heartbeat | m.Snapshot]:
        if self.is_growing:
            self._look_again()
        played = self.head.playing
        made = super()._advance(seconds)
        if self.is_growing:
            self.head = dataclasses.replace(self.head, playing=played)
        return made

    @property
    def is_growing(self) -> bool:
        return self._view.state in m.ACTIVE_RUN_STATES

    def _look_again(self) -> None:
        """What the record has gained."""
        last = self._reader.last_step()
        if last is not None:
            self._view = self._read_view(self.head.first, last.step)
            self.head = dataclasses.replace(self.head, last=last.step).at(self.head.step, playing=self.head.playing)
            self.events_known += self._reader.all_events(self.events_known[-1].id if self.events_known else 0)
            self._samples_known = self._reader.all_samples()


def watch_growing(directory: Path, speed: float) -> int:
    """The full screen until it is left; its exit status. Raises InvalidInputError for what can't be shown."""
    with contextlib.closing(GrowingSource(directory, speed)) as source:
        found = launch.configuration()
        app = ReplayApp(source, **launch.options(found))
        return launch.run(app, found, lambda: f"left the simulated run at step {source.head.step:,}")
