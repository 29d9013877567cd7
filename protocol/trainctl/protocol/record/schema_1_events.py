"""Events of records of schema 1, which kept them as prose: what each says as data.

The only place where events are read back from text. What no pattern knows stays as it was, as a Notice.
"""

import hashlib
import re
from collections.abc import Callable
from typing import Final, get_args

from trainctl.protocol.messages import events as e
from trainctl.protocol.messages.base import Generation

_PAIR = re.compile(r"([^=\s]+)=(\d+)")
_FAILED = re.compile(
    r"\S+(?: (?P<node>\S+))? (?:rejected|expired|failed): (?:(?P<field>[a-z_-]+): )?(?P<reason>.*)", re.S
)
_RATE = re.compile(r"(\S+)( constant| scaled)?")
_BATCH = re.compile(r"(\d+)(?:, learning rate (scaled with it|unchanged))?")
_ARROW = r" (?:→|->) "


def convert(
    kind: str, text: str, verb: str | None, before: str | None, after: str | None, outcome: str | None
) -> e.AnyEvent:
    """What a row of schema 1 says."""
    try:
        return _converted(kind, text, verb, before, after, outcome)
    except ValueError:  # a number that isn't one
        return _other(kind, text)


def _converted(
    kind: str, text: str, verb: str | None, before: str | None, after: str | None, outcome: str | None
) -> e.AnyEvent:
    if kind == "command" and outcome not in (None, "applied"):
        found = _FAILED.fullmatch(text)
        reason, field, node = found.group("reason", "field", "node") if found else (text, None, None)
        return e.CommandFailed(reason, field or "", node or "")
    if kind == "command" and verb is not None:
        return change(verb, _node_of(text, verb, before, after), before, after)
    for pattern, make in _PATTERNS.get(kind, ()):
        if found := pattern.fullmatch(text):
            return make(found, after)
    if kind == "alert" and after:
        node = after.split(":")[1] if ":" in after and text.startswith(f"{after.split(':')[1]} ") else ""
        return e.AlertRaised(after, node, text.removeprefix(f"{node} "))
    if kind == "note":
        return e.NoteWritten(text)
    if kind == "record":
        return e.RecordState("" if text == "the record is being written again" else text)
    return _other(kind, text)


def change(verb: str, node: str, before: str | None, after: str | None) -> e.AnyEvent:
    """What a command that was applied changed, by the texts before and after it."""
    had, has = shares_in(before or ""), shares_in(after or "")
    match verb:
        case "rebalance" | "drain" | "admit" if had is not None and has is not None:
            return e.SharesChanged(had, has, node=node)
        case "drain" | "admit" if before and after and before.startswith(f"{node} ") and after.startswith(f"{node} "):
            return e.NodeStateChanged(node, before.removeprefix(f"{node} "), after.removeprefix(f"{node} "))
        case "resize-batch" if before and after:
            return e.MicroBatchChanged(_sizes(before, node), _sizes(after, node))
        case "set-lr" if (was := _RATE.fullmatch(before or "")) and (now := _RATE.fullmatch(after or "")):
            return e.LearningRateChanged(
                float(was[1]), float(now[1]), "set" if now[2] == " constant" else "scale", was[2] == " constant"
            )
        case "set-global-batch" if (was := _BATCH.fullmatch(before or "")) and (now := _BATCH.fullmatch(after or "")):
            return e.GlobalBatchChanged(int(was[1]), int(now[1]), "scale" if now[2] == "scaled with it" else "set")
        case "promote" if found := re.fullmatch(r"(\S+) conducts, term (\d+)", after or ""):
            return e.LeadChanged((before or "").removesuffix(" conducts"), found[1], int(found[2]))
        case "pause" | "resume" | "stop" if before and after:
            return e.RunStateChanged(before, after)
        case "evaluate" if found := re.fullmatch(r"loss (\S+)", after or ""):
            return e.Evaluated(float(found[1]))
        case "checkpoint" if found := re.fullmatch(r"step-(\d+)", after or ""):
            return e.CheckpointWritten(int(found[1]))
        case _:
            result = f"{before}{' → ' if before and after else ''}{after or ''}" if before else after or ""
            return e.CommandApplied(node, result)


