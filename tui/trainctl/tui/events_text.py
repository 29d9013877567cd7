"""An event in words, the same on the screen and on the command line."""

import re

from trainctl.protocol import messages as m


def words(event: m.Event, arrow: str = "->") -> str:
    """The event's text, with its before and after, step and outcome, and a command's verb, where the text doesn't say
    them itself."""
    text = event.text or event.verb or event.kind
    if event.kind == "command" and event.verb and event.verb not in text:
        text = f"{event.verb} {text}"
    if event.before and event.after and not (event.before in text and event.after in text):
        text += f" {event.before} {arrow} {event.after}"
    if event.step is not None and not re.search(rf"(?<!\d){event.step}(?!\d)", text.replace(",", "")):
        text += f" @{event.step:,}"
    if event.outcome and event.outcome != "applied" and event.outcome not in text:
        text += f" {event.outcome}"
    return text
