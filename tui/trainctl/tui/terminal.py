"""How keys come from a terminal: Escape alone is told soon, and with a key close behind it as that key with alt."""

import os
import select
from codecs import getincrementaldecoder
from collections.abc import Iterable

from textual import constants, events
from textual._xterm_parser import XTermParser
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


class TerminalDriver(LinuxDriver):
    """Textual's driver of a terminal, but for how its input is read."""

    def run_input_thread(self) -> None:
        """Reads until the program leaves the terminal, or the terminal ends."""
        parser, decoder = KeyParser(self._debug), getincrementaldecoder("utf-8")("replace")
        while not self.exit_event.is_set():
            ready = select.select([self.fileno], [], [], ESCAPE_SECONDS if parser.waits else _LOOK_SECONDS)[0]
            if not ready:
                self._tell(parser.give_up())
                continue
            read = os.read(self.fileno, _READ_BYTES)
            if not read:
                return
            if text := decoder.decode(read):
                self._tell(parser.feed(text))

    def _tell(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.process_message(message)
