"""Verbs: what each takes, and the field that is named when it is given something else."""

import shlex
from collections.abc import Callable
from typing import Any

import pytest

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import verbs
from trainctl.protocol.messages.verb_arguments import completions

GOOD: dict[str, dict[str, Any]] = {
    "start-run": {"resume": "sft-1b-1"},
    "resize-batch": {"micro": 4},
    "rebalance": {"shares": {"studio": 16, "mbp": "33.5%"}},
    "set-global-batch": {"value": 48, "schedule": "scale"},
    "set-lr": {"value": 1e-4},
    "checkpoint": {},
    "evaluate": {},
    "sample": {"prompt": "x", "max_tokens": 5},
    "defragment": {},
    "profile": {"steps": 2},
    "drain": {},
    "admit": {},
    "promote": {"old_lead_is_off": True},
    "pause": {},
    "resume": {},
    "rollback": {"steps": 100, "skip_batches": 200},
    "stop": {"checkpoint": False},
    "note": {"text": "a warm day"},
    "acknowledge": {"id": "disk:mbp"},
    "mute": {"kind": "memory", "minutes": 30.0},
    "autopilot": {"name": "first-shares", "mode": "off"},
}


def test_these_are_all_the_verbs() -> None:
    assert set(GOOD) == set(verbs.VERBS)


@pytest.mark.parametrize("verb", GOOD)
def test_good_arguments_become_their_type_and_only_some_verbs_take_a_node(verb: str) -> None:
    kind, needed = verbs.VERBS[verb], "mbp" if verbs.VERBS[verb].needs_node else None
    args = verbs.check(verb, GOOD[verb], needed)
    assert type(args) is kind.args
    assert {name: getattr(args, name) for name in GOOD[verb]} == GOOD[verb]
    if kind.takes_node:
        verbs.check(verb, GOOD[verb], "studio")
    for refused, node in ((not kind.takes_node, "studio"), (kind.needs_node, None)):
        if refused:
            with pytest.raises(InvalidInputError) as caught:
                verbs.check(verb, GOOD[verb], node)
            assert caught.value.where == "node"


@pytest.mark.parametrize("verb", [verb for verb in GOOD if verb != "start-run"])
def test_what_is_written_of_a_command_is_read_as_that_command(verb: str) -> None:
    node = "studio" if verbs.VERBS[verb].needs_node else None
    args = verbs.check(verb, GOOD[verb], node)
    words = shlex.split(verbs.written(verb, verbs.given(args), node))
    pairs = dict(word.split("=", 1) for word in words[1:] if "=" in word)
    assert words[0] == verb
    assert verbs.parse_args(verb, pairs) == GOOD[verb], "what is left out isn't filled in"
    assert verbs.check(verb, verbs.parse_args(verb, pairs), node) == args
    assert (words[-2:] == ["--node", "studio"]) == (node is not None)


@pytest.mark.parametrize("verb", sorted(set(GOOD) - {"rebalance"}))
def test_an_argument_that_a_verb_does_not_have_is_named(verb: str) -> None:
    with pytest.raises(InvalidInputError, match="frobnicate"):
        verbs.check(verb, {**GOOD[verb], "frobnicate": 1}, "mbp" if verbs.VERBS[verb].needs_node else None)
    with pytest.raises(InvalidInputError) as caught:
        verbs.parse_args(verb, {"frobnicate": "1"})
    assert caught.value.where == "frobnicate"


def test_each_word_of_rebalance_is_a_node_or_auto() -> None:
    assert verbs.parse_args("rebalance", {"auto": "true"}) == {"auto": True}
    for words in ({"mbp": "much"}, {"mbp": "0"}, {"mbp": "-3"}, {"auto": "1"}):
        with pytest.raises(InvalidInputError) as caught:
            verbs.parse_args("rebalance", words)
        assert caught.value.where in words
    for args in ({}, {"shares": {}}, {"shares": {"a": 1}, "auto": True}, {"auto": False}):
        with pytest.raises(InvalidInputError, match="auto=true"):
            verbs.check("rebalance", args)


