"""A command on its way from the screen: sent, followed to its end, and its end reported if nothing else shows it."""

import dataclasses

from trainctl.protocol import messages as m
from trainctl.protocol.errors import TrainctlError, UnreachableError
from trainctl.tui.commands import forms, verb_registry
from trainctl.tui.commands.command import Order, replies
from trainctl.tui.commands.context import READ_ONLY, AppContext, ProgressView
from trainctl.tui.text.styled_line import Piece, clean, line, plain

MUTE_MINUTES = 60.0


class _Unwatched:
    """Nothing on screen follows the command: the bottom line says that it was applied, a notification why not."""

    watching = False

    def follow(self, progress: forms.Progress) -> None:
        return None


UNWATCHED = _Unwatched()


def acknowledge(app: AppContext, alert: m.AlertView, follower: ProgressView = UNWATCHED) -> None:
    """Have an alert call nobody any more."""
    send(app, Order("acknowledge", {"id": alert.id}), follower)


def mute(app: AppContext, alert: m.AlertView, follower: ProgressView = UNWATCHED) -> None:
    """Mute an alert's kind on its node for an hour; one that is muted, no longer."""
    minutes = 0.0 if alert.muted else MUTE_MINUTES
    send(app, Order("mute", {"kind": alert.kind, "minutes": minutes}, alert.node or None), follower)


def send(app: AppContext, order: Order, follower: ProgressView) -> None:
    """Sends a command of the run shown; `follower` is given each state, the person if nothing shows it any more."""
    run = app.shown.run
    if order.run is None and run is not None and verb_registry.of(order.verb).acts_on != "new run":
        order = dataclasses.replace(order, run=run.run)
    progress = forms.Progress(order, app.clock.wall())
    if app.read_only:
        app.notify(READ_ONLY, severity="warning")
        return
    follower.follow(progress)  # at once: the keys after this one must find it sent
    app.run_worker(_carry(app, progress, follower), group="command")


async def _carry(app: AppContext, progress: forms.Progress, follower: ProgressView) -> None:
    order = progress.order
    try:
        if app.client is None:
            raise UnreachableError("no agent")
        async for reply in replies(app.client, order):
            accepted = progress.accepted or reply.state == "accepted"
            progress = dataclasses.replace(progress, accepted=accepted, reply=reply)
            follower.follow(progress)
    except TrainctlError as error:
        progress = dataclasses.replace(progress, problem=str(error))
        follower.follow(progress)
    if not follower.watching:
        _tell(app, progress)


def _tell(app: AppContext, progress: forms.Progress) -> None:
    verb, node, reply = progress.order.verb, progress.order.node, progress.reply
    if reply is not None and progress.applied:
        name = f"{verb} {clean(node)}" if node else verb
        app.show_outcome(line(Piece(f"{name} ", "strong"), *forms.applied_line(reply, app.glyphs)))
    else:
        app.notify(f"{verb}: {plain(forms.progress_line(progress, app.glyphs))}", severity="error", markup=False)
