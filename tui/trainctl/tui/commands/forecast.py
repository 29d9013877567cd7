"""A dry run in words: what a command would do, as the run's lead predicts it. Pure."""

from collections.abc import Sequence

from trainctl.protocol.messages import DryRun, RankForecast
from trainctl.protocol.messages.verbs import VERBS
from trainctl.tui.text import formatting
from trainctl.tui.text.formatting import gigabytes
from trainctl.tui.text.styled_line import clean


def forecast(found: DryRun) -> str:
    """Return in one line what a command would do, or why it would be refused."""
    if found.refused:
        return clean(f"{found.field}: {found.refused}" if found.field not in (None, "verb", "run") else found.refused)
    verb = VERBS[found.verb]
    advising = ", ".join(found.advising)
    parts = [
        _change(found),
        *([] if not found.ranks else [_step(found), _memory(found.ranks)]),
        f"at step {found.step:,}" if found.step and verb.scope == "edit" else "",
        {"speed": "curve unchanged", "optimisation": "changes the curve"}.get(verb.affects, ""),
        f"policy {advising} will only advise" if advising else "",
    ]
    return "; ".join(part for part in parts if part)


def _change(found: DryRun) -> str:
    changes = []
    if found.verb in ("set-lr", "set-global-batch") and found.before and found.after:
        changes.append(f"{'lr' if found.verb == 'set-lr' else 'G'} {found.before} → {found.after}")
    moved = [
        f"{clean(one.node)} {_count(one.share_before)} → {_count(one.share)}"
        for one in found.ranks
        if one.share_before != one.share
    ]
    sizes = [
        f"{clean(one.node)} {_passes(one.share_before, one.micro_before)} → {_passes(one.share, one.micro)}"
        for one in found.ranks
        if one.share_before == one.share and one.micro_before != one.micro
    ]
    changes += [few(texts) for texts in (moved, sizes) if texts]
    if changes:
        return "; ".join(changes)
    if found.before is not None and found.before == found.after:
        return "no change: already set"
    if found.after:
        return clean(f"{found.before} → {found.after}" if found.before else found.after)
    return VERBS[found.verb].summary


def _count(share: int | None) -> str:
    return "0" if share is None else str(share)


def _passes(share: int | None, micro: int | None) -> str:
    """Return `4×2`: the samples of a pass, and how many passes a share takes."""
    return f"{micro}×{-(-share // micro)}" if share and micro else "0"


def _step(found: DryRun) -> str:
    step = seconds_change(found.step_seconds_before, found.step_seconds)
    return step or "step time isn't known yet"


def _memory(ranks: Sequence[RankForecast]) -> str:
    """Return `fits`, or the memory of a rank that may not; of one rank alone how much it would be."""
    known = [one for one in ranks if one.memory_bytes is not None and one.memory_cap_bytes]
    over = [one for one in known if (one.memory_bytes or 0) > (one.memory_cap_bytes or 0)]
    for one in over:
        return f"{clean(one.node)} {'may be' if one.memory_is_bound else 'is'} over its memory: {_bytes(one)}"
    return f"predicted memory {_bytes(known[0])}" if len(known) == 1 else "fits" if known else ""


def _bytes(one: RankForecast) -> str:
    bound = "at most " if one.memory_is_bound else ""
    return f"{bound}{gigabytes(one.memory_bytes or 0)} of {gigabytes(one.memory_cap_bytes or 0)} GB"


def few(parts: Sequence[str]) -> str:
    """Return the first three, and how many more there are."""
    more = f" and {len(parts) - 3} more" if len(parts) > 4 else ""
    return ", ".join(parts[:3] if more else parts) + more


def seconds_change(now: float | None, then: float | None) -> str:
    """Return `predicted 3.06 → 2.99 s`; nothing where one of them isn't known."""
    if now is None or then is None:
        return ""
    before, after = formatting.seconds(now), formatting.seconds(then)
    same = before.rpartition(" ")[2] == after.rpartition(" ")[2]
    return f"predicted {before.partition(' ')[0] if same else before} → {after}"
