"""transformers' own dropout, turned off: its random numbers depend on micro-batches, ranks and the device, so that one
batch would have another loss each time. `[adapter] dropout` does not depend on them, and is the only one."""

import re
from typing import Any

_NAME = re.compile(r"drop|jitter_noise")
"""In the names of rates: attention_dropout, resid_pdrop, drop_path_rate, layerdrop, router_jitter_noise."""


def turn_off(config: Any) -> tuple[str, ...]:
    """Set all rates of random noise in a configuration of transformers, and in those within it, to 0. Returns the
    names of those that were above 0."""
    changed: list[str] = []
    for name, value in [*vars(config).items()]:
        if hasattr(value, "to_dict"):
            changed += turn_off(value)
        elif _NAME.search(name) and isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            setattr(config, name, type(value)(0))
            changed.append(name)
    return tuple(changed)
