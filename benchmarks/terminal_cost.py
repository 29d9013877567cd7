"""Cost of the full-screen program to a terminal and a machine, in a real pseudo-terminal.

    python -m benchmarks terminal_cost [--seconds 30] [--minutes 1] [--record-steps 1000000] [--folder DIR]

Three parts: `steady`, the agents of 8 simulated nodes at 120x40 with every value changing about once a second; `first`,
the first full frame of `trainctl replay` on a long record, of which the best of several starts counts; and `many`, 16
simulated nodes, with keys pressed all the while. btop and `wandb leet symon` are measured beside the first where they
are installed. Prints a table and one JSON object; exits 1 if a bar is missed.
"""

import argparse
import itertools
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lib import long_record
from lib.pseudo_terminal import Screen, Terminal
from lib.simulated_cluster import simulated_cluster

COLUMNS, ROWS = 120, 40
SETTLE_SECONDS = 8.0
STARTS = 7
DEADLINE_SECONDS = 60.0


class Bar(NamedTuple):
    """One measured value, in the unit of its bar."""

    name: str
    value: float
    most: float
    unit: str

    @property
    def held(self) -> bool:
        return self.value <= self.most


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="of the steady part, and of each peer")
    parser.add_argument("--minutes", type=float, default=1.0, help="of the part with 16 nodes")
    parser.add_argument("--record-steps", type=int, default=1_000_000)
    parser.add_argument("--record-ranks", type=int, default=8)
    parser.add_argument(
        "--folder", type=Path, help="where to keep the long record; without it, one is made and deleted"
    )
    parser.add_argument("--only", choices=("steady", "first", "many", "peers"), action="append")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    print(f"this machine's cores: {contention():.2f} times slower than at their best (others use them)")
    parts = options.only or ["steady", "first", "many", "peers"]
    bars: list[Bar] = []
    beside: dict[str, Any] = {}
    if "steady" in parts:
        bars += steady(options.seconds)
    if "first" in parts:
        bars += first_frame(options)
    if "many" in parts:
        bars += many(options.minutes)
    if "peers" in parts:
        beside = peers(options.seconds)
    tell(bars, beside)
    return 0 if all(bar.held for bar in bars) else 1


def contention() -> float:
    """Return how much slower a core is than at its best here: shared ones make CPU figures grow by up to that."""

    def work() -> float:
        begun = time.process_time()
        sum(number * number % 7 for number in range(200_000))
        return time.process_time() - begun

    took = [work() for _ in range(60)]
    return statistics.median(took) / min(took)


def tell(bars: Sequence[Bar], beside: dict[str, Any]) -> None:
    for bar in bars:
        verdict = "met" if bar.held else "MISSED"
        print(f"{bar.name:48} {bar.value:10.2f} {bar.unit:9} bar {bar.most:g} {bar.unit}, {verdict}")
    for name, found in beside.items():
        words = found if isinstance(found, str) else "  ".join(f"{key} {value}" for key, value in found.items())
        print(f"{name:48} {words}")
    values = {bar.name: {"value": round(bar.value, 3), "bar": bar.most, "unit": bar.unit} for bar in bars}
    print(json.dumps({"ok": all(bar.held for bar in bars), "values": values, "beside": beside}))


# ---------------------------------------------------------------- the two sides


def trainctl(address: str) -> Terminal:
    return Terminal([sys.executable, "-m", "trainctl.tui.cli.main", "attach", "--connect", address], COLUMNS, ROWS)


def whole(*words: str) -> Any:
    """Return a predicate that is true of a screen that shows all of these words."""
    return lambda screen: all(word in screen.text for word in words)


def without(*words: str) -> Any:
    """Return a predicate that is true of a screen that shows none of these words."""
    return lambda screen: not any(word in screen.text for word in words)


# ---------------------------------------------------------------- the parts


