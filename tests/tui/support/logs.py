"""Recorded logs of the recorded runs' trainers: lines in the form, a traceback, and what native code prints."""

import msgspec
from tests.tui.support.recorded import CLOCK, NOW, Recorded, source_of

from trainctl.protocol import messages as m
from trainctl.protocol.client.client import Connection
from trainctl.protocol.record.log_format import write


def log_of(place: int, backend: str, device: str, ranks: int) -> str:
    """Return what a trainer of the group has said in the last hour."""
    start = NOW - 3600 + 0.4 * place
    lines = [
        write(start, "INFO", f"ready: {backend} on {device}, 1,235,814,400 parameters, 120,000 samples, at step 0"),
        write(start + 2, "INFO", f"g1.3 joined: {ranks} ranks by ring in 0.31 s"),
        "[W1120 13:31:08 socket.cpp:464] the server socket on [::]:29500 is IPv6 only",
        write(start + 900, "INFO", "evaluated at step 18,000: loss 1.9031 over 524,288 of weight"),
        write(start + 1700, "WARNING", "the sum failed: a peer closed its end"),
        write(start + 1700.1, "INFO", "g1.3 left at step 18,100"),
        write(start + 1701, "INFO", f"g1.4 joined: {ranks - 1} ranks by ring in 0.28 s"),
    ]
    return "\n".join(lines) + "\n"


def logs_of_four() -> dict[int, str]:
    """Return the logs of the fleet of four; the last has died, and its agent doesn't answer."""
    made = {
        rank: log_of(rank, backend, device, 4)
        for rank, (backend, device) in enumerate(
            [("mlx", "gpu Apple M2 Ultra"), ("mlx", "gpu Apple M3 Max"), ("torch", "cuda:0 NVIDIA RTX 4090")]
        )
    }
    made[0] += write(NOW - 700, "INFO", "checkpoint of step 18,222: 312.4 MB in 0.01 s") + "\n"
    made[2] += (
        write(NOW - 600, "WARNING", "step 18,231: memory did not suffice, micro-batch 13 from here on")
        + "\n"
        + write(NOW - 60, "ERROR", "step 18,238: checkpoint failed: No space left on device")
        + "\nTraceback (most recent call last):\n"
        + '  File "saving.py", line 41, in write\n    manifest = checkpoint.write(folder, state)\n'
        + "OSError: [Errno 28] No space left on device\n"
    )
    return made


def logging_source() -> Recorded:
    """The fleet of four with its logs, the other agents' lines and each node's processes; mini's agent is silent."""
    source = source_of(4)
    source.logs = logs_of_four()
    source.messages = [_with_processes(item) if isinstance(item, m.HostReading) else item for item in source.messages]
    for place, node in enumerate(("mbp", "forge"), 1):
        address = f"tcp://192.168.7.2{place}:7474"
        view = m.NodeView(node, f"{place}fe2a90c1d7b4e68", address, address, None, "0.1.0")
        beat = m.Heartbeat(node, NOW, 0.4, 0.0012 * place, view.boot, 7)
        for message in (Connection("connected", CLOCK.at_monotonic - 60), view, beat):
            source.more.put_nowait((node, message))
    silent = Connection("silent", CLOCK.at_monotonic - 14_400, "no answer from tcp://192.168.7.23:7474 within 5 s")
    source.more.put_nowait(("mini", silent))
    return source


def _with_processes(reading: m.HostReading) -> m.HostReading:
    rank = ("studio", "mbp", "forge").index(reading.node)
    told = (("agent", None, 1.4, 53e6), ("trainer", rank, 96.0, 6.1e9), ("keeper", rank, 0.0, 9e6),
            ("standby", rank, 0.0, 61e6), ("reducer", rank, 12.0, 5.2e9))  # fmt: skip
    processes = tuple(
        m.ProcessReading(611 + index, role, of, percent, int(size))
        for index, (role, of, percent, size) in enumerate(told)
    )
    return msgspec.structs.replace(reading, processes=processes)
