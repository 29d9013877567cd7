"""Clients of an agent: their turns and limits, who is attached, and what doctor and lists of runs read."""

from pathlib import Path

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from tests.integration.support.known_run import run_file as run_file_text
from tests.protocol.support.run_files import good

from trainctl.node_agent.clients.doctor import Doctor
from trainctl.node_agent.clients.query_context import EXPIRY_SECONDS, MAX_VIEWERS, Presence
from trainctl.node_agent.clients.router import Asker, FairQueue, Limits
from trainctl.node_agent.clients.run_queries import _summary
from trainctl.node_agent.records.agent_db import KnownRun
from trainctl.protocol import messages as m
from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import RunFile

LIMITS = Limits(at_once=4, at_once_of_viewers=2, at_once_of_caller=2, most=40, most_of_caller=8, most_bytes=4000)
ASKERS = tuple(Asker(bytes([number]), "anna" if number < 3 else "bob", number > 3) for number in range(6))


def begun(queue: FairQueue[int], count: int) -> list[int]:
    """The next requests, each over before the next begins."""
    requests = []
    for _ in range(count):
        found = queue.begin(lambda _: True)
        assert found is not None
        asker, request, size = found
        queue.leave(asker, size)
        requests.append(request)
    return requests


def flood(queue: FairQueue[int], key: str, *, is_viewer: bool, size: int = 1) -> int:
    """Enter requests of one key over as many connections as it likes; how many there was room for."""
    many = [queue.enter(Asker(b"%d" % number, key, is_viewer), -1, size) for number in range(100)]
    return sum(many)


def test_one_connection_has_a_limit_and_one_key_half_of_all() -> None:
    queue = FairQueue[int](LIMITS)
    assert [queue.enter(ASKERS[0], number, 1) for number in range(9)] == [True] * 8 + [False]
    assert flood(queue, "anna", is_viewer=False) == 12, "20 in all"
    assert queue.enter(ASKERS[3], 0, 1), "another key has room"


def test_one_key_has_half_of_the_bytes() -> None:
    queue = FairQueue[int](LIMITS)
    assert flood(queue, "anna", is_viewer=False, size=150) == 13
    assert queue.enter(ASKERS[3], 0, 150)


def test_viewers_however_many_leave_room_for_operators_who_come_first() -> None:
    queue = FairQueue[int](LIMITS)
    assert [flood(queue, key, is_viewer=True) for key in ("eve", "mallory", "oscar")] == [20, 10, 0]
    assert [queue.enter(ASKERS[0], number, 1) for number in range(3)] == [True] * 3
    assert begun(queue, 3) == [0, 1, 2]
    first = [queue.begin(lambda _: True) for _ in range(3)]
    assert [found is not None for found in first] == [True, True, False], "viewers have two at a time"
    assert queue.enter(ASKERS[0], 9, 1)
    assert begun(queue, 1) == [9]


def test_keys_take_turns_and_a_key_s_connections_too() -> None:
    queue = FairQueue[int](LIMITS)
    for asker, requests in ((ASKERS[0], (1, 2, 3)), (ASKERS[1], (4,)), (ASKERS[3], (5, 6))):
        for request in requests:
            assert queue.enter(asker, request, 1)
    assert begun(queue, 6) == [1, 5, 4, 6, 2, 3]


def test_who_may_not_begin_is_passed_over() -> None:
    queue = FairQueue[int](LIMITS)
    assert queue.enter(ASKERS[0], 1, 1) and queue.enter(ASKERS[1], 2, 1)
    found = queue.begin(lambda asker: asker != ASKERS[0])
    assert found is not None and found[1] == 2
    assert queue.begin(lambda asker: asker != ASKERS[0]) is None and queue.is_waiting


@given(st.lists(st.tuples(st.sampled_from(ASKERS), st.sampled_from(("enter", "begin", "leave"))), max_size=80))
def test_whatever_order_they_come_in_each_is_begun_once_and_nothing_stays(steps: list[tuple[Asker, str]]) -> None:
    queue, entered, done = FairQueue[int](LIMITS), [], []
    under_way: list[tuple[Asker, int, int]] = []
    for number, (asker, step) in enumerate(steps):
        if step == "enter" and queue.enter(asker, number, 10):
            entered.append(number)
        elif step == "begin" and (found := queue.begin(lambda _: True)) is not None:
            under_way.append(found)
        elif step == "leave" and under_way:
            over = under_way.pop(0)
            queue.leave(over[0], over[2])
            done.append(over[1])
        assert len(under_way) <= 4 and sum(item[0].is_viewer for item in under_way) <= 2
    for over in under_way:
        queue.leave(over[0], over[2])
        done.append(over[1])
    done += begun(queue, len(entered) - len(done))
    assert sorted(done) == entered
    assert not queue.is_waiting and not queue._under_way and not queue._held and not queue._bytes


