"""The update-to-weight ratio: measured at the steps asked for, from the weights themselves, without changing them."""

import numpy as np
import pytest


def flat(rig):
    weights = rig.backend.copy_out("weights")
    return np.concatenate([weights[name].ravel() for name in sorted(weights)]).astype(np.float64)


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_it_is_the_norm_of_the_update_over_that_of_the_weights(new_rig, backend):
    rig, plain = new_rig(backend, optimizer__update_ratio_every=2), new_rig(backend)
    for step in range(1, 5):
        before = flat(rig)
        report = rig.train(step, 4)
        assert "update_ratio" not in plain.train(step, 4).values
        expected = np.linalg.norm(flat(rig) - before) / np.linalg.norm(before)
        assert report.values.get("update_ratio") == (None if step % 2 else pytest.approx(expected, rel=1e-5))
    assert (flat(rig) == flat(plain)).all()
