"""A run in words for the alert rules: its steps, ranks and machines, and a clock of its own."""

from typing import Any

import msgspec

from trainctl.node_agent.alerts.conditions import RunSnapshot
from trainctl.node_agent.alerts.evaluator import Change, Evaluator, Raised
from trainctl.protocol import messages as m
from trainctl.protocol.calibration.profile import ProfileSummary
from trainctl.protocol.config.alert_rules import AlertsTable

RUN, GENERATION = "run-1", m.Generation(1, 1)
NODES = ("studio", "mbp")
CALM = AlertsTable(clear_seconds=5.0)


class World:
    """A run of two ranks whose clock the test moves; a look after each thing that happens."""

    def __init__(self, table: AlertsTable = CALM, **before: Any) -> None:
        self.now, self.step_number, self.state, self.doing = 100.0, 0, "running", "train"
        self.reason = ""
        self.kl: float | None = None
        self.profiles: dict[int, ProfileSummary] = {}
        self.rank_states, self.whys, self.silent = ["run", "run"], ["", ""], dict[str, str]()
        self.evaluator = Evaluator(table, self.now, **before)
        self.changes: list[tuple[float, Change]] = []
        self.look()

    def look(self, seconds: float = 0.0) -> None:
        self.now += seconds
        ranks = tuple(
            m.RankView(
                rank=rank, node=node, state=self.rank_states[rank], since_at=0, share=8, micro_batch=4,  # type: ignore[arg-type]
                why=self.whys[rank], device="gpu Apple M3 Max",
            )
            for rank, node in enumerate(NODES)
        )  # fmt: skip
        view = m.RunView(
            run=RUN, name="run", state=self.state, lead="studio", engine="ring", generation=GENERATION,  # type: ignore[arg-type]
            step=self.step_number, steps=10_000, plan_version=1, global_batch=16, samples=None, cursor=0,
            learning_rate=1e-3, started_at=0, ranks=ranks, directory="", reason=self.reason,
            eval_values=() if self.kl is None else (("eval/kl", self.kl),),
        )  # fmt: skip
        snapshot = RunSnapshot(view, self.silent, self.doing, self.profiles)
        found = self.evaluator.look(snapshot, self.now, 1000 + self.now)
        self.changes += [(self.now, change) for change in found]

    def step(self, loss: float | None = 2.0, *, seconds: float = 1.0, **fields: Any) -> None:
        """A committed step; `fields`: those of its message that are other than usual."""
        self.now += seconds
        self.step_number += 1
        made = m.StepCommitted(
            run=RUN, generation=GENERATION, step=self.step_number, committed_at=0, loss=loss, weight=100, samples=16,
            learning_rate=1e-3, grad_norm=1.0, cursor=0, global_batch=16, plan_version=1, step_seconds=seconds,
            tokens_total=0,
        )  # fmt: skip
        self.evaluator.heard(msgspec.structs.replace(made, **fields), self.now)
        self.look()

    def part(self, rank: int = 1, backward: float = 0.6, *, share: int = 8, **fields: Any) -> None:
        """A rank's part of the newest step; `fields`: those of its message that are other than usual."""
        part = m.RankStep(
            run=RUN, generation=GENERATION, step=self.step_number, rank=rank, node=NODES[rank], tokens=125 * share,
            samples=share, micro_batch=4, replays=0, step_seconds=1.0,
            phases=m.Phases(data=0.01 * share / 8, forward=0.3 * share / 8, backward=backward),
        )  # fmt: skip
        self.evaluator.heard(msgspec.structs.replace(part, **fields), self.now)
        self.look()

    def steps(self, count: int, backward: float = 0.6, first: float | None = None, **part: Any) -> None:
        """Steps with the part of rank 1, and that of rank 0 whose backward passes take `first` seconds."""
        for _ in range(count):
            self.step()
            self.part(1, backward, **part)
            if first is not None:
                self.part(0, first)

    def reading(
        self, *, free: float = 100e9, total: float | None = None, mhz: float = 1620.0, celsius: float = 71.0,
        percent: float = 98.0, limits: tuple[m.ClockLimit, ...] = (),
    ) -> None:  # fmt: skip
        self.now += 1
        gpu = m.GpuReading("Apple M3 Max", percent, mhz, 50.0, celsius, clock_limits=limits)
        reading = m.HostReading(
            node="mbp", read_at=0, cpu_percent=20.0, memory_used_bytes=1, memory_total_bytes=2,
            disk_free_bytes=int(free), disk_total_bytes=int(total) if total else None, load_1min=1.0, gpus=(gpu,),
        )  # fmt: skip
        self.evaluator.heard(reading, self.now)
        self.look()

    @property
    def told(self) -> list[str]:
        return [
            f"{'raised' if isinstance(change, Raised) else 'cleared'} {change.alert.id}" for _, change in self.changes
        ]

    def text(self, id: str) -> str:
        return self.evaluator.open[id].text

    def facts(self, id: str) -> tuple[str, ...]:
        return self.evaluator.open[id].facts
