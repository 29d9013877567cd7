"""The errors that more than one folder of the trainer raises or handles."""

from trainctl.protocol.errors import TrainctlError

FAILURES = (TrainctlError, OSError, RuntimeError, MemoryError)
"""Errors that end a trainer or a worker with one line: ours, the system's and the array libraries'."""


class DeviceMemoryError(Exception):
    """The device has no room for this micro-batch; the scratch is empty again, accumulators and weights are
    untouched."""


class GroupError(TrainctlError):
    """Joining, levelling or summing failed; what this rank holds is as it was."""


class EngineError(GroupError):
    """What an engine said when it failed; `peer` is the place of the rank that it is about, None if not known."""

    def __init__(self, text: str, peer: int | None) -> None:
        super().__init__(text)
        self.peer = peer


class AbandonedError(Exception):
    """The generation that a plan belongs to has been left; what was in flight is discarded."""


class OutdatedError(Exception):
    """An order of a generation lower than one already seen: its sender is no longer who orders here."""


def first_line(error: BaseException) -> str:
    """An exception as one line of at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].endswith(":"):  # a heading
        lines = [" ".join(lines[:2])]
    return (lines[0] if lines else type(error).__name__)[:300]
