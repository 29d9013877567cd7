"""The self-test's trial of a service, under a stand-in for systemctl and launchctl that runs agents for real."""

import os
import sys
from pathlib import Path

import pytest
from tests.waiting import HANG_SECONDS

from trainctl.node_agent.services import manager, service_trial
from trainctl.node_agent.services.model import Manager
from trainctl.node_agent.services.service_trial import ServiceTrial, tried

STAND_IN = '''#!{python}
"""systemctl and launchctl of one user: starts a service's command, starts it again when it ends, and stops it."""
import contextlib, os, plistlib, re, shlex, signal, subprocess, sys, time
from pathlib import Path

FAKE = Path(os.environ["FAKE"])
WORDS = [word for word in sys.argv[1:] if word != "--user"]

def command(file):
    text = file.read_bytes()
    if file.suffix == ".plist":
        job = plistlib.loads(text)
        return job["ProgramArguments"], job["EnvironmentVariables"]
    unit = text.decode()
    words = shlex.split(re.search(r"^ExecStart=(.*)$", unit, re.M)[1])
    given = [shlex.split(line)[0] for line in re.findall(r"^Environment=(.*)$", unit, re.M)]
    return words, dict(line.split("=", 1) for line in given)

def supervise(file):
    words, variables = command(Path(file))
    while not (FAKE / "stop").exists():
        null = subprocess.DEVNULL
        process = subprocess.Popen(words, env={{**os.environ, **variables}}, stdin=null, stdout=null, stderr=null)
        (FAKE / "new").write_text(str(process.pid))
        (FAKE / "new").replace(FAKE / "pid")
        process.wait()
        (FAKE / "starts").open("a").write("x")
        if (FAKE / "never-again").exists():
            break
        due = time.monotonic() + 1  # RestartSec
        while time.monotonic() < due and not (FAKE / "stop").exists():
            time.sleep(0.02)
    (FAKE / "pid").unlink(missing_ok=True)
    (FAKE / "ended").touch()

def start(file):
    null = subprocess.DEVNULL
    again = [sys.executable, __file__, "supervise", str(file)]
    subprocess.Popen(again, stdin=null, stdout=null, stderr=null, start_new_session=True)

def stop():
    (FAKE / "stop").touch()
    send(signal.SIGTERM)
    due = time.monotonic() + 5
    while not (FAKE / "ended").exists():
        time.sleep(0.02)
        if time.monotonic() > due:  # as managers do: one that has just been started may have missed the first signal
            send(signal.SIGKILL)

def send(number):
    with contextlib.suppress(OSError):
        os.kill(int((FAKE / "pid").read_text()), number)

pid = (FAKE / "pid").read_text() if (FAKE / "pid").exists() else None
with (FAKE / "calls").open("a") as calls:
    calls.write(" ".join([Path(sys.argv[0]).name, *WORDS]) + "\\n")
match WORDS:
    case ["supervise", file]:
        supervise(file)
    case ["is-system-running"]:
        print((FAKE / "running").read_text())
    case ["start", name]:
        start(Path(os.environ["XDG_RUNTIME_DIR"], "systemd/user", name))
    case ["show", _]:
        print("LoadState=loaded", f"ActiveState={{'active' if pid else 'failed'}}", f"MainPID={{pid or 0}}", sep="\\n")
    case ["bootstrap", _, file]:
        start(file)
    case ["print", target]:
        if pid is None:
            sys.exit(113)
        print(target, "= {{\\n\\tstate = running\\n\\tpid =", pid, "\\n}}")
    case ["kill", "-s", "KILL", _]:
        send(signal.SIGKILL)
    case ["stop" | "bootout", _]:
        stop()
    case ["daemon-reload"] | ["reset-failed", _]:
        pass
    case _:
        sys.exit(f"unknown: {{WORDS}}")
'''


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in's folder; this process is one that the self-test has started."""
    programs, folder = tmp_path / "bin", tmp_path / "fake"
    for made in (programs, folder, tmp_path / "runtime"):
        made.mkdir()
    for name in ("systemctl", "launchctl"):
        (programs / name).write_text(STAND_IN.format(python=sys.executable))
        (programs / name).chmod(0o755)
    (folder / "running").write_text("degraded")
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}", "FAKE": str(folder), "XDG_RUNTIME_DIR": str(tmp_path / "runtime"),
        "TRAINCTL_STATE": str(tmp_path / "trial/state"), "TRAINCTL_KEYS": str(tmp_path / "keys"),
        "HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for made in ("trial", "sockets"):
        (tmp_path / made).mkdir()
    monkeypatch.setattr(service_trial, "WAIT_SECONDS", HANG_SECONDS)
    return folder


def left(folder: Path) -> list[Path]:
    """Files of services that are still there."""
    return [path for kind in ("*.service", "*.plist") for path in folder.rglob(kind)]


@pytest.mark.parametrize("machine", ["systemd", "launchd"])
def test_an_agent_is_started_killed_restarted_and_removed(fake: Path, tmp_path: Path, machine: Manager) -> None:
    outcome = tried(tmp_path / "trial", tmp_path / "sockets", machine)
    assert (outcome.status, outcome.evidence) == (
        "ok", (f"{machine}: started, answered, killed, restarted and removed",),
    )  # fmt: skip
    assert outcome.figures["restart_seconds"] > 0
    starts = (fake / "starts").read_text()
    assert starts == "xx" or (
        machine == "systemd" and starts == "xxx"
    )  # killed, it may start again before it's stopped
    assert (fake / "ended").exists()
    assert left(tmp_path) == []
    calls = [call.split()[1] for call in (fake / "calls").read_text().splitlines()]
    assert not any("enable" in call for call in calls)
    removal = ["kill", "stop", "reset-failed", "daemon-reload"]
    assert [call for call in calls if call in removal][-4:] == removal or machine == "launchd"


def test_an_agent_that_is_not_restarted_is_a_failure_and_removed(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fake / "never-again").touch()
    answers = service_trial._answers  # the first agent may take its time; the second one never comes

    def impatient(agents: list[service_trial.LocalAgent]) -> bool:
        if found := answers(agents):
            monkeypatch.setattr(service_trial, "WAIT_SECONDS", 0.5)
        return found

    monkeypatch.setattr(service_trial, "_answers", impatient)
    outcome = tried(tmp_path / "trial", tmp_path / "sockets", "systemd")
    assert outcome.status == "failed" and "wasn't restarted" in outcome.evidence[0]
    assert left(tmp_path) == []


def test_without_a_manager_of_this_user_nothing_is_tried(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fake / "running").write_text("offline")
    assert tried(tmp_path / "trial", tmp_path / "sockets", "systemd").status == "not here"
    monkeypatch.setattr(manager, "BOOTED", tmp_path / "none")
    if sys.platform == "linux":
        assert (
            tried(tmp_path / "trial", tmp_path / "sockets")
            .evidence[0]
            .startswith("this machine has neither systemd nor launchd")
        )
    assert left(tmp_path) == []


def test_two_trials_have_different_names(tmp_path: Path) -> None:
    names = {ServiceTrial(tmp_path, tmp_path, machine).name for machine in ("systemd", "launchd") for _ in range(2)}
    assert len(names) == 4
    assert all("selftest" in name for name in names)
