"""A command that runs as it would without us, while its output is copied.

What is a terminal for this process is one for the command: a pseudo-terminal of the same size, which passes on each
key. What isn't is a pipe, and standard input is then the command's own. A signal that this process gets is passed on.
"""

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

PASSED_ON = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH),
)
TO_ALL = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP})
"""Signals that a terminal sends to each process in its foreground."""
QUIET_SECONDS = 0.5
"""Silence after the command's end for which processes that it left are waited for: they may write yet."""
_PIECE_BYTES = 65536
_LOOK_SECONDS = 0.2


class Process:
    """One command, its output copied to `take` as it comes, with the stream's number; `run` waits for it."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], take: Callable[[bytes, int], object] | None
    ) -> None:
        """Without `take`, nothing is copied: its output is this process's own."""
        self._command, self._environment, self._take = command, environment, take
        self._terminal = next((each for each in (0, 1, 2) if os.isatty(each)), None)
        self._has_screen = take is not None and (os.isatty(1) or os.isatty(2))
        self._saved: list[Any] | None = None  # the terminal's settings while they are changed
        self._copying_at = time.monotonic()
        self._lock = threading.Lock()  # held while the command's pid is sure to be its own
        self._pid: int | None = None
        self._main = -1  # our end of the pseudo-terminal
        self._is_over = False
        self.lost: OSError | None = None
        """The error for which output was lost; a reader that has gone is none."""

    def run(self, started: Callable[[], object] = lambda: None) -> int:
        """Run the command, call `started` once it runs, and return its exit status as a shell gives it: 128+n for
        signal n. Raises OSError if it can't be started."""
        taken = [number for number in PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
        with _held([*taken, signal.SIGCHLD]) as usual:
            try:
                self._enter()
                threads = self._start(taken, usual)
                started()
                while (status := self._ended()) is None:
                    self._on_signal(*_next_signal([*taken, signal.SIGCHLD]))
                self._drain(threads)
            finally:
                self._is_over = True
                self._leave()
        return 128 - status if status < 0 else status

    def send(self, number: signal.Signals) -> None:
        """Send the command a signal, if it runs; from any thread."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._pid is not None:
                os.kill(self._pid, number)

    # ------------------------------------------------------------ start and end

    def _start(self, taken: Sequence[signal.Signals], usual: set[signal.Signals]) -> list[threading.Thread]:
        inner, streams, sources = -1, [0, 1, 2], {}
        if self._has_screen:
            self._main, inner = os.openpty()
            sources[self._main] = 1 if os.isatty(1) else 2
            self._dress(inner)
        for own in (0, 1, 2):
            if self._has_screen and os.isatty(own):
                streams[own] = inner
            elif own == 2 and not os.isatty(1) and os.path.sameopenfile(1, 2):
                streams[own] = streams[1]  # their order is kept
            elif own and self._take is not None:
                reading, streams[own] = os.pipe()
                sources[reading] = own

        def prepare() -> None:
            for number in (*taken, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)  # ours would catch one that comes before the command is there
            signal.pthread_sigmask(signal.SIG_SETMASK, usual)
            if self._has_screen:
                fcntl.ioctl(inner, termios.TIOCSCTTY, 0)

        try:
            child = subprocess.Popen(
                self._command,
                stdin=streams[0],
                stdout=streams[1],
                stderr=streams[2],
                preexec_fn=prepare,
                close_fds=False,  # what a shell has opened for it
                env=self._environment,
                start_new_session=self._has_screen,
            )
        finally:
            for descriptor in {*streams} - {0, 1, 2}:
                os.close(descriptor)
        self._pid, child.returncode = child.pid, 0  # it is waited for here
        copies = [(self._copy, source, target) for source, target in sources.items()]
        if self._has_screen and os.isatty(0):
            copies.append((self._type, 0, self._main))
        threads = [threading.Thread(target=copy, args=ends, name="copy", daemon=True) for copy, *ends in copies]
        for thread in threads:
            thread.start()
        return threads[: len(sources)]

    def _ended(self) -> int | None:
        """Return the command's exit status, or None while it runs. Stop with it when it stops."""
        assert self._pid is not None
        with self._lock:
            pid, status = os.waitpid(self._pid, os.WNOHANG | os.WUNTRACED)
            if pid and not os.WIFSTOPPED(status):
                self._pid = None
                return os.waitstatus_to_exitcode(status)
        if pid:
            self._leave()
            os.kill(os.getpid(), signal.SIGSTOP)
        return None

    def _drain(self, threads: Sequence[threading.Thread]) -> None:
        """Copy what is left. Whoever keeps the output open without writing isn't waited for."""
        self._copying_at = time.monotonic()
        while any(thread.is_alive() for thread in threads) and time.monotonic() < self._copying_at + QUIET_SECONDS:
            time.sleep(0.01)

    # ------------------------------------------------------------ signals

    def _on_signal(self, number: int, from_terminal: bool) -> None:
        if number == signal.SIGCHLD:
            return
        if number == signal.SIGWINCH and self._has_screen:
            self._resize(self._main)
            return
        if number == signal.SIGCONT:
            self._enter()
        elif from_terminal and number in TO_ALL and not self._has_screen:
            return  # the command is in the same group, and got it too
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._pid is not None and self._has_screen and (from_terminal or number == signal.SIGCONT):
                os.killpg(self._pid, number)
            elif self._pid is not None:
                os.kill(self._pid, number)

    # ------------------------------------------------------------ the terminal

    def _dress(self, inner: int) -> None:
        """Give the pseudo-terminal the settings and the size of the terminal."""
        assert self._terminal is not None
        settings = self._saved or termios.tcgetattr(self._terminal)
        if not os.isatty(0):
            settings[1] &= ~termios.OPOST  # the terminal itself, which isn't raw then, ends the lines
        termios.tcsetattr(inner, termios.TCSANOW, settings)
        self._resize(inner)

    def _resize(self, target: int) -> None:
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(self._terminal or 0, termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(target, termios.TIOCSWINSZ, size)

    def _is_in_front(self) -> bool:
        try:
            return os.tcgetpgrp(0) == os.getpgrp()
        except OSError:
            return False

    def _enter(self) -> None:
        """Pass on each key as it is typed, where this process is in the terminal's foreground."""
        if self._has_screen and os.isatty(0) and self._is_in_front() and self._saved is None:
            self._saved = termios.tcgetattr(0)
            tty.setraw(0, termios.TCSADRAIN)
            if self._main >= 0:  # it may have changed in the background
                self._resize(self._main)

    def _leave(self) -> None:
        if self._saved is not None:
            saved, self._saved = self._saved, None
            with contextlib.suppress(termios.error):
                termios.tcsetattr(0, termios.TCSADRAIN, saved)

    # ------------------------------------------------------------ copies

    def _copy(self, source: int, target: int) -> None:
        """Copy until the end; once the target takes no more, the command's next write fails as it would on it."""
        with contextlib.suppress(OSError):  # EIO: nobody has the pseudo-terminal open
            while data := os.read(source, _PIECE_BYTES):
                self._copying_at = time.monotonic()
                if self._take is not None:
                    self._take(data, target)
                try:
                    _write(target, data)
                except BrokenPipeError:
                    break
                except OSError as error:
                    self.lost = error
                    break
        os.close(source)

    def _type(self, source: int, target: int) -> None:
        with contextlib.suppress(OSError):
            while not self._is_over:
                ready = self._saved is not None and select.select([source], [], [], _LOOK_SECONDS)[0]
                if not ready or self._saved is None:  # in the background a read would stop this process
                    time.sleep(0 if ready else 0.02)
                    continue
                if not (data := os.read(source, _PIECE_BYTES)):
                    return
                _write(target, data)


def _write(target: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(target, rest) :]


@contextlib.contextmanager
def _held(numbers: Sequence[signal.Signals]) -> Iterator[set[signal.Signals]]:
    """Hold these signals back, to be waited for. Yields those that were held back before."""
    # Where a signal's default is to be ignored, some systems drop it, even one that is held back.
    before = {number: signal.signal(number, _stay) for number in numbers}
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield {signal.Signals(number) for number in usual}
    finally:
        while waiting := signal.sigpending() & {*numbers}:
            signal.sigwait(waiting)
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)
        for number, handler in before.items():
            signal.signal(number, handler)


def _stay(_number: int, _frame: object) -> None:
    """Never called: the signal is waited for."""


def _next_signal(numbers: Sequence[signal.Signals]) -> tuple[int, bool]:
    """Wait for a signal. Return its number, and whether a terminal has sent it."""
    if sys.platform == "linux":
        info = signal.sigwaitinfo(numbers)
        return info.si_signo, info.si_code > 0
    number = signal.sigwait(numbers)
    try:
        return number, os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return number, False
