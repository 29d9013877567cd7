"""Conversations as a chat template writes them: the assistant's turns, and the date. Pure: the template is a function.

Three rules, the first that fits:

1. A template with `{% generation %}` marks the turns itself (see row_tokens), by characters too.
2. Turn i spans what the text up to and with it adds to the text before it with the generation prompt, if each of the
   two is a prefix of the next and of the whole. Of the last turn, what both have in common is enough.
3. A turn before the last whose text changes with what follows (reasoning is cut, say), or one that nothing precedes, is
   found by a sentinel in place of its content. What ends the last turn ends it too. If it calls tools, it spans what is
   between the prompt and the end that precedes the next message's content.

Templates that write today's date call `strftime_now(format)`, a function of transformers. A macro of the same name
takes its place and always writes the same date, so that tokens don't depend on the day.
"""

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainctl.protocol.batch.data_statistics import TemplateUse
from trainctl.trainer.data.rows import Message, common_length, is_learned

Render = Callable[[Sequence[Message], bool], str]
"""The text of messages, with the generation prompt or without."""
_SENTINEL = "qzTurnContentzq"


class NotNestedError(Exception):
    """A turn cannot be separated from what it answers."""

    def __init__(self, turn: int) -> None:
        super().__init__(f"turn {turn + 1} cannot be separated from the turns before it")


@dataclass(frozen=True)
class Span:
    """Part of a text, in characters."""

    start: int
    stop: int


def assistant_spans(messages: Sequence[Message], render: Render, first: int = 0) -> tuple[str, list[Span]]:
    """Return the whole text, and the assistant's turns from message `first` on that are learned. Raises NotNestedError,
    and what `render` raises."""
    whole = render(messages, False)
    turns = [turn for turn in range(first, len(messages)) if messages[turn]["role"] == "assistant"]
    learned = [turn for turn in turns if is_learned(messages[turn])]
    return whole, [_span(messages, turn, whole, render) for turn in learned]


def ending(messages: Sequence[Message], render: Render) -> str:
    """Return the text that the template writes after the content of a last turn of the assistant."""
    last = max(turn for turn, message in enumerate(messages) if message["role"] == "assistant")
    kept = {name: value for name, value in messages[last].items() if name != "tool_calls"}
    text = render([*messages[:last], {**kept, "content": _SENTINEL}], False)
    return text.rpartition(_SENTINEL)[2]


def template_use(rows: Sequence[tuple[Sequence[Message], Render]], date: str) -> TemplateUse:
    """Return how a template treats conversations, at least one; `date` is written in place of today's. Raises what
    their renders raise."""
    messages, render = rows[0]
    turn = next(place for place, message in enumerate(messages) if message["role"] == "assistant")
    before = _with_sentinel(messages, 0, render).partition(_SENTINEL)[0]
    opened, plain = (render(messages[:turn], prompted) if turn else "" for prompted in (True, False))
    return TemplateUse(
        conversations=len(rows),
        before=before,
        opens=opened.removeprefix(plain),
        ends=ending(messages, render),
        changed=sum(_is_changed(*row) for row in rows),
        date=date,
    )


def _with_sentinel(messages: Sequence[Message], turn: int, render: Render) -> str:
    return render([*messages[:turn], {**messages[turn], "content": _SENTINEL}, *messages[turn + 1 :]], False)


def _is_changed(messages: Sequence[Message], render: Render) -> bool:
    """Return whether a content is missing in the text; white space around it doesn't matter."""
    text, start = render(messages, False), 0
    for content in ((message.get("content") or "").strip() for message in messages):
        place = text.find(content, start)
        if place < 0:
            return True
        start = place + len(content)
    return False


def _span(messages: Sequence[Message], turn: int, whole: str, render: Render) -> Span:
    if not turn:  # what the template writes before it, such as a system prompt, can't be rendered without it
        return _by_content(messages, turn, whole, render)
    before, with_it = render(messages[:turn], True), render(messages[: turn + 1], False)
    if whole.startswith(with_it) and with_it.startswith(before):
        return Span(len(before), len(with_it))
    if turn == len(messages) - 1:  # it begins where the text leaves the prompt
        start = common_length(before, whole)
        if start < len(render(messages[:turn], False)):
            raise NotNestedError(turn)
        return Span(start, len(whole))
    if not messages[turn].get("tool_calls"):
        return _by_content(messages, turn, whole, render)
    end, following = ending(messages, render), _content(messages, turn + 1, whole, render)
    between = whole[len(before) : following.start]
    if not whole.startswith(before) or not end or between.count(end) != 1:
        raise NotNestedError(turn)
    return Span(len(before), len(before) + between.index(end) + len(end))


def _by_content(messages: Sequence[Message], turn: int, whole: str, render: Render) -> Span:
    """Return a turn's content, and as much of what ends the last turn as follows it."""
    if messages[turn].get("tool_calls"):
        raise NotNestedError(turn)
    content = _content(messages, turn, whole, render)
    end = ending(messages, render)
    return Span(content.start, content.stop + common_length(whole[content.stop :], end))


def _content(messages: Sequence[Message], turn: int, whole: str, render: Render) -> Span:
    """Find a turn's content by what stays when it is replaced."""
    other = _with_sentinel(messages, turn, render)
    head, sentinel, tail = other.partition(_SENTINEL)
    is_between = whole.startswith(head) and whole.endswith(tail) and len(head) + len(tail) < len(whole)
    if not sentinel or _SENTINEL in tail or not is_between:
        raise NotNestedError(turn)
    return Span(len(head), len(whole) - len(tail))


TEMPLATE_DATE = datetime.datetime(2025, 1, 1)
_NAME = "strftime_now"
_CODES = "aAbBdefHIjklmMpSTuUwWyYDF"


def dated(template: str) -> str:
    """Return a chat template with TEMPLATE_DATE in place of today."""
    if _NAME not in template:
        return template
    filters = ""  # which replace each code of a format, without the padding and with it
    for code in _CODES:
        value = TEMPLATE_DATE.strftime(f"%{code}")
        short = (value.lstrip("0 ") or "0") if code in "deHIjklmMSy" else value
        filters += f' | replace("%-{code}", "{short}") | replace("%{code}", "{value}")'
    macro = f"{{% macro {_NAME}(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}"
    return macro + '{{ "" }}' + template  # the empty text keeps a line feed with which the template may begin
