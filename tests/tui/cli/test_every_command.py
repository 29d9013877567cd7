"""Every command of both programs, wherever what it prints goes, and whatever it knows of its user and its terminal."""

import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.asking import events_of
from tests.cluster.in_process import BlockingAgent
from tests.cluster.run_files import FOREVER
from tests.tui.support import forked_calls
from tests.waiting import HANG_SECONDS

from trainctl.node_agent import cli as agent_program
from trainctl.protocol.messages import RunsRequest
from trainctl.tui.cli import main as program
from trainctl.tui.cli.main import has_effect

ALL = pytest.mark.tier("all")
NOT_ALONE = {("trainctl", "demo"), ("trainctl", "keys", "new"), *(("trainctl-agent", name) for name in (
    "run", "simulate", "install", "uninstall"))}  # fmt: skip
"""Those that without a word more train, serve, or change this machine."""
DOCUMENTED = {0, 1, 2, 3, 4, 5, 6, 7, 129, 130, 141}
STREAMS = [*itertools.product(("stdout", "stderr"), ("closed", "full", "unread"))]
PLACES: dict[str, dict[str, str]] = {
    "plain": {},
    "C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "Latin-1": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "iso-8859-1"},
    "narrow": {"COLUMNS": "40"},
}
Result = tuple[int, str, str]
KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
CHANGES: tuple[tuple[tuple[str, ...], ...], ...] = (
    (
        ("trainctl", "keys", "authorize", "anna", KEY, "--role", "viewer"), ("trainctl", "keys", "new"),
        ("trainctl", "send", "note", "it prints nowhere"), ("trainctl", "send", "note", "it prints nowhere", "--json"),
        ("trainctl", "send", "mute", "disk", "minutes=1"), ("trainctl", "send", "set-lr", "1e-4"),
    ),
    (
        ("trainctl", "keys", "revoke", "anna"), ("trainctl", "send", "undo"),
        ("trainctl", "runs", "rename", "last", "renamed"),
    ),
)  # fmt: skip
"""Changes that succeed with an agent that has a run, those of the second group after the first."""


def leaves(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """All commands below one, by their words."""
    commands = getattr(command, "commands", None)
    if commands is None:
        yield path
        return
    for name in commands:
        yield from leaves(commands[name], (*path, name))


COMMANDS = [
    *leaves(typer.main.get_command(program.app), ("trainctl",)),
    *leaves(typer.main.get_command(agent_program.app), ("trainctl-agent",)),
]
CALLS = (
    ("trainctl", "--version"), ("trainctl-agent", "--version"), ("trainctl", "help", "keys"), ("trainctl", "--help"),
    *((*words, "--help") for words in COMMANDS),
    *((*words, "--no-such-option") for words in COMMANDS),
    *(words for words in COMMANDS if words not in NOT_ALONE),
    *((*words, "--json") for words in COMMANDS if words not in NOT_ALONE),
)  # fmt: skip
FEW = (
    ("trainctl", "keys", "new"), ("trainctl", "config"), ("trainctl", "config", "--json"), ("trainctl", "help", "keys"),
    ("trainctl", "check"), ("trainctl", "check", "--json"), ("trainctl-agent", "--version"),
)  # fmt: skip


def call(folder: Path, calls: Sequence[Sequence[str]], place: str = "plain", **streams: str) -> list[Result]:
    """Each call in a folder and with keys of its own."""
    user = {"HOME": str(folder / "home"), "TRAINCTL_STATE": str(folder / "state")}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **user, **PLACES.get(place, {})}
    cases = [{"words": words, "folder": str(folder), **streams} for words in calls]
    asked = {"cases": cases, "no_user": place == "nobody", "results": str(folder / "results")}
    subprocess.run(
        [sys.executable, "-m", forked_calls.__name__], input=json.dumps(asked), text=True, env=environment, check=True,
        timeout=HANG_SECONDS,
    )  # fmt: skip
    return [tuple(result) for result in json.loads((folder / "results").read_text("utf-8"))]


