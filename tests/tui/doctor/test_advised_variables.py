"""What `trainctl doctor` says of environment variables, beside what `trainctl advise` says of the same."""

from trainctl.protocol.advice.environment import VARIABLES
from trainctl.protocol.machine.facts import VARIABLES as READ
from trainctl.tui.doctor.check_environment import MEANINGS

LEVELS = {"set": "ok", "avoid": "warn", "no effect": "warn"}
BY_VALUE = {"PYTORCH_MPS_HIGH_WATERMARK_RATIO"}
"""Doctor warns of some of its values alone."""


def test_doctor_warns_of_what_advise_tells_to_avoid_and_of_nothing_that_it_sets() -> None:
    both = [one for one in VARIABLES if one.name in MEANINGS and one.name not in BY_VALUE]
    assert {one.name: MEANINGS[one.name].level for one in both} == {one.name: LEVELS[one.use] for one in both}
    assert len(both) > 5


def test_doctor_reads_what_it_explains() -> None:
    assert set(MEANINGS) <= set(READ)
