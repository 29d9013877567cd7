"""Any loop that steps an optimizer of torch, watched and steered by torch's global optimizer hooks, without a line.

A step is one of the first optimizer's. It is over when the next one is about to be applied: by then, what the script
logs after a step has come, and nothing of the next step is in the weights. Orders are carried out there.
"""

import atexit
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final

from trainctl.guest import run, scalars

_KNOWN: Final = 2
"""Newest major version of torch whose loops are steered; those of others are watched only."""
_IDLE_STEPS: Final = 50
"""Steps of other optimizers in a row after which the loop's is one of those."""
_SEVERAL: Final = "the loop has several optimizers: attach it with the one whose rate is to be set"


def enter(module: ModuleType) -> None:
    """Follow each optimizer that steps from now on. `module`: torch.optim.optimizer."""
    loop = TorchLoop()
    module.register_optimizer_step_pre_hook(loop.before)
    module.register_optimizer_step_post_hook(loop.after)
    scalars.taps.append(loop.hear)


class TorchLoop:
    """The loop of this process. It stands aside where the script or a more specific adapter has attached the run."""

    def __init__(self, attached: run.Run | None = None) -> None:
        """`attached`: the run that this loop's steps are of, where an adapter has attached it for that."""
        self.steers = True
        """False if the optimizer's rate isn't to be set."""
        self._attached = attached
        self._run: run.Run | None = None
        self._pid = os.getpid()
        self._is_off = False
        self._main: weakref.ref[Any] | None = None
        self._idle = 0
        self._steps = 0  # of the loop's optimizer
        self._closed = 0  # of them that have a row
        self._is_late: dict[str, bool] = {}  # name -> whether it is logged after its step, not before
        self._values: dict[int, dict[str, Any]] = {}  # step -> what was logged for it

    def hear(self, values: Mapping[str, Any]) -> None:
        """Keep what the script logs for the step that it belongs to."""
        if self._is_off:
            return
        for name, value in values.items():
            number = self._steps + (not self._is_late.setdefault(name, self._steps > 0))
            self._values.setdefault(number, {})[scalars.field_of(name)] = value

    def before(self, optimizer: Any, _args: object, _kwargs: object) -> None:
        """Before an optimizer's step: the loop's step before is over."""
        if self._is_off or _is_compiling():
            return
        if self._guarded(lambda: self._close_step(optimizer)):
            _interrupt()

    def after(self, optimizer: Any, _args: object, _kwargs: object) -> None:
        """After an optimizer's step: count it."""
        if not self._is_off and not _is_compiling():
            self._steps += self._is_main(optimizer)

    def finish(self) -> None:
        """Hand over the newest step: the loop is over."""
        self._guarded(self._hand_over)
        self._is_off = True

    def _close_step(self, optimizer: Any) -> bool:
        """Hand over the step before, if this optimizer is the loop's. Return True if a stop was ordered."""
        if self._run is None:
            self._begin(optimizer)
        elif not self._is_main(optimizer):
            self._join(optimizer)
        else:
            self._idle = 0
            return self._hand_over()
        return False

    def _begin(self, optimizer: Any) -> None:
        if os.getpid() != self._pid or run._current is not self._attached:
            self._is_off = True
            return
        self._run = run.attach(optimizer=optimizer if self.steers else None)
        self._main = weakref.ref(optimizer)
        atexit.register(self._guarded, self._hand_over)
        version = sys.modules["torch"].__version__
        if int(version.partition(".")[0]) > _KNOWN:
            why = f"torch {version} is newer than trainctl knows: its loops are only watched"
            for verb in ("set-lr", "pause", "resume", "stop"):
                self._run.offer(verb, why=why)
            self._run.note(why)

    def _join(self, optimizer: Any) -> None:
        """Another optimizer steps: beside the loop's, or in its place."""
        assert self._run is not None and self._main is not None
        self._idle += 1
        if self._main() is None or self._idle > _IDLE_STEPS:
            self._hand_over()
            self._idle, self._main = 0, weakref.ref(optimizer)
            run.attach(optimizer=optimizer)
        elif self._idle == 1:
            self._run.offer("set-lr", why=_SEVERAL)

    def _hand_over(self) -> bool:
        """Hand over the newest step, which is over."""
        if self._run is None or self._steps == self._closed or os.getpid() != self._pid:
            return False
        if self._run._last != self._closed:  # another one makes this run's steps
            self._is_off = True
            return False
        values = self._values.pop(self._steps, {})
        self._values = {number: rest for number, rest in self._values.items() if number > self._steps}
        self._closed = self._steps
        return self._run.step(**values)

    def _is_main(self, optimizer: Any) -> bool:
        return self._main is not None and self._main() is optimizer

    def _guarded(self, function: Callable[[], bool]) -> bool:
        try:
            return function()
        except Exception as error:  # noqa: BLE001  whatever is wrong with us, the loop goes on as without us
            self._is_off = True
            print(f"trainctl: this loop isn't watched any more: {error!r}", file=sys.stderr)
            return False


def _is_compiling() -> bool:
    """Return whether this is traced for torch.compile, which would take the hook's work into the graph."""
    compiler = getattr(sys.modules["torch"], "compiler", None)
    return compiler is not None and bool(compiler.is_compiling())


def _interrupt() -> None:
    """Have the main thread interrupted as by Ctrl-C."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, signal.SIG_DFL, None):
        raise KeyboardInterrupt
    os.kill(os.getpid(), signal.SIGINT)
