"""How a calibration takes a measuring process that hangs or is ended by a signal."""

import signal

import msgspec
import pytest
from tests.waiting import HANG_SECONDS

from trainctl.protocol.calibration.profile import Pass
from trainctl.protocol.errors import TrainctlError
from trainctl.trainer.calibration import measuring_process
from trainctl.trainer.calibration.findings import Findings, Trying

PASS = Pass(micro=1, seconds=0.1, peak_bytes=None)


def line(trying):
    return msgspec.json.encode(trying).decode()


@pytest.fixture(autouse=True)
def process(monkeypatch):
    monkeypatch.setattr(measuring_process, "MODULE", "tests.trainer.support.hung_measurement")
    monkeypatch.setattr(measuring_process, "SILENT_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(measuring_process, "MOST_STARTS", 1)


@pytest.fixture
def impatient(monkeypatch):
    """The process may take its time to begin; once it has said something, it is waited for no longer."""
    hear = measuring_process._Measured._hear

    def heard(measured, line, say):
        hear(measured, line, say)
        monkeypatch.setattr(measuring_process, "SILENT_SECONDS", 0.1)

    monkeypatch.setattr(measuring_process._Measured, "_hear", heard)


@pytest.mark.usefixtures("impatient")
def test_a_process_that_hangs_before_a_pass_ends_the_calibration():
    with pytest.raises(TrainctlError, match=r"said nothing for 0\.1 s and was killed"):
        measuring_process.measured(Findings(), [line(Trying(part="passes", micro=4))], lambda _: None)


@pytest.mark.usefixtures("impatient")
def test_a_process_that_hangs_later_costs_the_part_that_it_was_at():
    said: list[str] = []
    found = measuring_process.measured(Findings(passes=(PASS,)), [line(Trying(part="disk"))], said.append)
    assert (found.done, found.passes) == (("disk",), (PASS,))
    assert said == ["disk: not measured: the measuring process said nothing for 0.1 s and was killed"]


@pytest.mark.parametrize(("number", "micro"), [(signal.SIGKILL, 4), (signal.SIGSEGV, None)])
def test_only_a_kill_means_that_memory_ran_out(number, micro):
    said: list[str] = []
    given = [line(Trying(part="passes", micro=4)), str(int(number))]
    found = measuring_process.measured(Findings(passes=(PASS,)), given, said.append)
    assert found.out_of_memory_micro == micro
    assert (number.name in said[0]) == (micro is None)
