"""Profiles of the run's steps: the time of each phase on each rank, the longest operators, and the traces' files."""

from pathlib import Path
from typing import ClassVar

from textual.binding import Binding, BindingType

from trainctl.protocol.client.downloads import download_trace
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.messages import RunView, StepProfiles, StepProfilesRequest
from trainctl.tui.commands.context import Values
from trainctl.tui.screens import step_profile_view
from trainctl.tui.screens.polled_screen import PolledScreen
from trainctl.tui.screens.step_profile_view import StepProfile
from trainctl.tui.state.source import Source
from trainctl.tui.text.styled_line import Line, key_words


class StepProfileScreen(PolledScreen[StepProfiles, str]):
    """A row for each phase, a column for each rank; the operators of one of them below."""

    POLL_SECONDS = 2.0
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", "next phase", show=False),
        Binding("up,k", "move(-1)", "previous phase", show=False),
        Binding("right", "column(1)", "next rank", show=False),
        Binding("left", "column(-1)", "previous rank", show=False),
        Binding("pageup", "older(1)", "older", show=False, tooltip="the profile before"),
        Binding("pagedown", "older(-1)", "newer", show=False, tooltip="the profile after"),
        Binding("enter", "record", "profile", show=False, tooltip="profile the next steps"),
        Binding("f", "fetch", "fetch", show=False, tooltip="copy the traces to this machine"),
    ]

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._command: str | None = None  # of the group that is looked at; None: the newest
        self._column = 0

    @property
    def groups(self) -> tuple[StepProfile, ...]:
        return step_profile_view.profiles_of(self.answer.profiles) if self.answer is not None else ()

    @property
    def place(self) -> int:
        """Return the place of the group that is looked at."""
        keys = [group.command for group in self.groups]
        return keys.index(self._command) if self._command in keys else len(keys) - 1

    @property
    def group(self) -> StepProfile | None:
        return self.groups[self.place] if self.groups else None

    @property
    def column(self) -> int:
        return max(min(self._column, len(self.group.ranks) - 1), 0) if self.group is not None else 0

    @property
    def rows(self) -> tuple[str, ...]:
        return self.group.phases if self.group is not None else ()

    def is_of(self, answer: StepProfiles, run: RunView) -> bool:
        return answer.run == run.run

    def key(self, row: str) -> str:
        return row

    def depends_on(self, run: RunView) -> tuple[int, str, float]:
        """Return the step, state and time: a trace is written while a run may be paused."""
        return run.step, run.state, self.owner.clock.monotonic() if self.owner.shown.active else 0.0

    async def ask(self, client: Source, run: str) -> StepProfiles:
        return await client.lead.ask(StepProfilesRequest, run)

    def heading(self, answer: StepProfiles | None) -> str:
        return step_profile_view.title(self.groups, self.place)

    def table(self, answer: StepProfiles, columns: int, rows: int) -> list[Line]:
        group = self.group
        if group is None:
            return step_profile_view.nothing(columns, rows)
        keys = [
            key_words("f", "copy the traces here", "screen.fetch"),
            key_words("enter", "profile again", "screen.record"),
        ]
        phase = self.chosen or ""
        return step_profile_view.lines(group, phase, self.column, columns, rows, keys)

    def values(self) -> Values:
        """Return the folder of the traces on their node, and the name of the chosen rank's."""
        group = self.group
        if group is None or not group.ranks:
            return super().values()
        return (("the trace's name", group.ranks[self.column].file), *super().values())

    # ------------------------------------------------------------ actions

    def action_column(self, by: int) -> None:
        if self.group is not None and self.group.ranks:
            self._column = min(max(self.column + by, 0), len(self.group.ranks) - 1)
            self.paint()

    def action_choose_cell(self, row: int, column: int) -> None:
        """Choose a phase of a rank that was clicked."""
        self._column = column
        self.action_choose_at(row)

    def action_older(self, by: int) -> None:
        """Choose another; the newest is followed."""
        groups = self.groups
        if groups:
            at = min(max(self.place - by, 0), len(groups) - 1)
            self._command = groups[at].command if at < len(groups) - 1 else None
            self.paint()

    def action_record(self) -> None:
        self.owner.open_dialog("profile")

    def action_fetch(self) -> None:
        """Copy the group's traces in the background."""
        group, run = self.group, self.owner.shown.run
        if group is not None and group.ranks and run is not None:
            self.run_worker(self._fetch(group, run.run), group="traces", exclusive=False)

    async def _fetch(self, group: StepProfile, run: str) -> None:
        client, folder = self.owner.client, Path.cwd() / f"{run}-profiles"
        if client is None:
            return
        self.app.notify(f"copying {len(group.ranks)} traces to {folder}", markup=False)
        for rank in group.ranks:
            try:
                path = await download_trace(client.lead, run, rank, folder)
            except (TrainctlError, OSError) as error:
                self.app.notify(f"no trace of {group.label(rank)}: {error}", severity="error", markup=False)
            else:
                self.app.notify(f"trace copied: {path}; open it at ui.perfetto.dev", markup=False)
