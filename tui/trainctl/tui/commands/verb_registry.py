"""Every verb's description, in one table by its name."""

from collections.abc import Mapping

from trainctl.protocol.messages.verbs import VERBS
from trainctl.tui.commands.verb_description import VerbDescription, VerbKey
from trainctl.tui.commands.verbs import extra_work, nodes, optimization, run_life, splits

_GROUPS = (run_life, splits, optimization, nodes, extra_work)
_BY_NAME = {described.name: described for group in _GROUPS for described in group.DESCRIPTIONS}
DESCRIPTIONS: Mapping[str, VerbDescription] = {name: _BY_NAME[name] for name in VERBS}
"""Descriptions by verb, in the protocol's order."""


def of(verb: str) -> VerbDescription:
    """Return the description of a verb that there is."""
    return DESCRIPTIONS[verb]


def with_keys() -> list[tuple[str, VerbKey]]:
    """Return the verbs that have a key, with it, in their order on the screen."""
    keyed = [(name, described.key) for name, described in DESCRIPTIONS.items() if described.key is not None]
    return sorted(keyed, key=lambda pair: pair[1].place)
