"""The verbs a command may carry: their arguments, what each is for, and the check that both ends make.

A verb that isn't here doesn't exist. Arguments are absolute values, so that a command repeated is a command done once.
A new verb is a type of arguments, a row of VERBS and a place in its scope's union; mypy then asks for its handler.
"""

import dataclasses
import re
import shlex
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, get_args

import msgspec
from msgspec import Meta

from trainctl.protocol.config import validation_errors
from trainctl.protocol.config.alert_rules import AlertKind
from trainctl.protocol.config.policies import PolicyMode, PolicyName
from trainctl.protocol.config.run_tables import MAX_ANSWER_TOKENS, PromptText
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages.base import Count

MAX_SAMPLES = 1_048_576
MAX_PROFILE_STEPS = 20
"""Most steps of one profile: a trace grows with each of them."""
PERCENT = r"^\d{1,3}(\.\d{1,3})?%\Z"
"""A share of the global batch in percent: `62.5%`."""
Scope = Literal["agent", "run", "edit", "boundary"]
SCOPES: Final[dict[Scope, str]] = {
    "agent": "one agent does it immediately",
    "run": "acts on the whole run",
    "edit": "changes the plan; all ranks switch at the same step",
    "boundary": "runs between two steps; leaves the training state unchanged",
}
"""The part that carries a verb out, in words."""
Affects = Literal["nothing", "speed", "optimisation"]
AFFECTS: Final[dict[Affects, str]] = {
    "nothing": "nothing about the training",
    "speed": "speed and memory, never the loss",
    "optimisation": "the optimisation: the loss curve changes",
}
"""The effect of a verb, in words."""
Knob = Literal["shares", "micro-batch", "global batch", "learning rate"]
"""A setting of the plan. Two verbs that share one change the same thing."""


def _about(meaning: str, unit: str = "", typed: str | None = None, **bounds: Any) -> Meta:
    """Return what there is to know of an argument. `typed`: how it begins, where that isn't `name=`."""
    in_schema = {"x-unit": unit} if unit else None
    return Meta(description=meaning, extra={"unit": unit, "typed": typed}, extra_json_schema=in_schema, **bounds)


_LEAD_IS_OFF = "skip the vote, because the old lead is known to be powered off"


