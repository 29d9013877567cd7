"""Devices of torch: the one that a node asks for, and its memory limit."""

import os

import torch

from trainctl.protocol.config.run_tables import NodeTable
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.backends.host_memory import limit_process


def choose_device(wanted: str, where: str) -> torch.device:
    """The device of a node's `device` setting. Raises InvalidInputError, naming the field, if torch doesn't have it."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if wanted in ("auto", "gpu"):
        found = "cuda:0" if cuda else "mps" if mps else "cpu"
        if wanted == "gpu" and found == "cpu":
            raise InvalidInputError(f"{where}: nodes.device", "torch finds no GPU on this machine")
        return torch.device(found)
    device = torch.device("cuda:0" if wanted == "cuda" else wanted)
    missing = (device.type == "cuda" and (not cuda or (device.index or 0) >= torch.cuda.device_count())) or (
        device.type == "mps" and not mps
    )
    if missing:
        raise InvalidInputError(f"{where}: nodes.device", f"torch finds no device {wanted!r} on this machine")
    return device


def choose_kernels(device: torch.device, node: NodeTable, *, tf32: bool) -> None:
    """Which of a CUDA device's kernels may be used: those in TF32, and those whose bits differ from one time to the
    next. Timing cuDNN's algorithms chooses by speed, so it is off where bits must be the same."""
    if device.type != "cuda":
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = node.cudnn_benchmark and not node.deterministic
    if node.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as NVIDIA's documentation of cuBLAS asks for
        torch.use_deterministic_algorithms(True)


def memory_cap(device: torch.device, limit_bytes: int | None) -> int | None:
    """Bytes that the trainer may hold on its device; None on a CPU, whose memory is the host's."""
    if device.type == "cuda":
        total = int(torch.cuda.get_device_properties(device).total_memory)
    elif device.type == "mps":
        total = int(torch.mps.recommended_max_memory())
    else:
        return None
    return min(total, limit_bytes or total)


def limit_memory(device: torch.device, limit_bytes: int) -> None:
    """Let this process take at most so many bytes on its device."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
    elif device.type == "mps":
        torch.mps.set_per_process_memory_fraction(min(2.0, limit_bytes / torch.mps.recommended_max_memory()))
    else:
        limit_process(limit_bytes)
