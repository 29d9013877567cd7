"""Memory that another process reads and writes."""

import os

import numpy as np

from trainctl.trainer.backends.backend import Backend
from trainctl.trainer.backends.passes import Array
from trainctl.trainer.collective.shared_buffer import Layout, SharedBuffer


def doubled_by_another_process(backend: Backend, seed: int) -> dict[str, Array]:
    """Accumulators that go to a buffer, are doubled there by another mapping of it, as a reducer has one, and come
    back; the buffer's arrays."""
    random = np.random.default_rng(seed)
    given = {name: random.normal(size=shape).astype(np.float32) for name, shape in backend.shapes.items()}
    layout = Layout(backend.shapes, "")
    buffer = SharedBuffer.create(layout.elements)
    other = SharedBuffer(os.dup(buffer.descriptor), buffer.size_bytes)
    views = layout.views(buffer.floats)
    backend.device.pin(buffer.floats)
    backend.copy_in("accumulators", given)
    backend.copy_out("accumulators", views)
    other.floats *= 2
    backend.copy_in("accumulators", views)
    found = backend.copy_out("accumulators")
    assert all(np.array_equal(found[name], 2 * array) for name, array in given.items())
    other.close()
    buffer.close()
    return views
