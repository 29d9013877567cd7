"""How long a model's compiler has taken, and what it made."""

from dataclasses import dataclass


@dataclass
class CompileMeter:
    """Of all compilations so far; 0 where nothing is compiled."""

    seconds: float = 0.0
    graphs: int = 0  # compiled pieces of code; none if the compiler could do nothing with the layers
