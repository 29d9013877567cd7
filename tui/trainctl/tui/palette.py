"""The command palette's entries: every verb there is, each opening its dialog."""

from functools import partial
from typing import TYPE_CHECKING, cast

from textual.command import DiscoveryHit, Hit, Hits, Provider

from trainctl.protocol import verbs

if TYPE_CHECKING:
    from trainctl.tui.app import TrainctlApp


class VerbProvider(Provider):
    """Verbs by name, with their summaries from the table that the command line and the agent use too."""

    async def discover(self) -> Hits:
        for verb in verbs.VERBS.values():
            yield DiscoveryHit(verb.name, self._opener(verb.name), help=verb.summary)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for verb in verbs.VERBS.values():
            score = matcher.match(f"{verb.name} {verb.summary}")
            if score > 0:
                yield Hit(score, matcher.highlight(verb.name), self._opener(verb.name), help=verb.summary)

    def _opener(self, verb: str) -> "partial[None]":
        return partial(cast("TrainctlApp", self.app).open_dialog, verb)
