"""The CUDA card that a rank takes, and what is said of one without its data type; no card is needed."""

import pytest


@pytest.mark.parametrize(
    ("cards", "number"),
    [
        ([], 0), ([((6, 1), 20), ((8, 6), 82)], 1), ([((8, 6), 28), ((8, 6), 82), ((7, 5), 72)], 1),
        ([((9, 0), 132), ((9, 0), 132)], 0), ([((7, 5), 72), ((6, 1), 30)], 0), ([((9, 0), 132), ((12, 0), 36)], 1),
    ],
)  # fmt: skip
def test_the_card_that_can_do_most_is_taken(cards, number):
    from trainctl.trainer.backends.torch_device import fastest

    assert fastest(cards) == number


@pytest.mark.parametrize(
    ("capability", "dtype", "had"),
    [
        ((8, 0), "bfloat16", None),
        ((7, 5), "float16", None),
        ((7, 5), "bfloat16", "float32, float16"),
        ((6, 1), "float16", "float32"),
    ],
)
def test_a_type_that_a_card_has_no_hardware_for_is_named(capability, dtype, had):
    from trainctl.trainer.backends.torch_device import slow_type

    said = slow_type(capability, dtype)
    assert said is None if had is None else f" no hardware for {dtype}: " in said and f". It has {had}; " in said
