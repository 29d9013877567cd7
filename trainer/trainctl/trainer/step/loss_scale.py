"""The factor that keeps float16 gradients within range: dynamic loss scaling (Micikevicius et al. 2018).

Powers of two, so scaling rounds nothing. Other dtypes have float32's range and keep a factor of one.
"""

from dataclasses import dataclass

_FIRST = 65536.0
_SMALLEST, _LARGEST = 2.0**-14, 2.0**24
_GROW_AFTER = 2000


@dataclass
class LossScale:
    """Changes only when a step commits, and only by what all ranks know; so it is the same on all of them."""

    value: float
    good_steps: int = 0  # since the last change

    @classmethod
    def of(cls, dtype: str) -> "LossScale":
        return cls(_FIRST if dtype == "float16" else 1.0)

    def committed(self, dtype: str, skipped: str | None) -> None:
        """Halve after a step that was skipped, double after 2000 in a row that weren't."""
        if dtype != "float16":
            return
        self.good_steps = 0 if skipped else self.good_steps + 1
        if skipped:
            self.value = max(_SMALLEST, self.value / 2)
        elif self.good_steps >= _GROW_AFTER:
            self.value, self.good_steps = min(_LARGEST, self.value * 2), 0
