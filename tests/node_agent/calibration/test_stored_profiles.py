"""The profile that a rank's ready message has: that of its own key, as long as it is stored, and repeated cheaply."""

import msgspec
import pytest
from tests.protocol.support.profiles import profile_of
from tools.protocol_docs.examples import EXAMPLES

from trainctl.node_agent.calibration import stored_profiles
from trainctl.node_agent.calibration.stored_profiles import StoredProfiles
from trainctl.protocol.calibration.profile import key_of, summary
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
    assert profiles.with_profile(msgspec.structs.replace(alive, ready=None), CONFIG).ready is None


def test_an_earlier_profile_of_other_versions_is_comparable(profiles):
    old = profile_of(key=msgspec.structs.replace(KEY, backend_version="1.0"), created_at=5.0)
    for one in (old, profile_of(key=msgspec.structs.replace(KEY, dtype="bfloat16"), created_at=9.0)):
        profiles.add(one)
    assert profiles.comparable(profile_of(key=KEY)) == old
    assert [one.created_at for one in profiles.newest(16)] == [9.0, 5.0]
