"""How keys come from a terminal, and what is drawn goes to it: Escape alone comes soon, and with a key close behind
it as that key with alt; a terminal that is gone is reported, and holds nothing up."""

import os
import select
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TextIO, runtime_checkable

from textual import constants, events
from textual._xterm_parser import XTermParser
from textual.app import App
from textual.drivers.linux_driver import LinuxDriver
from textual.message import Message

ESCAPE_SECONDS = constants.ESCAPE_DELAY if "ESCDELAY" in os.environ else 0.025
"""After so long with nothing behind it an Escape is a key, not the beginning of another key's sequence."""
_LOOK_SECONDS = 0.1
"""How often it is seen that the program leaves the terminal."""
_READ_BYTES = 4096
_ESCAPE = "\x1b"
_OPENERS = frozenset("[OP]^_")
"""What goes on, after an Escape, as a sequence of more than one character."""


@runtime_checkable
class Leaves(Protocol):
    """A program that can be notified that its terminal is gone."""

    def hang_up(self) -> None: ...


class KeyParser(XTermParser):
    """Textual's parser. It takes some characters after an Escape for keys of their own (a `0` for a masculine ordinal,
    a `b` for ctrl+left), by which both would be lost; here each is the key with alt, which the program tells apart."""

    @property
    def waits(self) -> bool:
        """Whether what has come may be the beginning of a sequence."""
        return self._timeout_time is not None

    def give_up(self) -> Iterable[Message]:
        """What has come is all there is."""
        if self._timeout_time is not None:
            self._timeout_time = 0.0
            yield from self.tick()

    def _sequence_to_key_events(self, sequence: str, alt: bool = False) -> Iterable[events.Key]:
        pair = len(sequence) == 2 and sequence[0] == _ESCAPE and sequence[1] not in _OPENERS
        if not alt and not pair:
            yield from super()._sequence_to_key_events(sequence)
            return
        for key in super()._sequence_to_key_events(sequence[-1]):
            yield events.Key(f"alt+{key.key}", key.character)


class TerminalOutput:
    """What is written to a terminal. Once that is gone all is taken and dropped: Textual's thread that writes would
    end, and the program wait for ever for room in its queue."""

    def __init__(self, file: TextIO, gone: Callable[[], None]) -> None:
        """`gone` is called once, from the thread that writes."""
        self._file, self._gone, self._is_gone = file, gone, False

    def write(self, text: str) -> int:
        """As a file does; raises nothing."""
        self._unless_gone(lambda: self._file.write(text))
        return len(text)

    def flush(self) -> None:
        """As a file does; raises nothing."""
        self._unless_gone(self._file.flush)

    def fileno(self) -> int:
        """The terminal's descriptor."""
        return self._file.fileno()

    def _unless_gone(self, written: Callable[[], object]) -> None:
        if self._is_gone:
            return
        try:
            written()
        except OSError:
            self._is_gone = True
            self._gone()


class TerminalDriver(LinuxDriver):
    """Textual's driver of a terminal, but for how its input is read, and what becomes of a terminal that is gone."""

    def __init__(self, app: App[Any], **options: Any) -> None:
        super().__init__(app, **options)
        self._file: Any = TerminalOutput(self._file, self._terminal_gone)

    def _terminal_gone(self) -> None:
        """The signal that says so comes only where it is the program's own terminal."""
        if isinstance(self._app, Leaves):
            self._loop.call_soon_threadsafe(self._app.hang_up)

    def run_input_thread(self) -> None:
        """Reads until the program leaves the terminal, or the terminal ends."""
        parser, decoder = KeyParser(self._debug), getincrementaldecoder("utf-8")("replace")
        while not self.exit_event.is_set():
            ready = select.select([self.fileno], [], [], ESCAPE_SECONDS if parser.waits else _LOOK_SECONDS)[0]
            if not ready:
                self._tell(parser.give_up())
                continue
            read = self._read()
            if not read:
                self._terminal_gone()
                return
            if text := decoder.decode(read):
                self._tell(parser.feed(text))

    def _read(self) -> bytes:
        """What has been typed; nothing if the terminal is gone."""
        try:
            return os.read(self.fileno, _READ_BYTES)
        except OSError:
            return b""

    def _tell(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.process_message(message)
