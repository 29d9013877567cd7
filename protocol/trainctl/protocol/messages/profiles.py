"""Profiles of steps: what the operators of each phase took."""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from trainctl.protocol.messages.base import Count

OPERATORS_KEPT: Final = 10
"""Operators of a phase that a profile names, those with the most time of their own."""
TRACE_NAME: Final = r"^[a-z0-9][a-z0-9.-]{0,119}\Z"
TraceName = Annotated[str, Meta(pattern=TRACE_NAME)]
"""Name of a trace's file in the run's folder `profiles`."""


class OperatorTime(msgspec.Struct, array_like=True, frozen=True):
    """One operator in one phase, over all profiled steps."""

    name: Annotated[str, Meta(max_length=80)]  # name as in the trace, for example aten::addmm
    calls: Count  # number of calls, over all profiled steps
    seconds: float  # self time on the CPU, without the operators that it called
    device_seconds: float  # time of the kernels that it launched; 0 on a CPU


class PhaseProfile(msgspec.Struct, frozen=True):
    """One phase of a rank's step, over all profiled steps."""

    name: str  # data, forward, backward, sync or optimizer
    seconds: float  # wall time in the phase
    device_seconds: float = 0.0  # time of all kernels launched in it; 0 on a CPU
    operators: Annotated[tuple[OperatorTime, ...], Meta(max_length=OPERATORS_KEPT)] = ()  # longest first

    def share(self, operator: OperatorTime) -> float:
        """An operator's part of the phase: of its kernels' time where it has some, else of the wall time."""
        if self.device_seconds > 0:
            return operator.device_seconds / self.device_seconds
        return operator.seconds / self.seconds if self.seconds > 0 else 0.0
