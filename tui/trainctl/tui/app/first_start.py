"""Whether this is the first start of the full screen, remembered by an empty file in the state folder."""

from trainctl.protocol.record.paths import state_root

MARK = ".first-start"
"""The name of that file; nodes' names begin with no dot."""


def claim() -> bool:
    """True once: the first call makes the file. False if it can't be made, so that nothing is shown again and again."""
    file = state_root() / MARK
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.touch(exist_ok=False)
    except OSError:
        return False
    return True
