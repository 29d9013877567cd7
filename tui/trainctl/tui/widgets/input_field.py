"""A field that is typed into."""

from textual import events
from textual.widgets import Input


class InputField(Input):
    """An Input that takes keys strictly in the order they came.

    A plain Input inserts a character at once and a binding's key (backspace, enter) only after the whole batch, so
    that what a slow line delivers in one packet arrives shuffled.
    """

    async def _on_key(self, event: events.Key) -> None:
        mine = [] if event.is_printable else self._bindings.key_to_bindings.get(event.key, [])
        if not mine:
            await super()._on_key(event)
            return
        event.stop()
        event.prevent_default()
        for binding in mine:
            await self.run_action(binding.action)
