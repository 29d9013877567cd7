"""The reducer's process: what it says when it cannot sum, when it ends, and what it leaves behind (nothing)."""

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import MARK
from tests.trainer.support.fork_servers import ForkServers
from tests.trainer.support.ranks import DEADLINE_SECONDS, Ranks, pid_of
from tests.waiting import HANG_SECONDS, slowness

from trainctl.protocol import messages as m
from trainctl.protocol.config.run_tables import GroupTable
from trainctl.protocol.machine import process_title
from trainctl.protocol.machine.devices import MLX_FOR_CUDA
from trainctl.trainer.collective.channel import Reduce
from trainctl.trainer.collective.fork_client import ForkStandby
from trainctl.trainer.collective.group import ReducerGroup
from trainctl.trainer.collective.membership import Membership, find_interface
from trainctl.trainer.collective.reducer_process import ReducerProcess
from trainctl.trainer.collective.shared_buffer import Layout
from trainctl.trainer.collective.standby import SpawnStandby, Standby
from trainctl.trainer.common.errors import AbandonedError, GroupError

NewRanks = Callable[..., Ranks]
SHARES, MICROS = (6, 4, 2), (4, 3, 2)
FIRST = m.Generation(1, 1)


@pytest.fixture
def holder() -> Iterator[Callable[..., "tuple[subprocess.Popen[str], list[int]]"]]:
    """A process that holds reducers as a trainer does, and says their pids once they are at what `script` has them
    do."""
    started: list[subprocess.Popen[str]] = []
    common = """
        import threading, time
        from trainctl.protocol import messages as m
        from trainctl.protocol.config.run_tables import GroupTable
        from trainctl.trainer.collective.channel import Reduce
        from trainctl.trainer.collective.membership import Membership
        from trainctl.trainer.collective.shared_buffer import Layout
        from trainctl.trainer.collective.standby import standby_here

        generation, standby = m.Generation(1, 1), standby_here()
        def made(engine, ranks):
            layout = Layout({"a": (1000,)}, "x")
            memberships = [Membership(rank, layout, GroupTable(), "", engine, standby) for rank in range(ranks)]
            offer = m.Offer(run="r", generation=generation, engine=engine)
            endpoints = tuple(membership.offer(offer) for membership in memberships)
            form = m.Form(run="r", generation=generation, engine=engine, ranks=tuple(range(ranks)), endpoints=endpoints,
                          layout_digest="x", deadline_seconds=600.0)
            return memberships, form
    """

    def start(script: str, engine: str) -> "tuple[subprocess.Popen[str], list[int]]":
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(common) + textwrap.dedent(script), engine],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        started.append(process)
        assert process.stdout is not None
        return process, [int(pid) for pid in process.stdout.readline().split()]

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=HANG_SECONDS)


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess):
            if all(not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie" for pid in pids):
                return True
        time.sleep(0.01)
    return False


IN_A_SUM_AND_CONNECTING = """
    import sys
    memberships, form = made(sys.argv[1], 2)
    groups = [membership.form(form) for membership in memberships]
    threads = [threading.Thread(target=group.complete) for group in groups]
    [thread.start() for thread in threads]; [thread.join() for thread in threads]
    groups[0]._reducers[0].order(Reduce("float32", 0, 1000))
    memberships, form = made(sys.argv[1], 3)
    groups += [memberships[0].form(form)]
    while (pid := groups[2]._reducers[0].life.pid) is None: time.sleep(0.01)
    time.sleep(1.0)
    print(*[group._reducers[0].life.pid for group in groups], flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("engine", ["gloo", "ring"])
def test_a_reducer_ends_with_its_trainer_wherever_it_is(holder: Callable[..., Any], engine: str) -> None:
    """In a sum that another rank stays away from, waiting for it; connecting to ranks that never come."""
    process, pids = holder(IN_A_SUM_AND_CONNECTING, engine)
    assert len(pids) == 3
    assert all(psutil.pid_exists(pid) for pid in pids)
    process.kill()
    process.wait(HANG_SECONDS)
    assert gone(pids)


@pytest.mark.parametrize("engine", ["gloo", "ring"])
def test_ranks_that_lay_out_otherwise_are_named_before_anything_is_summed(
    new_ranks: NewRanks, engine: m.Engine
) -> None:
    ranks = new_ranks(engine, ("torch", "torch", "torch"))
    layouts = [rank.membership._layout for rank in ranks.ranks]
    ranks.ranks[1].membership._layout = Layout(layouts[1].shapes, "swapped")
    errors = ranks.form(layout_digest=layouts[0].digest)
    expected = "rank 1's parameter layout differs from the group's"
    assert [str(error) for error in errors] == [expected] * 3
    assert all(rank.rig.progress.last_step == 0 and not rank.rig.sent for rank in ranks.ranks)
    ranks.fence()
    ranks.ranks[1].membership._layout = layouts[1]
    assert ranks.form(layout_digest=layouts[0].digest) == []
    assert ranks.train(ranks.plan(1, SHARES, MICROS))[2].step == 1


def connected(endpoints: Sequence[Sequence[str]]) -> list[socket.socket]:
    """Up to three strangers' connections that have been talked into, had within a second."""
    strays: list[socket.socket] = []
    deadline = time.monotonic() + slowness()
    while time.monotonic() < deadline and len(strays) < 3:
        for (endpoint,) in endpoints:
            host, port = endpoint.split(":")
            stray = socket.socket()
            try:
                stray.connect((host, int(port)))
                stray.sendall(os.urandom(4096))
                strays.append(stray)
            except OSError:  # not there yet, or no more
                stray.close()
    return strays


@pytest.mark.parametrize("engine", ["gloo", "ring"])
def test_stray_bytes_cost_a_generation_at_most(new_ranks: NewRanks, engine: m.Engine) -> None:
    """Someone else connects first, to every endpoint, and talks; what is summed afterwards is right."""
    ranks = new_ranks(engine, ("torch", "torch", "torch"))
    assert ranks.form() == []
    ranks.fence()
    for _ in range(8):  # the engines listen for a moment only
        form = ranks.offer(deadline_seconds=4.0)
        for rank in ranks.ranks:
            rank.begin(form)
        strays = connected(form.endpoints)
        outcomes = ranks.all(lambda rank, form=form: rank.complete(form))
        for stray in strays:
            stray.close()
        assert all(outcome is None or isinstance(outcome, GroupError) for outcome in outcomes), outcomes
        if strays:
            break
        ranks.fence()
    assert strays, "someone did connect"
    if any(outcomes):
        ranks.fence()
        assert ranks.form() == []
    report = ranks.train(ranks.plan(1, SHARES, MICROS))[0]
    assert report.weight == 240.0


def test_nothing_is_left_of_a_group(new_ranks: NewRanks) -> None:
    ranks = new_ranks("gloo", ("torch", "torch"), own_standby=True)
    process = psutil.Process()

    def there() -> tuple[int, int]:
        gc.collect()
        return process.num_fds(), len(process.children(recursive=True))

    before = there()
    assert ranks.form() == []
    ranks.train(ranks.plan(1, (6, 6), (4, 4)))
    assert there() != before
    ranks.fence()
    ranks.offer()
    for rank in ranks.ranks:
        rank.close()
        rank.call(rank.rig.backend.clear)
        rank.group = rank.rig.executor.group = None
    assert there() == before


@pytest.mark.parametrize("engine", ["gloo", "ring"])
def test_a_peer_that_never_comes_is_waited_for_until_the_deadline(fork_servers: ForkServers, engine: m.Engine) -> None:
    layout = Layout({"a": (3,)}, "x")
    memberships = [Membership(rank, layout, GroupTable(), "", engine, fork_servers) for rank in (0, 1)]
    endpoints = tuple(one.offer(m.Offer(run="r", generation=FIRST, engine=engine)) for one in memberships)
    form = m.Form(run="r", generation=FIRST, engine=engine, ranks=(0, 1), endpoints=endpoints, deadline_seconds=1.0)
    group = memberships[0].form(form)
    assert isinstance(group, ReducerGroup)
    with pytest.raises(GroupError, match=r"^ranks \[0, 1\] did not connect to each other within 1 s$"):
        group.complete()
    group.close()
    for one in memberships:
        one.close()


STANDBYS = pytest.mark.parametrize("made", [ForkStandby, SpawnStandby])


@STANDBYS
def test_an_engine_that_fails_is_one_line_and_the_next_process_is_fresh(made: Callable[[], Standby]) -> None:
    standby = made()
    first = standby.take("ring")
    pid = pid_of(first)
    with pytest.raises(GroupError, match="RuntimeError: received a sum request before joining"):
        first.order(Reduce("float32", 0, 1))
        first.wait(DEADLINE_SECONDS)
    first.close()
    assert gone([pid])
    second = standby.take("ring")
    assert pid_of(second) != pid
    second.kill()
    with pytest.raises(AbandonedError):
        second.wait(DEADLINE_SECONDS)
    second.close()
    second.close()
    standby.close()
    with pytest.raises(GroupError, match="this rank is leaving"):
        standby.take("ring")


@STANDBYS
def test_a_reducer_s_title_follows_its_generation(made: Callable[[], Standby], monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked and started alike; it doesn't cost them their environment."""
    monkeypatch.setattr(process_title, "_whose", "rank 1 of demo-20260102-030405")
    standby, layout = made(), Layout({"a": (10,)}, "x")
    memberships = [Membership(rank, layout, GroupTable(), "", "gloo", standby) for rank in range(2)]
    generation = m.Generation(2, 7)
    endpoints = tuple(one.offer(m.Offer(run="r", generation=generation, engine="gloo")) for one in memberships)
    form = m.Form(
        run="r", generation=generation, engine="gloo", ranks=(0, 1), endpoints=endpoints, layout_digest="x",
        deadline_seconds=DEADLINE_SECONDS,
    )  # fmt: skip
    group = memberships[1].form(form)
    assert isinstance(group, ReducerGroup)
    reducer, waiting = group._reducers[0], standby.take("gloo")
    assert wait_for_title(reducer, "reducer") == "trainctl: reducer rank 1 of demo-20260102-030405 g2.7"
    assert wait_for_title(waiting, "standby") == "trainctl: standby reducer rank 1 of demo-20260102-030405"
    if isinstance(standby, ForkStandby):
        server = psutil.Process(pid_of(waiting)).parent()
        assert server is not None and title_of(server) == "trainctl: fork server rank 1 of demo-20260102-030405"
    group.close()
    waiting.close()
    for one in memberships:
        one.close()


def wait_for_title(reducer: ReducerProcess, begins: str) -> str:
    process, deadline = psutil.Process(pid_of(reducer)), time.monotonic() + DEADLINE_SECONDS
    while not title_of(process).startswith(f"trainctl: {begins}"):
        assert time.monotonic() < deadline, title_of(process)
        time.sleep(0.01)
    return title_of(process)


def title_of(process: psutil.Process) -> str:
    assert process.environ()[MARK] == os.environ[MARK]
    return " ".join(process.cmdline()).strip()


def test_a_process_that_died_while_it_waited_is_not_used() -> None:
    standby = SpawnStandby()
    standby.prepare("ring")
    (waiting,) = standby._waiting
    waiting.kill()
    waiting.life.reap()
    again = standby.take("ring")
    assert again is not waiting
    again.close()
    standby.close()


def test_a_fork_server_that_dies_takes_its_reducers_along_and_is_replaced() -> None:
    standby = ForkStandby()
    reducers = [standby.take("ring") for _ in range(3)]
    pids = [pid_of(reducer) for reducer in reducers]
    server = standby._server
    assert server is not None
    assert len({server.process.pid, *pids}) == 4
    server.process.kill()
    with pytest.raises(GroupError, match="the reducer ended without an exit status"):
        reducers[0].wait(DEADLINE_SECONDS)
    assert gone(pids)
    server.process.wait(DEADLINE_SECONDS)
    again = standby.take("ring")
    assert psutil.pid_exists(pid_of(again))
    for reducer in (*reducers, again):
        reducer.close()
    standby.close()


def test_the_first_fork_server_is_the_trainer_forked_and_one_that_dies_is_replaced(
    run_python: Callable[[str], str],
) -> None:
    said = run_python("""
        import gc, psutil
        from tests.trainer.support.ranks import pid_of
        from trainctl.trainer.collective.fork_self import ForkedServer
        from trainctl.trainer.collective.standby import early_standby
        standby = early_standby("ring")
        server = standby._server.process
        this, forked = psutil.Process(), psutil.Process(server.pid)
        first = standby.take("ring")
        print(forked.ppid() == this.pid, isinstance(server, ForkedServer), forked.num_threads())
        print(gc.get_freeze_count() > 0)  # so neither process's collections copy what they share
        print(psutil.Process(pid_of(first)).ppid() == server.pid, server.poll())
        server.kill()
        print(server.wait(60), server.poll())
        second = standby.take("ring")
        print(pid_of(second) != first.life.pid, standby._server.process is not server)
        for held in (first, second, standby):
            held.close()
        print(this.children(recursive=True))
    """)
    assert said.splitlines() == ["True True 1", "True", "True None", "-9 -9", "True True", "[]"]


@contextlib.contextmanager
def one_reducer(made: Callable[[], Standby], engine: m.Engine) -> Iterator[ReducerProcess]:
    standby = made()
    reducer = standby.take(engine)
    yield reducer
    reducer.close()
    standby.close()


def test_a_reducer_killed_before_it_is_born_never_serves() -> None:
    """The fork server is still importing when the group is left."""
    with one_reducer(ForkStandby, "gloo") as reducer:
        reducer.kill()
        with pytest.raises(AbandonedError):
            reducer.wait(DEADLINE_SECONDS)


def test_reducers_share_what_their_server_has_imported(fork_servers: ForkServers) -> None:
    """They are there at once, and a fork takes along only the one thread that there is."""
    first = fork_servers.take("gloo")
    with pytest.raises(GroupError, match="before joining"):  # imported by then
        first.order(Reduce("float32", 0, 1))
        first.wait(DEADLINE_SECONDS)
    assert psutil.Process(fork_servers.pid("gloo")).num_threads() == 1
    second = fork_servers.take("gloo")
    memory = psutil.Process(pid_of(second)).memory_full_info()
    assert memory.uss < 40e6 < memory.rss
    for reducer in (first, second):
        reducer.close()


def test_each_reducer_imports_mlx_for_cuda_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked process can't use CUDA; the build for it is known by its distribution's name."""
    made = tmp_path / "mlx_cuda_13-0.1.dist-info"
    made.mkdir()
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {MLX_FOR_CUDA[-1]}\nVersion: 0.1\n")
    paths = [str(tmp_path), *filter(None, sys.path)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))

    def has_mlx(pid: int) -> bool:
        return any("libmlx" in mapped.path for mapped in psutil.Process(pid).memory_maps())

    with one_reducer(ForkStandby, "ring") as reducer:
        reducer.prepare("ring")
        deadline = time.monotonic() + HANG_SECONDS
        while not has_mlx(pid_of(reducer)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not has_mlx(psutil.Process(pid_of(reducer)).ppid())


def test_a_reducer_says_what_ended_it() -> None:
    with one_reducer(ForkStandby, "ring") as reducer:
        os.kill(pid_of(reducer), signal.SIGKILL)
        with pytest.raises(GroupError, match="the reducer ended by SIGKILL"):
            reducer.wait(DEADLINE_SECONDS)


@STANDBYS
def test_a_reducer_that_is_stopped_is_found_while_it_is_waited_for(made: Callable[[], Standby]) -> None:
    with one_reducer(made, "ring") as reducer:
        os.kill(pid_of(reducer), signal.SIGSTOP)
        with pytest.raises(GroupError, match="the reducer hung and was stopped"):
            reducer.wait(DEADLINE_SECONDS)


def test_a_fork_server_that_is_stopped_is_replaced() -> None:
    standby = ForkStandby()
    first = standby.take("ring")
    pid_of(first)
    assert standby._server is not None
    stopped = standby._server.process
    stopped.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while standby._server.lives:
        assert time.monotonic() < deadline
    second = standby.take("ring")
    assert pid_of(second) != first.life.pid
    assert stopped.wait(DEADLINE_SECONDS) == -signal.SIGKILL
    for reducer in (first, second):
        reducer.close()
    standby.close()


@STANDBYS
def test_a_reducer_obeys_the_signals_that_its_trainer_blocks(made: Callable[[], Standby]) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    standby = made()
    try:
        reducer = standby.take("ring")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    pid, deadline = pid_of(reducer), time.monotonic() + DEADLINE_SECONDS
    while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.05)
    assert reducer._reap() == -signal.SIGTERM
    reducer.close()
    standby.close()


def test_an_interface_that_is_not_here_is_named_with_those_that_are() -> None:
    assert find_interface("")[1] == "127.0.0.1"
    name, _ = find_interface("")
    assert find_interface(name) == (name, "127.0.0.1")
    with pytest.raises(
        GroupError, match=rf"^nodes\.interface: no interface 'en77' .* available: .*{name} \(127\.0\.0\.1\)"
    ):
        find_interface("en77")
