"""How much a rank computes, on its Node screen."""

import pytest

from trainctl.tui.screens import node_facts
from trainctl.tui.text.styled_line import plain


@pytest.mark.parametrize(
    "values, shown",
    [
        ({}, ""),
        ({"tflops": 0.0423}, "0.0423 TFLOP/s, peak unknown: trainctl calibrate"),
        ({"tflops": 6.21, "matmul_use": 0.48}, "6.21 TFLOP/s, 48% of its matmul peak"),
        ({"tflops": 402.0, "matmul_use": 0.5, "mfu": 0.406}, "402 TFLOP/s, 50% of its matmul peak, MFU 41%"),
    ],
)
def test_operations_and_the_part_of_the_peak_where_they_are_known(values: dict[str, float], shown: str) -> None:
    assert plain(node_facts._flops(values)) == shown
