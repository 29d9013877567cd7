"""What checks share: the temporary home, the model and text in it, and one cluster that is started once."""

import contextlib
from typing import Any, Self

from trainctl.protocol import messages as m
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.machine.check_outcome import CheckOutcome
from trainctl.tui.demo.local_cluster import LocalCluster
from trainctl.tui.doctor import probe
from trainctl.tui.selftest.small_runs import NODES
from trainctl.tui.selftest.temporary_home import RANK_CHECKS, TemporaryHome

_NEEDED = {"torch": ("torch", "transformers"), "mlx": ("mlx", "mlx-lm")}


class SharedParts:
    """Made when a check first asks for them, and ended together. Use it as an asynchronous context manager."""

    def __init__(self) -> None:
        self.home: TemporaryHome  # from __aenter__ on
        self.facts: m.Facts = probe.here()
        self._cluster: LocalCluster | None = None
        self._has_assets = False
        self._found: dict[str, Any] = {}

    async def __aenter__(self) -> Self:
        self.home = TemporaryHome()
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            await self.end_cluster()
        finally:
            self.home.close()

    @property
    def backends(self) -> tuple[str, ...]:
        """The installed ones that can train."""
        have = self.facts.libraries
        return tuple(name for name, needed in _NEEDED.items() if all(one in have for one in needed))

    async def cluster(self) -> LocalCluster:
        """Two agents, without an active run."""
        await self.assets()
        if self._cluster is None:
            home = self.home
            self._cluster = await LocalCluster(home.folder, NODES, home.runtime, home.environment).__aenter__()
        return self._cluster

    async def end_cluster(self) -> None:
        """End the agents, with their run; the next check that needs some starts others."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            await cluster.__aexit__()

    async def assets(self) -> None:
        """Make the model and the text. Raises TrainctlError."""
        if not self._has_assets:
            outcome = await self.rank_check("assets", str(self.home.assets))
            if outcome.status != "ok":
                raise TrainctlError(f"the model can't be made: {' '.join(outcome.evidence)}")
            self._has_assets = True

    async def rank_check(self, *words: str) -> CheckOutcome:
        """A check that computes, in a process of its own."""
        return await self.home.outcome_of(RANK_CHECKS, *words)

    async def once(self, name: str, make: Any) -> Any:
        """What `await make()` gave the first time; two checks may judge the same run."""
        if name not in self._found:
            async with contextlib.AsyncExitStack() as undo:
                undo.push_async_callback(self._drop_cluster)
                self._found[name] = await make()
                undo.pop_all()
        return self._found[name]

    async def _drop_cluster(self) -> None:
        """End the cluster, whatever state it is in, so that the next check doesn't get it."""
        with contextlib.suppress(TrainctlError, OSError):
            await self.end_cluster()
