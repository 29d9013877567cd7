"""Tests of what the command line offers: its help, its completion in real shells, and which commands `--read-only`
refuses."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import typer
from tests.cluster.in_process import BlockingAgent
from tests.cluster.run_files import FOREVER, NODE
from tests.tui.support.cli_calls import ENVIRONMENT, assert_one_line, call
from tests.tui.support.typist import Typist
from tests.waiting import HANG_SECONDS, until

from trainctl.tui.cli.main import CHANGING, FILES, RENAMED, app
from trainctl.tui.setup import remote_install

READING = {
    *(
        "advise",
        "alerts",
        "attach",
        "check",
        "config",
        "diagnose",
        "diff",
        "doctor",
        "events",
        "export",
        "help",
        "logs",
    ),
    *("ls", "mirror", "policies", "replay", "report", "schema", "simulate", "status", "watch"),
    *("cluster", "cluster discover", "cluster list", "data", "data bench", "data preview", "keys", "keys audit"),
    *("keys list", "model", "model export", "model quantize", "runs"),
}


def test_each_command_either_changes_something_or_is_known_to_read() -> None:
    group: Any = typer.main.get_command(app)
    names = set()
    for name, command in group.commands.items():
        names |= {name, *(f"{name} {inner}" for inner in getattr(command, "commands", {}))}
    assert names == READING | CHANGING
    assert not READING & CHANGING


@pytest.mark.parametrize("words", ["send note text=x", "promote mbp", "keys revoke anna", "run run.toml"])
def test_read_only_refuses_what_changes_something(words: str) -> None:
    """It asks no agent first."""
    name = words if not words.startswith("keys") else "keys revoke"
    assert_one_line(call("--read-only", *words.split()), 2, "--read-only", name.split()[0])


def test_read_only_takes_what_reads(tmp_path: Path) -> None:
    assert "--read-only" not in call("--read-only", "keys", "list", TRAINCTL_KEYS=str(tmp_path)).stderr


def test_each_command_takes_the_agents_and_settings_that_are_named_before_it(tmp_path: Path) -> None:
    group: Any = typer.main.get_command(app)
    root = group.make_context("trainctl", ["--connect", "tcp://a:1", "--cluster", "c.toml", "--config", "d.toml", "ls"])
    commands = [
        command for outer in group.commands.values() for command in (outer, *getattr(outer, "commands", {}).values())
    ]
    for command in commands:
        for option in command.params:
            if {"--connect", "--cluster", "--config"} & {*option.opts}:
                own = option.process_value(typer.Context(command, parent=root), None)
                assert str(own) == str(root.params[option.name]), (command.name, option.name)
    file = tmp_path / "c.toml"
    file.write_text('[nodes.mbp]\naddress = "tcp://mbp:7474"\n', "utf-8")
    assert "mbp" in call("--cluster", file, "cluster", "list").stdout
    assert_one_line(call("--cluster", file, "cluster", "remove", "mbp"), 2, "mbp is defined in", "c.toml")


def test_help_lists_all_commands_by_heading_and_says_more_if_asked() -> None:
    brief, whole = call("--help").stdout, call("--help", "--all").stdout
    assert len([row for row in brief.splitlines() if row]) <= 12
    assert {*FILES, "attach"} <= {*brief.split()}
    assert "--read-only" in whole and "Exit codes" in whole
    assert all(any(row.split()[:1] == [name] for row in whole.splitlines()) for name in (*FILES, "attach"))


@pytest.mark.parametrize("name", RENAMED)
def test_an_old_name_works_as_the_new_one_and_names_it(name: str, tmp_path: Path) -> None:
    rest = {"discover": ["--cluster", tmp_path / "none.toml"]}.get(name, [tmp_path / "none", "--to", "mlx-4bit"])
    old, new = call(name, *rest, "--json"), call(*RENAMED[name].split(), *rest, "--json")
    assert (old.returncode, old.stdout) == (new.returncode, new.stdout) and new.returncode
    assert f"trainctl {RENAMED[name]}" in old.stderr.splitlines()[0] and "is now" not in new.stderr


DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_each_page_is_a_topic_that_prints_it() -> None:
    topics = {line.split()[0] for line in call("help").stdout.splitlines()[1:]}
    assert topics == {page.stem for page in DOCS.glob("*.md")} - {"README", "protocol-agents"}
    done = call("help", "training")
    assert (done.returncode, done.stdout) == (0, (DOCS / "training.md").read_text("utf-8"))
    assert_one_line(call("help", "trianing"), 2, "no topic 'trianing'; the topics are ")


def test_the_program_s_wheel_has_the_pages() -> None:
    names = zipfile.ZipFile(BytesIO(remote_install.build_wheel().body)).namelist()
    assert {f"trainctl/tui/docs/{page.name}" for page in DOCS.glob("*.md")} <= set(names)


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


@pytest.mark.tier("all")
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
