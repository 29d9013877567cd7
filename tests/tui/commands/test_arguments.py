"""Arguments as they are typed: a verb's example is a command, and the shell and the `:` line propose what follows."""

import pytest
from tests.tui.support.cli_calls import call_process

from trainctl.protocol.messages import verbs
from trainctl.tui.commands import arguments


def test_pairs_keep_what_follows_the_first_equals_sign_and_an_at_sign_means_a_file_only_where_one_is_wanted() -> None:
    assert arguments.pairs(["text=a=b", "empty="], "note") == {"text": "a=b", "empty": ""}
    assert arguments.verb_args("note", ["text=@anna look"], local=True) == {"text": "@anna look"}


@pytest.mark.parametrize(
    ("text", "args"),
    [
        ("set-lr 3e-4", {"value": 3e-4}),
        ("resize-batch 4 --node studio", {"micro": 4}),
        ("note 'two words'", {"text": "two words"}),
        ("autopilot first-shares mode=on", {"name": "first-shares", "mode": "on"}),
    ],
)
def test_a_verb_s_first_argument_needs_no_name(text: str, args: dict[str, object]) -> None:
    assert arguments.parse(text).args == args


def test_each_verb_s_example_is_a_command() -> None:
    for verb in verbs.VERBS.values():
        if "@" not in verb.example:
            order = arguments.parse(verb.typed)
            assert order.verb == verb.name
            assert "'" in verb.example or arguments.parse(arguments.spoken(order)) == order, verb.name


@pytest.mark.parametrize(
    ("words", "begun", "proposed"),
    [
        ([], "re", ["resize-batch", "rebalance", "resume"]),
        (["resize-batch"], "", ["micro=", "--node"]),
        (["resize-batch", "micro=4"], "", ["--node"]),
        (["set-lr"], "schedule=s", ["schedule=scale", "schedule=set"]),
        (["set-lr", "schedule=set"], "s", []),
        (["mute"], "dis", ["disk"]),
        (["autopilot", "first-shares"], "mode=a", ["mode=advise"]),
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
        ("", None),
        ("RES", "resize-batch micro="),
        ("dr", "drain --node "),
        ("set-lr ", "set-lr value="),
        ("set-lr value=1e-4 schedule=se", "set-lr value=1e-4 schedule=set"),
        ("fly", None),
    ],
)
def test_the_line_is_proposed_a_word_longer(text: str, whole: str | None) -> None:
    assert arguments.completed(text) == whole


@pytest.mark.parametrize(
    ("line", "word", "proposed"),
    [
        ("trainctl send pa", 2, ["pause"]),
        ("trainctl send set-lr schedule = sc", 5, ["scale"]),  # as bash takes the words apart
    ],
)
def test_the_shell_is_told_what_may_follow(line: str, word: int, proposed: list[str]) -> None:
    done = call_process(_TRAINCTL_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(word))
    assert done.stdout.split() == proposed
