"""Fixtures and options for every test: a leaked process or thread fails it; with --fail-on-skip a skipped test does
too."""

import gc
import os
import resource
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings
from tests import schedule, tiers
from tests.lacking import NEEDS, lacks, packages
from tests.second_chance import REAL_PROCESSES, SecondChance
from tests.waiting import Patience

pytest_plugins = ["tests.cluster.fixtures"]
ROOT = Path(__file__).parents[1]
MARK = "TRAINCTL_TEST_SESSION"
"""Every process that a test starts inherits this variable, however it detaches itself."""
GRACE_SECONDS = 5.0
LOOK_SECONDS = 5.0
"""Seconds between two looks whether a test has taken too long."""
SOAK_SECONDS = 900
"""Timeout of a test in the soak, if it has none of its own."""
gc.disable()  # in workers until tests are collected: what is imported stays, and a third of the time went to it
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):  # the hundreds of processes that tests start would compile it again
    sys.dont_write_bytecode = False
os.environ["HF_HUB_OFFLINE"] = "1"  # before any library reads it: nothing is fetched, and no thread reports use
os.environ[MARK] = secrets.token_hex(8)
_state = tempfile.TemporaryDirectory(prefix="tt-state-")
os.environ["TRAINCTL_STATE"] = _state.name  # no test finds an agent of the person's, or of another worker's tests
Path(_state.name, ".first-start").touch()  # no screen in a terminal begins with the keys of the first start
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # before any library reads it: on few cores their threads wait for each other
for _number, _action in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:  # as by nohup, or in a script's background: children inherit it
        signal.signal(_number, _action)
MIN_WORKERS = 3
SKIPPED = 8
"""Exit status where a skipped test fails the session."""
SHARED_PIDS: set[int] = set()
"""Processes that a session's fixture keeps beyond the test that first asked for it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fail-on-skip", action="store_true", help="a skipped test fails the session")
    parser.addoption("--second-chance", action="store_true", help="run failed tests of real processes once more")
    parser.addoption("--record-durations", action="store_true", help="keep the files' seconds in tests/durations.json")
    tiers.add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    tiers.configure(config)
    slow = (HealthCheck.too_slow,)  # the machine may be busy: no property depends on how fast it is checked
    settings.register_profile(
        "any-speed", deadline=None, suppress_health_check=slow, max_examples=tiers.scale("examples")
    )
    settings.register_profile("same-examples", settings.get_profile("any-speed"), derandomize=True)
    settings.load_profile("any-speed")
    if tiers.is_soak() and config.getoption("timeout") is None:
        config.option.timeout = SOAK_SECONDS
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(schedule.Schedule())
        if config.getoption("--second-chance"):
            config.pluginmanager.register(SecondChance(config))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Half of the tests' time is spent waiting for processes and screens: a third worker on two cores saves a fifth."""
    return max(MIN_WORKERS, os.cpu_count() or 1)


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.pluginmanager.hasplugin("dsession"):  # it only hands out what its workers collect
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    held = tiers.chosen(config, items)
    if later := set(items) - set(held):
        config.hook.pytest_deselected(items=[*later])
    items[:] = held
    without = [item for item in items if any(lacks(what) for what in needed(item))]
    if without:
        config.stash[_lacking] = dict(Counter(what for item in without for what in needed(item) if lacks(what)))
        items[:] = [item for item in items if item not in without]
        config.hook.pytest_deselected(items=without)
    items[:] = schedule.in_order(items)
    gc.collect()
    gc.freeze()
    gc.enable()


def needed(item: pytest.Item) -> set[str]:
    """Return what a test needs of the machine, as its marks `needs` say."""
    return {what for mark in item.iter_markers("needs") for what in mark.args}


def our_processes(but: set[int]) -> dict[int, str]:
    """Live processes of this session other than this one and `but`: pid and title or command line."""
    found = {}
    for pid in set(psutil.pids()) - but - SHARED_PIDS - {os.getpid()}:
        try:
            process = psutil.Process(pid)
            if is_ours(process):
                found[pid] = " ".join(process.cmdline()).strip()[:200]
        except psutil.Error:
            continue
    return found


def is_ours(process: psutil.Process) -> bool:
    """Return whether it lives and is of this session. Raises psutil.Error."""
    return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == os.environ[MARK]


def our_threads() -> dict[int, str]:
    return {thread.ident: thread.name for thread in threading.enumerate() if thread.ident is not None}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[_before] = (set(psutil.pids()), set(our_threads()))
    item.stash[_reaped] = _faults_of_children()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.user_properties.append((REAL_PROCESSES, _has_processes(item)))
    return report


def _has_processes(item: pytest.Item) -> bool:
    """Return whether a test has started processes, or uses those that its folder's tests share."""
    in_folder = item.path.is_relative_to(ROOT / "tests" / "integration")
    return in_folder or _faults_of_children() != item.stash[_reaped] or bool(our_processes(item.stash[_before][0]))


def _faults_of_children() -> int:
    """Return a number that grows with each child that ends: it has used memory."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield
    pids, threads = item.stash[_before]
    patience = Patience(GRACE_SECONDS, least_seconds=GRACE_SECONDS)
    while True:
        left = our_processes(pids)
        running = {i: name for i, name in our_threads().items() if i not in threads and not _is_pool(name)}
        if not left and not running:
            return
        if patience.is_over():
            break
        time.sleep(0.05)
    for pid in left:
        psutil.Process(pid).kill()
    pytest.fail(f"left behind: processes {left}, threads {running}", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, object, object]:
    """A test that takes too long is stopped by pytest-timeout, but its seconds too are those of a quiet machine."""
    done = yield
    stop, patience = signal.getsignal(signal.SIGALRM), Patience(settings.timeout, least_seconds=0.0)
    if settings.method == "signal" and callable(stop):
        signal.signal(signal.SIGALRM, lambda number, frame: stop(number, frame) if patience.is_over() else None)
        signal.setitimer(signal.ITIMER_REAL, LOOK_SECONDS, LOOK_SECONDS)
    return done


def _is_pool(name: str) -> bool:
    """Worker threads that a library keeps for the life of the process."""
    return name.startswith(("ThreadPoolExecutor", "asyncio_", "tqdm", "pymp", "Thread-auto"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for what, count in sorted(config.stash.get(_lacking, {}).items()):
        line, wanted = f"without {what}: {count} tests that need it were left out", packages(NEEDS[what].programs)
        if wanted and config.getoption("--tier") != tiers.TIERS[0]:
            line += f"; on Debian: apt-get install {' '.join(wanted)}"
        terminalreporter.write_line(line, yellow=True)
    skipped = terminalreporter.stats.get("skipped", [])
    if config.getoption("--fail-on-skip") and skipped:
        terminalreporter.write_line(f"{len(skipped)} skipped, and --fail-on-skip was given", red=True)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["lacking"] = session.config.stash.get(_lacking, {})
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.getoption("--fail-on-skip") and reporter and reporter.stats.get("skipped"):
        session.exitstatus = SKIPPED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """In the process that reports, what a worker of pytest-xdist has left out: all collect the same tests."""
    node.config.stash.setdefault(_lacking, {}).update(getattr(node, "workeroutput", {}).get("lacking", {}))


_lacking: pytest.StashKey[dict[str, int]] = pytest.StashKey()
_reaped: pytest.StashKey[int] = pytest.StashKey()
_before: pytest.StashKey[tuple[set[int], set[int]]] = pytest.StashKey()
