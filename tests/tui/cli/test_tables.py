"""Tables of the command line: what each rank computes on."""

import msgspec
import pytest
from tests.tui.support.recorded import run_view
from tests.tui.support.scripted import SNAPSHOT

from trainctl.protocol import messages as m
from trainctl.tui.cli import tables

H200 = m.GpuReading("NVIDIA H200")
MIXED = "bfloat16, weights float32"
TORCH = m.Compute("bfloat16", attention="flash", weights="float32", versions=(("torch", "2.11.0"),))
MLX = m.Compute("float32", attention="mx.fast", weights="float32", versions=(("mlx", "0.30"),))


def host(node: str, *gpus: m.GpuReading) -> m.HostReading:
    return m.HostReading(
        node=node, read_at=0.0, cpu_percent=None, memory_used_bytes=None, memory_total_bytes=None, disk_free_bytes=None,
        gpus=gpus,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("device", "backend", "compute", "gpus", "cells"),
    [
        ("cuda:0", "torch", TORCH, (H200,), ["yes (CUDA)", "cuda:0", "torch 2.11.0", "flash", MIXED]),
        ("cpu", "torch", MLX, (H200,), ["no: NVIDIA H200 is idle", "cpu", "torch", "mx.fast", "float32"]),
        ("cpu", "torch", MLX, (), ["no: none here", "cpu", "torch", "mx.fast", "float32"]),
        ("gpu", "mlx", MLX, (), ["yes (Metal)", "gpu", "mlx 0.30", "mx.fast", "float32"]),
        ("mps", "torch", TORCH, (), ["yes (Metal)", "mps", "torch 2.11.0", "flash", MIXED]),
        (None, "torch", None, (), ["n/a", "n/a", "torch", "n/a", "n/a"]),
    ],
)  # fmt: skip
def test_each_rank_s_device_library_attention_and_precision_are_in_one_table(
    device: str | None, backend: str, compute: m.Compute | None, gpus: tuple[m.GpuReading, ...], cells: list[str]
) -> None:
    view = run_view()
    rank = msgspec.structs.replace(view.ranks[0], node="a", device=device, backend=backend, compute=compute)
    snapshot = msgspec.structs.replace(SNAPSHOT, run=msgspec.structs.replace(view, ranks=(rank,)))
    _, row = tables.devices_table(snapshot, {"a": host("a", *gpus)}).splitlines()
    assert [cell.strip() for cell in row.split("  ") if cell.strip()][1:6] == cells
