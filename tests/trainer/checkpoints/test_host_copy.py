"""The copy of a state in main memory has what the model holds, wherever that is."""

import numpy as np
from tests.trainer.support.passes import go_on, trained

from trainctl.trainer.checkpoints.saver import HostCopy


def test_a_copy_follows_updates_and_memory_that_moves(load_backend):
    backend = trained(load_backend, "torch", 1)
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


def test_a_copy_on_mlx_is_the_arrays_themselves_and_later_updates_leave_it_as_it_is(load_backend):
    backend = trained(load_backend, "mlx", 1)
    state = HostCopy(backend).take()
    for name, array in backend._moments["exp_avg"].items():
        assert np.shares_memory(state.slots["exp_avg"][name], np.asarray(array)), name
    before = {name: array.copy() for name, array in state.weights.items()}
    go_on(backend, 1, 3)
    for name, array in before.items():
        np.testing.assert_array_equal(state.weights[name], array)
        assert np.any(backend.copy_out("weights")[name] != array), name
