"""One session of a mirror, from its target opened to its target closed, ended by the run's end or by a signal."""

import contextlib
import importlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainctl.protocol.errors import UnreachableError
from trainctl.tui.export.mirror.progress import MirrorProgress, MirrorProgressFile
from trainctl.tui.export.mirror.run_source import RunSource
from trainctl.tui.export.mirror.sync import Mirror, MirrorTarget

To = Literal["tensorboard", "wandb"]
POLL_SECONDS = 2.0


@dataclass(frozen=True)
class MirrorOptions:
    """A mirror as its options describe it."""

    to: To
    folder: Path  # of this run and target
    follow: bool = False
    project: str = "trainctl"
    offline: bool = False
    tell: Callable[[str], object] = print  # how a remark reaches the person


def run(source: RunSource, wanted: MirrorOptions) -> MirrorProgress:
    """Mirror what there is, and with `follow` what comes, to the run's end. Raises InvalidInputError, and
    UnreachableError for an agent that does not answer at first."""
    _library(wanted)
    kept = MirrorProgressFile(wanted.folder / f"{wanted.to}.place.json")
    with kept.held(), _stopped() as stop:
        place = kept.load(source.run, wanted.to)
        target = _open(source, wanted, place)
        mirror = Mirror(source, target, place, keep=lambda _: None if target.at_end else kept.save(_), stop=stop.is_set)
        failed = False
        try:
            # A record that says nothing of its run's state is an old one.
            failed = _mirror(mirror, wanted, stop, whole=not wanted.follow and source.view() is None)
        finally:
            session = target.close(failed=failed)
            kept.save(mirror.place.finished(session))
        return mirror.place


def _mirror(mirror: Mirror, wanted: MirrorOptions, stop: threading.Event, *, whole: bool) -> bool:
    """Return whether the run has failed. `whole`: nothing is waited for."""
    state = mirror.catch_up(whole=whole)
    away = False
    while wanted.follow and not mirror.has_ended and not stop.wait(POLL_SECONDS):
        try:
            state = mirror.catch_up(whole=False)
        except UnreachableError as error:
            if not away:
                wanted.tell(f"{error}; waiting for it")
            away = True
        else:
            away = False
    return state == "failed"


def _library(wanted: MirrorOptions) -> None:
    """Load what writes the target. Raises InvalidInputError if it isn't installed, or can't be used."""
    loaded = importlib.import_module(f"trainctl.tui.export.mirror.{wanted.to}")
    if wanted.to == "wandb" and not wanted.offline:
        loaded.check_key()


def _open(source: RunSource, wanted: MirrorOptions, place: MirrorProgress) -> MirrorTarget:
    view, config = source.view(), dict(source.config())
    config |= {"trainctl": {"run": source.run}}
    if view is not None and view.cost is not None:
        config |= {"cost": {"currency": view.cost.currency}}
    if wanted.to == "tensorboard":
        from trainctl.tui.export.mirror.tensorboard import TensorBoard

        board = TensorBoard(wanted.folder, place.step)
        board.describe(config, view.started_at if view is not None else 0.0)
        return board
    from trainctl.tui.export.mirror.wandb import WeightsBiases

    made = WeightsBiases(
        wanted.folder,
        source.run,
        wanted.project,
        config,
        place.sessions,
        offline=wanted.offline,
        name=view.name if view is not None else source.run,
    )
    if made.url is not None:
        wanted.tell(f"wandb: {made.url}")
    return made


@contextlib.contextmanager
def _stopped() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set, so that what was written is finished."""
    stop = threading.Event()

    def end(number: int, frame: Any) -> None:
        stop.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
