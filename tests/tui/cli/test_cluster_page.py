"""The page on clusters names commands and options that are there, and links that lead somewhere."""

import re
from pathlib import Path
from typing import Any

import typer

from trainctl.node_agent import cli as agent_cli
from trainctl.tui.cli.main import app

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "cluster.md").read_text(encoding="utf-8")


def commands(program: typer.Typer, name: str) -> dict[str, set[str]]:
    """Every command line's words up to its options -> the options."""
    found: dict[str, set[str]] = {}

    def walk(command: Any, words: str) -> None:
        found[words] = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        for sub, inner in getattr(command, "commands", {}).items():
            walk(inner, f"{words} {sub}")

    walk(typer.main.get_command(program), name)
    return found


def test_what_it_says_to_type_can_be_typed() -> None:
    known = commands(app, "trainctl") | commands(agent_cli.app, "trainctl-agent")
    blocks = re.findall(r"```\n(.*?)```", PAGE, re.DOTALL)
    told = [line for block in blocks for line in block.splitlines()] + re.findall(r"`(trainctl[^`]*)`", PAGE)
    lines = [line.removeprefix("$ ").split("#")[0] for line in told]
    typed = [line for line in lines if re.match(r"trainctl(-agent)?( |$)", line)]
    assert len(typed) >= 12
    for line in typed:
        words = next(
            (words for words in sorted(known, key=len, reverse=True) if f"{line} ".startswith(f"{words} ")), ""
        )
        assert words and (words not in ("trainctl", "trainctl-agent") or line.strip() == words), line
        if words != "trainctl-agent install":  # it takes the options of run too
            assert set(re.findall(r"--[a-z-]+", line)) <= known[words], line
