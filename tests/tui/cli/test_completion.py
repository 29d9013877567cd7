"""Completion in real shells: what the Tab key adds to a command that is then run."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from tests.cluster.in_process import BlockingAgent
from tests.cluster.run_files import FOREVER, NODE
from tests.tui.support.cli_calls import ENVIRONMENT, call
from tests.tui.support.typist import Typist
from tests.waiting import HANG_SECONDS, until

pytestmark = pytest.mark.tier("all")
PROGRAM = """#!/bin/sh
[ -n "$_TRAINCTL_COMPLETE" ] || {{ echo "$@" >> "{ran}"; exit; }}
exec "{python}" -m trainctl.tui.cli.main "$@"
"""
SWITCH_ON = {
    "bash": 'eval "$(_TRAINCTL_COMPLETE=source_bash trainctl)"',
    "zsh": 'autoload -Uz compinit; compinit -u; eval "$(_TRAINCTL_COMPLETE=source_zsh trainctl)"',
    "fish": "_TRAINCTL_COMPLETE=source_fish trainctl | source",
}
Complete = Callable[[str], str]


@pytest.fixture
def run(agent: BlockingAgent, run_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run under way, of the agent that commands find."""
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(run_config(run__name="tiny", run__steps=FOREVER)), "utf-8")
    monkeypatch.setenv("TRAINCTL_CONNECT", agent.address)
    done = call("run", file)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(params=[pytest.param(shell, marks=pytest.mark.needs(shell)) for shell in ("bash", "zsh", "fish")])
def complete(request: pytest.FixtureRequest, tmp_path: Path, own_state: Path) -> Complete:
    """Return a function that gives the line which a shell runs after Tab and Enter."""
    shell = request.param
    ran, program = tmp_path / "ran", tmp_path / "bin" / "trainctl"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(ran=ran, python=sys.executable))
    program.chmod(0o755)
    env = {"PATH": f"{program.parent}:{os.environ['PATH']}", "HOME": str(tmp_path), "TERM": "dumb"}
    env |= {"TRAINCTL_STATE": str(own_state), "TRAINCTL_CONNECT": os.environ["TRAINCTL_CONNECT"]}

    def in_fish(line: str) -> str:
        done = subprocess.run(
            [shell, "-c", f"{SWITCH_ON[shell]}; complete -C '{line}'"], env={**ENVIRONMENT, **env}, text=True,
            capture_output=True, check=True, timeout=HANG_SECONDS,
        )  # fmt: skip
        (word,) = [row.split("\t")[0] for row in done.stdout.splitlines()]
        return f"{line.rpartition(' ')[0]} {word}".removeprefix("trainctl ")

    def on_terminal(line: str) -> str:
        words = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}[shell]
        typist = Typist(words, **env)
        typist.type(f"{SWITCH_ON[shell]}; echo re''ady\n")
        typist.until("\nready|\rready")
        typist.type(f"{line}\t\n")
        until(lambda: ran.exists() and ran.read_text().endswith("\n"), what=f"the command: {typist.said}")
        typist.type("exit\n")
        assert typist.ended() == 0
        return ran.read_text().strip()

    return in_fish if shell == "fish" else on_terminal


@pytest.mark.parametrize(
    ("line", "added"),
    [
        ("trainctl send set-l", "r"),
        ("trainctl send resize-batch mi", "cro="),
        ("trainctl send set-lr schedule=sc", "ale"),
        (f"trainctl send drain --node {NODE[:2]}", NODE[2:]),
        ("trainctl status ti", "RUN"),
    ],
)
def test_tab_completes_verbs_their_arguments_nodes_and_runs(
    run: str, complete: Complete, line: str, added: str
) -> None:
    whole = line[:-2] + run if added == "RUN" else line + added
    assert complete(line) == whole.removeprefix("trainctl ")
