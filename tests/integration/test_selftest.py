"""The self-test as a person runs it: real agents and ranks in a temporary home, one file, nothing left behind.

`make soak` takes all checks, `make test-all` those of two ranks and the quick ones.
"""

import getpass
import json
import re
import socket
import stat
from pathlib import Path

import pytest
from tests.tiers import is_soak
from tests.tui.support.cli_calls import (
    ENVIRONMENT,
    assert_none_left,
    assert_one_line,
    call,
    call_json,
    interrupt,
    started,
)
from tests.waiting import HANG_SECONDS, until

ALL = is_soak()
SOME = ("versions", "interfaces", "group", "command", "recordings")
PATIENT = ("--seconds", "3600")
pytestmark = pytest.mark.timeout(1800 if ALL else 600)
USER = "annika"


def environment(folder: Path) -> dict[str, str]:
    """Of a user whose home, state and temporary files are in a folder of the test's."""
    (folder / "tmp").mkdir()
    own = {"TMPDIR": str(folder / "tmp"), "HOME": str(folder / USER), "TRAINCTL_STATE": str(folder / "state")}
    return {**ENVIRONMENT, **own, "LOGNAME": USER}


def assert_untouched(folder: Path) -> None:
    """No process, no temporary file, and nothing of the user's."""
    assert_none_left(folder)
    assert [*(folder / "tmp").iterdir()] == []
    assert not (folder / USER).exists() and not (folder / "state").exists()


def test_it_checks_this_machine_and_writes_one_file_without_names(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    only = [] if ALL else [word for name in SOME for word in ("--only", name)]
    with started("selftest", *only, *PATIENT, "--out", file, env=environment(tmp_path)) as process:
        out, err = process.communicate(timeout=2 * HANG_SECONDS)
    assert (process.returncode, err) == (0, ""), out + err
    text = file.read_text("utf-8")
    report = json.loads(text)
    found = {check["name"]: check for check in report["checks"]}
    if ALL:
        print(out)
        wanted = {check["name"] for check in call_json("selftest", "--list")["checks"]}
        assert set(found) == wanted and report["counts"]["failed"] == 0
    else:
        assert {name: check["status"] for name, check in found.items()} == dict.fromkeys(SOME, "ok")
    lines = out.splitlines()
    assert len(lines) == len(found) + 1 and lines[-1].endswith(f"; wrote {file}")
    assert found["group"]["figures"]["difference"] <= 5e-6
    assert len(found["group"]["figures"]["losses"]) >= found["command"]["figures"]["step"] + 3
    assert found["recordings"]["figures"]["outputs"]
    assert_private(text, str(tmp_path))
    assert_untouched(tmp_path)


def assert_private(text: str, *secrets: str) -> None:
    names = {socket.gethostname(), getpass.getuser(), USER, *secrets} - {"root", "localhost"}
    assert not [name for name in names if len(name) > 2 and re.search(rf"\b{re.escape(name)}\b", text)]


def test_ctrl_c_ends_what_it_has_started(tmp_path: Path) -> None:
    words = ("selftest", "--only", "readings", *PATIENT, "--out", tmp_path / "report.json")
    with started(*words, env=environment(tmp_path)) as process:
        until(lambda: [*(tmp_path / "tmp").rglob("rank-0.process.json")], HANG_SECONDS, "a trainer")
        _, err = interrupt(process)
    assert process.returncode == 130, err
    assert not (tmp_path / "report.json").exists()
    assert_untouched(tmp_path)


def test_a_failed_check_is_exit_code_1_and_in_the_file(tmp_path: Path) -> None:
    """Without time for it, a check fails."""
    words = ("selftest", "--only", "group", "--seconds", "1")
    with started(*words, cwd=tmp_path, env=environment(tmp_path)) as process:
        out, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 1, out + err
    (file,) = tmp_path.glob("trainctl-selftest-*.json")
    assert out.splitlines()[-1] == f"0 ok, 1 failed, 0 not here; wrote {file.name}"
    report = json.loads(file.read_text("utf-8"))
    assert report["ok"] is False
    assert report["checks"][0]["evidence"] == ["not finished within 0.4 s; give more time with --seconds"]
    assert stat.S_ISREG(file.stat().st_mode)
    assert_untouched(tmp_path)


def test_its_checks_are_listed_and_an_unknown_one_is_refused() -> None:
    listed = call("selftest", "--list").stdout.splitlines()
    assert len(listed) == len(call_json("selftest", "--list")["checks"]) >= 15
    assert_one_line(call("selftest", "--only", "gpu"), 2, "--only: no check 'gpu'", "versions, cpu, cuda")
