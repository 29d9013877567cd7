"""A smoothed line: an exponential moving average that knows how many steps lie between its values. Pure."""

import numpy as np
from numpy.typing import NDArray

from trainctl.tui.state.series import Window


def smooth(window: Window, half_life_steps: float) -> NDArray[np.float64]:
    """For each bucket the mean of all values up to it, where one loses half its weight in `half_life_steps` steps.

        s_i = sum_j<=i  n_j v_j d^(t_i - t_j)  /  sum_j<=i  n_j d^(t_i - t_j),    d = 2^(-1 / half_life_steps)

    v_j is a bucket's mean, n_j how many finite values it has and t_j its first step. The division is what corrects the
    start's bias; steps that are missing let older values fade for as long as they last; values that aren't finite
    count for nothing. NaN where a bucket has no finite value, so that gaps stay gaps.
    """
    mean, count = window.mean.tolist(), window.count.tolist()
    faded = np.exp2(-np.diff(window.first, prepend=window.first[:1]) / half_life_steps).tolist()
    made, total, weight = [], 0.0, 0.0
    for value, values, fade in zip(mean, count, faded, strict=True):
        total, weight = total * fade, weight * fade
        if values > 0:
            total, weight = total + value * values, weight + values
        made.append(total / weight if values > 0 else np.nan)
    return np.asarray(made, np.float64)