def names(found: tuple[m.Viewer, ...]) -> list[str]:
    return [viewer.by for viewer in found]


def said(viewer: str, by: str = "", **other: bool) -> m.AttendRequest:
    return m.AttendRequest(rid="r", viewer=viewer, by=by or viewer, **other)


def test_each_learns_of_the_others_and_whoever_only_asks_of_all() -> None:
    presence = Presence()
    assert presence.hear(said("a", "anna"), 0.0, 100.0) == ()
    assert names(presence.hear(said("b", "cron", read_only=True), 1.0, 101.0)) == ["anna"]
    assert presence.hear(said("a", "anna"), 5.0, 105.0) == (m.Viewer(by="cron", since_at=101.0, read_only=True),)
    assert names(presence.hear(m.AttendRequest(rid="r"), 6.0, 106.0)) == ["anna", "cron"]


def test_they_are_forgotten_when_they_leave_or_fall_silent() -> None:
    presence = Presence()
    presence.hear(said("a", "anna"), 0.0, 100.0)
    presence.hear(said("b", "cron"), EXPIRY_SECONDS / 2, 110.0)
    presence.hear(said("a", "anna"), EXPIRY_SECONDS - 1, 119.0)
    (anna,) = presence.hear(m.AttendRequest(rid="r"), EXPIRY_SECONDS * 1.5, 130.0)
    assert (anna.by, anna.since_at) == ("anna", 100.0)
    assert presence.hear(said("a", leaving=True), EXPIRY_SECONDS * 1.5, 130.0) == ()
    assert presence.hear(m.AttendRequest(rid="r"), EXPIRY_SECONDS * 1.5, 130.0) == ()


def test_there_is_room_for_so_many() -> None:
    presence = Presence()
    for index in range(MAX_VIEWERS + 10):
        presence.hear(said(f"v{index}"), 0.0, float(index))
    assert len(presence.hear(m.AttendRequest(rid="r"), 0.0, 0.0)) == MAX_VIEWERS
    assert len(presence.hear(said("v0"), 1.0, 1.0)) == MAX_VIEWERS - 1


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A run file, and the data that it names."""
    (tmp_path / "data.txt").write_text("text")
    file = tmp_path / "run.toml"
    file.write_text(run_file_text(tmp_path, tmp_path / "data.txt"))
    return file


def doctor_of(file: Path) -> Doctor:
    return Doctor("box", file.parent, file.parent, lambda: (file,))


def asked(path: Path) -> m.DigestsRequest:
    return m.DigestsRequest(rid="r", what="data", path=str(path))


async def test_a_run_file_is_read_again_only_if_it_has_changed(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []
    read = run_file.read

    def counted(path: Path) -> RunFile:
        reads.append(path)
        return read(path)

    monkeypatch.setattr(run_file, "read", counted)
    doctor, data = doctor_of(own), own.with_name("data.txt")
    for _ in range(3):
        assert (await doctor.digests(asked(data))).digest
        assert not (await doctor.digests(asked(own))).named
    assert len(reads) == 1
    other = own.with_name("other.txt")
    other.write_text("other")
    own.write_text(run_file_text(own.parent, other))
    assert not (await doctor.digests(asked(data))).named
    assert (await doctor.digests(asked(other))).digest
    assert len(reads) == 2
    own.unlink()
    assert not (await doctor.digests(asked(other))).named


@pytest.mark.needs("linux")  # which has /proc
@pytest.mark.parametrize("path", ["/proc/version", "/proc/self/environ"])
async def test_what_the_kernel_makes_as_it_is_read_is_not_read(own: Path, path: str) -> None:
    own.write_text(run_file_text(own.parent, path))
    reply = await doctor_of(own).digests(asked(Path(path)))
    assert (reply.named, reply.digest) == (True, "")
    assert "not on a disk" in reply.problem


def test_an_ended_run_without_a_view_has_the_steps_and_the_batch_of_its_run_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(tomli_w.dumps(good()).encode())
    found = _summary(KnownRun("r", "sft-1b", tmp_path, 0.0, "failed", ""))
    assert (found.step, found.steps, found.global_batch) == (0, 100, 24)
    nothing = _summary(KnownRun("r", "sft-1b", tmp_path / "none", 0.0, "failed", ""))
    assert (nothing.steps, nothing.global_batch, nothing.cost) == (None, None, None)
