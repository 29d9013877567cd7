"""An event in words, the same on the screen and on the command line."""

import re

from trainctl.protocol import messages as m

_SHARE = re.compile(r"([^=\s]+)=(\d+)")


def words(event: m.Event, arrow: str = "→") -> str:
    """The event's text, with before and after, step, outcome and verb where the text doesn't say them itself."""
    text = event.text or event.verb or event.kind
    if event.kind == "command" and event.verb and event.verb not in text:
        text = f"{event.verb} {text}"
    text = with_change(text, event, arrow)
    if event.step is not None and not re.search(rf"(?<!\d){event.step}(?!\d)", text.replace(",", "")):
        text += f" @{event.step:,}"
    if event.outcome and event.outcome != "applied" and event.outcome not in text:
        text += f" {event.outcome}"
    return text


def with_change(text: str, event: m.Event, arrow: str) -> str:
    """The text with the event's before and after in it; of shares by node only those that are other than they were."""
    if not event.before or not event.after:
        return text
    change = moved(event.before, event.after, arrow) or f"{event.before} {arrow} {event.after}"
    for written in (f"{event.before} → {event.after}", f"{event.before} -> {event.after}"):
        if written in text:
            return text.replace(written, change)
    return text if event.before in text and event.after in text else f"{text} {change}".strip()


def moved(before: str, after: str, arrow: str) -> str | None:
    """The shares that changed, as `studio 16→9, mbp 8→15`, from `studio=16 mbp=8 forge=40` before and the same form
    after. None where these aren't shares of the same nodes."""
    had, has = shares_in(before), shares_in(after)
    if had is None or has is None or had.keys() != has.keys():
        return None
    parts = [f"{node} {had[node]}{arrow}{share}" for node, share in has.items() if share != had[node]]
    return ", ".join(parts) or "all shares as they were"


def shares_in(text: str) -> dict[str, int] | None:
    """Shares by node of `studio=16 mbp=8`; None for anything else."""
    found = [_SHARE.fullmatch(word) for word in text.split()]
    return {match[1]: int(match[2]) for match in found if match is not None} if found and all(found) else None
