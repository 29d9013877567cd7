"""The copy of a state in main memory has what the model holds, wherever that is."""

from collections.abc import Callable
from typing import Any

import numpy as np
from tests.trainer.precision.test_rounding import trained

from trainctl.trainer.checkpoints.host_copy import HostCopy


def test_a_copy_follows_updates_and_memory_that_moves(run_file: Callable[..., Any]) -> None:
    backend = trained(run_file, "torch", 1)
    copy, names = HostCopy(backend), [*backend.shapes]
    for change in (lambda p: p, lambda p: p.mul_(2), lambda p: p.clone() + 1):
        for parameter in backend._parameters:
            parameter.data = change(parameter.data)
        state = copy.take()
        for name, parameter in zip(names, backend._parameters, strict=True):
            np.testing.assert_array_equal(state.weights[name], parameter.detach().numpy())
        for slot, moments in state.slots.items():
            for name, moment in zip(names, backend._optimizer.moments(slot), strict=True):
                np.testing.assert_array_equal(moments[name], moment.numpy())
