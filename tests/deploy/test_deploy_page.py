"""docs/deploy.md: its command lines, as the programs take them, and the order in which keys are replaced."""

import re
import shlex

import pytest
import typer
from tests.conftest import ROOT
from tests.deploy.command_lines import parsed
from tests.deploy.rendering import FOLDER, GROUPS, rendered

PAGE = (ROOT / "docs" / "deploy.md").read_text("utf-8")
CALL = re.compile(r"(?:-- |`)(trainctl(?:-agent)?(?: [^`#\n]*)?)")


def test_the_programs_take_every_command_line_of_the_page() -> None:
    calls = [words for text in CALL.findall(PAGE) if " " in text and (words := shlex.split(text))]
    assert ["trainctl", "send", "stop"] in calls and ["trainctl", "run", "/tmp/run.toml"] in calls
    for words in calls:
        parsed(words)
    with pytest.raises(typer.TyperException):
        parsed(["trainctl", "stop-the-run"])


def test_keys_are_replaced_while_no_pod_runs() -> None:
    (block,) = (text for text in re.findall(r"```\n(.*?)```", PAGE, re.DOTALL) if "rm -r keys" in text)
    lines = [re.sub(r"\s+#.*", "", line).strip() for line in block.splitlines()]
    starts = (
        "trainctl send stop",
        "--replicas=0",
        "--for=delete",
        "rm -r keys",
        "make-keys.sh",
        "create secret",
        "apply -k",
    )
    assert [word in line for word, line in zip(starts, (line for line in lines if line), strict=True)] == [True] * 7
    created = [line.strip() for line in PAGE.splitlines() if "kubectl create secret" in line]
    assert created[0].split()[:6] == created[1].split()[:6]
    assert created[0] in (FOLDER / "make-keys.sh").read_text("utf-8")
    for folder in GROUPS:  # applied again, each has its pods back
        assert [one["spec"]["replicas"] for one in rendered(folder) if one["kind"] == "StatefulSet"] == [3]
