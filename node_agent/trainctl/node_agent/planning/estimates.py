"""How long whole states and sums may take where nothing has been measured yet: pure functions of the model's size."""

GRADIENT_BYTES, STATE_BYTES = 4, 12
"""Bytes per parameter: a gradient in fp32; weights and two moments of 4 bytes each."""
LINK_BYTES_PER_SECOND = 10e6
"""Bytes per second of the slowest link that a group may form over, a tenth of a gigabit."""
DISK_BYTES_PER_SECOND = 100e6
"""Bytes per second of a slow disk or a network disk."""


def level_seconds(parameters: int) -> float:
    """Giving a whole state to others."""
    return parameters * STATE_BYTES / LINK_BYTES_PER_SECOND


def sum_seconds(parameters: int) -> float:
    """Summing all gradients; in a ring each of them passes a link twice."""
    return 2 * parameters * GRADIENT_BYTES / LINK_BYTES_PER_SECOND


def write_seconds(parameters: int) -> float:
    """Writing a checkpoint."""
    return parameters * STATE_BYTES / DISK_BYTES_PER_SECOND
