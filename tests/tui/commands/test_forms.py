"""Commands as typed: the grammar, completions, checks, what a dialog promises, and outcomes in words."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tui.support.cli_calls import call_process
from tests.tui.support.recorded import CLOCK, CONNECTED, run_view, shrunk, snapshot

from trainctl.protocol import messages as m
from trainctl.protocol.messages import verbs
from trainctl.protocol.messages.events import Evaluated
from trainctl.tui.commands import arguments
from trainctl.tui.commands import forms as c
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.forms import changes_nothing, preview
from trainctl.tui.state import reducer
from trainctl.tui.state import view_state as md
from trainctl.tui.state.filter_language import TypedLineError
from trainctl.tui.text import formatting as f

STATE = reducer.apply(reducer.apply(md.ViewState(), CONNECTED, 0.0), snapshot(run_view(1)), CLOCK.at_monotonic)
FLEET = reducer.apply(
    reducer.apply(md.ViewState(), CONNECTED, 0.0), snapshot(run_view(4, step=18_240, steps=60_000)), CLOCK.at_monotonic
)


def test_a_command_is_read_as_on_the_command_line() -> None:
    order = arguments.parse("resize-batch micro=4 --node studio --if-plan=7")
    assert order == Order("resize-batch", {"micro": 4}, "studio", None, 7)
    assert arguments.parse("note 'text=two words'").args == {"text": "two words"}
    assert arguments.parse("stop checkpoint=false").args == {"checkpoint": False}
    assert arguments.parse("set-lr value=1e-4 schedule=set").args == {"value": 1e-4, "schedule": "set"}


def test_an_evaluation_is_promised_the_time_of_the_last_one() -> None:
    event = m.Event(40, CLOCK.at_wall, "info", "auto", Evaluated(1.9031, 2.14), step=60, run=run_view(1).run)
    timed = msgspec.structs.replace(STATE, events=(event,))
    assert preview(Order("evaluate"), timed).text.endswith(", took 2.14 s; curve unchanged")
    assert "took" not in preview(Order("evaluate"), STATE).text


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("", 1),
        ("fly", 1),
        ("resize-batch size=3", 14),
        ("resize-batch micro=4 micro=8 --node studio", 22),
        ("resize-batch micro=4 --node studio --node mbp", 36),
        ("pause --node a", 7),
        ("drain", 6),
        ("resize-batch micro=3 --speed 4", 22),
        ("resize-batch micro=3 --node", 22),
        ("note 'text=x", 6),
        ("resize-batch micro=x --node a", 14),
        ("resize-batch micro=3 --if-plan=x", 32),
    ],
)
def test_a_wrong_command_is_named_where_it_is_wrong(text: str, column: int) -> None:
    with pytest.raises(TypedLineError) as caught:
        arguments.parse(text)
    assert caught.value.column == column
    assert str(caught.value).startswith(f"column {column}: ") and "\n" not in str(caught.value)


@given(st.text(max_size=60))
def test_anything_typed_is_an_order_or_an_error(text: str) -> None:
    try:
        assert arguments.parse(text).verb in verbs.VERBS
    except TypedLineError as error:
        assert 1 <= error.column <= len(text) + 1


def test_a_dialog_carries_the_plan_it_was_computed_from() -> None:
    form = c.form("resize-batch", FLEET, rank=2)
    values = {item.name: item.value for item in form.fields}
    assert values == {"node": "forge", "micro": "13"}
    order = c.order_of(form, {**values, "micro": " 6 "})
    assert order == Order("resize-batch", {"micro": 6}, "forge", "sft-1b-20261120-110000", 4)
    assert c.form("checkpoint", STATE).if_plan is None


OUT = reducer.apply(md.ViewState(), snapshot(shrunk(run_view(3))), CLOCK.at_monotonic)
LOST = msgspec.structs.replace(
    shrunk(run_view(3)),
    ranks=tuple(msgspec.structs.replace(view, state="lost" if view.rank else view.state)
                for view in shrunk(run_view(3)).ranks),
)  # fmt: skip


def test_one_that_is_lost_comes_back_by_itself_and_one_that_failed_by_admit() -> None:
    lost = reducer.apply(md.ViewState(), snapshot(LOST), CLOCK.at_monotonic)
    assert c.form("admit", lost).blocked == "no node is drained or failed"
    assert c.form("admit", OUT, rank=2).fields[0].choices == ("torch-b",)
    assert c.way_back(OUT) == [
        "torch-b failed; :admit --node torch-b puts it back", "mlx-c is coming back and rejoins automatically",
    ]  # fmt: skip


def test_a_run_that_ended_takes_no_commands_but_notes() -> None:
    over = reducer.apply(md.ViewState(), snapshot(run_view(1, "finished")), 0.0)
    assert c.form("pause", over).blocked
    assert not c.form("note", over).blocked
    assert c.form("pause", md.ViewState()).blocked == "no active run"


def test_what_changes_nothing_is_known_before_it_is_sent() -> None:
    run = FLEET.run
    first, rate = run.ranks[0], f.scientific(run.learning_rate)
    for text in (f"resize-batch micro={first.micro_batch} --node {first.node}", f"set-lr value={rate}",
                 f"set-global-batch value={run.global_batch}"):  # fmt: skip
        assert changes_nothing(arguments.parse(text), FLEET), text
    for text in (f"resize-batch micro={first.micro_batch}", f"set-lr value={rate} schedule=set", "set-lr value=0.5",
                 "set-global-batch value=128", "checkpoint"):  # fmt: skip
        assert not changes_nothing(arguments.parse(text), FLEET), text


def test_a_verb_that_the_run_does_not_take_is_not_sent() -> None:
    offered = (("set-lr", ""), ("evaluate", "no evaluation function was given"))
    guest = msgspec.structs.replace(FLEET, run=msgspec.structs.replace(FLEET.run, kind="guest", verbs=offered))
    expected = {"set-lr": "", "note": "", "evaluate": "no evaluation function was given",
                "rebalance": "a different program trains this run"}  # fmt: skip
    assert {verb: c.form(verb, guest).blocked for verb in expected} == expected
    told = {
        text: preview(arguments.parse(text), guest).text for text in ("evaluate", "rebalance auto=true", "checkpoint")
    }
    assert [*told.values()] == ["no evaluation function was given", *["a different program trains this run"] * 2]
    hosted = msgspec.structs.replace(
        FLEET, run=msgspec.structs.replace(FLEET.run, verbs=(("evaluate", "none held out"),))
    )
    assert [c.form(verb, hosted).blocked for verb in ("evaluate", "checkpoint")] == ["none held out", ""]


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
