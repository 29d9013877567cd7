"""How fast a run's data are read, beside what training takes: plain values. Pure."""

from typing import Literal

import msgspec


class Assembling(msgspec.Struct, frozen=True):
    """Micro-batches that were assembled from the token cache, one after another."""

    micro_batches: int
    tokens: int  # without padding
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class StepNeed(msgspec.Struct, frozen=True):
    """Tokens per second that training takes on a node."""

    tokens_per_second: float
    source: Literal["given", "run", "model"]  # by the user, from a recorded run, or timed on this machine
    detail: str = ""  # the run's id; or what was timed


class DataRates(msgspec.Struct, frozen=True, kw_only=True):
    """What `trainctl data bench` measures."""

    source_bytes: int  # of the files that were tokenized
    tokens: int  # that they came to
    tokenizing_seconds: float
    micro_batch: int  # samples at most
    prefetch: int  # micro-batches assembled ahead
    workers: int  # threads that assemble them
    cold: Assembling | None  # from the disk; None: the system keeps the files in memory
    warm: Assembling  # from memory
    need: StepNeed | None = None

    def share_of_step(self, assembling: Assembling) -> float | None:
        """Seconds of assembling for each second of training; None without a need."""
        return None if self.need is None else self.need.tokens_per_second / assembling.tokens_per_second
