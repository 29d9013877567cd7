"""Titles of processes, whose environment stays readable from outside."""

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest
from tests.conftest import MARK
from tests.waiting import HANG_SECONDS

from trainctl.protocol.machine.process_title import role_of

LONG = "x" * 200
"""Room for a title: a command line is as long as it was."""


def run(script: str, *words: str) -> Any:
    """Run a script, and return the JSON that it prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", textwrap.dedent(script), *words]
    return json.loads(subprocess.check_output(command, env=environment, timeout=HANG_SECONDS))


@pytest.mark.needs("ps")
def test_a_title_is_what_ps_shows_and_a_fork_keeps_whose_it_is() -> None:
    said = run(
        """
        import json, os, psutil, subprocess, sys
        from trainctl.protocol.machine.process_title import set_title
        def shown():
            ps = ["ps", "-o", "args=", "-p", str(os.getpid())]
            mark = psutil.Process().environ().get(sys.argv[1])
            return subprocess.run(ps, capture_output=True, text=True).stdout.strip(), mark
        set_title("trainer", "rank 1 of r-1")
        first, (reading, writing) = shown(), os.pipe()
        if os.fork() == 0:
            set_title("standby reducer")
            before = shown()
            set_title("reducer", more="g1.3")
            os.write(writing, json.dumps([before, shown()]).encode())
            os._exit(0)
        os.wait()
        print(json.dumps([first, *json.loads(os.read(reading, 4096)), shown()]))
        """,
        MARK,
        LONG,
    )
    trainer = "trainctl: trainer rank 1 of r-1"
    titles = [trainer, "trainctl: standby reducer rank 1 of r-1", "trainctl: reducer rank 1 of r-1 g1.3", trainer]
    assert said == [[title, os.environ[MARK]] for title in titles]


def test_a_long_title_is_cut_and_the_environment_stays_whole_here_and_in_processes_started() -> None:
    before, after, title, mark, length = run(
        """
        import json, os, psutil, subprocess, sys
        from trainctl.protocol.machine.process_title import set_title
        def of_a_child():
            code = "import json, os; print(json.dumps(dict(os.environ)))"
            return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True).stdout)
        before, process = of_a_child(), psutil.Process()
        set_title("trainer", "y" * 5000)
        title, mark = " ".join(process.cmdline()).strip(), process.environ().get(sys.argv[1])
        length = sum(len(os.fsencode(word)) + 1 for word in sys.orig_argv)
        print(json.dumps([before, of_a_child(), title, mark, length]))
        """,
        MARK,
    )
    assert title.startswith("trainctl: trainer yyy")
    assert length - 4 <= len(title) < length
    assert mark == os.environ[MARK]
    assert after == before


@pytest.mark.needs("linux")  # it reads this process's memory as Linux shows it
@pytest.mark.parametrize("whose", ["rank 1 of r", "z" * 5000])
def test_on_macos_as_many_zero_bytes_are_left_before_the_environment_as_there_were_arguments(whose: str) -> None:
    """That is how the system finds an environment there."""
    zeros, words, begins = run(
        """
        import json, sys
        from pathlib import Path
        import logging, setproctitle
        from trainctl.protocol.machine.process_title import set_title
        sys.platform = "darwin"
        set_title("trainer", sys.argv[1][:5000])
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        first, end = int(fields[45]), int(fields[46])
        with open("/proc/self/mem", "rb") as memory:
            memory.seek(first)
            arguments = memory.read(end - first)
        print(json.dumps([arguments.count(0), len(sys.orig_argv), arguments.decode()[:17]]))
        """,
        whose,
        LONG,
    )
    assert zeros == words
    assert begins == "trainctl: trainer"


def test_a_role_is_read_from_a_title_only() -> None:
    assert role_of(["trainctl: fork server rank 0 of r", "", ""]) == "fork server"
    assert role_of(["trainctl:", "standby", "reducer", "rank", "0", "of", "r"]) == "standby reducer"
    assert role_of(["python", "-m", "trainctl.trainer.collective.reducer", "--whose", "rank 0 of r"]) == ""
    assert role_of([]) == ""
    # The library is loaded by those that are shown only.
    loaded = "import json, sys, trainctl.protocol.machine.process_title, trainctl.tui.cli.main; "
    assert run(loaded + "print(json.dumps('setproctitle' in sys.modules))") is False
