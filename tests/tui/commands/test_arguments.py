"""What the command line says of one verb: `send VERB --help`, and what the shell and the `:` line propose."""

import pytest
from tests.tui.support.cli_calls import call, call_process

from trainctl.protocol.messages import verbs
from trainctl.protocol.messages.verb_arguments import arguments_of
from trainctl.tui.commands import arguments, command_line


@pytest.mark.parametrize("verb", verbs.VERBS.values(), ids=lambda verb: verb.name)
def test_its_help_has_all_that_is_declared(verb: verbs.Verb) -> None:
    done = call("send", verb.name, "--help")
    text = " ".join(done.stdout.split())
    assert done.returncode == 0
    assert verb.summary[1:] in text
    assert verbs.SCOPES[verb.scope] in text
    assert verbs.AFFECTS[verb.affects] in text
    assert f"undone by {verb.inverse or 'nothing'}" in text
    assert f"trainctl send {verb.typed}" in text
    for argument in arguments_of(verb):
        assert argument.meaning, argument.name
        assert f"{argument.typed} {argument.meaning}" in text


def test_help_says_unit_bounds_and_default() -> None:
    text = " ".join(call("send", "mute", "--help").stdout.split())
    assert "minutes= duration of the mute; 0 unmutes; number from 0 to 43,200, minutes; default 60" in text
    text = " ".join(call("send", "resize-batch", "-h").stdout.split())
    assert "whole number from 1 to 1,048,576, samples; required" in text
    assert "send drain --node NODE" in " ".join(call("send", "drain", "--help").stdout.split())
    assert "Options:" in call("send", "--help").stdout
    assert "Options:" in call("send", "frobnicate", "--help").stdout


@pytest.mark.parametrize("verb", verbs.VERBS.values(), ids=lambda verb: verb.name)
def test_its_example_is_a_command(verb: verbs.Verb) -> None:
    if "@" not in verb.example:
        order = command_line.parse(verb.typed)
        assert order.verb == verb.name
        assert "'" in verb.example or command_line.parse(command_line.spoken(order)) == order


@pytest.mark.parametrize(
    ("words", "begun", "proposed"),
    [
        ([], "re", ["resize-batch", "rebalance", "resume"]),
        (["resize-batch"], "", ["micro=", "--node"]),
        (["resize-batch", "micro=4"], "", ["--node"]),
        (["set-lr", "value=1e-4"], "", ["schedule="]),
        (["set-lr"], "schedule=s", ["schedule=scale", "schedule=set"]),
        (["set-lr", "schedule=set"], "s", []),
        (["drain"], "", ["--node"]),
        (["rebalance"], "a", ["auto="]),
        (["start-run"], "c", ["config=@"]),
        (["frobnicate"], "", []),
    ],
    ids=str,
)
def test_what_may_follow(words: list[str], begun: str, proposed: list[str]) -> None:
    assert arguments.next_words(words, begun) == proposed


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("", None), ("res", "resize-batch micro="), ("RES", "resize-batch micro="), ("check", "checkpoint"),
        ("dr", "drain --node "), ("set-lr ", "set-lr value="), ("set-lr value=1e-4 sch", "set-lr value=1e-4 schedule="),
        ("set-lr value=1e-4 schedule=se", "set-lr value=1e-4 schedule=set"), ("note text=x ", None), ("fly", None),
    ],
)  # fmt: skip
def test_the_line_is_proposed_a_word_longer(text: str, whole: str | None) -> None:
    assert arguments.completed(text) == whole


@pytest.mark.parametrize(
    ("line", "word", "proposed"),
    [
        ("trainctl send pa", 2, ["pause"]),
        ("trainctl send set-lr value=1 s", 4, ["schedule="]),
        ("trainctl send set-lr schedule=", 3, ["schedule=scale", "schedule=set"]),
        ("trainctl send set-lr schedule = sc", 5, ["scale"]),  # as bash takes the words apart
    ],
)
def test_the_shell_is_told_what_may_follow(line: str, word: int, proposed: list[str]) -> None:
    done = call_process(_TRAINCTL_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(word))
    assert done.stdout.split() == proposed
