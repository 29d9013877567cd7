"""`python screen_once.py COMMAND...`: opens a full screen on a terminal of its own, presses q, exits with its status.

It exits with 1 if the command ends without having taken the whole screen.
"""

import fcntl
import os
import pty
import struct
import sys
import termios

WHOLE_SCREEN = b"\x1b[?1049h"


def main(command: list[str]) -> int:
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm-256color"
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        os.execvp(command[0], command)
    drawn = b""
    while part := _read(terminal):
        drawn += part
        if WHOLE_SCREEN in drawn:  # at each part: the first closes what a first start shows
            os.write(terminal, b"q")
    _, status = os.waitpid(pid, 0)
    if WHOLE_SCREEN not in drawn:
        sys.stderr.write(drawn.decode("utf-8", "replace"))
        return 1
    return os.waitstatus_to_exitcode(status)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # how Linux says that the program has closed the terminal
        return b""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
