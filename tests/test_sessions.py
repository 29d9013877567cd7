"""A test session: the tests that it holds, the lines about those that it left out, and its end."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from tests import conftest, lacking, tiers
from tests.conftest import ROOT
from tests.second_chance import REAL_PROCESSES, SecondChance
from tests.waiting import HANG_SECONDS


@pytest.mark.parametrize(
    ("tier", "hint"), [("test", ""), ("all", "; on Debian: apt-get install openssh-client openssh-server")]
)
def test_what_workers_left_out_is_in_the_summary(tier: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = SimpleNamespace(stash=pytest.Stash(), getoption={"--tier": tier, "--fail-on-skip": False}.get)
    monkeypatch.setattr(lacking, "find", lambda program: None)
    for output in ({"lacking": {"cuda": 2, "sshd": 3}}, {}):
        conftest.pytest_testnodedown(SimpleNamespace(config=config, workeroutput=output))
    conftest.pytest_testnodedown(SimpleNamespace(config=config))  # one that crashed
    said: list[str] = []
    reporter: Any = SimpleNamespace(stats={}, write_line=lambda line, yellow: said.append(line))
    conftest.pytest_terminal_summary(reporter, config)
    counted = [
        f"without {what}: {count} tests that need it were left out" for what, count in (("cuda", 2), ("sshd", 3))
    ]
    assert said == [counted[0], counted[1] + hint]


def item(file: str, module: list[str], own: list[str]) -> Any:
    """A test of a file whose module and which itself are marked for tiers."""
    nodes = [SimpleNamespace(own_markers=[pytest.mark.tier(name).mark for name in names]) for names in (module, own)]
    return SimpleNamespace(path=tiers.ROOT / file, listchain=lambda: nodes)


ITEMS = [
    item("tui/x.py", [], []), item("integration/x.py", [], []), item("integration/x.py", [], ["test"]),
    item("trainer/x.py", ["all"], []), item("trainer/x.py", ["all"], ["test"]),
    item("trainer/x.py", [], ["all", "soak"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("tier", "beyond", "held"),
    [("test", None, [0, 2, 4]), ("all", None, [0, 1, 2, 3, 4]), ("soak", None, [0, 1, 2, 3, 4, 5]),
     ("all", "test", [1, 3]), ("soak", "all", [5])],
)  # fmt: skip
def test_a_tier_holds_what_begins_there_or_before(tier: str, beyond: str | None, held: list[int]) -> None:
    config: Any = SimpleNamespace(getoption={"--tier": tier, "--beyond": beyond}.get)
    assert tiers.chosen(config, ITEMS) == [ITEMS[number] for number in held]


def failed(name: str, *, is_real: bool) -> Any:
    return SimpleNamespace(failed=True, nodeid=name, user_properties=[(REAL_PROCESSES, is_real)])


@pytest.mark.parametrize(
    ("reports", "passes", "status", "says"),
    [
        ([failed("a", is_real=True)], True, 0, "FLAKY: these failed, and passed when run alone:\n  a\n"),
        ([failed("a", is_real=True)], False, 1, "second chance: failed, and run once more:\n  a\n"),
        ([failed("a", is_real=True), failed("b", is_real=False)], True, 1, "run again: 1 start no process\n"),
        ([failed(str(number), is_real=True) for number in range(6)], True, 1, "run again: at most 5 are\n"),
    ],
)
def test_only_a_few_tests_of_real_processes_are_run_again(
    reports: list[Any], passes: bool, status: int, says: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    config: Any = SimpleNamespace(getoption={"--tier": "all"}.get, rootpath=ROOT)
    session: Any = SimpleNamespace(exitstatus=pytest.ExitCode.TESTS_FAILED)
    ran: list[list[str]] = []
    monkeypatch.setattr(
        subprocess, "run", lambda words, **_: ran.append(words) or SimpleNamespace(returncode=int(not passes))
    )
    plugin = SecondChance(config)
    plugin.pytest_sessionstart(session)
    for report in reports:
        plugin.pytest_runtest_logreport(report)
    plugin.pytest_unconfigure()
    assert session.exitstatus == status and capsys.readouterr().out.endswith(says)
    assert [words[-1] for words in ran] == ["a"] * (len(reports) == 1)


def test_a_session_ends_well_without_the_cache_of_pytest() -> None:
    """`make debian` has none."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
