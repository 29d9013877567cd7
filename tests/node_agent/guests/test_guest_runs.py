"""Attached runs without a socket: silence, limits, and what the record of one says."""

import asyncio
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainctl.node_agent.guests import guest_rows, guest_runs
from trainctl.node_agent.guests.guest_runs import GuestRuns, NotAttachedError
from trainctl.node_agent.records.agent_db import AgentDb
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader


class Life:
    """One agent's part for attached runs, with a clock that the test sets."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 100.0
        self.published: list[m.Live] = []
        self.open()

    def open(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.db = AgentDb(self.folder / "agent.db")
        self.guests = GuestRuns("box", self.folder, self.db, self.published.append, clock=lambda: self.now)

    def close(self) -> None:
        self.guests.close()
        self.db.close()

    def attach(self, run: str = "a", ranks: int = 2, after_step: int | None = None) -> m.RunKept:
        made = tuple(m.GuestRank(rank) for rank in range(ranks))
        return self.guests.take(
            m.AttachRun(rid="r", run=run, name="mine", started_at=1.0, ranks=made, after_step=after_step)
        )

    def steps(self, *steps: m.GuestStep, run: str = "a") -> m.RunKept:
        kept = self.guests.take(m.RunSteps(rid="r", run=run, steps=steps))
        if (guest := self.guests.find(run)) is not None:
            asyncio.run(guest.recorder.settled())
        return kept

    def state(self, run: str = "a") -> tuple[str, str]:
        known = self.db.known_run(run)
        assert known is not None
        return known.state, known.reason

    def shown(self) -> list[tuple[str, str, str]]:
        """Run state, first rank's state and why, at each view published."""
        views = [message for message in self.published if isinstance(message, m.RunView)]
        return [(view.state, view.ranks[0].state, view.ranks[0].why) for view in views]


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    made = Life(tmp_path)
    yield made
    made.close()


def test_a_run_goes_on_where_its_node_s_folder_is_now(tmp_path: Path) -> None:
    """A run continues after `mv`, and in both copies after `cp -r`; 0.2.0 wrote the folder's absolute path."""
    first = Life(tmp_path / "a")
    first.attach()
    first.steps(step(1), step(2), step(3))
    first.db._connection.execute("UPDATE runs SET directory = ?", (str(tmp_path / "a" / "runs" / "a"),))
    first.close()
    (tmp_path / "a").rename(tmp_path / "b")
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    for folder, last in ((tmp_path / "b", 4), (tmp_path / "c", 5)):
        life = Life(folder)
        assert [known.directory for known in life.db.runs()] == [folder / "runs" / "a"]
        life.guests.take_up(life.db.runs()[0])
        kept = life.attach()
        assert (kept.step, kept.directory) == (3, str(folder / "runs" / "a"))
        assert life.steps(*map(step, range(4, last + 1))).step == last
        assert life.guests.live[0].view.directory == str(folder / "runs" / "a")
        life.close()
        with RecordReader(RunPaths(folder / "runs" / "a")) as reader:
            assert reader.last_step() is not None and reader.last_step().step == last  # type: ignore[union-attr]
    assert not (tmp_path / "a").exists()


def evaluated(life: Life) -> tuple[float | None, int | None]:
    view = life.guests.live[0].view
    return view.eval_loss, view.eval_step


def step(number: int, *parts: m.GuestPart, **fields: object) -> m.GuestStep:
    return m.GuestStep(step=number, committed_at=1.0 + number, step_seconds=1.0, parts=parts, **fields)  # type: ignore[arg-type]


def test_silence_loses_the_ranks_then_the_run_and_a_word_brings_them_back(life: Life) -> None:
    life.attach()
    life.now += guest_runs.SILENT_SECONDS
    asyncio.run(life.guests.watch())
    assert life.shown() == [("running", "run", "")]
    assert len(life.guests.training()) == 1
    life.now += 1
    assert life.guests.training() == []
    asyncio.run(life.guests.watch())
    asyncio.run(life.guests.watch())
    assert life.shown()[1:] == [("running", "lost", "its program has been silent for 31 s")]
    life.steps()
    assert life.shown()[2:] == [("running", "run", "")]
    life.now += guest_runs.GIVE_UP_SECONDS + 1
    asyncio.run(life.guests.watch())
    assert life.state() == ("failed", "its program has been silent for 601 s")
    assert life.shown()[-1] == ("failed", "failed", "") and life.guests.live == ()
    with pytest.raises(NotAttachedError):
        life.steps(step(1))
    assert life.attach().step == 0 and life.state() == ("running", "")


def test_the_next_agent_goes_on_with_it(life: Life) -> None:
    life.attach()
    life.steps(*(step(number, m.GuestPart(1, 3.0)) for number in range(1, 4)))
    life.close()
    life.open()
    (known,) = life.db.runs()
    assert (known.kind, known.state) == ("guest", "running")
    life.guests.take_up(known)
    (guest,) = life.guests.live
    assert (guest.step, guest.view.name, [*guest.parts]) == (3, "mine", [1])
    assert life.steps(step(3), step(4)).step == 4
    life.attach(ranks=1)
    assert [*life.guests.live[0].parts] == [], "fewer ranks leave no old part behind"


