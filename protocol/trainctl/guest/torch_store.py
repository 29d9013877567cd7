"""The store by which the ranks of a loop under torch.distributed agree."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Protocol

    class Store(Protocol):
        """Texts by key that all ranks see. One thread calls the methods. If one raises, the ranks no longer agree."""

        rank: int
        ranks: int

        def put(self, key: str, value: str) -> str:
            """Keep a value, unless the key has one, atomically. Return the one that is kept."""

        def read(self, keys: Sequence[str]) -> list[str] | None:
            """Return the values of keys, or None if one has none. Does not wait for it."""

        def delete(self, keys: Sequence[str]) -> None:
            """Forget keys."""


class TorchStore:
    """The default store of torch.distributed, by a connection of its own. The process group exists."""

    def __init__(self) -> None:
        distributed: Any = sys.modules["torch.distributed"]
        self.rank: int = distributed.get_rank()
        self.ranks: int = distributed.get_world_size()
        store = distributed.distributed_c10d._get_default_store()
        if hasattr(store, "clone"):
            store = store.clone()
        else:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = distributed.TCPStore(address, port, is_master=False)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = distributed.PrefixStore(f"trainctl/{attempt}", store)

    def put(self, key: str, value: str) -> str:
        return bytes(self._store.compare_set(key, "", value)).decode()

    def read(self, keys: Sequence[str]) -> list[str] | None:
        if not self._store.check([*keys]):  # `wait` would print warnings when its time is over
            return None
        return [bytes(value).decode() for value in self._store.multi_get([*keys])]

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._store.delete_key(key)


def rank_and_ranks() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, by torch.distributed or else by torchrun's variables."""
    if is_initialized():
        distributed: Any = sys.modules["torch.distributed"]
        return distributed.get_rank(), distributed.get_world_size()
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1


def is_initialized() -> bool:
    """Return whether torch.distributed has a process group."""
    distributed: Any = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()
