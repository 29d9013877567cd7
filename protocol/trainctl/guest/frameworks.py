"""Parts that the adapters to training frameworks share: versions, and an evaluation that leaves no trace."""

import contextlib
import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, Final

from trainctl.guest.run import Run

_STEERED: Final = ("set-lr", "checkpoint", "evaluate", "pause", "resume", "stop")


def is_known(version: str, known: tuple[tuple[int, int], tuple[int, int]]) -> bool:
    """Return whether a version lies between two minor versions, both included."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and known[0] <= (int(numbers[1]), int(numbers[2])) <= known[1]


def watch_only(run: Run, why: str) -> None:
    """Refuse all verbs but `note`, and say once why."""
    for verb in _STEERED:
        run.offer(verb, why=why)
    run.note(why)


def unknown(framework: str, version: str) -> str:
    """Return why a version that isn't known is only watched."""
    return f"this trainctl does not know {framework} {version}, so it only watches it"


def owner_above(frame: FrameType | None, kind: type) -> Any:
    """Return the object of a class whose method is being called, from a frame on upwards: callbacks don't get it."""
    while frame is not None:
        if isinstance(owner := frame.f_locals.get("self"), kind):
            return owner
        frame = frame.f_back
    return None


def count(batch: Any) -> tuple[int | None, Any]:
    """Return how many samples a batch has, and how many tokens without padding, as far as they are to be seen in it."""
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
        if ids is None:
            return count(next(iter(batch.values()), None))[0], None
        mask = batch.get("attention_mask")
        return ids.shape[0], ids.numel() if mask is None or mask.dim() != 2 else mask.sum()
    if isinstance(batch, (list, tuple)):
        first = batch[0] if batch else None
        return (len(batch), None) if isinstance(first, Mapping) else (count(first)[0], None)
    shape = getattr(batch, "shape", None)
    return (shape[0] if shape else None), None


@contextlib.contextmanager
def undisturbed(modules: Iterable[Any]) -> Iterator[None]:
    """Restore the train modes of torch modules and all random numbers afterwards, so that training goes on as if
    nothing had happened in between."""
    torch, numpy = sys.modules["torch"], sys.modules.get("numpy")
    modes = [(module, module.training) for module in modules]
    own = random.getstate()
    array = numpy.random.get_state() if numpy is not None else None
    cpu = torch.get_rng_state()
    devices = [getattr(torch, name) for name in ("cuda", "xpu") if getattr(torch, name).is_available()]
    states = [device.get_rng_state_all() for device in devices]
    metal = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        random.setstate(own)
        if numpy is not None:
            numpy.random.set_state(array)
        torch.set_rng_state(cpu)
        for device, state in zip(devices, states):  # noqa: B905  Python 3.10
            device.set_rng_state_all(state)
        if metal is not None:
            torch.mps.set_rng_state(metal)
