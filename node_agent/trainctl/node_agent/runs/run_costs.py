"""The cost of one run that is led here: who takes part is kept in its record, prices are those of this machine."""

from collections.abc import Collection

import msgspec

from trainctl.node_agent.planning.durable import Settings
from trainctl.node_agent.records.keys import NODE_TIMES_KEY
from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.batch import cost
from trainctl.protocol.config.cluster_file import Prices


class RunCosts:
    """Follows one run; `cost` is None while none of its nodes has a price."""

    def __init__(self, recorder: RunDb, prices: Prices) -> None:
        """Continues from the record."""
        self._recorder, self._prices = recorder, prices
        self._times, self._joules = kept_times(recorder), dict[str, float]()
        self._known: tuple[Settings, m.RunState] | None = None
        self.cost: m.RunCost | None = None

    def look(self, settings: Settings, state: m.RunState, at: float) -> m.RunCost | None:
        """The cost once the run has these settings and this state, from `at` (Unix seconds) on."""
        if self._known is None or self._known[0] is not settings or self._known[1] != state:
            self._known = settings, state
            nodes = {setting.node for setting in settings.live.values()} if state in m.ACTIVE_RUN_STATES else set()
            before, self._times = self._times, cost.counted(self._times, nodes, at)
            if self.cost is None or self._times != before:
                self.cost = cost.run_cost(self._times, self._prices, at)
            if self._times != before:
                keep_times(self._recorder, self._times)
        return self.cost

    def read(self, reading: m.HostReading) -> None:
        """A reading of one of the run's machines."""
        if reading.energy_joules is not None:
            self._joules[reading.node] = reading.energy_joules

    def with_cost(self, step: m.StepCommitted) -> m.StepCommitted:
        """A step with what the run has cost by then, and beside it the energy; as it is where nothing has a price."""
        if self.cost is None:
            return step
        spent = cost.spent_by(self.cost, step.committed_at)
        values = {**step.values, "cost": spent, "cost_per_hour": self.cost.per_hour}
        joules = [self._joules[time.node] for time in self._times if time.node in self._joules]
        return msgspec.structs.replace(step, values=values | ({"energy_joules": sum(joules)} if joules else {}))


def kept_times(recorder: RunDb) -> cost.Times:
    """Return who took part, by the record. A cost is no reason not to lead a run: what can't be read is counted
    again."""
    text = recorder.meta(NODE_TIMES_KEY)
    try:
        return msgspec.json.decode(text, type=cost.Times) if text is not None else ()
    except msgspec.MsgspecError:
        return ()


def keep_times(recorder: RunDb, times: cost.Times) -> None:
    """Keep who took part for how long, here and on the run's other nodes."""
    recorder.set_meta(NODE_TIMES_KEY, msgspec.json.encode(times).decode())


def close_times(recorder: RunDb, at: float, nodes: Collection[str] | None = None) -> None:
    """Of a run that ended with its agent, about `at` (Unix seconds): from then on nobody took part, or only others than
    `nodes`."""
    times = kept_times(recorder)
    others = {time.node for time in times if time.since_at is not None} - set(nodes) if nodes is not None else ()
    if (over := cost.counted(times, others, at)) != times:
        keep_times(recorder, over)
