"""Tests of what the agent's program says before it starts."""

from pathlib import Path

import pytest

from trainctl.node_agent import cli


def test_an_agent_without_a_name_says_whose_runs_are_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli._name_others("vm", tmp_path)
    assert capsys.readouterr().err == "", "a machine without runs"
    (tmp_path / "box" / "runs" / "small-1").mkdir(parents=True)
    cli._name_others("box", tmp_path)
    assert capsys.readouterr().err == "", "its own runs"
    cli._name_others("vm", tmp_path)
    assert "--name box" in capsys.readouterr().err