class Args(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The root of all arguments."""

    usage: ClassVar[str] = ""
    """The arguments as they are typed, where that isn't `name=` for each."""

    def check(self) -> None:
        """Raise InvalidInputError where values are wrong together."""

    @classmethod
    def parse(cls, pairs: Mapping[str, str]) -> dict[str, Any]:
        """Typed texts as values. Raises msgspec.ValidationError or InvalidInputError."""
        values: dict[str, Any] = msgspec.to_builtins(msgspec.convert(dict(pairs), cls, strict=False))
        return {name: values[name] for name in pairs}

    @classmethod
    def spoken(cls, args: Mapping[str, Any]) -> dict[str, Any]:
        """Values by the names that they are typed under."""
        return dict(args)


class StartRun(Args, frozen=True):
    """Give one of `config`, `resume` and `branch`; `branch` may have a `config` too. The `node`, if given, becomes the
    lead. On the command line, each override is a separate argument: `branch=RUN@50 optimizer.learning_rate=1e-4`."""

    usage: ClassVar[str] = "config=@RUN.toml | resume=RUN | branch=RUN@STEP [TABLE.KEY=VALUE ...]"

    config: Annotated[dict[str, Any] | None, _about("parsed run file", typed="config=@")] = None
    resume: Annotated[str | None, _about("ID of the run to resume")] = None
    old_lead_is_off: Annotated[bool, _about(f"resume: {_LEAD_IS_OFF}")] = False
    from_step: Annotated[
        Count | None, _about("resume: step of the checkpoint to continue from, in place of the newest; 0 starts over")
    ] = None
    steps: Annotated[
        Annotated[int, Meta(ge=1, le=2**40)] | None,
        _about("resume: train to this step, if no earlier step would have been different", "steps"),
    ] = None
    branch: Annotated[
        str | None,
        _about(
            "RUN@STEP: the checkpoint of a run that a new run starts from; without @STEP, the newest. Without config,"
            " the new run has that run's file"
        ),
    ] = None
    overrides: Annotated[
        dict[str, str],
        _about("branch without config: settings to change, by table.key, as TOML values", typed="TABLE.KEY="),
    ] = {}

    def check(self) -> None:
        """Raise InvalidInputError unless it is one run, new or old."""
        given = (self.config is not None or self.branch is not None, self.resume is not None)
        if sum(given) != 1:
            raise InvalidInputError("config", "give one of config, resume and branch")
        if self.old_lead_is_off and self.resume is None:
            raise InvalidInputError("old_lead_is_off", "a new run has no old lead: remove this argument")
        if self.from_step is not None and self.resume is None:
            raise InvalidInputError("from_step", "only a run that is resumed has earlier steps: remove this argument")
        if self.steps is not None and self.resume is None:
            raise InvalidInputError("steps", "a new run has run.steps in its file: remove this argument")
        if self.branch is not None:
            branch_point(self.branch)
        if self.overrides and (self.branch is None or self.config is not None):
            raise InvalidInputError("overrides", "they change the run file of a branch: give branch, and no config")

    @classmethod
    def parse(cls, pairs: Mapping[str, str]) -> dict[str, Any]:
        """A name with a dot is a setting of the run file."""
        overrides = {name: text for name, text in pairs.items() if "." in name}
        values = super().parse({name: text for name, text in pairs.items() if name not in overrides})
        return {**values, "overrides": overrides} if overrides else values

    @classmethod
    def spoken(cls, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return each override by its name."""
        return {**{name: value for name, value in args.items() if name != "overrides"}, **args.get("overrides", {})}


def branch_point(text: str) -> tuple[str, int | None]:
    """The run and the step of RUN@STEP; None: of its newest checkpoint. Raises InvalidInputError."""
    run, at, step = text.partition("@")
    if not run or (at and not re.fullmatch(r"[1-9][0-9]{0,17}", step)):
        raise InvalidInputError("branch", f"{text!r} must be RUN@STEP, with the step of a checkpoint, or RUN")
    return run, int(step) if at else None


class ResizeBatch(Args, frozen=True):
    micro: Annotated[int, _about("samples per forward and backward pass", "samples", ge=1, le=MAX_SAMPLES)]


class Rebalance(Args, frozen=True):
    """Give each node's share, or `auto` for the fastest split at the measured speeds. On the command line, each node
    is a separate argument: `rebalance studio=16 mbp=8`."""

    usage: ClassVar[str] = "NODE=SAMPLES|NODE=PERCENT% ... | auto=true"

    shares: Annotated[
        dict[str, Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | Annotated[str, Meta(pattern=PERCENT)]],
        _about("each node's share of the global batch", "samples or percent", typed="NODE="),
    ] = {}
    auto: Annotated[bool, _about("choose shares from the ranks' measured speeds")] = False

    def check(self) -> None:
        """Raise InvalidInputError unless it is shares or `auto`."""
        if bool(self.shares) == self.auto:
            raise InvalidInputError("shares", "give each node's share (studio=16 mbp=8, or 60%), or auto=true")

    @classmethod
    def parse(cls, pairs: Mapping[str, str]) -> dict[str, Any]:
        """Every argument but `auto` is a node with its share: samples, or a percentage."""
        shares = {name: _share(name, text) for name, text in pairs.items() if name != "auto"}
        if "auto" not in pairs:
            return {"shares": shares}
        if pairs["auto"] not in ("true", "false"):
            raise InvalidInputError("auto", f"{pairs['auto']!r} is not a boolean: use true or false")
        return {"auto": pairs["auto"] == "true", **({"shares": shares} if shares else {})}

    @classmethod
    def spoken(cls, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return each node by its name."""
        return {**{name: value for name, value in args.items() if name != "shares"}, **args.get("shares", {})}


def _share(node: str, text: str) -> int | str:
    if text.isdecimal() and 1 <= int(text) <= MAX_SAMPLES:
        return int(text)
    if re.match(PERCENT, text):
        return text
    raise InvalidInputError(
        node, f"{text!r} is not a share: give 1 to {MAX_SAMPLES:,} samples, or a percentage such as 60%"
    )


class SetGlobalBatch(Args, frozen=True):
    value: Annotated[int, _about("samples per step, across all ranks", "samples", ge=1, le=MAX_SAMPLES)]
    schedule: Annotated[
        Literal["set", "scale"], _about("scale: scale the learning rate by the same factor; set: leave it unchanged")
    ] = "set"


class SetLr(Args, frozen=True):
    value: Annotated[float, _about("learning rate", ge=0, le=100)]
    schedule: Annotated[
        Literal["scale", "set"], _about("scale: scale the rest of the schedule; set: keep it constant from now on")
    ] = "scale"


class Checkpoint(Args, frozen=True):
    """It has no arguments."""


class Evaluate(Args, frozen=True):
    """It has no arguments."""


class Defragment(Args, frozen=True):
    """It has no arguments."""


class Profile(Args, frozen=True):
    """Without nodes, all ranks of the group are profiled. The first step only warms up the profiler."""

    usage: ClassVar[str] = "[steps=N] [nodes=NODE,NODE ...]"

    steps: Annotated[int, _about("steps to profile", "steps", ge=1, le=MAX_PROFILE_STEPS)] = 3
    nodes: Annotated[
        Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=64)], ...], Meta(max_length=64)],
        _about("nodes to profile, separated by commas; empty: all"),
    ] = ()

    @classmethod
    def parse(cls, pairs: Mapping[str, str]) -> dict[str, Any]:
        """Nodes are separated by commas."""
        for name in pairs:
            if name not in ("steps", "nodes"):
                near = validation_errors.did_you_mean(name, ("steps", "nodes")) or f"; it takes {cls.usage}"
                raise InvalidInputError(name, f"profile has no argument {name!r}{near}")
        values = super().parse({name: text for name, text in pairs.items() if name == "steps"})
        nodes = {"nodes": [node for node in pairs["nodes"].split(",") if node]} if "nodes" in pairs else {}
        return {**values, **nodes}

    @classmethod
    def spoken(cls, args: Mapping[str, Any]) -> dict[str, Any]:
        """Nodes in one word."""
        nodes = {"nodes": ",".join(args["nodes"])} if args.get("nodes") else {}
        return {**{name: value for name, value in args.items() if name != "nodes"}, **nodes}


