"""One more try for failed tests of real processes, one after another: by then the machine is idle.

Such tests depend on clocks of the system. What passes then is named FLAKY: the test or the product needs a fix. Pure
tests get no second chance, and neither does a session in which more than a few tests failed.
"""

import subprocess
import sys

import pytest

REAL_PROCESSES = "real-processes"
"""The property of a failed test's report that says whether it has any."""
MOST_FAILED = 5


class SecondChance:
    """A plugin of the process that reports. It changes the session's exit status once all is printed."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._failed: dict[str, bool] = {}
        """Names of failed tests, and whether they have real processes."""
        self._session: pytest.Session | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            is_real = dict(report.user_properties).get(REAL_PROCESSES) is True
            self._failed[report.nodeid] = is_real and self._failed.get(report.nodeid, True)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        session = self._session
        if session is None or session.exitstatus != pytest.ExitCode.TESTS_FAILED or not self._failed:
            return
        pure = [name for name, is_real in self._failed.items() if not is_real]
        if pure or len(self._failed) > MOST_FAILED:
            why = f"{len(pure)} start no process" if pure else f"at most {MOST_FAILED} are"
            print(f"second chance: none of {len(self._failed)} failed tests is run again: {why}", flush=True)
            return
        print("second chance: failed, and run once more:", *self._failed, sep="\n  ", flush=True)
        words = ["-m", "pytest", f"--tier={self._config.getoption('--tier')}", *self._failed]
        if self._config.getoption("--fail-on-skip"):
            words.append("--fail-on-skip")
        if subprocess.run([sys.executable, *words], cwd=self._config.rootpath, check=False).returncode == 0:
            session.exitstatus = pytest.ExitCode.OK
            print("FLAKY: these failed, and passed when run alone:", *self._failed, sep="\n  ", flush=True)
