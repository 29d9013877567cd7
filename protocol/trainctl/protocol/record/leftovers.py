"""What is named after a process: whether that process still lives."""

import os


def is_left_by_dead(pid: int) -> bool:
    """Whether no one works any more on what was named after `pid`. Our own number means a predecessor that had it, so
    don't ask while at work on such a folder."""
    import psutil  # of the extra `tui`

    if pid == os.getpid():
        return True
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False
