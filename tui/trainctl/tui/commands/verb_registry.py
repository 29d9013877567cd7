"""Every verb's description, found by a scan of `commands/verbs/`."""

import functools
import importlib
import pkgutil
from collections.abc import Mapping

from trainctl.protocol.messages.verbs import VERBS
from trainctl.tui.commands import verbs
from trainctl.tui.commands.verb_description import VerbDescription, VerbKey


@functools.cache
def descriptions() -> Mapping[str, VerbDescription]:
    """By verb, in the order in which the protocol has them."""
    names = [module.name for module in pkgutil.iter_modules(verbs.__path__)]
    modules = [importlib.import_module(f"{verbs.__name__}.{name}") for name in names]
    found: dict[str, VerbDescription] = {each.name: each for module in modules for each in module.DESCRIPTIONS}
    return {name: found[name] for name in VERBS}


def of(verb: str) -> VerbDescription:
    """What describes a verb that there is."""
    return descriptions()[verb]


def with_keys() -> list[tuple[str, VerbKey]]:
    """The verbs that have a key, with it, in their order on the screen."""
    found = [(name, described.key) for name, described in descriptions().items() if described.key is not None]
    return sorted(found, key=lambda pair: pair[1].place)
