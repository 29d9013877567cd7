"""Values that a report has of memory, by the metrics' names."""

from trainctl.protocol import messages as m


def memory(held: float | None = None, peak: float | None = None, cap: float | None = None) -> dict[str, float]:
    """In bytes; what is None isn't known."""
    found = zip(m.RANK_COLUMNS, (held, peak, cap), strict=True)
    return {name: float(value) for name, value in found if value is not None}


def memory_parts(peak: float, held: float) -> dict[str, float]:
    """The parts of a peak and the cache of an allocator, in bytes: of a model that is trained as a whole."""
    of_peak = {"weights": 0.13, "gradients": 0.13, "moments": 0.26, "activations": 0.48}
    assert of_peak.keys() == m.MEMORY_PARTS.keys()
    return {
        **{f"memory_{name}_bytes": part * peak for name, part in of_peak.items()}, "memory_cache_bytes": 0.07 * held,
    }  # fmt: skip