def steady(seconds: float) -> list[Bar]:
    """Bytes, CPU, memory and how old a step is when it is shown, with 8 nodes and all changing once a second."""
    with simulated_cluster(8) as address, trainctl(address) as terminal:
        terminal.until(whole("RUNNING", "mac-2", "detach"), DEADLINE_SECONDS)
        terminal.run(SETTLE_SECONDS)
        before, cpu, begun = terminal.bytes_read, terminal.cpu_seconds, time.monotonic()
        seen: list[float] = []
        steps: list[str] = [step_of(terminal.screen)]

        def look() -> None:
            if (step := step_of(terminal.screen)) != steps[-1]:
                steps.append(step)
                seen.append(time.monotonic())

        terminal.run(seconds, look)
        took = time.monotonic() - begun
        between = [after - before for before, after in itertools.pairwise(seen)]
        now = terminal.memory_bytes
        return [
            Bar("bytes/s, 8 nodes at 1 Hz, 120x40", (terminal.bytes_read - before) / took, 6000, "B/s"),
            Bar("CPU, 8 nodes at 1 Hz", 100 * (terminal.cpu_seconds - cpu) / took, 3.0, "% of core"),
            Bar("steps not shown within their second", max(int(took) - 1 - len(seen), 0), 1, "steps"),
            Bar("between two steps shown, p95", percentile(between, 0.95), 2.0, "s"),
            Bar("peak memory, 8 nodes", max(terminal.peak_bytes, now) / 1e6, 120, "MB"),
        ]


def step_of(screen: Screen) -> str:
    """Return the step that the head of the screen shows."""
    return next((word for word in screen.line(0).split() if "/" in word and word[0].isdigit()), "")


def first_frame(options: Any) -> list[Bar]:
    """Wall time from the start of the command to the first full frame, the best of several; and the peak memory."""
    with tempfile.TemporaryDirectory() as passing:
        directory = long_record.make(options.folder or Path(passing), options.record_steps, options.record_ranks)
        walls, cpus, peaks = zip(*(start(directory) for _ in range(STARTS)), strict=True)
    print(
        f"first frame: wall {' '.join(f'{wall:.2f}' for wall in walls)} s; CPU {' '.join(f'{c:.2f}' for c in cpus)} s"
    )
    name = f"first full frame, {options.record_steps:,} steps"
    return [
        Bar(f"{name}, best of {STARTS}", min(walls), 0.8, "s"),
        Bar(f"{name}, CPU of trainctl", min(cpus), 0.8, "s"),
        Bar("peak memory, that record", max(peaks) / 1e6, 120, "MB"),
    ]


def start(directory: Path) -> tuple[float, float, float]:
    command = [sys.executable, "-m", "trainctl.tui.cli.main", "replay", str(directory)]
    with Terminal(command, COLUMNS, ROWS) as terminal:
        terminal.until(whole("n0", "detach", "loss", "events", "tok/s"), DEADLINE_SECONDS)
        wall, cpu = time.monotonic() - terminal.begun, terminal.cpu_seconds
        terminal.run(1.0)
        now = terminal.memory_bytes
        return wall, cpu, max(now, terminal.peak_bytes)


