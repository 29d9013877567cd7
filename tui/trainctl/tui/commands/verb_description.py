"""A verb as a person sees it, as data, and what several descriptions share: fields, checks and phrases. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from trainctl.protocol.messages import Event, RankView, RunView
from trainctl.tui.commands.command import Order
from trainctl.tui.state import series
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.formatting import seconds

ActsOn = Literal["active run", "any run", "alerts", "new run"]
"""The least that a verb needs: a run that is active; one that may have ended; nothing, as alerts are about machines
too; or no active run at all."""


class NoInverse(ValueError):  # noqa: N818  a finding, not a failure
    """The reason why an event can't be undone."""


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


@dataclass(frozen=True)
class Proposal:
    """A command that a person is about to send, and the run that it is for."""

    order: Order
    state: ViewState
    run: RunView


@dataclass(frozen=True)
class VerbDescription:
    """One verb: its dialog, what it says before it is sent, how it is undone, and its key."""

    name: str
    changes: str
    keeps: str
    undo: Callable[[Event, RunView], Order] | str
    """The command that undoes an event of this verb (it raises NoInverse with the reason), or why there is none."""
    title: str = ""  # of the dialog; empty: the verb
    acts_on: ActsOn = "active run"
    fields: Callable[[ViewState, int | None], tuple[FormField, ...]] | tuple[FormField, ...] = ()
    """Fields of the dialog, also as made from the state and the rank that is selected."""
    no_nodes: str = ""  # why the dialog can send nothing when its first field has no node to choose
    blocked: Callable[[ViewState], str] = lambda state: ""
    """The reason why an active run gives the dialog nothing to do."""
    preview: Callable[[Proposal], str] | None = None
    """One line on what a command would do to the run, until its lead has said it; None: the verb's summary says it."""
    changes_nothing: Callable[[Order, RunView], bool] = lambda order, run: False
    """Return whether all is as the command would have it already."""
    undo_remark: Callable[[Order], str] = lambda order: ""
    """The difference that stays when this verb undoes another."""
    against_plan: bool = False  # its values are computed from a plan, and refused if that has moved on
    ask: str = ""  # the question that only `y` answers with yes; empty: enter sends
    dialog: Literal["form", "split"] = "form"
    key: VerbKey | None = None

    def fields_for(self, state: ViewState, rank: int | None) -> tuple[FormField, ...]:
        """Return the dialog's fields for a state and the rank that is selected."""
        return self.fields if isinstance(self.fields, tuple) else self.fields(state, rank)


# ---------------------------------------------------------------- fields and checks


def node_field(views: Sequence[RankView], rank: int | None) -> FormField:
    """Return a choice among the nodes of these ranks; that of the selected rank comes first."""
    chosen = next((view.node for view in views if view.rank == rank), views[0].node if views else "")
    return FormField("node", "node", chosen, tuple(dict.fromkeys(view.node for view in views)))


# ---------------------------------------------------------------- phrases


def within(state: ViewState) -> str:
    """Return how long the step in progress may take yet."""
    usual = series.typical(state.lately("step_seconds"))
    active = state.run is not None and state.run.state == "running"
    return f", within about {seconds(usual)}" if active and usual is not None else ""