def test_the_argument_at_fault_is_named_in_plain_words() -> None:
    refused: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("resize-batch", {"micro": "8"}, "micro: must be a whole number"),
        ("resize-batch", {"micro": True}, "micro: must be a whole number"),
        ("resize-batch", {"micro": 0}, "micro: must be a whole number of at least 1"),
        ("resize-batch", {"micro": 2**80}, "micro: must be a whole number"),
        ("resize-batch", {"micro": 2**21}, "micro: must be a whole number of at most 1048576"),
        ("resize-batch", {}, "micro: is required but missing"),
        ("set-lr", {"value": -1e-9}, "value: must be a number of at least 0"),
        ("set-lr", {"value": float("nan")}, "value: must be a"),
        ("set-lr", {"value": 1e-4, "schedule": "halve"}, "schedule: 'halve' is not one of scale, set"),
        ("stop", {"checkpoint": 1}, "checkpoint: must be true or false"),
        ("note", {"text": "x" * 501}, "text: must be text of at most 500 characters"),
        ("start-run", {}, "config: "),
        ("start-run", {"config": "run.toml"}, "config: must be a table"),
        ("start-run", {"config": {}, "resume": "a"}, "config: "),
        ("start-run", {"branch": "a@3", "resume": "a"}, "config: "),
        ("start-run", {"branch": "a@"}, "branch: "),
        ("start-run", {"branch": "a@0"}, "branch: "),
        ("start-run", {"branch": "a@" + "1" * 5000}, "branch: "),
        ("start-run", {"resume": "a", "overrides": {"run.steps": "9"}}, "overrides: "),
        ("start-run", {"config": {}, "old_lead_is_off": True}, "old_lead_is_off: "),
        ("profile", {"steps": 21}, "steps: "),
    )
    for verb, args, says in refused:
        with pytest.raises(InvalidInputError) as caught:
            verbs.check(verb, args)
        assert str(caught.value).startswith(says) and "\n" not in str(caught.value)


@pytest.mark.parametrize("call", [verbs.check, verbs.parse_args])
def test_an_unknown_verb_names_those_there_are(call: Callable[..., Any]) -> None:
    for verb in ("resize_batch", "RESIZE-BATCH", "resise-batch"):
        with pytest.raises(InvalidInputError, match=r"^verb: unknown verb '.*'; did you mean resize-batch"):
            call(verb, {})
    for verb in ("", "frobnicate", "__class__"):
        with pytest.raises(InvalidInputError, match=r"^verb: .*the verbs are start-run, resize-batch"):
            call(verb, {})


def test_words_for_yes_and_no_and_a_branch_with_its_settings_by_name() -> None:
    for word, value in (("true", True), ("false", False), ("1", True), ("0", False)):
        assert verbs.parse_args("stop", {"checkpoint": word}) == {"checkpoint": value}
    args = {"branch": "sft-1b-1@50", "overrides": {"optimizer.learning_rate": "1e-4"}}
    typed = verbs.written("start-run", args)
    assert typed == "start-run branch=sft-1b-1@50 optimizer.learning_rate=1e-4"
    assert verbs.parse_args("start-run", dict(word.split("=") for word in typed.split()[1:])) == args


def test_nodes_of_a_profile_are_typed_in_one_word() -> None:
    args = verbs.parse_args("profile", {"steps": "4", "nodes": "studio,mbp"})
    assert args == {"steps": 4, "nodes": ["studio", "mbp"]}
    assert verbs.written("profile", args) == "profile steps=4 nodes=studio,mbp"
    assert verbs.check("profile", args) == verbs.Profile(steps=4, nodes=("studio", "mbp"))
    assert verbs.check("profile", {}) == verbs.Profile(steps=3, nodes=())
    with pytest.raises(InvalidInputError) as refused:
        verbs.parse_args("profile", {"steps": "21"})
    assert refused.value.where == "steps"


def test_an_argument_with_few_values_is_completed_by_them() -> None:
    set_lr, stop = verbs.VERBS["set-lr"], verbs.VERBS["stop"]
    assert completions(set_lr, ["value=1e-4"], "schedule=") == ["schedule=scale", "schedule=set"]
    assert completions(set_lr, [], "schedule=sc") == ["schedule=scale"]
    assert completions(stop, [], "checkpoint=") == ["checkpoint=true", "checkpoint=false"]
    assert completions(set_lr, [], "value=") == []