def undoes(command: str | None) -> str | None:
    """The token of the event that a command of 0.1.0 took back, which its id has: a UUID of version 8 (RFC 9562) whose
    third group is `8d0e` and whose last 48 bits are the token."""
    return command[-12:] if (command or "")[14:18] == "8d0e" and command else None


def token(run: str, event: int, command: str | None) -> str:
    """48 bits in hexadecimal that stood for an event."""
    return hashlib.blake2b((command or f"{run}/{event}").encode(), digest_size=6).hexdigest()


def shares_in(text: str) -> dict[str, int] | None:
    """Shares by node of `studio=16 mbp=8`; None for anything else."""
    found = [_PAIR.fullmatch(word) for word in text.split()]
    return {match[1]: int(match[2]) for match in found if match is not None} if found and all(found) else None


def _sizes(text: str, node: str) -> e.Pairs:
    """`8` of the node, or `a=4 b=8`."""
    return ((node, int(text)),) if text.isdigit() else tuple((name, int(size)) for name, size in _PAIR.findall(text))


def _node_of(text: str, verb: str, before: str | None, after: str | None) -> str:
    """The node that a command was for, as the text behind its verb has it."""
    rest = text.removeprefix(verb).strip()
    for known in (f"{before} → {after}" if before and after else "", after or ""):
        rest = rest.removesuffix(known).strip() if known else rest
    return rest if rest and " " not in rest else ""


def _other(kind: str, text: str) -> e.Notice:
    return e.Notice(text, next((name for name in get_args(e.Category) if name == kind), "run"))


def _shares(text: str | None) -> dict[str, int]:
    return shares_in(text or "") or {}


def _float(text: str | None) -> float | None:
    return float(text.replace(",", "")) if text else None


def _generation(text: str) -> Generation:
    term, n = text.removeprefix("g").split(".")
    return Generation(int(term), int(n))


