"""The devices that a rank may compute on, as parameters of tests; those that this machine lacks are left out."""

from typing import NamedTuple

import pytest


class Device(NamedTuple):
    """A backend, and its device as a run file names it."""

    backend: str
    device: str

    @property
    def table(self) -> dict[str, object]:
        """Its [nodes.NAME] table, with the same bits each time where the backend has to be asked for them."""
        table: dict[str, object] = {"backend": self.backend, "device": self.device, "threads": 1}
        return table | ({"deterministic": True} if self.device == "cuda" else {})


ACCELERATORS = [
    pytest.param(Device("torch", "cuda"), marks=pytest.mark.needs("cuda"), id="torch-cuda"),
    pytest.param(Device("torch", "mps"), marks=pytest.mark.needs("mps"), id="torch-mps"),
    pytest.param(Device("mlx", "gpu"), marks=pytest.mark.needs("mlx-gpu"), id="mlx-gpu"),
]
PROCESSORS = [pytest.param(Device(backend, "cpu"), id=f"{backend}-cpu") for backend in ("torch", "mlx")]
