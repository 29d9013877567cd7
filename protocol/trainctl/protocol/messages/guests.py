"""Lines between a training loop and the agent of its machine, on the Unix socket `guests.sock`.

Each line is one JSON object in UTF-8; `type` tells which. Numbers that aren't finite are the strings "nan", "inf" and
"-inf". The loop needs no library of ours for them. A spool file has the same lines, those of the loop only.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from trainctl.protocol.messages.base import Count, Name, Severity
from trainctl.protocol.messages.peers import GuestStep
from trainctl.protocol.messages.requests import AttachRun
from trainctl.protocol.messages.verbs import VERBS

GUEST_VERSION: Final = 1
"""Version of these lines; it grows when existing fields change."""
GUEST_SOCKET: Final = "guests.sock"
"""Name of the socket in the agent's runtime directory."""
MAX_LINE_BYTES: Final = 1024 * 1024
"""Longest line, with its line feed."""
MAX_STEPS: Final = 500
"""Most steps in one line."""
MAX_VERBS: Final = 2 * len(VERBS)
"""Most verbs in a hello: it may know some that this version does not have."""

CommandId = Annotated[str, Meta(min_length=1, max_length=64)]
Text = Annotated[str, Meta(max_length=1000)]
Value = str | float | None


class GuestLine(msgspec.Struct, frozen=True, tag_field="type", tag=str.lower):
    """The base of all lines; unknown fields are ignored."""


class Outcome(msgspec.Struct, frozen=True):
    """The end of an order. It is repeated until a line with it was answered by `kept`."""

    id: CommandId
    state: Literal["applied", "rejected", "failed"]
    step: Count | None = None  # step whose row carries the order; None: it ended at no step
    reason: Text = ""
    before: Value = None
    after: Value = None


class Hello(GuestLine, frozen=True):
    """Begins each connection, and is sent again when the run or its verbs changed."""

    version: Count
    attach: dict[str, Any]  # fields of `attach-run`
    verbs: Annotated[dict[Name, Text], Meta(max_length=MAX_VERBS)] = {}  # verb -> why not; empty: it is offered
    socket: str = ""  # path of the socket whose agent has earlier steps of the run; empty: none is known to

    @property
    def request(self) -> AttachRun:
        """The run as a client would attach it. Raises msgspec.ValidationError."""
        return msgspec.convert({**self.attach, "rid": "guest"}, AttachRun, strict=False)


class StepsLine(GuestLine, frozen=True, tag="steps"):
    """Steps in order, and how orders ended. Without both it shows that the loop's process lives: one each 5 s."""

    steps: Annotated[tuple[GuestStep, ...], Meta(max_length=MAX_STEPS)] = ()
    outcomes: Annotated[tuple[Outcome, ...], Meta(max_length=1000)] = ()


class RunEvent(GuestLine, frozen=True, tag="event"):
    """Something that happened in the loop, for the run's events."""

    text: Annotated[str, Meta(min_length=1, max_length=4000)]
    number: Count  # counts up from 1 in a process of the run, so that a repeated one is recorded once
    severity: Severity = "info"
    step: Count | None = None


class End(GuestLine, frozen=True):
    """The run is over."""

    state: Literal["finished", "stopped", "failed"] = "finished"
    reason: Text = ""


class Kept(GuestLine, frozen=True):
    """Answers `hello`, `steps`, `event` and `end`: what needn't be sent again."""

    step: Count  # newest step that is in the record; 0: none
    event: Count = 0  # number of the newest event in the record


class Order(GuestLine, frozen=True):
    """A command for the loop to carry out between two steps. It is repeated until its outcome arrives."""

    id: CommandId
    verb: Name
    args: dict[str, Any] = {}
    expires_at: float | None = None  # time in Unix seconds from which on it isn't to be begun


class RefusedLine(GuestLine, frozen=True, tag="refused"):
    """A line that isn't accepted; the connection then ends."""

    reason: str
    final: bool = False  # whether the same would be refused again


FromGuest = Hello | StepsLine | RunEvent | End
ToGuest = Kept | Order | RefusedLine