def many(minutes: float) -> list[Bar]:
    """16 nodes: how long a key takes to the screen, and whether memory stays."""
    chance = random.Random(5)
    waits: list[float] = []
    memory: list[tuple[float, int]] = []
    with simulated_cluster(16) as address, trainctl(address) as terminal:
        terminal.until(whole("RUNNING", "mac-2", "detach"), DEADLINE_SECONDS)
        terminal.run(SETTLE_SECONDS)
        cpu, before, begun = terminal.cpu_seconds, terminal.bytes_read, time.monotonic()
        while time.monotonic() - begun < 60 * minutes:
            waits += typed(terminal, chance)
            waits += switched(terminal, chance)
            memory.append((time.monotonic() - begun, terminal.memory_bytes))
        took = time.monotonic() - begun
        growth = (settled(memory, took, 2 / 3, 1.0) - settled(memory, took, 0.1, 0.4)) / 1e6
        curve = ", ".join(f"{at / 60:.0f} min {size / 1e6:.1f}" for at, size in by_the_minute(memory))
        print(f"16 nodes, resident MB at: {curve}")
        print(
            f"16 nodes: {len(waits)} keys, median {1e3 * statistics.median(waits):.0f} ms, "
            f"worst {1e3 * max(waits):.0f} ms; CPU {100 * (terminal.cpu_seconds - cpu) / took:.1f} %, "
            f"{(terminal.bytes_read - before) / took:,.0f} B/s"
        )
        return [
            Bar("key to screen, 16 nodes, p95", 1e3 * percentile(waits, 0.95), 100, "ms"),
            Bar(f"memory's growth over {minutes:g} min", growth, 3.0, "MB"),
            Bar("peak memory, 16 nodes", terminal.peak_bytes / 1e6, 160, "MB"),
        ]


def settled(memory: Sequence[tuple[float, int]], took: float, first: float, last: float) -> float:
    """The median of what was read in a part of the time; the screens' first opening is before the tenth of it."""
    return statistics.median([size for at, size in memory if first * took <= at <= last * took] or [memory[-1][1]])


def by_the_minute(memory: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """The first reading of each minute."""
    found: dict[int, tuple[float, int]] = {}
    for at, size in memory:
        found.setdefault(int(at // 60), (at, size))
    return list(found.values())


def typed(terminal: Terminal, chance: random.Random) -> list[float]:
    """Into the command line, a letter at a time; each is waited for."""
    terminal.press(":")
    terminal.until(whole("a verb as on the command line"), DEADLINE_SECONDS)
    waits, words = [], ""
    for _ in range(6):
        terminal.run(chance.uniform(0.05, 0.4))
        letter = chance.choice("abcdefghijklmnopqrstuvwxyz")
        words += letter
        terminal.press(letter)
        waits.append(terminal.until(lambda screen, words=words: words in screen.text, DEADLINE_SECONDS))  # type: ignore[misc]
    terminal.press("\x1b")
    terminal.until(lambda screen: words not in screen.text, DEADLINE_SECONDS)
    return waits


def switched(terminal: Terminal, chance: random.Random) -> list[float]:
    """To another screen and back."""
    waits = []
    for key, shown in (("?", whole(" keys ")), ("\x1b", without(" keys ")), ("0", whole("runs")), ("1", whole("NODE"))):
        terminal.run(chance.uniform(0.2, 0.6))
        terminal.press(key)
        waits.append(terminal.until(shown, DEADLINE_SECONDS))
    return waits


def percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(int(part * len(values)), len(values) - 1)] if values else float("inf")


# ---------------------------------------------------------------- peers


def peers(seconds: float) -> dict[str, Any]:
    """Bytes and CPU of other full-screen programs, each at its own pace."""
    commands = {"btop": ["btop"], "wandb leet symon": ["wandb", "leet", "symon"]}
    return {name: _peer(command, seconds) for name, command in commands.items()}


def _peer(command: list[str], seconds: float) -> dict[str, float] | str:
    found = shutil.which(command[0]) or shutil.which(str(Path(sys.executable).parent / command[0]))
    if found is None:
        return "not installed"
    with Terminal([found, *command[1:]], COLUMNS, ROWS) as terminal:
        terminal.run(SETTLE_SECONDS)
        if terminal.process.poll() is not None:
            return f"ended with {terminal.process.returncode}"
        before, cpu = terminal.bytes_read, _tree_cpu(terminal)
        terminal.run(seconds)
        return {
            "B/s": round((terminal.bytes_read - before) / seconds),
            "CPU %": round(100 * (_tree_cpu(terminal) - cpu) / seconds, 2),
        }


def _tree_cpu(terminal: Terminal) -> float:
    family = [terminal.usage, *terminal.usage.children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in family)


if __name__ == "__main__":
    sys.exit(main())
