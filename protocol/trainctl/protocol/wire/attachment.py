"""The pure half of attaching: which live message to deliver, drop, or fetch what went missing before."""

import dataclasses
from typing import Literal

from trainctl.protocol.messages import Heartbeat, Live, Snapshot


@dataclasses.dataclass(frozen=True)
class Connection:
    """The state of the line to the agent; `since_monotonic` is a reading of `time.monotonic`."""

    state: Literal["connecting", "connected", "silent"]
    since_monotonic: float
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Gap:
    """Messages first..last of this boot were published and not seen."""

    boot: str
    first: int
    last: int


class Attachment:
    """A client's place in one agent's sequence of live messages."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.boot, self.seq = snapshot.boot, snapshot.seq

    def judge(self, message: Live | Heartbeat) -> Literal["deliver", "drop", "reattach"] | Gap:
        """Return what to do with a message. A Gap is to be filled first; then judge the message again."""
        if message.boot != self.boot:
            return "reattach"
        if isinstance(message, Heartbeat):
            return Gap(self.boot, self.seq + 1, message.seq) if message.seq > self.seq else "deliver"
        if message.seq <= self.seq:
            return "drop"
        if message.seq > self.seq + 1:
            return Gap(self.boot, self.seq + 1, message.seq - 1)
        self.seq = message.seq
        return "deliver"