class SampleModel(Args, frozen=True):
    """Without a prompt, the model answers those of the run file. What isn't given is as in the run file."""

    prompt: Annotated[PromptText | None, _about("text to continue or answer")] = None
    chat: Annotated[bool, _about("send the prompt as a user's message, through the model's chat template")] = False
    max_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_ANSWER_TOKENS)] | None, _about("most tokens per answer", "tokens")
    ] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=10)] | None, _about("randomness; 0: always the likeliest token")
    ] = None
    seed: Annotated[Annotated[int, Meta(ge=0, le=2**40)] | None, _about("seed of the random numbers")] = None
    use_generation_config: Annotated[
        bool | None, _about("apply the other settings of generation_config.json; torch only")
    ] = None

    def check(self) -> None:
        """Raise InvalidInputError for `chat` without a prompt."""
        if self.chat and self.prompt is None:
            raise InvalidInputError("chat", "needs a prompt: add prompt=TEXT")


class Drain(Args, frozen=True):
    """It has no arguments."""


class Admit(Args, frozen=True):
    """It has no arguments."""


class Promote(Args, frozen=True):
    old_lead_is_off: Annotated[bool, _about(_LEAD_IS_OFF)] = False


class Pause(Args, frozen=True):
    """It has no arguments."""


class Resume(Args, frozen=True):
    """It has no arguments."""


