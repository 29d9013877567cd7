"""The reducer's process: what it says when it cannot sum, when it ends, and what it leaves behind (nothing)."""

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap

import psutil
import pytest
from tests.conftest import MARK
from tests.node_agent.support.processes import python
from tests.trainer.support.ranks import DEADLINE_SECONDS, form_of, pid_of
from tests.waiting import HANG_SECONDS, until

from trainctl.protocol import messages as m
from trainctl.protocol.config.run_tables import GroupTable
from trainctl.protocol.machine import process_title
from trainctl.protocol.machine.devices import MLX_FOR_CUDA
from trainctl.trainer.collective.channel import Reduce
from trainctl.trainer.collective.membership import Membership, find_interface
from trainctl.trainer.collective.shared_buffer import Layout
from trainctl.trainer.collective.standby import ForkStandby, SpawnStandby
from trainctl.trainer.common.errors import AbandonedError, GroupError

SHARES, MICROS = (6, 4, 2), (4, 3, 2)
FIRST = m.Generation(1, 1)


@pytest.fixture
def holder():
    """A process that holds reducers as a trainer does, and says their pids once they are at what `script` has them
    do."""
    started: list[subprocess.Popen[str]] = []
    common = """
        import threading, time
        from tests.trainer.support.ranks import form_of
        from trainctl.protocol import messages as m
        from trainctl.protocol.config.run_tables import GroupTable
        from trainctl.trainer.collective.channel import Reduce
        from trainctl.trainer.collective.membership import Membership
        from trainctl.trainer.collective.shared_buffer import Layout
        from trainctl.trainer.collective.standby import standby_here

        generation, standby = m.Generation(1, 1), standby_here()
        def made(engine, ranks):
            layout = Layout({"a": (1000,)}, "x")
            memberships = [Membership(rank, layout, GroupTable(), "", engine, standby=standby) for rank in range(ranks)]
            offer = m.Offer(run="r", generation=generation, engine=engine)
            endpoints = tuple(membership.offer(offer) for membership in memberships)
            return memberships, form_of(offer, endpoints)
    """

    def start(script, engine):
        process = python(textwrap.dedent(common) + textwrap.dedent(script), engine)
        started.append(process)
        return process, [int(pid) for pid in process.stdout.readline().split()]

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=HANG_SECONDS)


