"""The command palette's entries: every verb there is, each opening its dialog, and all else that a key does."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from textual.binding import Binding
from textual.command import DiscoveryHit, Hit, Hits, Provider

from trainctl.protocol.messages import verbs
from trainctl.tui.commands.context import context_of
from trainctl.tui.widgets.theme import THEMES


class PaletteEntry(NamedTuple):
    """What is chosen by name, what it is, and what it does."""

    name: str
    words: str
    run: Callable[[], Any]


class PaletteProvider(Provider):
    """All entries at first, then those that match, by name before by words. It is one provider: of two Textual takes
    the one first that chance has first."""

    def entries(self) -> Iterator[PaletteEntry]:
        """Verbs, then all else that a key does, by its name in the configuration, and the themes."""
        owner = context_of(self.screen)
        for verb in verbs.VERBS.values():
            yield PaletteEntry(verb.name, verb.summary, partial(owner.open_dialog, verb.name))
        for binding in type(self.app).BINDINGS:
            if (
                isinstance(binding, Binding)
                and binding.id
                and not binding.action.startswith(("dialog(", "command_pal"))
            ):
                words = binding.tooltip or binding.description
                yield PaletteEntry(binding.id, words, partial(self.app.run_action, binding.action))
        for theme in THEMES:
            chosen = partial(setattr, self.app, "theme", theme.name)
            yield PaletteEntry(f"theme {theme.name}", "change how the screen looks", chosen)
        words = "commands are off: turn them on" if owner.read_only else "turn commands off for this screen"
        yield PaletteEntry("read-only", words, partial(self.app.run_action, "read_only"))

    async def discover(self) -> Hits:
        for entry in self.entries():
            yield DiscoveryHit(entry.name, entry.run, help=entry.words)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for entry in self.entries():
            score = max(matcher.match(entry.name), 0.5 * matcher.match(entry.words))
            if score > 0:
                yield Hit(score, matcher.highlight(entry.name), entry.run, help=entry.words)