class Rollback(Args, frozen=True):
    """Give exactly one of `step` and `steps`."""

    step: Annotated[Annotated[int, Meta(ge=1, le=2**40)] | None, _about("step of a checkpoint")] = None
    steps: Annotated[
        Annotated[int, Meta(ge=1, le=2**40)] | None,
        _about("go back to the newest checkpoint at least so many steps before", "steps"),
    ] = None
    skip_batches: Annotated[
        int, _about("skip the samples of so many batches after the checkpoint", "global batches", ge=0, le=1_000_000)
    ] = 0

    def check(self) -> None:
        """Raise InvalidInputError unless it is one of both."""
        if (self.step is None) == (self.steps is None):
            raise InvalidInputError("step", "give exactly one of step and steps")


class Stop(Args, frozen=True):
    checkpoint: Annotated[bool, _about("write a checkpoint before the run ends")] = True


class Note(Args, frozen=True):
    text: Annotated[str, _about("text of the note, on one line", min_length=1, max_length=500)]


class Acknowledge(Args, frozen=True):
    id: Annotated[str, _about("ID of an open alert, such as disk:studio", min_length=1, max_length=200)]


class Mute(Args, frozen=True):
    kind: Annotated[AlertKind, _about("alert kind")]
    minutes: Annotated[float, _about("duration of the mute; 0 unmutes", "minutes", ge=0, le=43_200)] = 60.0


class Autopilot(Args, frozen=True):
    name: Annotated[PolicyName, _about("policy name")]
    mode: Annotated[PolicyMode, _about("off: do nothing; advise: suggest the command in an event; on: send it")]


AgentArgs = StartRun | Promote | Acknowledge | Mute
RunArgs = Pause | Resume | Rollback | Stop | Note | Autopilot
EditArgs = ResizeBatch | Rebalance | SetGlobalBatch | SetLr | Drain | Admit
BoundaryArgs = Checkpoint | Evaluate | SampleModel | Defragment | Profile
AnyArgs = AgentArgs | RunArgs | EditArgs | BoundaryArgs
"""The closed union. A handler that takes it, or one scope's, ends in `assert_never`: mypy says what is missing."""
_BY_SCOPE: Final[dict[Scope, Any]] = {"agent": AgentArgs, "run": RunArgs, "edit": EditArgs, "boundary": BoundaryArgs}


@dataclasses.dataclass(frozen=True)
class Verb:
    """One row of the table: what the command line, the palette, the docs and the agent's dispatch are made from."""

    name: str
    args: type[AnyArgs]
    summary: str
    affects: Affects
    inverse: str | None  # the verb that undoes it
    example: str = ""  # its arguments, as they are typed
    knobs: frozenset[Knob] = frozenset()  # the settings that it changes
    takes_node: bool = False
    needs_node: bool = False
    to_node: bool = False  # the agent of the node that it names carries it out
    for_any_run: bool = False  # the agent carries it out whatever the run takes

    @property
    def scope(self) -> Scope:
        """Return what carries it out."""
        return next(scope for scope, kinds in _BY_SCOPE.items() if self.args in get_args(kinds))

    @property
    def first(self) -> str:
        """The argument whose name may be left out where it comes first; empty: none."""
        fields = msgspec.structs.fields(self.args)
        return fields[0].name if fields and not self.args.usage else ""

    @property
    def typed(self) -> str:
        """The whole command of the example."""
        return f"{self.name} {self.example}".rstrip()