def test_a_record_that_was_moved_away_fails_the_run_and_not_the_agent(life: Life) -> None:
    life.attach()
    life.close()
    paths = RunPaths(life.folder / "runs" / "a")
    paths.record.write_bytes(b"not a database, for sure")
    for file in paths.directory.glob("record.db-*"):
        file.unlink()
    life.open()
    life.guests.take_up(life.db.runs()[0])
    assert life.state()[0] == "failed" and "record" in life.state()[1]


def test_no_more_runs_and_metrics_than_the_limits(life: Life) -> None:
    for number in range(guest_runs.MOST_GUESTS):
        life.attach(f"run-{number}")
    found = life.guests.find(None)
    assert found is not None and found.view.run == f"run-{guest_runs.MOST_GUESTS - 1}", "the newest"
    with pytest.raises(RefusedError, match="end one first"):
        life.attach("one-more")
    assert life.db.known_run("one-more") is None and not (life.folder / "runs" / "one-more").exists()
    many = {f"user:m{number}": float(number) for number in range(guest_rows.MOST_OWN_METRICS + 20)}
    life.steps(step(1, m.GuestPart(0, values={**many, "own_loss": 1.0})), run="run-0")
    life.guests.live[0].recorder.flush()
    with RecordReader(RunPaths(life.folder / "runs" / "run-0")) as reader:
        assert len(reader.own_metrics()) == guest_rows.MOST_OWN_METRICS
        (part,) = reader.rank_steps(1)
    assert part.values["own_loss"] == 1.0


def test_a_loss_that_is_no_number_or_not_known_is_kept_as_that(life: Life) -> None:
    life.attach()
    life.steps(step(1, loss=math.nan), step(2), step(3, loss=1.5, weight=2.0), step(3, loss=9.9))
    life.guests.live[0].recorder.flush()
    with RecordReader(RunPaths(life.folder / "runs" / "a")) as reader:
        losses = [kept.loss for kept in reader.steps(0, 10)[0]]
    assert losses[0] is not None and math.isnan(losses[0])
    assert losses[1:] == [None, 1.5]


def test_after_a_retraction_no_step_falls_on_a_retracted_row(life: Life) -> None:
    life.attach()
    life.steps(*(step(number, loss=9.0) for number in range(1, 11)))
    life.attach(after_step=5)
    life.guests.take(m.EndRun(rid="r", run="a", state="failed", reason="out of memory"))
    assert life.attach().step == 5
    assert life.steps(*(step(number, loss=1.0) for number in range(6, 9))).step == 8
    with RecordReader(RunPaths(life.folder / "runs" / "a")) as reader:
        assert [kept.loss for kept in reader.steps(0, 20)[0]] == [9.0] * 5 + [1.0] * 3


def test_an_end_is_said_once_with_its_reason_however_often_it_is_asked_for(life: Life) -> None:
    life.attach()
    life.steps(step(1))
    end = m.EndRun(rid="r", run="a", state="failed", reason="CUDA out of memory")
    assert life.guests.take(end).step == life.guests.take(end).step == 1
    events = [message for message in life.published if isinstance(message, m.Event)]
    assert [(event.text, event.severity) for event in events][1:] == [("failed at step 1: CUDA out of memory", "error")]


def test_an_evaluation_comes_with_a_step_and_other_names_with_fields_are_refused(life: Life) -> None:
    life.attach()
    life.steps(step(1), step(2, values={"eval_loss": 3.5, "user:reward": 1.0}))
    assert evaluated(life) == (3.5, 2)
    life.attach()
    assert evaluated(life) == (3.5, 2), "attached again"
    for wrong in (step(3, values={"loss": 1.0}), step(3, m.GuestPart(0, values={"eval_loss": 1.0}))):
        with pytest.raises(InvalidInputError, match="leave it out"):
            life.steps(step(4), wrong)
    life.guests.live[0].recorder.flush()
    with RecordReader(RunPaths(life.folder / "runs" / "a")) as reader:
        assert [(one.step, one.loss) for one in reader.evaluations()] == [(2, 3.5)]
        assert len(reader.steps(0, 10)[0]) == 2


def test_readings_of_the_machine_belong_to_the_step_made_meanwhile(life: Life) -> None:
    life.attach(ranks=1)
    for at, percent in ((1.2, 10.0), (1.8, 30.0), (2.5, 90.0)):
        life.guests.read(
            m.HostReading(
                node="box", read_at=at, cpu_percent=percent, memory_used_bytes=None, memory_total_bytes=None,
                disk_free_bytes=None,
            )
        )  # fmt: skip
    life.steps(*(step(number, m.GuestPart(0)) for number in (1, 2, 3)))
    parts = [message.values for message in life.published if isinstance(message, m.RankStep)]
    assert [values.get("cpu_percent") for values in parts] == [20.0, 90.0, None]
