"""The verbs a command may carry: their arguments, what each is for, and the check that both ends make.

A verb that isn't here doesn't exist. Arguments are absolute values, so that a command repeated is a command done once.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from trainctl.protocol.config import validation_errors
from trainctl.protocol.config.alert_rules import AlertKind
from trainctl.protocol.errors import InvalidInputError

MAX_SAMPLES = 1_048_576
PERCENT = r"^\d{1,3}(\.\d{1,3})?%\Z"
"""A share of the global batch in percent: `62.5%`."""


class Args(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The root of all arguments."""


class StartRun(Args, frozen=True):
    """Exactly one of the first two is given. The node, if one is named, is the one that is to conduct the run."""

    config: dict[str, Any] | None = None  # a run file as parsed
    resume: str | None = None  # the id of a run to take up again
    old_lead_is_off: bool = False  # resume: taken on trust where no majority of the cluster's nodes can be asked


class ResizeBatch(Args, frozen=True):
    micro: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)]  # samples per forward/backward


class Rebalance(Args, frozen=True):
    """Shares by node, or `auto`: those of the shortest step by the ranks' measured speeds. On the command line each
    node is an argument of its own: `rebalance studio=16 mbp=8`."""

    shares: dict[str, Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | Annotated[str, Meta(pattern=PERCENT)]] = {}
    auto: bool = False


class SetGlobalBatch(Args, frozen=True):
    value: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)]  # samples per step over all ranks
    schedule: Literal["set", "scale"] = "set"  # scale: learning rate times new G / old G


class SetLr(Args, frozen=True):
    value: Annotated[float, Meta(ge=0, le=100)]
    schedule: Literal["scale", "set"] = "scale"  # scale: the rest of the schedule, scaled; set: constant from here


class Checkpoint(Args, frozen=True):
    """No arguments."""


class Evaluate(Args, frozen=True):
    """No arguments."""


class Drain(Args, frozen=True):
    """No arguments."""


class Admit(Args, frozen=True):
    """No arguments."""


class Promote(Args, frozen=True):
    old_lead_is_off: bool = False  # taken on trust where no majority of the cluster's nodes can be asked


class Pause(Args, frozen=True):
    """No arguments."""


class Resume(Args, frozen=True):
    """No arguments."""


class Stop(Args, frozen=True):
    checkpoint: bool = True  # write one before ending


class Note(Args, frozen=True):
    text: Annotated[str, Meta(min_length=1, max_length=500)]


class Acknowledge(Args, frozen=True):
    id: Annotated[str, Meta(min_length=1, max_length=200)]  # of an open alert, such as disk:studio


class Mute(Args, frozen=True):
    kind: AlertKind
    minutes: Annotated[float, Meta(ge=0, le=43_200)] = 60.0  # from now on; 0: no longer


@dataclasses.dataclass(frozen=True)
class Verb:
    """One row of the table: what the CLI, the palette, the docs and the agent's dispatch are made from."""

    name: str
    args: type[Args]
    summary: str
    takes_node: bool = False
    needs_node: bool = False


VERBS: dict[str, Verb] = {
    verb.name: verb
    for verb in (
        Verb("start-run", StartRun, "start a run from a run file, or take up an old one", True),
        Verb("resize-batch", ResizeBatch, "micro-batch of a node: speed and memory only, never the loss", True),
        Verb("rebalance", Rebalance, "samples of the batch by node: speed only, never the loss"),
        Verb("set-global-batch", SetGlobalBatch, "samples per step: changes the optimisation"),
        Verb("set-lr", SetLr, "learning rate: changes the optimisation"),
        Verb("checkpoint", Checkpoint, "write a checkpoint at the next step boundary"),
        Verb("evaluate", Evaluate, "loss on the held-out samples at the next step boundary; works while paused"),
        Verb("drain", Drain, "take a node out of the group at the next step; its trainer waits", True, True),
        Verb("admit", Admit, "take a drained node back, levelled to the others", True, True),
        Verb("promote", Promote, "have a node conduct the run in the place of its lead", True, True),
        Verb("pause", Pause, "stop after the step in progress; commands then apply at once"),
        Verb("resume", Resume, "go on from where the run was paused"),
        Verb("stop", Stop, "end the run, with a checkpoint first"),
        Verb("note", Note, "write a line into the run's events"),
        Verb("acknowledge", Acknowledge, "have an open alert call nobody any more until it is raised again"),
        Verb("mute", Mute, "have a kind of alert call nobody for a while, on one node or on all", True),
    )
}
"""Every verb there is, by name."""


