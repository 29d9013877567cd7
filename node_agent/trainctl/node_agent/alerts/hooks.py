"""Calls about alerts and runs: the machine's command and webhook, given the event as JSON, for a limited time, and not
too often."""

import asyncio
import contextlib
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from trainctl.protocol.config.alert_rules import AlertHooks, HookEvent
from trainctl.protocol.messages import AlertView, HookOutcome

HOOK_SECONDS = 10.0
"""Seconds a command or a webhook may take; a command is then killed with all that it started."""
BURST, PER_SECONDS = 10, 60.0
"""Most calls within that many seconds; further ones are dropped and reported."""
WAITING_CALLS = 32
OUTPUT_BYTES = 2000
"""Bytes of a failing command's output that the event keeps."""
PIPE_BYTES = 65536
"""Most bytes of it that are read at once: what a pipe holds."""


class HookCall(msgspec.Struct, frozen=True):
    """Input of a hook."""

    event: HookEvent | Literal["test"]
    at: float  # Unix seconds
    agent: str  # node that calls
    run: str
    name: str  # the run's name
    text: str
    alert: AlertView | None = None  # None: the event is of the run

    @property
    def environment(self) -> dict[str, str]:
        alert = self.alert
        return {
            "TRAINCTL_ALERT_EVENT": self.event,
            "TRAINCTL_ALERT_KIND": alert.kind if alert is not None else "",
            "TRAINCTL_ALERT_ID": alert.id if alert is not None else "",
            "TRAINCTL_ALERT_SEVERITY": alert.severity if alert is not None else "",
            "TRAINCTL_ALERT_NODE": alert.node if alert is not None else "",
            "TRAINCTL_ALERT_TEXT": self.text,
            "TRAINCTL_RUN": self.run,
        }


class Budget:
    """Limit on how often a hook is called: pure."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def take(self, now: float) -> bool:
        """Return whether one more call is allowed at `now`, and count it if so."""
        self._times = [at for at in self._times if now - at < PER_SECONDS]
        if len(self._times) >= BURST:
            return False
        self._times.append(now)
        return True


class Hooks:
    """Calls one after another; `turned` is called whenever `problem` changes, with one line on what has begun to go
    wrong, once for each series of failures, and else with an empty one."""

    def __init__(self, hooks: AlertHooks, turned: Callable[[str], None]) -> None:
        self._hooks, self._turned = hooks, turned
        self._queue: asyncio.Queue[HookCall] = asyncio.Queue(WAITING_CALLS)
        self._budget = Budget()
        self._problems: dict[str, str] = {}  # by hook, and of calls that were dropped

    @property
    def problem(self) -> str:
        """Return one line on the hooks that fail now, empty if none does."""
        return "; ".join(self._problems.values())

    @property
    def waiting(self) -> int:
        """Calls that are still to be made."""
        return self._queue.qsize()

    def call(self, call: HookCall) -> None:
        """Have the hooks called soon; returns at once."""
        if call.event not in self._hooks.on or not (self._hooks.command or self._hooks.webhook):
            return
        is_of_run = call.alert is None  # its end comes once, after many alerts
        if not (is_of_run or self._budget.take(time.monotonic())) or self._queue.full():
            self._note("rate", f"alert hooks: over {BURST} calls per minute; additional ones are not sent")
            return
        self._note("rate", "")
        self._queue.put_nowait(call)

    async def serve(self) -> None:
        """Make the calls; runs until it is cancelled."""
        while True:
            await self.make(await self._queue.get())

    async def make(self, call: HookCall) -> tuple[HookOutcome, ...]:
        """Call each hook that there is, and return how that went."""
        body, outcomes = msgspec.json.encode(call), list[HookOutcome]()
        if self._hooks.command:
            ended = await run_command(self._hooks.command, body, call.environment)
            outcomes.append(HookOutcome("command", ended.problem))
        if self._hooks.webhook:
            outcomes.append(HookOutcome("webhook", await post(self._hooks.webhook, body)))
        for outcome in outcomes:
            self._note(outcome.hook, outcome.problem and f"alert {outcome.hook} failed: {outcome.problem}")
        return tuple(outcomes)

    def _note(self, source: str, problem: str) -> None:
        before = self._problems.pop(source, "")
        if problem:
            self._problems[source] = problem
        if problem != before:
            self._turned("" if before else problem)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a program."""

    status: int | None  # None: it could not be started, or was killed when its time was up
    problem: str  # what went wrong in one line, empty for status 0