def gone(pids):
    def have_ended():
        with contextlib.suppress(psutil.NoSuchProcess):
            return all(not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie" for pid in pids)
        return False

    return bool(until(have_ended))


IN_A_SUM_AND_CONNECTING = """
    import sys
    import psutil
    memberships, form = made(sys.argv[1], 2)
    groups = [membership.form(form) for membership in memberships]
    threads = [threading.Thread(target=group.complete) for group in groups]
    [thread.start() for thread in threads]; [thread.join() for thread in threads]
    groups[0]._reducers[0].order(Reduce("float32", 0, 1000))
    memberships, form = made(sys.argv[1], 3)
    groups += [memberships[0].form(form)]
    while groups[2]._reducers[0].life.pid is None: time.sleep(0.01)
    while not psutil.Process(groups[2]._reducers[0].life.pid).net_connections(): time.sleep(0.01)
    print(*[group._reducers[0].life.pid for group in groups], flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("engine", ["gloo", "ring"])
def test_a_reducer_ends_with_its_trainer_wherever_it_is(holder, engine):
    process, pids = holder(IN_A_SUM_AND_CONNECTING, engine)
    assert len(pids) == 3 and all(psutil.pid_exists(pid) for pid in pids)
    process.kill()
    process.wait(HANG_SECONDS)
    assert gone(pids)


@pytest.mark.parametrize("engine", ["gloo", "ring"])
def test_ranks_that_lay_out_otherwise_are_named_before_anything_is_summed(new_ranks, engine):
    ranks = new_ranks(engine, ("mlx", "mlx", "mlx"))
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


def connected(endpoints):
    """Return up to three strangers' connections that have been talked into, of some tries."""
    strays: list[socket.socket] = []
    for _ in range(5000):
        if len(strays) == 3:
            break
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


@pytest.mark.parametrize("engine", ["gloo", pytest.param("ring", marks=pytest.mark.tier("all"))])
def test_stray_bytes_cost_a_generation_at_most(new_ranks, engine):
    ranks = new_ranks(engine, ("mlx", "mlx", "mlx"))
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


def test_nothing_is_left_of_a_group(new_ranks):
    ranks = new_ranks("ring", ("mlx", "mlx"), own_standby=True)
    process = psutil.Process()

    def there():
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
        rank.group = rank.rig.rank.group = None
    assert there() == before


@pytest.mark.parametrize("engine", ["gloo", "ring"])
def test_a_peer_that_never_comes_is_waited_for_until_the_deadline(fork_servers, engine):
    layout = Layout({"a": (3,)}, "x")
    memberships = [Membership(rank, layout, GroupTable(), "", engine, standby=fork_servers) for rank in (0, 1)]
    offer = m.Offer(run="r", generation=FIRST, engine=engine)
    group = memberships[0].form(form_of(offer, tuple(one.offer(offer) for one in memberships), 1.0))
    with pytest.raises(GroupError, match=r"^ranks \[0, 1\] did not connect to each other within 1 s$"):
        group.complete()
    group.close()
    for one in memberships:
        one.close()


@pytest.fixture(params=[ForkStandby, SpawnStandby])
def standby(request):
    made = request.param()
    yield made
    made.close()


@pytest.fixture
def forking():
    made = ForkStandby()
    yield made
    made.close()


@pytest.fixture
def take():
    """Take a reducer, which is closed in the end."""
    held = []
    yield lambda standby, engine="ring": held.append(standby.take(engine)) or held[-1]
    for reducer in held:
        reducer.close()


def test_an_engine_that_fails_is_one_line_and_the_next_process_is_fresh(standby, take):
    first = take(standby)
    pid = pid_of(first)
    with pytest.raises(GroupError, match="RuntimeError: received a sum request before joining"):
        first.order(Reduce("float32", 0, 1))
        first.wait(DEADLINE_SECONDS)
    first.close()
    assert gone([pid])
    second = take(standby)
    assert pid_of(second) != pid
    second.kill()
    with pytest.raises(AbandonedError):
        second.wait(DEADLINE_SECONDS)
    second.close()
    standby.close()
    with pytest.raises(GroupError, match="this rank is leaving"):
        standby.take("ring")


def test_a_reducer_s_title_follows_its_generation(standby, take, monkeypatch):
    monkeypatch.setattr(process_title, "_whose", "rank 1 of demo-20260102-030405")
    layout = Layout({"a": (10,)}, "x")
    memberships = [Membership(rank, layout, GroupTable(), "", "gloo", standby=standby) for rank in range(2)]
    offer = m.Offer(run="r", generation=m.Generation(2, 7), engine="gloo")
    group = memberships[1].form(form_of(offer, tuple(one.offer(offer) for one in memberships)))
    waiting = take(standby, "gloo")

    expected = {"reducer": (pid_of(group._reducers[0]), " g2.7"), "spare reducer": (pid_of(waiting), "")}
    if isinstance(standby, ForkStandby):
        expected["fork server"] = (psutil.Process(pid_of(waiting)).ppid(), "")
    for kind, (pid, more) in expected.items():
        process, title = psutil.Process(pid), f"trainctl: {kind} rank 1 of demo-20260102-030405{more}"
        until(lambda process=process, title=title: " ".join(process.cmdline()).strip() == title, what=title)
        assert process.environ()[MARK] == os.environ[MARK]
    group.close()
    for one in memberships:
        one.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_fork_server_that_dies_or_is_stopped_takes_its_reducers_along_and_is_replaced(forking, take, number):
    pids = [pid_of(take(forking)) for _ in range(3)]
    server = forking._server
    assert len({server.process.pid, *pids}) == 4
    os.kill(server.process.pid, number)
    until(lambda: not server.lives)
    assert psutil.pid_exists(pid_of(take(forking)))
    assert forking._server is not server
    assert server.process.reap() == -signal.SIGKILL
    assert gone(pids)


def test_the_first_fork_server_is_the_trainer_forked_and_one_that_dies_is_replaced(run_python):
    said = run_python("""
        import gc, psutil
        from tests.trainer.support.ranks import pid_of
        from trainctl.trainer.collective.standby import early_standby
        standby = early_standby("ring")
        server = standby._server.process
        this, forked = psutil.Process(), psutil.Process(server.pid)
        first = standby.take("ring")
        print(forked.ppid() == this.pid, forked.environ() == this.environ(), forked.num_threads())
        print(gc.get_freeze_count() > 0)  # so neither process's collections copy what they share
        print(psutil.Process(pid_of(first)).ppid() == server.pid, server.poll())
        server.kill()
        print(server.reap(), server.poll())
        second = standby.take("ring")
        print(pid_of(second) != first.life.pid, standby._server.process is not server)
        for held in (first, second, standby):
            held.close()
        print(this.children(recursive=True))
    """)
    assert said.splitlines() == ["True True 1", "True", "True None", "-9 -9", "True True", "[]"]


def test_a_reducer_killed_before_it_is_born_never_serves(forking, take):
    """The fork server is still importing when the group is left."""
    reducer = take(forking, "gloo")
    reducer.kill()
    with pytest.raises(AbandonedError):
        reducer.wait(DEADLINE_SECONDS)


def test_reducers_share_what_their_server_has_imported(fork_servers, take):
    """They are there at once, and a fork takes along only the one thread that there is."""
    first = take(fork_servers, "gloo")
    with pytest.raises(GroupError, match="before joining"):  # imported by then
        first.order(Reduce("float32", 0, 1))
        first.wait(DEADLINE_SECONDS)
    assert psutil.Process(fork_servers.pid("gloo")).num_threads() == 1
    memory = psutil.Process(pid_of(take(fork_servers, "gloo"))).memory_full_info()
    assert memory.uss < 40e6 < memory.rss


def test_each_reducer_imports_mlx_for_cuda_itself(forking, take, tmp_path, monkeypatch):
    """A forked process can't use CUDA; the build for it is known by its distribution's name."""
    made = tmp_path / "mlx_cuda_13-0.1.dist-info"
    made.mkdir()
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {MLX_FOR_CUDA[-1]}\nVersion: 0.1\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))

    def has_mlx(process):
        return any("libmlx" in mapped.path for mapped in process.memory_maps())

    reducer = take(forking)
    reducer.prepare("ring")
    process = psutil.Process(pid_of(reducer))
    until(lambda: has_mlx(process))
    assert not has_mlx(process.parent())


@pytest.mark.parametrize(
    ("number", "says"),
    [(signal.SIGKILL, "the reducer ended by SIGKILL"), (signal.SIGSTOP, "the reducer hung and was stopped")],
)
def test_a_reducer_that_is_killed_or_stopped_is_found_while_it_is_waited_for(standby, take, number, says):
    reducer = take(standby)
    os.kill(pid_of(reducer), number)
    with pytest.raises(GroupError, match=says):
        reducer.wait(DEADLINE_SECONDS)


def test_a_reducer_obeys_the_signals_that_its_trainer_blocks(standby, take):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        reducer = take(standby)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    process = psutil.Process(pid_of(reducer))
    until(lambda: process.terminate() or process.status() == psutil.STATUS_ZOMBIE)
    assert reducer._reap() == -signal.SIGTERM


def test_an_interface_that_is_not_here_is_named_with_those_that_are():
    name, address = find_interface("")
    assert find_interface(name) == (name, address) == (name, "127.0.0.1")
    with pytest.raises(GroupError, match=rf"^nodes\.interface: no interface 'en77' .*: .*{name} \(127\.0\.0\.1\)"):
        find_interface("en77")
