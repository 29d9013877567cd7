"""Whether two ranks of this machine sum through a network interface. Nothing of it leaves the machine."""

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, cast

import numpy as np

from trainctl.protocol import messages as m
from trainctl.protocol.config.run_tables import GroupTable
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.machine.check_outcome import CheckOutcome, absent, combined, failed, judged
from trainctl.trainer.backends.base import Array, Backend
from trainctl.trainer.collective import engines
from trainctl.trainer.collective.group import Group, ReducerGroup, Tail
from trainctl.trainer.collective.membership import Membership
from trainctl.trainer.collective.shared_buffer import Layout, layout_digest
from trainctl.trainer.collective.standby import Standby, standby_here
from trainctl.trainer.common.errors import first_line

ROWS, COLUMNS = 1024, 1024
"""Shape of the float32 numbers that are summed."""
DEADLINE_SECONDS: Final = 60.0
"""Within which the ranks must have connected to each other."""
_GENERATION: Final = m.Generation(1, 1)
_RUN: Final = "selftest"


def check_interfaces(names: Sequence[str]) -> CheckOutcome:
    """Sums of two ranks through each of these interfaces, by each installed engine."""
    present = engines.installed()
    if not present:
        return absent("neither torch nor mlx is installed, so there is no engine that sums")
    with contextlib.closing(standby_here()) as standby:
        return combined([(f"{name} {engine}", _checked(engine, name, standby)) for name in names for engine in present])


def _checked(engine: m.Engine, interface: str, standby: Standby) -> CheckOutcome:
    with _logged() as warnings:
        try:
            sums, seconds = _summed(engine, interface, standby)
        except (TrainctlError, OSError) as error:
            return failed("; ".join([first_line(error), *warnings]))
    right = all(np.array_equal(one, _values(0) + _values(1)) for one in sums)
    size = ROWS * COLUMNS * 4
    said = f"two ranks summed {size:,} bytes in {seconds * 1000:.1f} ms"
    return judged([] if right else ["a sum of two ranks is wrong"], said, bytes=size, seconds=seconds)


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    """The warnings of this process's ranks: what an engine said itself is there alone."""
    said: list[str] = []
    handler, source = logging.Handler(logging.WARNING), logging.getLogger("trainctl.trainer.collective")
    handler.emit = lambda record: said.append(record.getMessage().splitlines()[0])  # type: ignore[method-assign]
    source.addHandler(handler)
    try:
        yield said
    finally:
        source.removeHandler(handler)


def _values(rank: int) -> Array:
    """A rank's numbers: integers, whose sum is exact."""
    return np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS) * (rank + 1)


class _Numbers:
    """What `Group` needs of a backend: arrays to sum."""

    def __init__(self, rank: int) -> None:
        self.values = _values(rank)

    def pin(self, flat: Array) -> None:
        """They are no device's."""

    def copy_out(self, part: str, arrays: Mapping[str, Array]) -> None:
        np.copyto(arrays["weight"], self.values)

    def copy_in(self, part: str, arrays: Mapping[str, Array]) -> None:
        self.values = arrays["weight"].copy()


def _summed(engine: m.Engine, interface: str, standby: Standby) -> tuple[list[Array], float]:
    """What each of two ranks has after the second sum, and the longer of their times for it."""
    shapes = {"weight": (ROWS, COLUMNS)}
    layout = Layout(shapes, layout_digest(shapes))
    with contextlib.ExitStack() as held:
        ranks = [Membership(rank, layout, GroupTable(), interface, None, standby) for rank in range(2)]
        for rank in ranks:
            held.callback(rank.leave)
        offer = m.Offer(run=_RUN, generation=_GENERATION, engine=engine)
        form = m.Form(
            run=_RUN, generation=_GENERATION, engine=engine, ranks=(0, 1),
            endpoints=tuple(rank.offer(offer) for rank in ranks), layout_digest=layout.digest,
            deadline_seconds=DEADLINE_SECONDS,
        )  # fmt: skip
        groups = [cast(ReducerGroup, rank.form(form)) for rank in ranks]
        for group in groups:
            held.callback(group.close)
        with ThreadPoolExecutor(len(groups)) as threads:
            done = [*threads.map(_twice, groups, range(len(groups)))]
    return [values for values, _ in done], max(seconds for _, seconds in done)


def _twice(group: ReducerGroup, rank: int) -> tuple[Array, float]:
    """Join, and sum once to warm up and once for its time."""
    group.complete()
    group.formed()
    _sum(group, rank)
    begun = time.perf_counter()
    values = _sum(group, rank)
    return values, time.perf_counter() - begun


def _sum(group: Group, rank: int) -> Array:
    numbers = _Numbers(rank)
    backend = cast(Backend, numbers)
    group.all_reduce(backend, Tail({"loss": 0.0}, {"loss": 1.0}, {}, 1, 0))
    group.deliver(backend)
    return numbers.values
