"""A rank's part in forming groups: the endpoints it offers, the process that joins, and its end at a fence.

Joining begins on the control thread, at the order, since ranks that begin far apart wait for each other; the main
thread, which may be within a micro-batch, completes it.
"""

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from trainctl.protocol.config.run_tables import GroupTable
from trainctl.protocol.messages import Engine, Form, Generation, Offer
from trainctl.trainer.collective.group import Group, ReducerGroup, Solo
from trainctl.trainer.collective.shared_buffer import WORD_BYTES, Layout
from trainctl.trainer.collective.standby import Standby, standby_here
from trainctl.trainer.common.errors import GroupError

_LOOPBACK = "127.0.0.1"
_BACKLOG = 64


@dataclass
class _Offered:
    """Endpoints that are held open until the group is formed or fenced."""

    generation: Generation
    engine: Engine
    sockets: list[socket.socket] = field(default_factory=list)

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple("{}:{}".format(*held.getsockname()) for held in self.sockets)

    def close(self) -> None:
        for held in self.sockets:
            held.close()


class Membership:
    """Used by the control thread, but for `stand_by` and `close` (main thread) and `abort` (any)."""

    def __init__(
        self,
        rank: int,
        layout: Layout,
        table: GroupTable,
        interface: str,
        likely: Engine | None,
        *,
        standby: Standby | None = None,
        nodes: Sequence[str] = (),
    ) -> None:
        """`interface` is the one to sum over, empty for loopback; `likely` is the engine to keep ready, if any, by a
        `standby` that may have begun; `nodes` are names by rank, for errors."""
        self._rank, self._layout, self._table, self._interface = rank, layout, table, interface
        self._nodes = nodes
        self._likely: Engine | None = likely
        self._standby = standby or standby_here()
        self._offered: _Offered | None = None
        self._active: ReducerGroup | None = None

    def stand_by(self) -> None:
        """Have processes ready for the next group, if this run has groups. Raises GroupError."""
        if self._likely is not None:
            self._standby.prepare(self._likely, self._links(self._likely))

    def offer(self, order: Offer) -> tuple[str, ...]:
        """Return host:port of sockets that stay open; the same again for the same generation. Raises GroupError naming
        the interface."""
        offered = self._offered
        if offered is None or (offered.generation, offered.engine) != (order.generation, order.engine):
            self._withdraw()
            self._likely = order.engine
            self._standby.prepare(order.engine, self._links(order.engine))
            self._offered = offered = _Offered(order.generation, order.engine)
            self._open(offered)
        return offered.endpoints

    def form(self, order: Form) -> Group:
        """Return the group of an order that names this rank; one by a reducer has begun to join. Raises GroupError."""
        self.abort()
        self._active = None
        if order.engine == "none":
            if order.ranks != (self._rank,):
                raise GroupError(f"ranks {list(order.ranks)} cannot form a group without an engine")
            self._withdraw()
            return Solo()
        offered, self._offered = self._offered, None
        if offered is None:
            raise GroupError(f"rank {self._rank} has no endpoints open for {order.generation}")
        with contextlib.ExitStack() as unless_begun:
            unless_begun.callback(offered.close)
            group = self._begin(order, offered)
            unless_begun.pop_all()
        return group

    def leave(self) -> None:
        """End what was formed, begun or offered; a thread that waits for it gives up."""
        self.abort()
        self._active = None  # its memory is the main thread's to let go of
        self._withdraw()

    def abort(self) -> None:
        """End the group that is formed or being formed."""
        active = self._active
        if active is not None:
            active.abort()

    def close(self) -> None:
        self.leave()
        self._standby.close()

    def _begin(self, order: Form, offered: _Offered) -> ReducerGroup:
        if (offered.generation, offered.engine) != (order.generation, order.engine):
            raise GroupError(f"rank {self._rank} has no {order.engine} endpoints open for {order.generation}")
        name, _ = find_interface(self._interface)
        with contextlib.ExitStack() as unless_held:
            taken = (self._standby.take(offered.engine) for _ in zip(*order.endpoints, strict=False))
            reducers = [unless_held.enter_context(contextlib.closing(reducer)) for reducer in taken]
            group = ReducerGroup(order, self._rank, self._layout, reducers, self._nodes)
            unless_held.pop_all()
        self._active = group
        chunk_words = self._table.chunk_mb * 1_000_000 // WORD_BYTES
        group.begin(name, chunk_words, offered.sockets)
        return group

    def _links(self, engine: Engine) -> int:
        """Return how many rings join at once, each with one link to a neighbour. One ring of MLX's with several links
        opens them one by one, and listens for a link only after it has accepted the one before. Its peer mostly
        connects too early, is refused, and sleeps for 1 s each time."""
        return self._table.links_per_peer if engine == "ring" else 1

    def _open(self, offered: _Offered) -> None:
        """Open one socket that listens for gloo, or for the ring as many as there are links, only bound, to keep the
        ports from others until the engine listens on them itself."""
        _, address = find_interface(self._interface)
        try:
            for _ in range(self._links(offered.engine)):
                held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                offered.sockets.append(held)
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1 if offered.engine == "ring" else 0)
                held.bind((address, 0))
                if offered.engine == "gloo":
                    held.listen(_BACKLOG)
        except OSError as error:
            self._withdraw()
            raise GroupError(f"cannot open an endpoint on {address}: {error.strerror}") from None

    def _withdraw(self) -> None:
        if self._offered is not None:
            self._offered.close()
        self._offered = None


def find_interface(name: str) -> tuple[str, str]:
    """Return the name and IPv4 address of a network interface; of loopback for an empty name. Raises GroupError naming
    those that there are."""
    every = psutil.net_if_addrs().items()
    addresses = {name: entry.address for name, entries in every for entry in entries if entry.family == socket.AF_INET}
    for interface, address in addresses.items():
        if interface == name or (not name and address == _LOOPBACK):
            return interface, address
    there = ", ".join(f"{interface} ({address})" for interface, address in addresses.items()) or "none"
    raise GroupError(
        f"nodes.interface: no interface {name or _LOOPBACK!r} with an IPv4 address here; available: {there}"
    )
