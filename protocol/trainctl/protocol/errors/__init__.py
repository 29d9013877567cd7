"""The exceptions that the packages raise to each other, each with the exit code the command line gives it.

TrainctlError
├── InvalidInputError       exit 2   a file, argument or address that is wrong by itself
│   ├── NotCachedError      exit 2   a model that has yet to be downloaded
│   ├── BusyError           exit 2   a database that another process has locked
│   ├── DamagedError        exit 2   a database that can't be read
│   └── SeveralInvalidError exit 2   several of them at once
├── RefusedError            exit 3   the agent rejected the request, or it failed there
├── ExpiredError            exit 4   not applied within the time asked for
├── UnreachableError        exit 5   nothing answered at the address, or the connection was lost
│   └── NotConnectedError   exit 5   there is no connection to the address at all
├── ClosedError             exit 1   a client was asked before it connected, or after it closed
├── NotAuthorisedError      exit 6   the peer's key does not allow it
└── ProtocolError           exit 5   what arrived is not this protocol
    └── VersionError        exit 5   it is, in another version
"""

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence

START_ONE = "start one with trainctl-agent run, or try trainctl demo"
"""Advice for where no agent answers."""

CRASH_STATUS = 70
"""Exit status of an agent after a fault of its own, or a hung event loop: its supervisor starts it again."""


class TrainctlError(Exception):
    """Anything this program says no with; its text is one line that names what, where and what would be right."""

    exit_code = 1


class InvalidInputError(TrainctlError):
    """A file, argument or address that is wrong by itself. `where` names it: `run.toml: batch.global`."""

    exit_code = 2

    def __init__(self, where: str, problem: str) -> None:
        self.where, self.problem = where, problem
        super().__init__(f"{where}: {problem}")

    @property
    def each(self) -> "tuple[InvalidInputError, ...]":
        """Return what is wrong, one by one."""
        return (self,)


class NotCachedError(InvalidInputError):
    """The id of a `model` that isn't in this machine's Hugging Face cache."""

    def __init__(self, where: str, model: str) -> None:
        self.model = model
        super().__init__(
            where, f"no such folder, and {model} isn't in the Hugging Face cache here; run: hf download {model}"
        )


class BusyError(InvalidInputError):
    """A database that another process has locked. It can be used once that process lets go of it."""


class DamagedError(InvalidInputError):
    """A database whose contents can't be read, or whose file is gone."""


class SeveralInvalidError(InvalidInputError):
    """Several things that are wrong; its own place and text are the first one's, and how many more there are."""

    def __init__(self, several: Sequence[InvalidInputError]) -> None:
        self._each = tuple(several)
        super().__init__(several[0].where, f"{several[0].problem} (and {len(several) - 1} more)")

    @property
    def each(self) -> tuple[InvalidInputError, ...]:
        return self._each


class Collected:
    """Gathers what is wrong, to tell all of it at once."""

    def __init__(self) -> None:
        self._found: list[InvalidInputError] = []

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """Keep the InvalidInputError that ends the block, if one does."""
        try:
            yield
        except InvalidInputError as error:
            self._found += error.each

    def raise_any(self) -> None:
        """Raise the InvalidInputError that was kept, or one for all of them, each reported once."""
        found = list({str(error): error for error in self._found}.values())
        if found:
            raise found[0] if len(found) == 1 else SeveralInvalidError(found)


class RefusedError(TrainctlError):
    """The agent rejected the request, or it failed there."""

    exit_code = 3


class ExpiredError(TrainctlError):
    """Not applied within the time asked for."""

    exit_code = 4


class UnreachableError(TrainctlError):
    """Nothing answered at the address, or the connection was lost."""

    exit_code = 5


class NotConnectedError(UnreachableError):
    """There is no connection to the address at all: no agent runs there, or the network is down."""


class ClosedError(TrainctlError):
    """A client was asked before `connect()`, or after `close()`."""

    def __init__(self, address: str) -> None:
        super().__init__(f"the client of {address} isn't connected: call connect() first, or open it by `with`")


class NotAuthorisedError(TrainctlError):
    """The peer's key does not allow what was asked."""

    exit_code = 6


class ProtocolError(TrainctlError):
    """A frame that is not a message of this protocol: malformed, over a limit, or of an unknown type."""

    exit_code = 5


class VersionError(ProtocolError):
    """A message of another protocol version."""


def check_installed(library: str, extra: str, where: str, what: str) -> None:
    """Raise InvalidInputError blaming `where` if a library that `what` needs isn't installed here."""
    if importlib.util.find_spec(library.replace("-", "_")) is None:
        raise InvalidInputError(where, f"{what} needs {library}; {installing(extra)}")


def installing(*extras: str) -> str:
    """Return how to get optional dependencies, any of `extras`; trainctl itself is in no package index yet."""
    return "in a trainctl checkout, run: pip install " + " or ".join(f"'.[{extra}]'" for extra in extras)