_SHARES: Final[frozenset[Knob]] = frozenset({"shares"})
VERBS: dict[str, Verb] = {
    verb.name: verb
    for verb in (
        Verb(
            "start-run",
            StartRun,
            "start a run, resume one, or branch off one",
            "nothing",
            None,
            "config=@run.toml",
            takes_node=True,
            to_node=True,
            for_any_run=True,
        ),
        Verb(
            "resize-batch",
            ResizeBatch,
            "set a node's micro-batch (this changes speed and memory, never the loss)",
            "speed",
            "resize-batch",
            "micro=4 --node studio",
            frozenset({"micro-batch"}),
            takes_node=True,
        ),
        Verb(
            "rebalance",
            Rebalance,
            "set each node's share (this changes speed, never the loss)",
            "speed",
            "rebalance",
            "studio=16 mbp=8",
            _SHARES,
        ),
        Verb(
            "set-global-batch",
            SetGlobalBatch,
            "set the samples per step (this changes the loss curve)",
            "optimisation",
            "set-global-batch",
            "value=48 schedule=scale",
            frozenset({"global batch", "shares", "learning rate"}),
        ),
        Verb(
            "set-lr",
            SetLr,
            "set the learning rate (this changes the loss curve)",
            "optimisation",
            "set-lr",
            "value=1e-4",
            frozenset({"learning rate"}),
        ),
        Verb("checkpoint", Checkpoint, "write a checkpoint at the next step boundary", "nothing", None),
        Verb(
            "evaluate",
            Evaluate,
            "measure the held-out loss at the next step boundary, even while paused",
            "nothing",
            None,
        ),
        Verb(
            "sample",
            SampleModel,
            "have the model answer prompts at the next step boundary, even while paused",
            "nothing",
            None,
            "prompt='Once upon a time' max_tokens=64",
            takes_node=True,
        ),
        Verb(
            "defragment",
            Defragment,
            "clear the allocators' caches on one node or all at the next step boundary",
            "nothing",
            None,
            "--node studio",
            takes_node=True,
        ),
        Verb(
            "profile",
            Profile,
            "record how long each operator takes in the next steps, on some nodes or all",
            "nothing",
            None,
            "steps=3 nodes=studio,mbp",
        ),
        Verb(
            "drain",
            Drain,
            "remove a node from the group at the next step; its trainer keeps running",
            "speed",
            "admit",
            "--node studio",
            _SHARES,
            takes_node=True,
            needs_node=True,
        ),
        Verb(
            "admit",
            Admit,
            "return a drained node to the group and bring it up to date",
            "speed",
            "drain",
            "--node studio",
            _SHARES,
            takes_node=True,
            needs_node=True,
        ),
        Verb(
            "promote",
            Promote,
            "make another node the lead",
            "nothing",
            "promote",
            "--node mbp",
            takes_node=True,
            needs_node=True,
            to_node=True,
        ),
        Verb(
            "pause", Pause, "pause after the step in progress; commands then take effect at once", "nothing", "resume"
        ),
        Verb("resume", Resume, "continue a paused run", "nothing", "pause"),
        Verb(
            "rollback",
            Rollback,
            "go back to an earlier checkpoint, and skip the samples that followed if wanted",
            "optimisation",
            None,
            "steps=100 skip_batches=200",
        ),
        Verb("stop", Stop, "write a checkpoint and end the run", "nothing", "start-run", "checkpoint=false"),
        Verb(
            "note",
            Note,
            "add a note to the run's events",
            "nothing",
            None,
            "text='new data from here'",
            for_any_run=True,
        ),
        Verb(
            "acknowledge",
            Acknowledge,
            "silence an open alert until it is raised again",
            "nothing",
            None,
            "id=disk:studio",
            for_any_run=True,
        ),
        Verb(
            "mute",
            Mute,
            "mute an alert kind on one node or all (still recorded)",
            "nothing",
            None,
            "kind=disk minutes=60",
            takes_node=True,
            for_any_run=True,
        ),
        Verb(
            "autopilot",
            Autopilot,
            "turn a policy on or off, or let it only advise",
            "nothing",
            "autopilot",
            "name=first-shares mode=advise",
        ),
    )
}
"""Every verb there is, by name."""


