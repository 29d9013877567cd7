"""`python screen_once.py WORD COMMAND...`: runs a command on a terminal of its own, presses q once WORD is on its
screen, and exits with its status. Exits with 1 if it ends before that."""

import fcntl
import os
import pty
import struct
import sys
import termios


def main(word: str, command: list[str]) -> int:
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm-256color"
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        os.execvp(command[0], command)
    drawn, is_shown = b"", False
    while part := _read(terminal):
        drawn += part
        is_shown = is_shown or word.encode() in drawn
        if is_shown:  # at each part: the first closes what a first start shows
            os.write(terminal, b"q")
    _, status = os.waitpid(pid, 0)
    if not is_shown:
        sys.stderr.write(drawn.decode("utf-8", "replace"))
    return os.waitstatus_to_exitcode(status) if is_shown else 1


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # how Linux says that the program has closed the terminal
        return b""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
