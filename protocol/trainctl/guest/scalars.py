"""Numbers that a script logs by wandb, trackio or TensorBoard, as metrics of its steps."""

import functools
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final

taps: Final[list[Callable[[Mapping[str, Any]], None]]] = []
"""Called with the names and numbers of each call that logs some."""
_LOGGED: Final[dict[str, tuple[str, str]]] = {
    "wandb.sdk.wandb_run": ("Run", "log"),
    "trackio.run": ("Run", "log"),
    "torch.utils.tensorboard.writer": ("SummaryWriter", "add_scalar"),
    "tensorboardX.writer": ("SummaryWriter", "add_scalar"),
}
_TRAINING: Final = frozenset({"train", "training", "step", "batch", "iter"})
_HELD_OUT: Final = frozenset({"val", "valid", "validation", "eval", "evaluation"})


def enter(module: ModuleType) -> None:
    """Hear what is logged by a module's class, which is called as always."""
    owner, method = _LOGGED[module.__name__]
    kind = getattr(module, owner)
    log = getattr(kind, method)

    @functools.wraps(log)
    def logged(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = log(self, *args, **kwargs)
        for tap in taps:
            values = _scalar(*args, **kwargs) if method == "add_scalar" else numbers(*args, **kwargs)
            if values:
                tap(values)
        return result

    setattr(kind, method, logged)


def _scalar(tag: Any = None, scalar_value: Any = None, *_: Any, **__: Any) -> dict[str, Any]:
    return numbers({tag: scalar_value})


def numbers(data: Any = None, *_: Any, **__: Any) -> dict[str, Any]:
    """Return what is a number among the values that are logged."""
    if not isinstance(data, Mapping):
        return {}
    return {name: value for name, value in data.items() if isinstance(name, str) and _is_number(value)}


def _is_number(value: Any) -> bool:
    if isinstance(value, (int, float)):
        return not isinstance(value, bool)
    return hasattr(value, "item") and getattr(value, "ndim", 1) == 0


def field_of(name: str) -> str:
    """Return the argument of `step()` that a logged name stands for: `loss`, `eval_loss`, or the name itself."""
    words = {*re.split(r"[^a-z]+", name.lower())} - {""}
    if words - _TRAINING == {"loss"}:
        return "loss"
    return "eval_loss" if "loss" in words and words - _HELD_OUT == {"loss"} else name
