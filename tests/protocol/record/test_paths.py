"""Paths, addresses and the status page: where things are, and what refuses to be there."""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from tests.waiting import HANG_SECONDS

from trainctl.protocol.config.run_file import NAME_PATTERN
from trainctl.protocol.errors import InvalidInputError, ProtocolError
from trainctl.protocol.record import paths, status_page
from trainctl.protocol.wire import sockets

# ---------------------------------------------------------------- paths


def test_the_state_folder_is_the_one_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINCTL_STATE", str(tmp_path))
    assert paths.node_directory("studio") == tmp_path / "studio"
    assert paths.node_directory("studio", tmp_path / "other") == tmp_path / "other" / "studio"
    monkeypatch.delenv("TRAINCTL_STATE")
    assert paths.state_root().name == "trainctl"


@pytest.mark.parametrize(
    ("host", "name"),
    [("Studio.local", "studio"), ("büro-7", "b-ro-7"), ("x" * 80, "x" * 64), ("a-" * 40, "a-" * 31 + "a"),
     ("--", "node"), ("", "node"), (".x", "node"), ("_x_1_", "x_1"), ("Ⅷ²", "node")],
)  # fmt: skip
def test_a_machine_s_name_is_a_node_s_name(host: str, name: str) -> None:
    assert paths.node_name(host) == name
    assert re.fullmatch(NAME_PATTERN, paths.node_name(host))


@given(st.text(max_size=100))
def test_any_machine_has_a_node_s_name(host: str) -> None:
    assert re.fullmatch(NAME_PATTERN, paths.node_name(host))


def test_files_of_a_run(tmp_path: Path) -> None:
    run = paths.RunPaths(tmp_path / "node" / "runs" / "r")
    names = {run.run_file, run.record, run.checkpoints, run.logs, run.rank_record(0), run.rank_record(1)}
    names |= {run.status_page(0), run.process(0), run.log(0), run.log(1), run.checkpoint(10)}
    assert len(names) == 11
    assert all(name.is_relative_to(run.directory) for name in names)
    assert run.node_data == tmp_path / "node" / "data"
    assert run.checkpoint(10).parent == run.checkpoints


def test_the_runtime_folder_is_short_private_and_its_node_s_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("long" * 30)))
    node = tmp_path / "studio"
    made = paths.runtime_directory(node)
    try:
        assert made == paths.runtime_directory(node)
        assert made.stat().st_mode & 0o777 == 0o700
        assert len(str(made / "trainers.sock")) < 104  # what macOS allows
        other = paths.runtime_directory(tmp_path / "mbp")
        assert other != made
        other.rmdir()
    finally:
        made.rmdir()


def test_the_hash_is_the_same_in_every_process() -> None:
    code = "from trainctl.protocol.record.paths import hash_text; print(hash_text('studio'))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True, text=True, timeout=HANG_SECONDS, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert found == {f"{paths.hash_text('studio')}\n"}
    assert paths.hash_text("studio") != paths.hash_text("mbp")


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    "address",
    ["tcp://127.0.0.1:7474", "tcp://127.8.9.1:0", "tcp://localhost:1", "tcp://[::1]:7474", "ipc:///tmp/a.sock"],
)
def test_loopback_can_be_listened_on(address: str) -> None:
    sockets.check_bind(address)


@pytest.mark.parametrize(
    "address",
    [
        "tcp://0.0.0.0:7474", "tcp://*:7474", "tcp://192.168.1.4:7474", "tcp://[::]:7474", "tcp://studio.local:7474",
        "tcp://127.0.0.1.example.org:7474", "tcp://2130706433:7474", "tcp://eth0:7474",
    ],
)  # fmt: skip
def test_nothing_else_can_without_keys(address: str) -> None:
    with pytest.raises(InvalidInputError, match="only loopback"):
        sockets.check_bind(address)


@pytest.mark.parametrize(
    "address",
    ["", "7474", "127.0.0.1:7474", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://127.0.0.1:x",
     "tcp://127.0.0.1:70000", "udp://127.0.0.1:7474", "ipc://", "inproc://a", "http://127.0.0.1:80"],
)  # fmt: skip
def test_what_is_no_address_is_told_what_one_looks_like(address: str) -> None:
    for call in (sockets.split, sockets.check_bind):
        with pytest.raises(InvalidInputError, match="tcp://host:port"):
            call(address)


