"""A verb as a person sees it, as data: the files of `commands/verbs/` describe them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from trainctl.protocol import messages as m
from trainctl.tui.commands.command import Order
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.glyphs import Glyphs

ActsOn = Literal["active run", "any run", "alerts", "new run"]
"""What there has to be: a run that is active; one that may have ended; nothing, as alerts are about machines too; or no
active run at all."""


class NoInverse(ValueError):  # noqa: N818  a finding, not a failure
    """Why an event can't be undone."""


@dataclass(frozen=True)
class FormField:
    """One thing a dialog asks for: typed, or one of `choices`."""

    name: str
    label: str
    value: str = ""
    choices: tuple[str, ...] = ()
    if_empty: str = ""  # what an empty field means


@dataclass(frozen=True)
class VerbKey:
    """The key that opens a verb's dialog."""

    key: str
    word: str  # what it is called at the bottom of the screen
    tooltip: str  # what it is called in Help and in docs/keys.md
    place: int  # among the keys of all verbs, ascending
    shown: bool = True  # at the bottom of the screen
    stands_for: Callable[[ViewState], str] | None = None  # the verb it opens now, where that can be another


def _no_fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    return ()


def _nothing_blocks(state: ViewState, fields: Sequence[FormField]) -> str:
    return ""


def _not_refused(order: Order, state: ViewState, run: m.RunView) -> str:
    return ""


def _changes_something(order: Order, run: m.RunView) -> bool:
    return False


def _no_remark(order: Order) -> str:
    return ""


@dataclass(frozen=True)
class VerbDescription:
    """One verb: its dialog, what it says before it is sent, how it is undone, and its key."""

    name: str
    changes: str
    keeps: str
    undo: Callable[[m.Event, m.RunView], Order] | str
    """The command that undoes an event of this verb (it raises NoInverse with the reason), or why there is none."""
    title: str = ""  # of the dialog; empty: the verb
    acts_on: ActsOn = "active run"
    fields: Callable[[ViewState, int | None], tuple[FormField, ...]] = _no_fields
    """What the dialog asks for, filled from the state and the rank that is selected."""
    blocked: Callable[[ViewState, Sequence[FormField]], str] = _nothing_blocks
    """Why an active run gives the dialog nothing to do."""
    refused: Callable[[Order, ViewState, m.RunView], str] = _not_refused
    """What the agent can already be seen to refuse a command for."""
    preview: Callable[[Order, ViewState, m.RunView, Glyphs], str] | None = None
    """What a command would do to the run, in one line; None: the verb's summary says it."""
    changes_nothing: Callable[[Order, m.RunView], bool] = _changes_something
    """Whether all is as the command would have it already."""
    undo_remark: Callable[[Order], str] = _no_remark
    """What won't be quite as it was, when this verb undoes another."""
    against_plan: bool = False  # its values are computed from a plan, and refused if that has moved on
    ask: str = ""  # the question that only `y` answers with yes; empty: enter sends
    dialog: Literal["form", "split"] = "form"
    key: VerbKey | None = None
