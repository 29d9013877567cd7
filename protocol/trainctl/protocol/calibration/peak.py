"""The fastest micro-batch of a device: when the sweep ends, where its peak is, and what has got slower. Pure."""

import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from trainctl.protocol.calibration.profile import DeviceProfile, Pass, ProfileKey
from trainctl.protocol.config.run_tables import Wanted, unmeasured_micro

FALL = 0.02
"""Fraction of the best rate below which a micro-batch counts as a fall."""
FALLS = 2
"""Falls in a row past the peak after which no larger micro-batch is tried."""
NEAR = 0.01
"""Fraction of the best rate by which a smaller micro-batch, which needs less memory, may be slower."""
MAX_CAP_PART = 0.85
"""Part of the memory cap that the peak of a chosen micro-batch may take: the rest is for what training adds."""
SLOWER = 0.1
"""Fraction by which a rate must fall to be reported as slower: repeated measurements differ by less."""


def next_micro(passes: Sequence[Pass], most: int, out_of_memory: int | None = None) -> int | None:
    """The micro-batch to measure next in the sweep 1, 2, 4 ...; None at its end. `most`: the largest of interest.
    `out_of_memory`: the smallest that ran out of memory."""
    if not passes:
        return 1 if out_of_memory is None or out_of_memory > 1 else None
    largest = max(one.micro for one in passes)
    wanted = min(2 * largest, most)
    is_too_large = out_of_memory is not None and wanted >= out_of_memory
    return None if wanted <= largest or is_too_large or has_fallen(passes) else wanted


def has_fallen(passes: Sequence[Pass]) -> bool:
    """Return whether the last micro-batches are all past the peak, and slower by more than FALL."""
    ordered = sorted(passes, key=lambda one: one.micro)
    best = max(range(len(ordered)), key=lambda at: ordered[at].rate)
    last = ordered[max(best + 1, len(ordered) - FALLS) :]
    return len(last) == FALLS and all(one.rate < (1 - FALL) * ordered[best].rate for one in last)


def between(passes: Sequence[Pass], out_of_memory: int | None = None) -> list[int]:
    """Micro-batches half-way from the fastest one to its neighbours: a sweep by doubling can miss the peak there. The
    upper neighbour may be the smallest that ran out of memory."""
    best = max(passes, key=lambda one: one.rate).micro
    sizes = sorted({one.micro for one in passes} | ({out_of_memory} if out_of_memory is not None else set()))
    at = sizes.index(best)
    near = sizes[max(0, at - 1) : at + 2]
    return [(low + high) // 2 for low, high in itertools.pairwise(near) if high - low > 1]


def peak(passes: Sequence[Pass], most: int | None = None, max_bytes: float | None = None) -> Pass:
    """The smallest micro-batch whose rate is within NEAR of the best, of those within `most` samples and `max_bytes`
    of memory. If none is, the smallest. Raises ValueError without passes."""
    allowed = [one for one in passes if _is_within(one, most, max_bytes)]
    if not allowed:
        return min(passes, key=lambda one: one.micro)
    best = max(one.rate for one in allowed)
    return min((one for one in allowed if one.rate >= (1 - NEAR) * best), key=lambda one: one.micro)


def fastest_within_cap(passes: Sequence[Pass], most: int, cap_bytes: float | None) -> Pass:
    """Return the peak that leaves room in the memory that a rank may take: what `micro = "auto"` chooses."""
    return peak(passes, most, None if cap_bytes is None else MAX_CAP_PART * cap_bytes)


def first_micro(
    wanted: Wanted,
    passes: Sequence[Pass],
    global_batch: int,
    *,
    cap_bytes: float | None = None,
    share: int | None = None,
) -> int:
    """Return the micro-batch that a rank begins with: as the run file sets it (`wanted`), else by the passes of its
    profile, else a usual one. Agents, advice and simulations all begin with it. `share`: as the run file sets it."""
    if isinstance(wanted, int) or not passes:
        return unmeasured_micro(wanted, global_batch, share)
    return fastest_within_cap(passes, global_batch, cap_bytes).micro


def _is_within(one: Pass, most: int | None, max_bytes: float | None) -> bool:
    is_small = most is None or one.micro <= most
    return is_small and (max_bytes is None or one.peak_bytes is None or one.peak_bytes <= max_bytes)


# ---------------------------------------------------------------- beside an earlier profile


class Slowdown(NamedTuple):
    """A rate that has fallen since an earlier profile."""

    what: str
    before: float
    now: float

    @property
    def fraction(self) -> float:
        """The part of the earlier rate that is missing."""
        return 1 - self.now / self.before


def slower(earlier: DeviceProfile, later: DeviceProfile) -> list[Slowdown]:
    """Return what both profiles have, and is slower by more than SLOWER in the later one. The training rate is compared
    only if the model, length, data type and settings are the same."""
    found = [Slowdown(*one) for one in _both(earlier, later)]
    return [one for one in found if one.now < (1 - SLOWER) * one.before]


def is_comparable(one: DeviceProfile, other: DeviceProfile) -> bool:
    """Return whether the passes of two profiles were of the same kind, beside as many other nodes of the machine,
    whatever versions of the libraries ran them."""
    return _kind(one.key) == _kind(other.key) and len(one.beside) == len(other.beside)


def _kind(key: ProfileKey) -> ProfileKey:
    return msgspec.structs.replace(key, backend_version="", trainctl_version="")


def _both(earlier: DeviceProfile, later: DeviceProfile) -> Iterator[tuple[str, float, float]]:
    """Return what the two have in common: its name, the earlier rate and the later one."""
    if is_comparable(earlier, later):
        rates = {one.micro: one.rate for one in earlier.passes}
        ratios = [one.rate / rates[one.micro] for one in later.passes if one.micro in rates]
        if ratios:
            best = max(rates.values())
            yield "training, samples/s", best, best * statistics.median(ratios)
    if earlier.key.device == later.key.device:
        before, after = _parts(earlier), _parts(later)
        yield from ((what, rate, after[what]) for what, rate in before.items() if what in after)


def _parts(profile: DeviceProfile) -> dict[str, float]:
    """The rates of the machine's parts by name."""
    found: dict[str, float | None] = {f"{one.dtype} matmul, GFLOPS": one.gflops for one in profile.matmul}
    if profile.disk is not None:
        found["disk write, bytes/s"] = profile.disk.write_bytes_per_second
        found["disk read, bytes/s"] = profile.disk.read_bytes_per_second
    for link in profile.links:
        found[f"to {link.peer}, bytes/s"] = link.sent_bytes_per_second
        found[f"from {link.peer}, bytes/s"] = link.received_bytes_per_second
    return {name: rate for name, rate in found.items() if rate is not None}
