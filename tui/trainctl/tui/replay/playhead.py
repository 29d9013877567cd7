"""Where a replay is, and how it moves: an immutable value."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

SLOWEST, FASTEST = 0.25, 4096.0


@dataclass(frozen=True)
class Playhead:
    """Steps first..last; `step` is the newest that is shown. `rest` is time watched that no step has taken yet."""

    first: int
    last: int
    step: int = 0  # 0: the first
    playing: bool = True
    speed: float = 1.0  # seconds of the run in a second
    rest: float = 0.0

    def __post_init__(self) -> None:
        if not self.step:
            object.__setattr__(self, "step", self.first)

    def at(self, step: int, *, playing: bool | None = None) -> "Playhead":
        """At another step, as near as there is one."""
        step = min(max(step, self.first), self.last)
        return replace(self, step=step, rest=0.0 if playing is None else self.rest,
                       playing=self.playing if playing is None else playing)  # fmt: skip

    def toggled(self) -> "Playhead":
        """Playing or not; from the end it begins again."""
        if not self.playing and self.step == self.last:
            return replace(self, step=self.first, playing=True, rest=0.0)
        return replace(self, playing=not self.playing)

    def faster(self, times: float) -> "Playhead":
        return replace(self, speed=min(max(self.speed * times, SLOWEST), FASTEST))

    def after(self, seconds: float, ahead: Sequence[float]) -> tuple["Playhead", int]:
        """After so much time: how many of the steps ahead, told by their seconds, are shown. At the end it stops."""
        if not self.playing:
            return self, 0
        budget, passed = self.rest + seconds * self.speed, 0
        for took in ahead:
            if took > budget:
                break
            budget -= max(took, 1e-6)
            passed += 1
        over = self.step >= self.last or (passed == len(ahead) and not ahead)
        return replace(self, rest=budget if passed < len(ahead) else 0.0, playing=not over), passed
