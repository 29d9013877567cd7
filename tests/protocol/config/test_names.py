"""Names of machines as nodes."""

import re

from hypothesis import given
from hypothesis import strategies as st

from trainctl.protocol.config import names
from trainctl.protocol.config.names import NAME_PATTERN


@given(st.text(max_size=100))
def test_any_machine_has_a_node_s_name(host: str) -> None:
    assert re.fullmatch(NAME_PATTERN, names.node_name(host))
    known = {"Studio.local": "studio", "büro-7": "b-ro-7", "a-" * 40: "a-" * 31 + "a", "": "node", "_x_1_": "x_1"}
    assert {name: names.node_name(name) for name in known} == known
