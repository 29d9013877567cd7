"""Thresholds of the loss curve that alerts, policies and detectors begin with: each number stands once."""

from typing import Final

SPIKE_MADS: Final = 6.0
"""Distance above the trend that makes a spike, in units of the scatter (scaled MAD)."""
SPIKE_PERCENT: Final = 5.0
"""Least distance above the trend in percent of it, for curves that hardly scatter."""
SPIKE_STEPS: Final = 3
"""Steps in a row that make a spike."""
BACK_STEPS: Final = 50
"""Steps after which a spike whose loss has not come back is stuck."""
TREND_STEPS: Final = 200
"""Steps over which a loss that diverges must rise."""
PAST_STEPS: Final = 100
"""Steps in a row at which its level must be far above the best."""
DIVERGED_MADS: Final = 3.0
"""Distance above the best level, in units of the scatter (scaled MAD) at the best."""
CLIP_STEPS: Final = 100
"""Steps whose median clip scale is judged."""
CLIP_SCALE: Final = 0.01
"""Median clip scale below which clipping holds training back."""
