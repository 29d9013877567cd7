"""The command palette's entries: every verb there is, each opening its dialog, and all else that a key does."""

import abc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, cast

from textual.binding import Binding
from textual.command import DiscoveryHit, Hit, Hits, Provider

from trainctl.protocol.messages import verbs
from trainctl.tui.commands.context import AppContext
from trainctl.tui.widgets.theme import THEMES


class PaletteEntry(NamedTuple):
    """What is chosen by name, what it is, and what it does."""

    name: str
    words: str
    run: Callable[[], Any]


class _Entries(Provider):
    """A provider of entries: all of them at first, then those that match, by name before by words."""

    @property
    def _owner(self) -> AppContext:
        return cast(AppContext, self.app)

    @abc.abstractmethod
    def entries(self) -> Iterator[PaletteEntry]:
        """All there are."""

    async def discover(self) -> Hits:
        for entry in self.entries():
            yield DiscoveryHit(entry.name, entry.run, help=entry.words)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for entry in self.entries():
            score = max(matcher.match(entry.name), 0.5 * matcher.match(entry.words))
            if score > 0:
                yield Hit(score, matcher.highlight(entry.name), entry.run, help=entry.words)


class VerbProvider(_Entries):
    """Verbs by name, with their summaries from the table that the command line and the agent use too."""

    def entries(self) -> Iterator[PaletteEntry]:
        for verb in verbs.VERBS.values():
            yield PaletteEntry(verb.name, verb.summary, partial(self._owner.open_dialog, verb.name))


class ActionProvider(_Entries):
    """Screens, and all else that a key of the program does, by the names that the configuration has for them."""

    def entries(self) -> Iterator[PaletteEntry]:
        for binding in type(self.app).BINDINGS:
            if (
                isinstance(binding, Binding)
                and binding.id
                and not binding.action.startswith(("dialog(", "command_pal"))
            ):
                words = binding.tooltip or binding.description
                yield PaletteEntry(binding.id, words, partial(self.app.run_action, binding.action))
        for theme in THEMES:
            yield PaletteEntry(
                f"theme {theme.name}", "how all of it looks", partial(setattr, self.app, "theme", theme.name)
            )
        words = "commands are off; this puts them on" if self._owner.read_only else "puts commands off for this screen"
        yield PaletteEntry("read-only", words, partial(self.app.run_action, "read_only"))


class EverythingProvider(Provider):
    """Verbs, and then keys: of two providers Textual takes the one first that chance has first."""

    async def discover(self) -> Hits:
        for kind in (VerbProvider, ActionProvider):
            async for hit in kind(self.screen).discover():
                yield hit

    async def search(self, query: str) -> Hits:
        for kind in (VerbProvider, ActionProvider):
            async for hit in kind(self.screen).search(query):
                yield hit