def args_type(verb: str | None) -> type[AnyArgs] | None:
    """The type of a verb's arguments; None for one that isn't known here."""
    entry = VERBS.get(verb or "")
    return entry.args if entry is not None else None


def knobs(verb: str | None) -> frozenset[Knob]:
    """The settings of the plan that a verb changes; none of one that isn't known here."""
    entry = VERBS.get(verb or "")
    return entry.knobs if entry is not None else frozenset()


def check(verb: str, args: dict[str, Any], node: str | None = None) -> AnyArgs:
    """The arguments as their type. Raises InvalidInputError naming the verb or the field that is wrong."""
    entry = entry_of(verb)
    if node is not None and not entry.takes_node:
        raise InvalidInputError("node", f"{verb} applies to the whole run: leave out the node")
    if node is None and entry.needs_node:
        raise InvalidInputError("node", f"{verb} needs a node: add --node NAME")
    try:
        typed: AnyArgs = msgspec.convert(args, entry.args)
    except msgspec.ValidationError as error:
        raise InvalidInputError(*_field_and_problem(entry, args, error, strict=True)) from None
    typed.check()
    return typed


def parse_args(verb: str, pairs: dict[str, str]) -> dict[str, Any]:
    """`key=value` texts as the values the verb's fields want. Raises InvalidInputError as `check` does."""
    entry = entry_of(verb)
    known = {field.name for field in msgspec.structs.fields(entry.args)}
    for name in pairs:
        if name not in known and not entry.args.usage:
            problem = f"{verb} has no argument {name!r}"
            raise InvalidInputError(name, problem + (validation_errors.did_you_mean(name, known) or _takes(entry)))
    try:
        return entry.args.parse(pairs)
    except msgspec.ValidationError as error:
        raise InvalidInputError(*_field_and_problem(entry, pairs, error, strict=False)) from None


def entry_of(verb: str) -> Verb:
    """Return the row of a verb. Raises InvalidInputError, with the names that are spelled like it."""
    if verb not in VERBS:
        near = validation_errors.did_you_mean(verb, VERBS)
        every = f"; the verbs are {', '.join(VERBS)}"
        raise InvalidInputError("verb", f"unknown verb {verb!r}{near or every}")
    return VERBS[verb]


def written(verb: str, args: Mapping[str, Any], node: str | None = None) -> str:
    """A command as a person types it: `rebalance studio=16 mbp=8`."""
    words = (shlex.quote(f"{name}={_word(value)}") for name, value in VERBS[verb].args.spoken(args).items())
    return " ".join([verb, *words, *(["--node", node] if node else [])])


def _word(value: object) -> str:
    """A value as it is typed: `true`, and of a number what tells it apart."""
    return str(value).lower() if isinstance(value, bool) else f"{value:.7g}" if isinstance(value, float) else str(value)


def given(args: Args) -> dict[str, Any]:
    """The arguments as values, without those that are as they would be by themselves."""
    fields = msgspec.structs.fields(type(args))
    values: dict[str, Any] = msgspec.to_builtins(args)
    return {field.name: values[field.name] for field in fields if field.required or values[field.name] != field.default}


def _takes(entry: Verb) -> str:
    names = [field.name for field in msgspec.structs.fields(entry.args)]
    return f"; it takes {', '.join(names)}" if names else "; it takes no arguments"


def _field_and_problem(
    entry: Verb, args: Mapping[str, Any], error: msgspec.ValidationError, *, strict: bool
) -> tuple[str, str]:
    """Return which field is wrong, or the verb where none can be named, and what it needs."""
    field, problem = next(
        validation_errors.found(dict(args), entry.args, strict=strict), validation_errors.split(str(error))
    )
    return field or entry.name, problem