async def run_command(
    command: tuple[str, ...], body: bytes, environment: Mapping[str, str], seconds: float = HOOK_SECONDS
) -> Outcome:
    """Run a program with the body on its standard input, until it ends. What it leaves behind isn't waited for."""
    try:
        with _StandardError() as errors:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=errors.write_end,
                env={**os.environ, **environment},
                start_new_session=True,
            )
            status = await _ended(process, body, seconds)
            last = errors.read().decode("utf-8", "replace").strip().splitlines()[-1:]
    except (OSError, ValueError) as error:
        return Outcome(None, f"{command[0]}: {error}")
    if status is None:
        return Outcome(None, f"{command[0]} took longer than {seconds:g} s and was killed")
    said = f": {last[0][:200]}" if last else ""
    return Outcome(status, f"{command[0]} exited with {status}{said}" if status else "")


async def _ended(process: asyncio.subprocess.Process, body: bytes, seconds: float) -> int | None:
    """The exit status of a program that is given the body; None if it was killed when its time was up."""
    assert process.stdin is not None
    try:
        async with asyncio.timeout(seconds):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                process.stdin.write(body)
                await process.stdin.drain()
            process.stdin.close()
            return await process.wait()
    except TimeoutError:
        return None
    finally:
        process.stdin.close()
        if process.stdin.transport.get_write_buffer_size():
            process.stdin.transport.abort()  # of a body that is not read
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # what it left behind ends with it
        await asyncio.shield(process.wait())


class _StandardError:
    """The end of what a program writes on standard error. A child that it leaves behind may never close it, so its
    end isn't waited for."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._said, self._loop = b"", asyncio.get_running_loop()

    def __enter__(self) -> "_StandardError":
        self._loop.add_reader(self._read_end, self.read)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.remove_reader(self._read_end)
        os.close(self._read_end)
        os.close(self.write_end)

    def read(self) -> bytes:
        """The last OUTPUT_BYTES of what was written up to now."""
        with contextlib.suppress(BlockingIOError):
            self._said = (self._said + os.read(self._read_end, PIPE_BYTES))[-OUTPUT_BYTES:]
        return self._said


async def post(address: str, body: bytes, seconds: float = HOOK_SECONDS) -> str:
    """Post a JSON body; gives what went wrong in one line, empty if nothing did.

    In a thread of its own, which no one waits for any longer than that: a server can answer a byte at a time.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str] = loop.create_future()

    def settle(problem: str) -> None:
        if not answer.done():
            answer.set_result(problem)

    def work() -> None:
        problem = _post(address, body, seconds)
        with contextlib.suppress(RuntimeError):  # the loop is over
            loop.call_soon_threadsafe(settle, problem)

    threading.Thread(target=work, name="alert-webhook", daemon=True).start()
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError:
        return _no_answer(address, seconds)


def _no_answer(address: str, seconds: float) -> str:
    return f"{address} did not answer within {seconds:g} s"


def _post(address: str, body: bytes, seconds: float) -> str:
    headers = {"Content-Type": "application/json", "User-Agent": "trainctl"}
    request = urllib.request.Request(address, body, headers)  # noqa: S310  http or https: checked where it was set
    try:
        with urllib.request.urlopen(request, timeout=seconds):  # noqa: S310
            return ""
    except urllib.error.HTTPError as error:
        return f"{address} answered {error.code} {error.reason}"
    except (OSError, ValueError) as error:  # of these are URLError and http.client's errors
        reason = getattr(error, "reason", error)
        return _no_answer(address, seconds) if isinstance(reason, TimeoutError) else f"{address}: {reason}"
    except Exception as error:  # noqa: BLE001  what a broken server makes the library raise must not end the agent
        return f"{address}: {error}"
