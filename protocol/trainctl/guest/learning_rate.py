"""The learning rate of any torch optimizer, changed while it trains.

Only during `optimizer.step()` do its parameter groups have the changed rate. Before and after, and so for every
scheduler and checkpoint, they have the loop's own. What was ordered is in the groups too, as numbers under the names
below, so that `optimizer.load_state_dict()` brings it back.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_FACTOR = "trainctl_lr_factor"
_CONSTANT = "trainctl_lr"


class LearningRate:
    """Steps of one optimizer, with a factor or a constant in place of the loop's own rates."""

    def __init__(self, optimizer: Any) -> None:
        self.used: Any = None
        """The rate of the newest step, of the first group that learns."""
        self.refusal = ""
        """Why the rate can't be set; empty if it can."""
        self.optimizer = optimizer
        self._changed: list[tuple[dict[str, Any], Any, Any]] = []  # group, own rate, rate in use
        self._base: list[float] = []
        inner = optimizer
        while hasattr(getattr(inner, "optimizer", None), "param_groups"):  # as accelerate wraps it
            inner = inner.optimizer
        self._inner = inner
        if not hasattr(inner, "register_step_pre_hook"):
            self.refusal = f"{type(optimizer).__name__} has no step hooks as torch's optimizers have: offer set-lr"
        elif any(group.get("lr") is None for group in inner.param_groups):
            self.refusal = f"{type(inner).__name__} chooses its rate by itself"
        else:
            self._base = [float(group.get("initial_lr", group["lr"])) for group in inner.param_groups]
            self._first = next((at for at, rate in enumerate(self._base) if rate > 0), 0)
            self._hooks = (inner.register_step_pre_hook(self._before), inner.register_step_post_hook(self._after))

    def set(self, value: float, schedule: str = "scale") -> tuple[float, float]:
        """Have the next steps use the rate `value`, and scale the rest of the schedule by the same factor or keep it
        constant; the other groups keep their proportion to the first. Return the rate before and after.

        Raises ValueError for a scale from a schedule that is at 0.
        """
        self._restore()
        groups = self._inner.param_groups
        own = [float(group["lr"]) for group in groups]
        first = own[self._first]
        before = _rate(groups[self._first], first)
        if schedule == "scale":
            if first == 0 and value > 0:
                raise ValueError("the loop's own schedule is at 0 now, which no factor changes: use schedule=set")
            factor = value / first if first else 1.0
            for group in groups:
                group.pop(_CONSTANT, None)
                group[_FACTOR] = factor
        else:
            shares = own if first else self._base
            for group, share in zip(groups, shares):  # noqa: B905  groups added since have no base
                group.pop(_FACTOR, None)
                group[_CONSTANT] = value * (share / shares[self._first]) if shares[self._first] else value
        return before, value

    @property
    def is_changed(self) -> bool:
        """Tell if the steps use another rate than the loop's own."""
        return any(_FACTOR in group or _CONSTANT in group for group in self._inner.param_groups)

    def remove(self) -> None:
        """Leave the optimizer as it was."""
        if not self.refusal:
            self._restore()
            for hook in self._hooks:
                hook.remove()

    def _before(self, *_: object) -> None:
        if self._changed:
            self._restore()
        groups = self._inner.param_groups
        first = groups[self._first]
        self.used = _copy(first["lr"])
        if _FACTOR in first or _CONSTANT in first:
            for group in groups:
                own = group["lr"]
                rate = _rate(group, own)
                if hasattr(own, "copy_"):  # a tensor that captured graphs read
                    own, tensor = own.clone(), own
                    tensor.copy_(rate)
                    rate = tensor
                else:
                    group["lr"] = rate
                self._changed.append((group, own, rate))
            self.used = _copy(first["lr"])

    def _after(self, *_: object) -> None:
        if self._changed:
            self._restore()

    def _restore(self) -> None:
        """Give the groups the loop's own rates back; also after a step that raised."""
        for group, own, rate in self._changed:
            if group["lr"] is rate:  # else the loop has set another
                if hasattr(own, "copy_"):
                    rate.copy_(own)
                else:
                    group["lr"] = own
        self._changed.clear()


def _rate(group: dict[str, Any], own: Any) -> Any:
    if _CONSTANT in group:
        return group[_CONSTANT]
    return own * group[_FACTOR] if _FACTOR in group else own


def _copy(rate: Any) -> Any:
    return rate.clone() if hasattr(rate, "clone") else rate
