"""Calibrations of a node: the side of a link that is asked, and the profile that a rank's ready message has."""

import asyncio
import socket
import types

import msgspec
import pytest
from tests.protocol.support.profiles import profile_of
from tools.protocol_docs.examples import EXAMPLES

from trainctl.node_agent.calibration import link_meter, stored_profiles
from trainctl.node_agent.calibration.link_meter import LinkMeter
from trainctl.node_agent.calibration.stored_profiles import MIN_STEPS, StoredProfiles
from trainctl.node_agent.roles.role import AgentRole
from trainctl.protocol import messages as m
from trainctl.protocol.calibration.profile import Pass, key_of, summary
from trainctl.protocol.config import run_file
from trainctl.protocol.errors import InvalidInputError, RefusedError

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


REQUEST = m.LinkRequest(rid="r", node="b", token="7f" * 16)


def meter(role, address="tcp://127.0.0.1:7474"):
    return LinkMeter(types.SimpleNamespace(node="a", address=address), role, lambda _: None)


def test_a_node_that_is_at_work_refuses():
    async def ask(role):
        return await meter(role).reply(REQUEST)

    role = AgentRole()
    role.start("run-1")
    with pytest.raises(RefusedError, match="takes part in a run"):
        asyncio.run(ask(role))
    role = AgentRole()
    role.is_calibrating = True
    with pytest.raises(InvalidInputError, match="calibration is in progress"):
        asyncio.run(ask(role))
    with pytest.raises(InvalidInputError, match="not in the cluster file"):
        asyncio.run(meter(AgentRole()).measured("b"))


async def test_a_connection_without_the_token_gets_nothing_and_the_node_is_free_again():
    role = AgentRole()
    asked = meter(role)
    opened = await asked.reply(REQUEST)
    assert role.is_calibrating
    with pytest.raises(InvalidInputError, match="calibration is in progress"):
        await asked.reply(m.LinkRequest(rid="r", node="c", token="00" * 16))
    with socket.create_connection(("127.0.0.1", opened.port)) as connection:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(connection, b"0" * 32)
        assert await asyncio.get_running_loop().sock_recv(connection, 1) == b""
    result = await asked.reply(REQUEST)
    assert (result.port, result.bytes_per_second) == (opened.port, None)
    assert not role.is_calibrating


async def test_the_exchange_ends_at_its_bounds(monkeypatch):
    monkeypatch.setattr(link_meter, "LINK_BYTES", 5_000_000)
    asked = meter(AgentRole())
    opened = await asked.reply(REQUEST)
    received, trip = await asyncio.to_thread(link_meter._called, "127.0.0.1", opened.port, REQUEST.token)
    assert received > 0 and trip > 0
    assert (await asked.reply(REQUEST)).bytes_per_second > 0
    assert link_meter.LINK_SECONDS <= 5 and link_meter.LINK_BYTES <= 256_000_000