def test_options_of_sockets() -> None:
    context = zmq.Context()
    try:
        router = sockets.new_socket(context, zmq.ROUTER, control=True)
        dealer = sockets.new_socket(context, zmq.DEALER)
        pub = sockets.new_socket(context, zmq.XPUB)
        sub = sockets.new_socket(context, zmq.SUB)
        assert router.getsockopt(zmq.MAXMSGSIZE) == 64 * 1024
        assert dealer.getsockopt(zmq.MAXMSGSIZE) == 1024 * 1024
        assert router.getsockopt(zmq.RCVHWM) == 32
        assert pub.getsockopt(zmq.SNDHWM) == 1000
        assert sub.getsockopt(zmq.RCVHWM) == 10_000
        assert dealer.getsockopt(zmq.IMMEDIATE) == 1
        for socket in (router, dealer, pub, sub):
            assert socket.getsockopt(zmq.LINGER) == 0
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("count", [0, 2, 3])
def test_other_counts_of_frames_are_refused(count: int) -> None:
    assert sockets.check_frames([b"x"], 1) == [b"x"]
    with pytest.raises(ProtocolError, match=f"{count} frames where 1"):
        sockets.check_frames([b"x"] * count, 1)


@pytest.mark.parametrize(("sent", "kept"), [(1, 1), (8, 8), (9, 9), (500, 9)])
async def test_a_long_multipart_message_is_not_kept(sent: int, kept: int) -> None:
    import zmq.asyncio

    context = zmq.asyncio.Context()
    try:
        there, here = sockets.new_socket(context, zmq.PAIR), sockets.new_socket(context, zmq.PAIR)
        port = here.bind_to_random_port("tcp://127.0.0.1")
        there.connect(f"tcp://127.0.0.1:{port}")
        await there.send_multipart([b"x"] * sent)
        await there.send_multipart([b"next"])
        assert len(await sockets.receive(here)) == kept
        assert await sockets.receive(here) == [b"next"]
    finally:
        context.destroy(linger=0)


# ---------------------------------------------------------------- the status page


def test_what_is_shown_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.status"
    assert status_page.read_status(path) is None
    writer = status_page.StatusWriter(path, os.getpid())
    first = status_page.read_status(path)
    assert first is not None
    assert first[:5] == (os.getpid(), 0, 0, 0, "starting")
    assert first.changed_at == pytest.approx(time.time(), abs=60)
    writer.show("forward", step=7, generation=(1, 4))
    writer.show("backward")
    seen = status_page.read_status(path)
    assert seen is not None
    assert (seen.pid, seen.term, seen.n, seen.step, seen.phase) == (os.getpid(), 1, 4, 7, "backward")
    writer.close()
    assert status_page.read_status(path) is not None


@pytest.mark.parametrize("phase", status_page.PHASES)
def test_every_phase_has_its_number(tmp_path: Path, phase: str) -> None:
    writer = status_page.StatusWriter(tmp_path / "page", 1)
    writer.show(phase)
    seen = status_page.read_status(tmp_path / "page")
    assert seen is not None
    assert seen.phase == phase
    writer.close()


@pytest.mark.parametrize("content", [b"", b"short", bytes(64), b"\x01" + bytes(63), b"\xff" * 64])
def test_a_page_that_is_torn_empty_or_odd_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "page"
    path.write_bytes(content)
    assert status_page.read_status(path) is None


def test_no_reader_sees_half_an_update(tmp_path: Path) -> None:
    path = tmp_path / "page"
    writer = status_page.StatusWriter(path, 1)
    writer.show("idle", step=0, generation=(0, 0))
    done = threading.Event()

    def write() -> None:
        for step in range(1, 3000):
            writer.show("forward", step=step, generation=(step, step))
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    looks = 0
    while not done.is_set() or looks == 0:
        seen = status_page.read_status(path)
        looks += 1
        assert seen is None or seen.step == seen.term == seen.n
    thread.join(timeout=HANG_SECONDS)
    writer.close()
