"""What the self-test's device check needs of an array library on one device."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


class DeviceMemory(NamedTuple):
    """An allocator's counters; None where the device has none."""

    used_bytes: int
    peak_bytes: int | None


class Device(NamedTuple):
    """What is needed of an array library on one device."""

    title: str
    is_host: bool  # whether its memory is the host's, of which a check must not take all
    facts: dict[str, Any]
    product: Callable[[Array, Array, str], Array]
    hold: Callable[[int], Any]  # allocates bytes, and waits for the device
    memory: Callable[[], DeviceMemory | None]
    empty: Callable[[], None]  # gives unused memory back
    is_out_of_memory: Callable[[BaseException], bool]
