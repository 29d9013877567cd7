"""A curve through noisy points that consists of few straight pieces: a continuous line with a knot at some points."""

from bisect import bisect_right
from collections.abc import Sequence

LEAST_BEND = 6.0
"""Rise of the sum of squared errors, in variances, below which a knot is noise and is left out."""

Points = Sequence[tuple[int, float]]


def straightened(points: Points, noise: float) -> tuple[tuple[int, float], ...]:
    """The same sizes with the values of the line. `noise`: the values' relative standard error. Knots are left out
    one after another, that which changes the fit least first, while the change is within the noise."""
    if noise <= 0 or len(points) < 3:
        return tuple(points)
    knots = [*range(len(points))]
    fit, error = [value for _, value in points], 0.0
    while len(knots) > 2:
        tries = [(*_fit(points, [*knots[:at], *knots[at + 1 :]], noise), at) for at in range(1, len(knots) - 1)]
        next_error, next_fit, at = min(tries)
        if next_error - error > LEAST_BEND or min(next_fit) <= 0:
            break
        fit, error = next_fit, next_error
        del knots[at]
    return tuple((size, value) for (size, _), value in zip(points, fit, strict=True))


def _fit(points: Points, knots: Sequence[int], noise: float) -> tuple[float, list[float]]:
    """Sum of squared errors, and values, of the line with these knots that is nearest to the points."""
    places = [_place(points, knots, size) for size, _ in points]
    weights = [1 / (noise * value) ** 2 for _, value in points]
    count = len(knots)
    diagonal, beside, right = [0.0] * count, [0.0] * count, [0.0] * count
    for (left, part), weight, (_, value) in zip(places, weights, points, strict=True):
        diagonal[left] += weight * (1 - part) ** 2
        diagonal[left + 1] += weight * part**2
        beside[left] += weight * part * (1 - part)
        right[left] += weight * (1 - part) * value
        right[left + 1] += weight * part * value
    at_knots = _solved(diagonal, beside, right)
    values = [at_knots[left] * (1 - part) + at_knots[left + 1] * part for left, part in places]
    errors = (weight * (value - fit) ** 2 for weight, (_, value), fit in zip(weights, points, values, strict=True))
    return sum(errors), values


def _place(points: Points, knots: Sequence[int], size: int) -> tuple[int, float]:
    """The knot before a size, and the part of the way to the next one."""
    sizes = [points[knot][0] for knot in knots]
    left = min(bisect_right(sizes, size) - 1, len(sizes) - 2)
    return left, (size - sizes[left]) / (sizes[left + 1] - sizes[left])


def _solved(diagonal: list[float], beside: list[float], right: list[float]) -> list[float]:
    """The solution of a symmetric tridiagonal system (Thomas algorithm); the arguments are used up."""
    for row in range(1, len(diagonal)):
        factor = beside[row - 1] / diagonal[row - 1]
        diagonal[row] -= factor * beside[row - 1]
        right[row] -= factor * right[row - 1]
    for row in range(len(diagonal) - 1, -1, -1):
        following = beside[row] * right[row + 1] if row + 1 < len(diagonal) else 0.0
        right[row] = (right[row] - following) / diagonal[row]
    return right
