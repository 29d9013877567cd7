"""Separate work: each row has one result, journaled, on copies of a checkpoint, and needs the machine alone."""

import asyncio
import hashlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainctl.node_agent.roles.role import AgentRole
from trainctl.node_agent.work import checkpoint_files
from trainctl.node_agent.work.dealer import FIRST_ROWS, MOST_DEALS, SLICE_BYTES, Dealer, Slice
from trainctl.node_agent.work.journal import Journal, Opened
from trainctl.node_agent.work.work_lead import WorkLead
from trainctl.node_agent.work.worker_host import WorkerHost
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.record import checkpoints

WORKERS = ("a", "b", "c")
MOST_ROWS = 50
Step = tuple[str, str, float]  # worker, what happens, seconds since the step before


def steps() -> st.SearchStrategy[list[Step]]:
    happening = st.sampled_from(("ask", "answer", "answer again", "die", "restart the lead"))
    return st.lists(st.tuples(st.sampled_from(WORKERS), happening, st.floats(0, 30)), max_size=60)


@given(sizes=st.lists(st.integers(1, 2000), min_size=1, max_size=200), steps=steps())
def test_each_row_once(sizes: list[int], steps: list[Step]) -> None:
    dealer, now = Dealer(sizes, MOST_ROWS), 0.0
    held: dict[str, Slice] = {}  # what each worker has in hand, also if the dealer has given it up
    late: list[tuple[str, Slice]] = []
    journal: dict[int, tuple[Slice, bool]] = {}
    counted = [0] * len(sizes)

    def answer(worker: str, one: Slice) -> None:
        if dealer.answer(worker, one.id, now) is None:
            return
        journal[one.id] = (one, True)
        for row in range(one.first, one.first + one.rows):
            counted[row] += 1

    def ask(worker: str) -> None:
        if (one := dealer.deal(worker, now)) is not None:
            held[worker] = one
            journal.setdefault(one.id, (one, False))

    for worker, what, seconds in steps:
        now += seconds
        if what == "ask":
            ask(worker)
        elif what == "answer" and worker in held:
            late.append((worker, held[worker]))
            answer(worker, held.pop(worker))
        elif what == "answer again" and late:
            answer(*late[0])
        elif what == "die":
            dealer.lose(worker)
        elif what == "restart the lead":
            dealer = Dealer(sizes, MOST_ROWS, [journal[number] for number in sorted(journal)])
    while not dealer.is_done:
        now += 0.5
        ask("a")
        if "a" in held:
            answer("a", held.pop("a"))
        else:  # the others have the rest
            dealer.lose("b")
            dealer.lose("c")
    assert counted == [1] * len(sizes)
    assert dealer.answered_rows == len(sizes)


def simulate(speeds: dict[str, float], rows: int) -> float:
    """Seconds until workers of these speeds, in rows per second, have done all rows of one size."""
    dealer, free, finished = Dealer([100] * rows, MOST_ROWS * 10), dict.fromkeys(speeds, 0.0), 0.0
    while not dealer.is_done:
        worker = min(free, key=lambda one: free[one])
        now = free[worker]
        if (one := dealer.deal(worker, now)) is None:
            free[worker] = float("inf")
            continue
        free[worker] = now + one.rows / speeds[worker]
        finished = max(finished, free[worker])
        dealer.answer(worker, one.id, free[worker])
    return finished


@pytest.mark.parametrize("speeds", [{"a": 100.0, "b": 50.0, "c": 20.0}, {"a": 3000.0, "b": 10.0}])
def test_unequal_workers_finish_together(speeds: dict[str, float]) -> None:
    rows = 20_000
    seconds = simulate(speeds, rows)
    assert rows / sum(speeds.values()) / seconds > 0.98


def test_the_first_slice_is_small_and_a_lost_reply_is_repeated() -> None:
    dealer = Dealer([10] * 1000, MOST_ROWS)
    first = dealer.deal("a", 0.0)
    assert first == Slice(0, 0, FIRST_ROWS)
    assert dealer.deal("a", 0.1) == first
    dealer.answer("a", 0, 0.2)
    second = dealer.deal("a", 0.2)
    assert second is not None and (second.first, second.rows) == (FIRST_ROWS, 40)  # 2 s at 20 rows/s
    assert dealer.speed("a") == pytest.approx(FIRST_ROWS / 0.2)


def test_a_slice_that_ends_every_worker_is_named() -> None:
    dealer = Dealer([10] * 4, MOST_ROWS)
    for _ in range(MOST_DEALS):
        assert dealer.repeatedly_lost() is None
        one = dealer.deal("a", 0.0)
        dealer.lose("a")
    assert dealer.repeatedly_lost() == one


def test_answers_are_dealt_by_number_of_rows_within_the_limit_of_bytes() -> None:
    dealer = Dealer([10, SLICE_BYTES, 10, 10, 10, *[10] * 20], 6, alike=True)
    assert dealer.deal("a", 0.0) == Slice(0, 0, 1)  # a row may take long
    dealer.answer("a", 0, 1.0)
    assert dealer.deal("a", 1.0) == Slice(1, 1, 1)  # 2 s would be two rows
    dealer.answer("a", 1, 2.0)
    assert dealer.deal("a", 2.0) == Slice(2, 2, 2)
    assert dealer.deal("b", 2.0) == Slice(3, 4, 1)
    dealer.answer("b", 3, 2.01)
    assert dealer.deal("b", 2.01) == Slice(4, 5, 6)


ROWS = "".join(f'{{"text":"row {number} \u00e4"}}\n' for number in range(6)).encode()


def opened(data: bytes = ROWS) -> Opened:
    request = m.OpenWork(
        rid="r", work="abcd", kind="log-probabilities", run="run-1", rows=6, size_bytes=len(data),
        digest=hashlib.sha256(data).hexdigest(),
    )  # fmt: skip
    return Opened(request, 4, ("studio",))


