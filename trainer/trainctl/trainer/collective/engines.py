"""The libraries whose all-reduce a reducer runs: gloo through torch.distributed, and the ring of mlx.distributed.

An engine joins once in the life of a process. While it is connecting, the ring keeps the interpreter's lock, so no
other Python thread runs; a process that may not wait forever needs a timer of the system's.

What an engine's error means is said in plain words that name the peer where its text or its addresses tell which.
"""

import contextlib
import importlib.util
import json
import os
import re
import socket
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from trainctl.protocol.messages import Engine

_SLOWEST_STEP = timedelta(days=1)
"""Time gloo waits within a sum for a slower rank; a rank that waits in vain is killed from outside."""
_HEAD_START_SECONDS = 0.015
_RETRY_SECONDS = 0.005
_MODULES: dict[Engine, str] = {"gloo": "torch", "ring": "mlx"}


class Gloo:
    """All-reduce by torch.distributed, in place. `ports` are the TCP ports of other ranks' processes by place, as far
    as they are known."""

    def __init__(self) -> None:
        import torch
        import torch.distributed

        torch.set_num_threads(1)
        self.ports: dict[int, list[int]] = {}
        self._torch = torch
        self._distributed: Any = torch.distributed

    def join(
        self, index: int, endpoints: Sequence[Sequence[str]], interface: str, seconds: float, listener: int | None
    ) -> None:
        """Connect to all other ranks. `listener` is the socket behind the first rank's endpoint, on the first rank.
        Raises RuntimeError or OSError."""
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        host, port = endpoints[0][0].rsplit(":", 1)
        store = self._distributed.TCPStore(
            host,
            int(port),
            len(endpoints),
            is_master=index == 0,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            master_listen_fd=listener,  # by itself it would listen on every interface
        )
        self._distributed.init_process_group(
            "gloo", store=store, rank=index, world_size=len(endpoints), timeout=_SLOWEST_STEP
        )
        if len(endpoints) > 2:
            self.ports = _exchanged_ports(store, index, len(endpoints))

    def all_reduce(self, words: NDArray[Any]) -> None:
        """Replace float32 or int32 `words` by their sum over all ranks, the same bits on each. Raises RuntimeError."""
        self._distributed.all_reduce(self._torch.from_numpy(words))


class Ring:
    """All-reduce by mlx.distributed, in memory of MLX's own; see Gloo."""

    def __init__(self) -> None:
        import mlx.core as mx

        mx.set_default_device(mx.Device(mx.cpu))
        self.ports: dict[int, list[int]] = {}  # its errors name no address
        self._mx: Any = mx

    def join(
        self, index: int, endpoints: Sequence[Sequence[str]], interface: str, seconds: float, listener: int | None
    ) -> None:
        """Connect as Gloo does. The last rank connects first, to the first; all others listen first. One that is
        refused sleeps for a second, so all start together, and the last a little later."""
        reading, writing = os.pipe()
        os.write(writing, json.dumps(endpoints).encode())
        os.close(writing)
        os.environ["MLX_HOSTFILE"], os.environ["MLX_RANK"] = f"/dev/fd/{reading}", str(index)
        _rendezvous(index, endpoints)
        last = index == len(endpoints) - 1
        if last:
            time.sleep(_HEAD_START_SECONDS)
        with contextlib.nullcontext() if last else _yielding():
            self._group = self._mx.distributed.init(strict=True, backend="ring")
        os.close(reading)

    def all_reduce(self, words: NDArray[Any]) -> None:
        total = self._mx.distributed.all_sum(self._mx.array(words), group=self._group)
        self._mx.eval(total)
        np.copyto(words, np.array(total, copy=False))


def _exchanged_ports(store: Any, index: int, count: int) -> dict[int, list[int]]:
    """Exchange all ranks' TCP ports by place: gloo's errors name a peer by one of them, which it chooses itself."""
    try:
        own = [each.laddr.port for each in psutil.Process().net_connections("tcp") if each.laddr]
    except psutil.Error:
        own = []
    store.set(f"ports/{index}", json.dumps(own))
    return {place: json.loads(store.get(f"ports/{place}")) for place in range(count)}


