"""The keys under which a run's record keeps what is no row of a table."""

from trainctl.protocol.record.schema import VALUES_FROM

DURABLE_KEY = "conductor"
"""What the conductor must not forget."""
ALERTS_KEY = "alerts"
"""The open alerts and mutes; the run's other nodes keep them too."""
VIEW_KEY, GENERATION_KEY, HANDED_OVER_KEY = "view", "generation", "handed-over"
OWN_KEYS = frozenset({VIEW_KEY, GENERATION_KEY, HANDED_OVER_KEY, VALUES_FROM})
"""What is kept of this node alone, and not copied to others."""


def settings_key(plan_version: int) -> str:
    """Where the record keeps the settings of a plan version."""
    return f"settings-{plan_version}"
