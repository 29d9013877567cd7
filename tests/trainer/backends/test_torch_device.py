"""The CUDA card that a rank takes, and what is said of one without its data type; no card is needed."""

import pytest

from trainctl.trainer.backends.torch_device import fastest, slow_type


@pytest.mark.parametrize(
    ("cards", "number"),
    [
        ([], 0), ([((6, 1), 20), ((8, 6), 82)], 1), ([((8, 6), 28), ((8, 6), 82), ((7, 5), 72)], 1),
        ([((9, 0), 132), ((9, 0), 132)], 0), ([((7, 5), 72), ((6, 1), 30)], 0), ([((9, 0), 132), ((12, 0), 36)], 1),
    ],
)  # fmt: skip
def test_the_card_that_can_do_most_is_taken(cards: list[tuple[tuple[int, int], int]], number: int) -> None:
    assert fastest(cards) == number


@pytest.mark.parametrize(
    ("capability", "dtype", "had"),
    [
        ((8, 0), "bfloat16", None), ((8, 0), "float16", None), ((6, 1), "float32", None), ((7, 5), "float16", None),
        ((7, 5), "bfloat16", "float32, float16"), ((6, 1), "float16", "float32"), ((6, 1), "bfloat16", "float32"),
    ],
)  # fmt: skip
def test_a_type_that_a_card_has_no_hardware_for_is_named(
    capability: tuple[int, int], dtype: str, had: str | None
) -> None:
    said = slow_type(capability, dtype)
    assert (said is None) == (had is None)
    if said is not None:
        assert said.startswith(f"has compute capability {capability[0]}.{capability[1]} and no hardware for {dtype}: ")
        assert f". It has {had}; " in said
