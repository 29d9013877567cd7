"""The profile that a rank's ready message has: that of its own key, as long as it is stored, and repeated cheaply."""

import msgspec
import pytest
from tests.protocol.support.profiles import profile_of
from tools.protocol_docs.examples import EXAMPLES

from trainctl.node_agent.calibration import stored_profiles
from trainctl.node_agent.calibration.stored_profiles import MIN_STEPS, StoredProfiles
from trainctl.protocol import messages as m
from trainctl.protocol.calibration.profile import Pass, key_of, summary
from trainctl.protocol.config import run_file

CONFIG = run_file.parse({
    "run": {"name": "demo", "steps": 10}, "model": {"path": "/models/small"}, "data": {"path": "/data/a.txt"},
    "batch": {"global": 16}, "optimizer": {"learning_rate": 0.001},
})  # fmt: skip
READY = msgspec.structs.replace(EXAMPLES["trainer to agent"]["ready"], profile=None)
KEY = key_of(CONFIG, "a", backend=READY.backend, device=READY.device, model_digest=READY.model_digest)


@pytest.fixture
def profiles(tmp_path):
    return StoredProfiles("a", tmp_path)


def test_ready_has_the_newest_profile_that_fits(profiles):
    assert profiles.with_profile(READY, CONFIG) == READY
    for at in (1.0, 2.0):
        profiles.add(profile_of(key=KEY, created_at=at))
    profiles.add(profile_of(key=msgspec.structs.replace(KEY, dtype="bfloat16"), created_at=3.0))
    assert profiles.with_profile(READY, CONFIG).profile == summary(profile_of(key=KEY, created_at=2.0))
    on_another_device = msgspec.structs.replace(READY, device="cuda:0 NVIDIA L4")
    assert profiles.with_profile(on_another_device, CONFIG).profile is None


def test_a_heartbeat_repeats_it_without_reading_again(profiles, monkeypatch):
    profiles.add(profile_of(key=KEY))
    alive = msgspec.structs.replace(EXAMPLES["trainer to agent"]["alive"], ready=READY)
    told = profiles.with_profile(alive, CONFIG)
    assert told.ready.profile == summary(profile_of(key=KEY))
    monkeypatch.setattr(stored_profiles, "profiles_of_key", lambda *_: pytest.fail("read again"))
    monkeypatch.setattr(stored_profiles, "key_of", lambda *_, **__: pytest.fail("versions read again"))
    assert profiles.with_profile(alive, CONFIG) == told
    later = msgspec.structs.replace(alive, ready=msgspec.structs.replace(READY, last_step=9, cursor=90))
    assert profiles.with_profile(later, CONFIG).ready.profile == told.ready.profile, "a step later, in the same process"
    assert profiles.with_profile(msgspec.structs.replace(alive, ready=None), CONFIG).ready is None


def test_an_earlier_profile_of_other_versions_is_comparable(profiles):
    old = profile_of(key=msgspec.structs.replace(KEY, backend_version="1.0"), created_at=5.0)
    for one in (old, profile_of(key=msgspec.structs.replace(KEY, dtype="bfloat16"), created_at=9.0)):
        profiles.add(one)
    assert profiles.comparable(profile_of(key=KEY)) == old
    assert [one.created_at for one in profiles.newest(16)] == [9.0, 5.0]


def step(micro, samples, seconds, **fields):
    report = EXAMPLES["trainer to agent"]["report"]
    phases = m.Phases(forward=0.25 * seconds, backward=0.75 * seconds)
    values = {"memory_peak_bytes": 77.0}
    return msgspec.structs.replace(
        report, kind="train", micro_batch=micro, own_samples=samples, phases=phases, replays=0, values=values, **fields
    )


def test_running_ranks_teach_a_profile_only_what_is_faster(profiles):
    calibrated = profile_of(key=KEY, passes=(Pass(1, 1.0, 10), Pass(4, 2.0, 40), Pass(8, 5.0, 80)))
    profiles.add(calibrated)
    profiles.with_profile(READY, CONFIG)
    rates = {1: 2.0, 4: 1.0, 6: 1.9, 12: 2.5, 16: 3.0}  # samples per second: of 4 and 6 slower than calibrated
    for micro, rate in rates.items():
        for _ in range(MIN_STEPS - (micro == 16)):  # of 16 too few steps
            profiles.show(step(micro, 48, 48 / rate))
    assert profiles.newest(1) == (calibrated,), "not before the end of the run"
    profiles.learn()
    (learned,) = profiles.newest(9)
    assert learned.passes == (Pass(1, 0.5, 10), Pass(4, 2.0, 40), Pass(8, 5.0, 80), Pass(12, 4.8, 77))
    assert learned.created_at == calibrated.created_at
    profiles.learn()
    assert profiles.newest(9) == (learned,)


def test_without_a_calibration_nothing_is_learned(profiles):
    profiles.with_profile(READY, CONFIG)
    for _ in range(MIN_STEPS):
        profiles.show(step(4, 8, 1.0))
    profiles.learn()
    assert profiles.newest(1) == ()