def _rendezvous(index: int, endpoints: Sequence[Sequence[str]]) -> None:
    """Return on all ranks at about the same time, once all are there: each connects to the first at its endpoint, and
    the first answers all of them together. Raises OSError."""
    host, port = endpoints[0][0].rsplit(":", 1)
    if index > 0:
        with _connected(host, int(port)) as connection:
            if not connection.recv(1):
                raise ConnectionError("the first rank left before all ranks had connected to it")
        return
    with contextlib.ExitStack() as held:
        with socket.socket() as listener:
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # the engine listens there next
                listener.setsockopt(socket.SOL_SOCKET, option, 1)
            listener.bind((host, int(port)))
            listener.listen(len(endpoints))
            connections = [held.enter_context(listener.accept()[0]) for _ in endpoints[1:]]
        for connection in connections:
            connection.send(b"1")


def _connected(host: str, port: int) -> socket.socket:
    while True:
        with contextlib.suppress(ConnectionRefusedError):  # no one listens yet
            return socket.create_connection((host, port))
        time.sleep(_RETRY_SECONDS)


@contextlib.contextmanager
def _yielding() -> Iterator[None]:
    """Take no core from others as this process wakes (Linux). The first of two ranks connects to the second
    as soon as that one has connected to it; on one machine that was often before the second listened."""
    if sys.platform != "linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    yield
    for task in Path("/proc/self/task").iterdir():  # the engine's new threads too
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(int(task.name), os.SCHED_OTHER, os.sched_param(0))


Collective = Gloo | Ring


def load(engine: Engine) -> Collective:
    """Import an engine. Raises ImportError if it isn't installed."""
    return Gloo() if engine == "gloo" else Ring()


def usable_after_fork(engine: Engine) -> bool:
    """Return whether a process that is forked can use the engine that its parent has imported. CUDA can't be used in
    one, and MLX's library for CUDA allocates all its memory through it."""
    from trainctl.protocol.machine.devices import MLX_FOR_CUDA
    from trainctl.protocol.machine.facts import installed_version

    return engine != "ring" or not any(map(installed_version, MLX_FOR_CUDA))


def installed() -> tuple[Engine, ...]:
    """Return the engines that `load` can load here."""
    return tuple(engine for engine, module in _MODULES.items() if importlib.util.find_spec(module) is not None)


def likely(wanted: str) -> Engine | None:
    """Return the engine that a group here will probably use: `wanted`, or by this machine alone where it is "auto"."""
    present = installed()
    order: tuple[Engine, ...] = ("gloo", "ring") if sys.platform == "linux" else ("ring", "gloo")
    return next((engine for engine in order if engine in present and wanted in ("auto", engine)), None)


_PATTERNS = {
    r"Connection reset by peer|Broken pipe": "connection to {peer} was reset",
    r"Connection closed by peer|Connection was likely closed|got 0 bytes": "connection to {peer} was closed",
    r"connection to a peer was lost": "connection to {peer} was lost",
    r"Connection refused": "{peer} refused the connection",
    r"Connection timed out|socket has timed out|Timed out waiting|wait timeout": "{peer} did not answer in time",
    r"No route to host|Network is unreachable": "no route to {peer}",
    r"Couldn't connect": "could not connect to {peer}",
}
_STORE = re.compile(r"Failed to recv|client socket has timed out")
"""Errors of gloo's rendezvous store, which the first rank serves."""
_ADDRESS = re.compile(r"\[([\w.:%-]+)\]:(\d+)")


def plain_error(text: str, peer: str | None, own_log: str, what: str) -> str:
    """Return an engine's error for a person; `own_log` names the rank whose log has `text`, `what` failed."""
    for pattern, meaning in _PATTERNS.items():
        if re.search(pattern, text):
            return meaning.format(peer=peer or "a peer")
    return f"{what} failed (details in the log of {own_log})"


def lost_peer(
    text: str, own: int, endpoints: Sequence[Sequence[str]], ports: Mapping[int, Collection[int]]
) -> int | None:
    """Return the place in the engine of the rank that an error is about; None if it can't be told. `endpoints` are the
    ranks' host:port by place, `ports` the TCP ports of those ranks' processes that are known.

    gloo prints a peer's port with its two bytes swapped, so both orders count.
    """
    others = [place for place in range(len(endpoints)) if place != own]
    if len(others) == 1:
        return others[0]
    if _STORE.search(text):
        return 0 if own != 0 else None
    address = _ADDRESS.search(text)
    if address is None:
        return None
    host, port = address[1], int(address[2])
    near = [place for place in others if endpoints[place][0].rsplit(":", 1)[0] == host]
    if len(near) > 1:
        near = [place for place in near if {port, _swapped(port)} & {*ports.get(place, ())}]
    return near[0] if len(near) == 1 else None


def _swapped(port: int) -> int:
    return (port & 0xFF) << 8 | port >> 8 & 0xFF