def assert_plain(words: Sequence[str], result: Result) -> None:
    code, _, err = result
    assert code in DOCUMENTED, (words, result)
    for fault in ("Traceback", "Exception ignored", "internal error"):
        assert fault not in err, (words, result)


@functools.cache
def usual(calls: tuple[tuple[str, ...], ...]) -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        return call(Path(folder), calls)


def check_streams(folder: Path, calls: tuple[tuple[str, ...], ...], stream: str, kind: str) -> None:
    for words, expected, result in zip(calls, usual(calls), call(folder, calls, **{stream: kind}), strict=True):
        assert_plain(words, result)
        prints = bool(expected[1]) and not (words[0] == "trainctl" and has_effect(words[1:]))
        lost = stream == "stdout" and expected[0] == 0 and prints
        code = {"full": 1, "unread": 141}.get(kind, 0) if lost else expected[0]
        assert result[0] == code, (words, expected, result)


def check_place(folder: Path, calls: tuple[tuple[str, ...], ...], place: str) -> None:
    folder = folder / "où"  # which Latin-1 has, and UTF-8 writes otherwise
    folder.mkdir()
    for words, expected, result in zip(calls, usual(calls), call(folder, calls, place), strict=True):
        assert_plain(words, result)
        if place != "nobody":  # who may have no place for keys and settings
            assert result[0] == expected[0], (words, expected, result)
        if "--json" in words and result[1]:
            json.loads(result[1].encode("latin-1").decode("utf-8"))


@pytest.mark.parametrize(
    ("words", "has_effect"),
    [
        ("--cluster c.toml --connect ipc:///a send stop", True),
        ("--config c.toml --connect ipc:///a run r.toml", True),
        ("model export r --to mlx", True),
        ("export r --output o.csv", True),
        ("export r", False),
        ("alerts --test", True),
        ("alerts", False),
        ("keys new", True),
        ("keys list", False),
        ("send stop --help", False),
        ("help run", False),
        ("status demo", False),
        ("report run", False),
    ],
)
def test_lost_output_fails_only_what_does_nothing_but_print(
    words: str, has_effect: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    group: Any = typer.main.get_command(program.app)
    monkeypatch.setattr(typer.core.TyperGroup, "resolve_command", lambda *_: 1 / 0)  # what comes next
    with pytest.raises(ZeroDivisionError):
        group.main(args=words.split(), standalone_mode=False)
    assert group.has_effect is has_effect


def test_what_is_lost_changes_no_outcome_of_some(tmp_path: Path) -> None:
    check_streams(tmp_path, FEW, "stdout", "full")


@pytest.mark.parametrize("place", ["Latin-1", "nobody"])
def test_some_run_anywhere(tmp_path: Path, place: str) -> None:
    check_place(tmp_path, FEW, place)


@pytest.mark.parametrize(
    ("stream", "kind"), [pytest.param(*stream, marks=() if stream == ("stdout", "full") else ALL) for stream in STREAMS]
)
def test_a_change_succeeds_wherever_its_answer_goes(
    agent: BlockingAgent, run_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: str, kind: str
) -> None:
    with agent.client() as client:
        config = run_config(run__name="tiny", run__steps=FOREVER)
        run = client.send("start-run", {"config": config}).run
        monkeypatch.setenv("TRAINCTL_CONNECT", agent.address)
        for group in CHANGES:
            for words, result in zip(group, call(tmp_path, group, **{stream: kind}), strict=True):
                assert_plain(words, result)
                assert result[0] == 0, (words, result)
        events = events_of(client, run)
        assert sum("it prints nowhere" in event.text for event in events) == 2
        assert any(event.undoes for event in events)
        assert client.ask(RunsRequest).runs[0].name == "renamed"


@ALL
@pytest.mark.parametrize(("stream", "kind"), STREAMS)
def test_what_is_lost_changes_no_outcome(tmp_path: Path, stream: str, kind: str) -> None:
    check_streams(tmp_path, CALLS, stream, kind)


@ALL
@pytest.mark.parametrize("place", [*PLACES, "nobody"][1:])
def test_every_command_runs_anywhere(tmp_path: Path, place: str) -> None:
    check_place(tmp_path, CALLS, place)
