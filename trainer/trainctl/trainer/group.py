"""What ranks sum over each other between accumulating and updating, and the group of one."""

from dataclasses import dataclass
from typing import Protocol

from trainctl.protocol.errors import RefusedError
from trainctl.protocol.messages import Form
from trainctl.trainer.backend import Backend


@dataclass(frozen=True)
class Tail:
    """What travels behind the gradients, so that every rank decides from the same sums."""

    loss_sum: float  # nats
    weight: float  # tokens
    bad_losses: int  # ranks whose loss sum is not finite
    bad_gradients: int  # ranks whose gradient is not finite


class Group(Protocol):
    """The live ranks of one generation."""

    def all_reduce(self, backend: Backend, tail: Tail) -> Tail:
        """Replace the backend's accumulators by their sum over all ranks; returns the sum of the tails."""


class Solo:
    """A group of one rank: its sums are the totals."""

    def all_reduce(self, backend: Backend, tail: Tail) -> Tail:
        return tail


def join(form: Form, rank: int) -> Group:
    """The group that `form` names. Raises RefusedError for one that this version cannot form."""
    if form.engine != "none" or form.ranks != (rank,):
        raise RefusedError(
            f"rank {rank} was asked to form ranks {list(form.ranks)} by engine {form.engine!r};"
            " this version trains one rank alone"
        )
    return Solo()
