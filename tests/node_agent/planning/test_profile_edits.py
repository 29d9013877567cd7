"""`micro = "auto"`: a rank begins with the fastest micro-batch of its profile that memory allows."""

import msgspec
import pytest
from tests.node_agent.support.simulation import config, durable
from tests.protocol.support.profiles import profile_of
from tools.protocol_docs.examples import EXAMPLES

from trainctl.node_agent.planning.share_edits import fastest_micro
from trainctl.protocol.calibration.profile import Pass, summary
from trainctl.protocol.config.micro_batches import FIRST

PASSES = (Pass(1, 0.1, 100), Pass(2, 0.15, 150), Pass(4, 0.2, 200), Pass(16, 0.6, 800))


def ready(**changes):
    profile = summary(profile_of(passes=PASSES))
    return msgspec.structs.replace(
        EXAMPLES["trainer to agent"]["ready"], **{"rank": 0, "profile": profile, "memory_cap_bytes": None, **changes}
    )


def kept(micro=FIRST, **changes):
    whole = durable(("a",), batch=32)
    setting = msgspec.structs.replace(whole.settings.ranks[0], micro_batch=micro, **changes)
    return msgspec.structs.replace(whole.settings, ranks={0: setting})


AUTO = config(batch=32, nodes={"a": {"micro": "auto"}})


@pytest.mark.parametrize(("cap", "micro"), [(None, 16), (900, 4), (10, 1)])
def test_the_peak_within_85_percent_of_the_cap_is_taken(cap, micro):
    edit = fastest_micro(kept(), AUTO, ready(memory_cap_bytes=cap))
    assert edit.settings.ranks[0].micro_batch == micro
    assert edit.settings.plan_version == kept().plan_version + 1
    assert edit.change.after == (("a", micro),)
    assert fastest_micro(kept(share=1), AUTO, ready(memory_cap_bytes=cap)).settings.ranks[0].micro_in_force == 1


def test_batch_micro_may_be_auto_too():
    assert fastest_micro(kept(), config(batch=32, nodes={"a": {}}, **{"group": {}}), ready()) is None
    whole = msgspec.structs.replace(AUTO, batch=msgspec.structs.replace(AUTO.batch, micro="auto"), nodes={})
    assert fastest_micro(kept(), whole, ready()).settings.ranks[0].micro_batch == 16


@pytest.mark.parametrize(
    ("settings", "message"),
    [(kept(), ready(profile=None)), (kept(3), ready()), (kept(halved_to=8), ready()), (kept(), ready(rank=7))],
)
def test_what_has_been_decided_otherwise_stays(settings, message):
    assert fastest_micro(settings, AUTO, message) is None
