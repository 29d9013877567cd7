"""A node's profile as lines: its curve over the micro-batch with the peak, and the machine's parts. Pure."""

from collections.abc import Iterator

from trainctl.protocol.calibration.peak import peak, slower
from trainctl.protocol.calibration.profile import DeviceProfile
from trainctl.tui.text.formatting import NA, gigabytes, percent, seconds

PEAK_WORD = "peak"
"""Beside the micro-batch that `micro = "auto"` takes."""


def number(value: float) -> str:
    """Return four significant digits, but all of a whole number's: 64.33, 13,600."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def title(node: str, profile: DeviceProfile) -> str:
    """Return the node, and what the profile holds for."""
    key = profile.key
    words = (node, key.device, f"model {key.model_digest[:8]}", f"{key.sequence_length:,} tokens", key.dtype)
    return "  ".join((*words, f"{key.backend} {key.backend_version}"))


def curve_rows(profile: DeviceProfile) -> list[tuple[str, str, str, str, str]]:
    """Return micro-batch, samples per second, part of the peak, peak memory, and a mark; what ran out of memory comes
    last."""
    best, chosen = max(one.rate for one in profile.passes), peak(profile.passes)
    rows = [
        (
            f"{point.micro:,}",
            number(point.rate),
            percent(point.rate / best),
            gigabytes(point.peak_bytes),
            PEAK_WORD if point == chosen else "",
        )
        for point in profile.passes
    ]
    if profile.out_of_memory_micro is not None:
        rows.append((f"{profile.out_of_memory_micro:,}", NA, NA, NA, "out of memory"))
    return rows


def part_lines(profile: DeviceProfile) -> list[tuple[str, str]]:
    """Return name and figures of each part of the machine that was measured."""
    return [(name, text) for name, text in _parts(profile) if text]


def _parts(profile: DeviceProfile) -> Iterator[tuple[str, str]]:
    samples = min((point.micro * point.accumulation for point in profile.grid), default=0)
    cuts = (f"{one.micro}x{one.accumulation} {seconds(one.seconds)}" for one in profile.grid)
    yield f"step of {samples:,}", ", ".join(cuts)
    yield "update", seconds(profile.optimizer_seconds) if profile.optimizer_seconds is not None else ""
    if profile.forward:
        best = max(profile.forward, key=lambda one: one.rate)
        yield "forward only", f"{number(best.rate)} samples/s, micro-batch {best.micro:,}"
    for rate in profile.matmul:
        yield f"{rate.dtype} products", f"{number(rate.gflops)} GFLOPS"
    if profile.disk is not None:
        read = profile.disk.read_bytes_per_second
        yield (
            "disk",
            f"{_bytes(profile.disk.write_bytes_per_second)} written" + (f", {_bytes(read)} read" if read else ""),
        )
    yield "measured beside", ", ".join(profile.beside)
    for link in profile.links:
        trip = f", round trip {seconds(link.latency_seconds)}" if link.latency_seconds is not None else ""
        both = f"{_bytes(link.sent_bytes_per_second)} sent, {_bytes(link.received_bytes_per_second)} received at once"
        yield f"link to {link.peer}", both + trip


def _bytes(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"


def slower_lines(node: str, earlier: DeviceProfile | None, profile: DeviceProfile, when: str) -> list[str]:
    """Return a line for each rate that has fallen since an earlier profile, made at `when`."""
    found = slower(earlier, profile) if earlier is not None else []
    return [
        f"{node} is slower than on {when}: {one.what} {number(one.before)} → {number(one.now)}"
        f" ({-100 * one.fraction:.0f} %)"
        for one in found
    ]
