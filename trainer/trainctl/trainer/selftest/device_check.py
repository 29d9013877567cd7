"""Whether a device multiplies as the CPU does, counts its memory, and survives a request for more than it has."""

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.machine.check_outcome import CheckOutcome, absent, judged
from trainctl.trainer.selftest.checked_device import Array, Device

SIZE: Final = 256
"""Rows and columns of the matrices."""
TOLERANCES: Final[Mapping[str, float]] = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
"""Largest difference from the product in float64, relative to it, by Frobenius norms. Unit roundoffs are 2^-24, 2^-9
and 2^-12; TF32, with 2^-11, is over float32's tolerance."""
HELD_BYTES: Final = 64 << 20
"""Bytes that are allocated to see them counted."""
HUGE_BYTES: Final = 1 << 46
"""More than any accelerator has. Of the host's memory it isn't asked for: a system may grant it."""
SLACK_BYTES: Final = 1 << 20
"""By which an allocator may round."""


def check_device(backend: str, name: str) -> CheckOutcome:
    """Products, memory counters and an allocation that can't succeed. Not here if the library doesn't find the
    device."""
    device = _opened(backend, name)
    if device is None:
        return absent(f"{backend} finds no {name} device")
    left, right = _matrices()
    faults, figures = _products(device, left, right)
    more_faults, memory = _memory(device)
    out_of_memory = _out_of_memory(device)
    again = device.product(left, right, "float32")
    if digest(again) != figures["float32"]["sha256"]:
        faults.append("the float32 product has other bits after a failed allocation than before")
    worst = ", ".join(f"{dtype} {figures[dtype]['difference']:.1e}" for dtype in TOLERANCES if dtype in figures)
    return judged(
        [*faults, *more_faults, *out_of_memory], f"{device.title}: products differ from float64 by {worst}",
        device=device.title, facts=device.facts, products=figures, memory=memory,
    )  # fmt: skip


def _opened(backend: str, name: str) -> Device | None:
    if backend == "mlx":
        from trainctl.trainer.selftest.mlx_device import open_device as open_mlx

        return open_mlx(name)
    from trainctl.trainer.selftest.torch_device_parts import open_device as open_torch

    return open_torch(name)


def _matrices() -> tuple[Array, Array]:
    numbers = np.random.Generator(np.random.PCG64(7))
    left, right = (numbers.standard_normal((SIZE, SIZE), np.float32) for _ in range(2))
    return left, right


def digest(product: Array) -> str:
    """SHA-256 of an array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(product).tobytes()).hexdigest()


def difference(product: Array, exact: NDArray[np.float64]) -> float:
    """Of a product from the exact one, relative to it, by Frobenius norms."""
    return float(np.linalg.norm(product.astype(np.float64) - exact) / np.linalg.norm(exact))


def _products(device: Device, left: Array, right: Array) -> tuple[list[str], dict[str, Any]]:
    """Faults, and the figures of each data type."""
    exact = left.astype(np.float64) @ right.astype(np.float64)
    faults, figures = list[str](), dict[str, Any]()
    for dtype, tolerance in TOLERANCES.items():
        found = [device.product(left, right, dtype) for _ in range(2)]
        apart = difference(found[0], exact)
        same = digest(found[0]) == digest(found[1])
        figures[dtype] = {"difference": apart, "tolerance": tolerance, "sha256": digest(found[0]), "repeats": same}
        if not apart <= tolerance:
            faults.append(f"a {dtype} product differs by {apart:.1e} from float64; at most {tolerance:g} is expected")
    return faults, figures


def _memory(device: Device) -> tuple[list[str], dict[str, Any]]:
    """Whether the counters follow an allocation and its end."""
    before = device.memory()
    if before is None:
        return [], {}
    held = device.hold(HELD_BYTES)
    during = device.memory()
    del held
    device.empty()
    after = device.memory()
    assert during is not None and after is not None
    figures = {"before": before._asdict(), "during": during._asdict(), "after": after._asdict()}
    grown, shrunk = during.used_bytes - before.used_bytes, during.used_bytes - after.used_bytes
    faults = [
        f"the memory counter {what} by {bytes_:,} bytes for {HELD_BYTES:,}"
        for what, bytes_ in (("rose", grown), ("fell", shrunk))
        if not HELD_BYTES - SLACK_BYTES <= bytes_ <= 2 * HELD_BYTES
    ]
    if during.peak_bytes is not None and during.peak_bytes < during.used_bytes:
        faults.append(f"the peak, {during.peak_bytes:,} bytes, is below the memory in use, {during.used_bytes:,}")
    return faults, {**figures, "allocated_bytes": HELD_BYTES}


def _out_of_memory(device: Device) -> list[str]:
    """The fault if an allocation that can't succeed isn't recognized as a lack of memory."""
    if device.is_host:
        return []
    try:
        device.hold(HUGE_BYTES)
    except (RuntimeError, MemoryError, ValueError) as error:
        if device.is_out_of_memory(error):
            return []
        return [f"an allocation of {HUGE_BYTES:,} bytes failed with an error that isn't recognized: {error}"]
    return [f"an allocation of {HUGE_BYTES:,} bytes succeeded"]