_RANK_STATES: Final = {
    "restarted": r"the trainer of (.+?) is started again, (.*)",
    "failed": r"(.+?) failed: (.*)",
    "hung": r"the trainer of (.+?) ((?:has|is|was) .*) while it loads: it is ended",
    "slow": r"(.+?) (?:has|have) not finished (?:its|their) part of (.*)",
    "waited-for": r"(.+?), the last with the run's state, is (.*)",
    "not-admitted": r"(.+?) cannot join again: (.*)",
    "ended": r"(.+?) is drained, and its trainer (.*)",
    "out-of-memory": r"(.+?) is out of memory at a micro-batch of 1: (.*)",
}
Made = Callable[[re.Match[str], str | None], e.AnyEvent]
_PATTERNS: Final[dict[str, tuple[tuple[re.Pattern[str], Made], ...]]] = {
    kind: tuple((re.compile(pattern, re.S), make) for pattern, make in patterns)
    for kind, patterns in dict[str, tuple[tuple[str, Made], ...]](
        run=(
            (
                r"(g\d+\.\d+) formed, (\d+) ranks?(?: by (\S+))?(?:; (.+?) given the state of (\S+))?"
                r"(?:; the ranks waited (\S+) s)?",
                lambda f, a: e.GenerationFormed(
                    _generation(f[1]),
                    int(f[2]),
                    (),
                    f[3] or "none",
                    tuple((f[4] or "").split(", ")) if f[4] else (),
                    f[5] or "",
                    _float(f[6]),
                ),
            ),
            (r"(g\d+\.\d+) left: (.*)", lambda f, a: e.GenerationLeft(_generation(f[1]), f[2])),
            (r"step (\d+) left the parameters alone: (.*)", lambda f, a: e.StepSkipped(int(f[1]), f[2])),
            (r"step (\d+) retracted: .*", lambda f, a: e.StepRetracted(int(f[1]))),
            (r"no more steps: (.*)", lambda f, a: e.StepsStopped(f[1])),
            (r"enough nodes are in reach: .*", lambda f, a: e.StepsStopped("")),
            (
                r"all ranks given (\S+)'s weights; drift (\S+) at most(?:, on (.+))?",
                lambda f, a: e.StateShared(f[1], float(f[2]), f[3] or ""),
            ),
            (
                r"(finished|stopped|failed) at step ([\d,]+)",
                lambda f, a: e.RunStateChanged("", f[1], step=int(f[2].replace(",", ""))),
            ),
            (r"failed: (.*)", lambda f, a: e.RunStateChanged("", "failed", f[1])),
            (r"stopped all the same: (.*)", lambda f, a: e.RunStateChanged("", "stopped", f[1])),
            (r"(.*): going back to the newest checkpoint", lambda f, a: e.RunStateChanged("", "going back", f[1])),
            (r"taken up again from step .*", lambda f, a: e.RunStateChanged("", "resumed", f[0])),
        ),
        rank=(
            (
                rf"(.+?) is lost: (.*); ([^;]*){_ARROW}([^;]*)",
                lambda f, a: e.SharesChanged(_shares(f[3]), _shares(f[4]), f[2], lost=f[1]),
            ),
            (
                rf"(.+?) joins again: (.*){_ARROW}(.*)",
                lambda f, a: e.SharesChanged(_shares(f[2]), _shares(f[3]), returned=f[1]),
            ),
            (rf"rebalance (.*?){_ARROW}(.*?): (.*)", lambda f, a: e.SharesChanged(_shares(f[1]), _shares(f[2]), f[3])),
            (
                rf"resize-batch (\S+) (\d+){_ARROW}(\d+): (.*)",
                lambda f, a: e.MicroBatchChanged(((f[1], int(f[2])),), ((f[1], int(f[3])),), f[4]),
            ),
            (
                r"first shares stay even: no rate could be measured on (.*)",
                lambda f, a: e.SharesUnmeasured(tuple(f[1].split(", "))),
            ),
            *(
                (pattern, lambda f, a, state=state: e.RankChanged(tuple(f[1].split(", ")), state, f[2]))
                for state, pattern in _RANK_STATES.items()
            ),
        ),
        probe=(
            (
                rf"(.+?) is refused: (.*); ([^;]*){_ARROW}([^;]*)",
                lambda f, a: e.SharesChanged(_shares(f[3]), _shares(f[4]), f[2], lost=f[1], refused=True),
            ),
            (
                r"probe passed: .* at most (\S+) between (.+) and (.+) \(tolerance (\S+), (\d+) tokens\); took (\S+) s",
                lambda f, a: e.ProbePassed(f[2], f[3], float(f[1]), float(f[4]), int(f[5]), float(f[6])),
            ),
        ),
        checkpoint=(
            (
                r"checkpoint step-(\d+)(?:, ([\d,.]+) MB, loop paid ([\d,]+) ms)?",
                lambda f, a: e.CheckpointWritten(
                    int(f[1]),
                    round(float(f[2].replace(",", "")) * 1e6) if f[2] else None,
                    float(f[3].replace(",", "")) / 1e3 if f[3] else None,
                ),
            ),
            (r"no checkpoint on (\S+): (.*)", lambda f, a: e.CheckpointFailed(f[1], f[2])),
        ),
        evaluation=((r"held-out loss (\S+?)(?:, took (\S+) s)?", lambda f, a: e.Evaluated(float(f[1]), _float(f[2]))),),
        agent=(
            (
                r"(\S+) conducts the run from here on, in term (\d+); before it (\S+) did",
                lambda f, a: e.LeadChanged(f[3], f[1], int(f[2])),
            ),
            (r"the agent of (\S+) is silent: (.*)", lambda f, a: e.NodeState(f[1], "silent", f[2])),
            (r"the agent of (\S+) is in touch", lambda f, a: e.NodeState(f[1], "in-touch")),
            (r"the agent of (\S+) is at (\S+) now", lambda f, a: e.NodeState(f[1], "moved", f[2])),
            (r"back in touch with (\S+)'s trainer", lambda f, a: e.NodeState(f[1], "trainer-back")),
        ),
        alert=(
            (
                r"(?:(\S+) )?(\S+) is over(?: after (\d+) (min|s))?",
                lambda f, a: e.AlertCleared(
                    a or "", f[1] or "", f[2], int(f[3]) * (60.0 if f[4] == "min" else 1.0) if f[3] else None
                ),
            ),
        ),
    ).items()
}
"""By kind, what the text of an event looked like and what is made of it."""