def check(verb: str, args: dict[str, Any], node: str | None = None) -> Args:
    """The arguments as their type. Raises InvalidInputError naming the verb or the field that is wrong."""
    entry = VERBS.get(verb)
    if entry is None:
        raise InvalidInputError("verb", f"unknown verb {verb!r}; there are {', '.join(VERBS)}")
    if node is not None and not entry.takes_node:
        raise InvalidInputError("node", f"{verb} is for the whole run and takes no node")
    if node is None and entry.needs_node:
        raise InvalidInputError("node", f"{verb} needs the node that it is for")
    try:
        typed: Args = msgspec.convert(args, entry.args)
    except msgspec.ValidationError as error:
        raise InvalidInputError(*_field_and_problem(entry, args, error, strict=True)) from None
    if isinstance(typed, StartRun) and (typed.config is None) == (typed.resume is None):
        raise InvalidInputError("config", "start-run takes exactly one of config and resume")
    if isinstance(typed, StartRun) and typed.old_lead_is_off and typed.resume is None:
        raise InvalidInputError("old_lead_is_off", "is for a run that is taken up again: a new one has no old lead")
    if isinstance(typed, Rebalance) and bool(typed.shares) == typed.auto:
        raise InvalidInputError("shares", "rebalance takes shares by node (studio=16 mbp=8, or 60%) or auto=true")
    return typed


def parse_args(verb: str, pairs: dict[str, str]) -> dict[str, Any]:
    """`key=value` texts as the values the verb's fields want. Raises InvalidInputError as `check` does."""
    entry = VERBS.get(verb)
    if entry is None:
        check(verb, {})
        raise AssertionError(verb)
    if entry.args is Rebalance:
        return _parse_shares(pairs)
    known = {field.name for field in msgspec.structs.fields(entry.args)}
    for name in pairs:
        if name not in known:
            raise InvalidInputError(name, f"{verb} has no argument {name!r}; {_takes(entry)}")
    try:
        typed = msgspec.convert(pairs, entry.args, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidInputError(*_field_and_problem(entry, pairs, error, strict=False)) from None
    values: dict[str, Any] = msgspec.to_builtins(typed)
    return {name: values[name] for name in pairs}


def _parse_shares(pairs: dict[str, str]) -> dict[str, Any]:
    """Every argument but `auto` is a node with its share: samples, or a percentage."""
    shares: dict[str, int | str] = {}
    for name, text in pairs.items():
        if name != "auto":
            shares[name] = _share(name, text)
    if "auto" not in pairs:
        return {"shares": shares}
    if pairs["auto"] not in ("true", "false"):
        raise InvalidInputError("auto", f"{pairs['auto']!r} is neither true nor false")
    return {"auto": pairs["auto"] == "true", **({"shares": shares} if shares else {})}


def _share(node: str, text: str) -> int | str:
    if text.isdecimal() and 1 <= int(text) <= MAX_SAMPLES:
        return int(text)
    if re.match(PERCENT, text):
        return text
    raise InvalidInputError(
        node, f"{text!r} is no share: samples from 1 to {MAX_SAMPLES:,}, or a percentage such as 60%"
    )


def _takes(entry: Verb) -> str:
    names = [field.name for field in msgspec.structs.fields(entry.args)]
    return f"it takes {', '.join(names)}" if names else "it takes none"


def _field_and_problem(
    entry: Verb, args: Mapping[str, Any], error: msgspec.ValidationError, *, strict: bool
) -> tuple[str, str]:
    """Which field is wrong, or the verb where none can be named, and what it needs."""
    field, problem = next(
        validation_errors.found(dict(args), entry.args, strict=strict), validation_errors.split(str(error))
    )
    return field or entry.name, problem
