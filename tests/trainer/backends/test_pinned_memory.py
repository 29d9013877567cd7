"""Memory shared with a reducer is pinned where it is, and let go before it is unmapped; on a CPU nothing is pinned."""

import gc

import pytest
from tests.trainer.support.pinned import doubled_by_another_process

from trainctl.trainer.collective.shared_buffer import Layout, SharedBuffer


class Driver:
    """The part of CUDA's runtime that pins memory. It reads what it is given, as the real one does."""

    def __init__(self):
        self.pinned: dict[int, int] = {}  # bytes by address

    def cudaHostRegister(self, address, size, flags):
        assert flags == 1
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address):
        del self.pinned[address]
        return 0


@pytest.fixture
def driver(monkeypatch):
    global torch_device
    import torch

    from trainctl.trainer.backends import torch_device

    made = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def test_a_shared_buffer_stays_pinned_as_long_as_a_view_of_it_is_held(driver):
    buffer = SharedBuffer.create(100)
    views = Layout({"a": (10, 3), "b": (7,)}, "").views(buffer.floats)
    address = buffer.floats.ctypes.data
    torch_device.pin(buffer.floats)
    assert driver.pinned == {address: 400}
    views["a"][...] = 2.0
    buffer.close()
    del buffer
    gc.collect()
    assert driver.pinned == {address: 400} and float(views["a"].sum()) == 60.0
    views.clear()
    gc.collect()
    assert driver.pinned == {}


def test_arrays_of_one_block_are_pinned_together(driver):
    first, second = torch_device.pinned_arrays([(4, 2), (3,)])
    assert driver.pinned == {first.ctypes.data: 4 * 11} and second.ctypes.data == first.ctypes.data + 4 * 8
    del first, second
    gc.collect()
    assert driver.pinned == {}
    assert torch_device.pinned_arrays([]) == []


@pytest.mark.parametrize("library", ["torch", "mlx"])
def test_a_rank_on_a_cpu_pins_nothing(driver, new_rig, library):
    doubled_by_another_process(new_rig(library).backend, 0)
    assert driver.pinned == {}
