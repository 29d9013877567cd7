"""Typing and pasting into a field."""

import pytest
from textual import events
from textual.app import App, ComposeResult

from trainctl.tui.widgets.fields import InputField


class Field(App[None]):
    def compose(self) -> ComposeResult:
        yield InputField("note text=")


@pytest.mark.parametrize(
    ("pasted", "value"), [("two\r\n  lines\n", "two lines"), (" one ", " one "), ("\n", ""), ("a\n\nb", "a  b")]
)
async def test_pasted_lines_are_one(pasted: str, value: str) -> None:
    async with Field().run_test() as pilot:
        field = pilot.app.query_one(InputField)
        field.focus()
        await pilot.press("end")
        field.post_message(events.Paste(pasted))
        await pilot.press("x")
        assert field.value == f"note text={value}x"
