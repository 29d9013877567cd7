"""Fork servers that tests share: each takes seconds of CPU to begin, and most tests want only what it forks."""

from tests.conftest import SHARED_PIDS

from trainctl.protocol.messages import Engine
from trainctl.trainer.collective.reducer_process import ReducerProcess
from trainctl.trainer.collective.standby import ForkStandby


class ForkServers:
    """One for each engine; a `Standby` that a `Membership` closes without ending them."""

    def __init__(self) -> None:
        self._standbys: dict[Engine, ForkStandby] = {}

    def prepare(self, engine: Engine, count: int = 1) -> None:
        standby = self._standbys.setdefault(engine, ForkStandby())
        standby.prepare(engine, count)
        self._keep(standby)

    def take(self, engine: Engine) -> ReducerProcess:
        self.prepare(engine)
        return self._standbys[engine].take(engine)

    def pid(self, engine: Engine) -> int:
        """Return the server's process id, which is there once `prepare` or `take` was called."""
        server = self._standbys[engine]._server
        return server.process.pid

    def close(self) -> None:
        """Nothing: they outlive their users."""

    def end(self) -> None:
        for standby in self._standbys.values():
            standby.close()

    @staticmethod
    def _keep(standby: ForkStandby) -> None:
        """Its server, which may have been replaced, outlives the test."""
        if standby._server is not None:
            SHARED_PIDS.add(standby._server.process.pid)
