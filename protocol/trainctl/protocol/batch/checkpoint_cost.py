"""How long a checkpoint stops the training."""

from typing import Final

COPY_BYTES_PER_SECOND: Final = 2e9
"""What a rank copies of its state to main memory, if it wasn't measured: less than one PCIe 3.0 link of a GPU, or one
core, does."""


def loop_seconds(state_bytes: float, disk_bytes_per_second: float, *, background: bool) -> float:
    """Seconds of a writer's training loop: with `[checkpoint] background` those of the copy, else those of the write,
    whose copy is part of it."""
    return state_bytes / (COPY_BYTES_PER_SECOND if background else disk_bytes_per_second)
