"""The measuring process from outside: started again for what is left when it runs out of memory."""

import contextlib
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import IO, Final, cast

import msgspec

from trainctl.protocol.errors import TrainctlError
from trainctl.trainer.calibration.findings import Findings, Found, Line, OutOfMemory, Said, Trying, Waits
from trainctl.trainer.calibration.stages import StageRelay

MODULE: Final = "trainctl.trainer.calibration.measure_node"
MOST_STARTS: Final = 12
"""Processes of one calibration. Each but the last one has left out a size or a part."""
SILENT_SECONDS: Final = 300.0
"""Seconds without a line after which a measuring process counts as hung and is killed. Loading is silent."""


def measured(
    known: Findings, arguments: Sequence[str], say: Callable[[str], None], stages: StageRelay | None = None
) -> Findings:
    """Everything that can be measured; `stages` of a calibration beside others. Raises TrainctlError with the reason if
    there is no pass."""
    stages = stages or StageRelay.alone()
    for _ in range(MOST_STARTS):
        ended = _Measured(known, stages)
        status = ended.follow(arguments, say)
        known = ended.found
        if status == 0 and ended.out_of_memory is None:
            break
        micro = ended.out_of_memory
        if micro is not None and ended.trying.part == "forward":  # training's passes may still fit
            say("forward: not measured: out of memory")
            known = known.with_done("forward")
        elif micro is not None:
            say(f"micro-batch {micro}: out of memory")
            known = known.without_memory_for(micro)
        elif ended.trying.part in (None, "passes") and not known.passes:
            raise TrainctlError(ended.problem)
        elif ended.trying.part is None:
            say(f"not measured further: {ended.problem}")
            break
        else:
            say(f"{ended.trying.part}: not measured: {ended.problem}")
            known = known.with_done(ended.trying.part)
        if known.out_of_memory_micro == 1:
            raise TrainctlError(
                "out of memory with a micro-batch of one sample; use a smaller model or shorter samples"
            )
    if not known.passes:
        raise TrainctlError("no micro-batch could be measured")
    return known


class _Measured:
    """One process, from its start to its end."""

    def __init__(self, known: Findings, stages: StageRelay) -> None:
        self.found, self.trying, self._stages = known, Trying(), stages
        self.out_of_memory: int | None = None
        self.problem = ""
        self._process: subprocess.Popen[str] | None = None
        self._is_hung = False

    def follow(self, arguments: Sequence[str], say: Callable[[str], None]) -> int:
        """The exit status; negative: the signal that ended it."""
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", MODULE, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors, text=True,
            )  # fmt: skip
            self._process = process
            with contextlib.suppress(BrokenPipeError), process:  # it may have ended already: its status says how
                source, into = cast(IO[str], process.stdout), cast(IO[str], process.stdin)
                into.write(msgspec.json.encode(self.found).decode() + "\n")
                into.flush()
                self._stages.begin(into)
                hang = self._start_timer()
                for line in source:
                    hang.cancel()
                    self._hear(line, say)
                    hang = self._start_timer()
                hang.cancel()
            errors.seek(0)
            self.problem = self._problem(process.returncode, errors.read())
        if process.returncode == -signal.SIGKILL and not self._is_hung and self.out_of_memory is None:
            self.out_of_memory = self.trying.micro  # as Linux does where memory runs out
        return process.returncode

    def _start_timer(self) -> threading.Timer:
        timer = threading.Timer(SILENT_SECONDS, self._kill_hung)
        timer.daemon = True
        timer.start()
        return timer

    def _kill_hung(self) -> None:
        assert self._process is not None
        self._is_hung = True
        self._process.kill()

    def _problem(self, status: int, errors: str) -> str:
        if self._is_hung:
            return f"the measuring process said nothing for {SILENT_SECONDS:g} s and was killed"
        if status < 0:
            return f"the measuring process was ended by {signal.Signals(-status).name}"
        return (errors.strip().splitlines() or [f"the measuring process ended with {status}"])[-1]

    def _hear(self, line: str, say: Callable[[str], None]) -> None:
        try:
            heard: Line = msgspec.json.decode(line, type=Line)
        except msgspec.DecodeError:
            return  # what a library prints
        match heard:
            case Trying():
                self.trying = heard
            case Said(text):
                say(text)
            case Found(findings):
                self.found = findings
            case OutOfMemory(micro):
                self.out_of_memory = micro
            case Waits(stage):
                self._stages.waits(stage)
