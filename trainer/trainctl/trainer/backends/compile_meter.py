"""How long a model's compiler has taken."""

from dataclasses import dataclass


@dataclass
class CompileMeter:
    """Seconds of all compilations so far; 0 where nothing is compiled."""

    seconds: float = 0.0
