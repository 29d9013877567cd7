"""A command on its way from the screen: sent, followed to its end, and told of where nothing shows it any more."""

import dataclasses
from typing import TYPE_CHECKING, Protocol

from trainctl.protocol.errors import TrainctlError, UnreachableError
from trainctl.tui.cli.agent_call import Order
from trainctl.tui.commands import forms
from trainctl.tui.text.styled_line import plain

if TYPE_CHECKING:
    from trainctl.tui.app.app import TrainctlApp


class Follower(Protocol):
    """What shows how far a command has come."""

    @property
    def watching(self) -> bool:
        """Whether a person still sees it."""
        ...

    def follow(self, progress: forms.Progress) -> None: ...


def send(app: "TrainctlApp", order: Order, follower: Follower) -> None:
    """Sends a command of the run shown; `follower` is told of each state it reaches, and the person if nothing shows it
    any more."""
    run = app.shown.run
    if order.run is None and order.verb != "start-run" and run is not None:
        order = dataclasses.replace(order, run=run.run)
    progress = forms.Progress(order, app.clock.wall())
    if app.read_only:
        app.notify("read-only: commands are off for this screen", severity="warning")
        return
    follower.follow(progress)  # at once: the keys after this one must find it sent
    app.run_worker(_carry(app, progress, follower), group="command")


async def _carry(app: "TrainctlApp", progress: forms.Progress, follower: Follower) -> None:
    order = progress.order
    try:
        if app.client is None:
            raise UnreachableError("no agent")
        async for reply in app.client.command(order.verb, dict(order.args), **order.options):
            accepted = progress.accepted or reply.state == "accepted"
            progress = dataclasses.replace(progress, accepted=accepted, reply=reply)
            follower.follow(progress)
    except TrainctlError as error:
        progress = dataclasses.replace(progress, problem=str(error))
        follower.follow(progress)
    if not follower.watching:
        _tell(app, progress)


def _tell(app: "TrainctlApp", progress: forms.Progress) -> None:
    text = f"{progress.order.verb}: {plain(forms.progress_line(progress, app.glyphs))}"
    failed = progress.reply is None or progress.reply.state != "applied"
    app.notify(text, severity="error" if failed else "information", markup=False)