def filled(folder: Path) -> Journal:
    journal = Journal(folder, opened())
    for offset in range(0, len(ROWS), 7):
        journal.receive(offset, ROWS[offset : offset + 7])
        journal.receive(offset, ROWS[offset : offset + 7])  # sent again, for the reply was lost
    return journal


def test_rows_that_differ_are_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "work", opened())
    journal.receive(0, ROWS.replace(b"row 0", b"row 9"))
    with pytest.raises(InvalidInputError, match="differ"):
        journal.seal()
    with pytest.raises(InvalidInputError, match="more rows"):
        journal.receive(len(ROWS), b"x")


def test_results_come_in_row_order_up_to_the_first_that_is_missing(tmp_path: Path) -> None:
    journal = filled(tmp_path / "work")
    slices = [Slice(0, 0, 2), Slice(1, 2, 2), Slice(2, 4, 2)]
    for one in slices:
        journal.dealt(one, "studio")
    journal.answered(slices[2], "studio", [b"4", b"5"])
    assert journal.results(0, 100, 1000) == ()
    journal.answered(slices[0], "studio", [b"0", b"1"])
    assert journal.results(0, 100, 1000) == (b"0", b"1")
    journal.dealt(slices[1], "mbp")
    journal.answered(slices[1], "mbp", [b"2", b"3"])
    assert journal.results(1, 3, 1000) == (b"1", b"2", b"3")
    assert journal.results(0, 100, 20) == (b"0", b"1")


def test_a_journal_opened_again_continues(tmp_path: Path) -> None:
    journal = filled(tmp_path / "work")
    assert journal.is_whole and sum(journal.seal()) == len(ROWS)
    assert journal.rows(Slice(0, 2, 3)) == tuple(ROWS.decode().splitlines()[2:5])
    journal.state = "running"
    journal.dealt(Slice(0, 0, 4), "studio")
    journal.answered(Slice(0, 0, 4), "studio", [b"0", b"1", b"2", b"3"])
    journal.dealt(Slice(1, 4, 1), "mbp")
    journal.close()
    again = Journal(tmp_path / "work")
    assert (again.opened, again.state, again.is_whole) == (opened(), "running", True)
    assert [*again.slices()] == [(Slice(0, 0, 4), True), (Slice(1, 4, 1), False)]
    with pytest.raises(InvalidInputError, match="empty"):
        Journal(tmp_path / "other")


CONTENT = b"content"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


async def read(name: str, offset: int) -> bytes:
    return CONTENT[offset:]


async def test_files_are_copied_once_and_are_a_checkpoint(tmp_path: Path) -> None:
    folder, asked = tmp_path / "work" / "checkpoint", []

    async def counted(name: str, offset: int) -> bytes:
        asked.append(name)
        return await read(name, offset)

    for _ in range(2):
        await checkpoint_files.copy({"a.json": DIGEST, "b": DIGEST}, folder, 5, "r", counted)
    assert asked == ["a.json"] * 4 + ["b"] * 4
    assert checkpoints.verify(folder).step == 5
    assert checkpoint_files.read_part(folder, "b", 3) == CONTENT[3:]


@pytest.mark.parametrize("name", ["../x", "/x", "", "a\0", ".x"])
async def test_a_name_that_leads_elsewhere_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    target = name if name != "/x" else str(tmp_path / "x")
    with pytest.raises(InvalidInputError, match="is not a name"):
        await checkpoint_files.copy({"a.json": DIGEST, target: DIGEST}, tmp_path / "work" / "c", 5, "r", read)
    with pytest.raises(InvalidInputError, match="is not a name"):
        checkpoint_files.read_part(tmp_path, target, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", ["a.json", "manifest.json"])
async def test_no_link_is_written_through(there: str, tmp_path: Path) -> None:
    folder, secret = tmp_path / "work", tmp_path / "secret"
    folder.mkdir()
    secret.write_text("secret")
    (folder / there).symlink_to(secret)
    with pytest.raises(OSError, match="link"):
        await checkpoint_files.copy({"a.json": DIGEST}, folder, 5, "r", read)
    assert secret.read_text() == "secret"
    (folder / there).unlink()
    os.mkfifo(folder / there)
    with pytest.raises(OSError, match="not a regular file"):
        await checkpoint_files.copy({"a.json": DIGEST}, folder, 5, "r", read)


OPEN = m.OpenWork(rid="r", work="abcd", kind="answers", run="run-1", rows=1, size_bytes=1, digest="")
HOST = m.HostWork(
    rid="r", work="abcd", kind="answers", run="run-1", lead="mbp", config={}, checkpoint=1, files={},
)  # fmt: skip


def test_work_is_refused_during_a_run(tmp_path: Path) -> None:
    role, context = AgentRole(), SimpleNamespace(directory=tmp_path, node="studio")
    role.start()
    made: Any = context
    host = WorkerHost(made, role, lambda node: None)
    lead = WorkLead(made, role, host, lambda node: None)
    with pytest.raises(RefusedError, match="studio takes part in a run"):
        asyncio.run(lead.reply(OPEN))
    hosted: Any = asyncio.run(lead.reply(HOST))
    assert hosted.problem == "studio takes part in a run"
    assert (role.work, role.worker, [*tmp_path.iterdir()]) == ("", "", [])


@pytest.mark.parametrize("part", ["work", "worker"])
def test_a_run_is_refused_during_work(part: str) -> None:
    role = AgentRole()
    role.check_no_work()
    setattr(role, part, "abcd")
    with pytest.raises(InvalidInputError, match="separate work abcd is in progress"):
        role.check_no_work()
