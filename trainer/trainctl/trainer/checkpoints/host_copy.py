"""A backend's state of one step in main memory, which a checkpoint is written from while training continues."""

from trainctl.trainer.backends.base import Array, Backend, Part, State
from trainctl.trainer.common.errors import first_line


class HostCopy:
    """Where the library writes to its arrays in place, they are copied into arrays that are made once and used again:
    fresh memory would take longer to touch than to fill."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._arrays: dict[Part, dict[str, Array]] = {}

    def take(self) -> State:
        """The state as it is now; valid until the next call. Raises MemoryError if device or host have no room for it;
        then nothing of it is kept."""
        try:
            slots = {slot: self._copy(slot) for slot in self._backend.slots}
            return self._backend.state_of(self._copy("weights"), slots)
        except (RuntimeError, MemoryError) as error:
            if not self._backend.is_out_of_memory(error):
                raise
            problem = first_line(error)
        self._arrays.clear()
        self._backend.discard()  # outside the handler, so that the traceback's frames hold no arrays
        raise MemoryError(f"out of memory for the copy of the state: {problem}")

    def release(self) -> None:
        """Give its memory back."""
        self._arrays.clear()

    def _copy(self, part: Part) -> dict[str, Array]:
        if (unchanging := self._backend.unchanging_arrays(part)) is not None:
            return unchanging
        arrays = self._arrays.get(part) or self._backend.host_arrays()
        self._arrays[part] = arrays
        self._backend.copy_out(part, arrays)
        return arrays
