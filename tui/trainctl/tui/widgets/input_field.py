"""A field that is typed into."""

from textual import events
from textual.widgets import Input


class InputField(Input):
    """An Input that takes keys strictly in the order they came.

    A plain Input inserts a character at once and a binding's key (backspace, enter) only after the whole batch, so
    that what a slow line delivers in one packet arrives shuffled.
    """

    def on_paste(self, event: events.Paste) -> None:
        """Insert all lines as one, where a plain Input takes only the first."""
        event.stop()
        event.prevent_default()
        lines = event.text.strip("\r\n").splitlines()
        self.replace(" ".join(lines[:1] + [line.strip() for line in lines[1:]]), *self.selection)

    async def on_key(self, event: events.Key) -> None:
        found = None if event.is_printable else self.screen.active_bindings.get(event.key)
        if found is not None and found.node is self:
            event.stop()
            event.prevent_default()
            await self.run_action(found.binding.action)
