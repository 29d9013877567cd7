"""Micro-batches that ran out of memory: not tried again for some steps, in what the policy `micro-batch` keeps."""

from collections.abc import Mapping

_SIZE, _UNTIL = "barred ", "until "
"""What the names of numbers begin with, before the rank's."""


def barred(rank: int, size: int, until: int) -> dict[str, float]:
    """What keeps a rank from micro-batches of this many samples, or more, before a step."""
    return {f"{_SIZE}{rank}": float(size), f"{_UNTIL}{rank}": float(until)}


def size(kept: Mapping[str, float], rank: int, step: int) -> int | None:
    """The least micro-batch in samples that a rank must not have at this step; None: any may be tried."""
    return int(kept[f"{_SIZE}{rank}"]) if step < kept.get(f"{_UNTIL}{rank}", 0.0) else None


def was_barred(kept: Mapping[str, float], rank: int) -> bool:
    """Whether a size has ever been barred, so that the micro-batch has been larger."""
    return f"{_SIZE}{rank}" in kept


def go_back(kept: dict[str, float], step: int, steps: int) -> None:
    """In a run that has gone back no bar lasts longer than a whole one, `steps`."""
    for name in kept:
        if name.startswith(_UNTIL):
            kept[name] = min(kept[name], float(step + steps))
