"""Whether a trainer died for want of memory: pure, from how it ended, the kernel's kills and what it had last reported.

A bare SIGKILL says nothing: somebody may have sent it. The kernel counts the processes that it kills for memory, and
where it ends them otherwise, as on a Mac, what the trainer held when it last reported has to tell.
"""

import signal
from typing import NamedTuple

NEAR_PART = 0.95
"""Of its cap: a trainer that held so much may have died of the next allocation."""
ENDINGS = (-signal.SIGKILL, -signal.SIGABRT)
"""How a lack of memory ends a process from outside Python: the kernel's kill, and an error that nobody catches."""


class Held(NamedTuple):
    """Memory of a trainer's last step, in bytes: held after it, its peak, the cap; None where it can't tell."""

    used: int | None = None
    peak: int | None = None
    cap: int | None = None

    @property
    def is_near_cap(self) -> bool:
        most = max(self.used or 0, self.peak or 0)
        return bool(self.cap) and most >= NEAR_PART * (self.cap or 0)


class Kills(NamedTuple):
    """How many processes the kernel had killed for memory where the trainer ran, just before its end and after it."""

    before: int
    after: int


def recognised(exit_status: int | None, kills: Kills | None, held: Held | None) -> str:
    """What says that it died for want of memory; empty if nothing does. `kills`, `held`: None if not known."""
    if exit_status == -signal.SIGKILL and kills is not None and kills.after > kills.before:
        return f"the kernel killed it for memory (oom_kill {kills.before} → {kills.after})"
    if exit_status in ENDINGS and held is not None and held.is_near_cap and held.cap is not None:
        most = max(held.used or 0, held.peak or 0)
        return f"it had last reported {most / 1e9:,.1f} of {held.cap / 1e9:,.1f} GB"
    return ""
