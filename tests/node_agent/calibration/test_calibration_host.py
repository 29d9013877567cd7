"""Calibrations that an agent is asked for: how they end when the measuring process misbehaves."""

import asyncio
from types import SimpleNamespace

import msgspec
import psutil
import pytest
from tests.protocol.support.profiles import profile_of

from trainctl.node_agent.calibration.calibration_host import CalibrationHost
from trainctl.node_agent.calibration.link_meter import LinkMeter
from trainctl.node_agent.calibration.stored_profiles import StoredProfiles
from trainctl.node_agent.guests.guest_runs import GuestRuns
from trainctl.node_agent.records.agent_db import AgentDb
from trainctl.node_agent.roles.role import AgentRole
from trainctl.protocol import messages as m
from trainctl.protocol.calibration.profile import CalibrationPoint, CalibrationTrying, Pass
from trainctl.protocol.machine import devices


@pytest.fixture
def context(tmp_path):
    return SimpleNamespace(node="a", directory=tmp_path)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Return the settings of a process that runs what `code` says as it starts."""

    def made(code):
        (tmp_path / "code").mkdir()
        (tmp_path / "code" / "sitecustomize.py").write_text(code, "utf-8")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"))
        return {
            "run": {"name": "demo", "steps": 10},
            "model": {"path": str(tmp_path / "model")},
            "data": {"path": str(tmp_path / "data"), "tokenizer": "bytes", "sequence_length": 128},
            "batch": {"global": 8},
            "optimizer": {"learning_rate": 1e-3},
            "nodes": {"a": {"backend": "torch"}},
        }

    return made


@pytest.fixture
def host(context):
    role = AgentRole()
    links = LinkMeter(context, role, lambda _: None)
    return CalibrationHost(context, role, StoredProfiles("a", context.directory), links)


def request(config, **fields):
    return m.CalibrateRequest(rid="1", calibration="calibration-abcd", config=config, **fields)


async def end_of(host, config, **fields):
    while getattr(reply := await host.reply(request(config, **fields)), "state", "") == "running":
        await asyncio.sleep(0.1)
    return reply


async def test_a_line_that_is_too_long_fails_the_calibration(context, config, host):
    reply = await asyncio.wait_for(end_of(host, config("print('x' * (2 << 20), flush=True)")), 60)
    assert isinstance(reply, m.Calibration), reply
    assert reply.state == "failed"
    assert "ValueError" in reply.problem
    assert not host._role.is_calibrating
    assert not [*context.directory.glob("calibration-*")]


HANGS = 'import sys, time\nprint(\'{"type":"progress","text":"begun"}\', flush=True)\ntime.sleep(1000)'


async def begun(host, config, **fields):
    while not (await host.reply(request(config, **fields))).progress:
        await asyncio.sleep(0.05)


async def test_a_calibration_is_cancelled_by_a_request(context, config, host):
    assert isinstance(await host.reply(request({}, cancel=True)), m.Refusal)
    config = config(HANGS)
    await asyncio.wait_for(begun(host, config), 60)
    await host.reply(request(config, cancel=True))
    reply = await asyncio.wait_for(end_of(host, config), 60)
    assert (reply.state, reply.problem) == ("failed", "the calibration was cancelled")
    await asyncio.wait_for(host.close(), 60)
    assert not host._role.is_calibrating
    mine = {child.pid for child in psutil.Process().children(recursive=True)}
    left = [one for one in psutil.process_iter(["cmdline"]) if one.pid in mine]
    assert not [one for one in left if "trainctl.trainer.calibration" in (one.info["cmdline"] or ())]
    assert not [*context.directory.glob("calibration-*")]


PROFILE = profile_of(passes=(Pass(1, 1.0, 10), Pass(2, 1.5, 20), Pass(4, 2.5, 40)))
PRINTS = """import os, sys, time
for line in {lines!r}:
    print(line, flush=True)
{then}
"""


async def profile_after(host, config, then, *lines):
    """The reply after a process has printed these lines and ended as `then` says."""
    words = [msgspec.json.encode(line).decode() for line in lines]
    run = config(PRINTS.format(lines=words, then=then)) | {"calibration": {"seconds": 5}}
    return await asyncio.wait_for(end_of(host, run), 60)


KILLED = "os.kill(os.getpid(), 9)"
STUCK = "time.sleep(1000)"


async def test_a_killed_process_loses_what_it_has_not_printed(config, host):
    reply = await profile_after(host, config, KILLED, CalibrationPoint(PROFILE), CalibrationTrying(4))
    assert reply.state == "finished"
    assert [known.micro for known in reply.profile.passes] == [1, 2]
    assert reply.profile.out_of_memory_micro == 4
    assert "micro-batch 4: out of memory" in reply.progress[-1]
    assert host._profiles.newest(1) == (reply.profile,)


@pytest.mark.parametrize(
    ("then", "problem"),
    [(STUCK, "took more than calibration.seconds"), ("os.kill(os.getpid(), 11)", "SIGSEGV"), (KILLED, "SIGKILL")],
)
async def test_a_process_that_hangs_or_breaks_later_costs_the_rest(config, host, then, problem):
    trying = CalibrationTrying(4), CalibrationPoint(PROFILE), CalibrationTrying()
    reply = await profile_after(host, config, then, *trying)
    assert reply.profile.passes == PROFILE.passes
    assert problem in reply.progress[-1]


@pytest.mark.parametrize(
    ("then", "problem"),
    [
        (STUCK, "took more than calibration.seconds"),
        (KILLED, "micro-batch 1: out of memory"),
        ("sys.exit('no GPU')", "no GPU"),
    ],
)
async def test_without_a_micro_batch_there_is_no_profile(config, host, then, problem):
    reply = await profile_after(host, config, then, CalibrationTrying(1))
    assert reply.state == "failed"
    assert problem in reply.problem


async def test_an_error_while_measuring_keeps_what_was_measured(config, host):
    fail = "print('CUDA error', file=sys.stderr, flush=True); os._exit(1)"
    reply = await profile_after(host, config, fail, CalibrationTrying(8), CalibrationPoint(PROFILE))
    assert (reply.profile.passes, reply.progress[-1]) == (PROFILE.passes, "not measured further: CUDA error")


async def test_what_the_process_refuses_is_no_profile(config, host):
    refuse = "print('the model changed', file=sys.stderr, flush=True); os._exit(2)"
    reply = await profile_after(host, config, refuse, CalibrationPoint(PROFILE))
    assert (reply.state, reply.problem) == ("failed", "the model changed")


SAYS_TYPE = """import json, sys, tomllib
file = next(word for word in sys.argv if word.endswith("run.toml"))
text = tomllib.load(open(file, "rb"))["model"]["dtype"]
print(json.dumps({"type": "progress", "text": text}), flush=True)
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("of_b", "lines"),
    [
        (("bfloat16", "float16"), ["bfloat16"]),
        (("float16",), ["float32"]),
    ],
)  # fmt: skip
async def test_auto_is_the_data_type_of_all_nodes_of_the_run_file(context, config, monkeypatch, of_b, lines):
    types = {"a": ("cpu", ("bfloat16",)), "b": ("cuda:0", of_b)}
    known = {node: (m.DeviceTypes("torch", *device),) for node, device in types.items()}
    monkeypatch.setattr(devices, "read_devices", lambda: known["a"])

    async def resolve(wanted):
        return devices.resolve(wanted, known, "config")[0]

    role = AgentRole()
    links = LinkMeter(context, role, lambda _: None)
    host = CalibrationHost(context, role, StoredProfiles("a", context.directory), links, resolve=resolve)
    wanted = config(SAYS_TYPE)
    wanted["model"]["dtype"], wanted["nodes"]["b"] = "auto", {"backend": "torch"}
    reply = await asyncio.wait_for(end_of(host, wanted), 60)
    assert [*reply.progress] == lines


async def test_without_its_client_a_calibration_beside_others_ends(config, host, monkeypatch):
    monkeypatch.setattr("trainctl.node_agent.calibration.calibration_host.CLIENT_SECONDS", 0.0)
    reply = await asyncio.wait_for(end_of(host, config(HANGS), beside=("b",)), 60)
    assert "not heard from" in reply.problem


async def test_during_a_calibration_no_run_is_attached_and_one_that_was_goes_on(context, config):
    role, db = AgentRole(), AgentDb(context.directory / "agent.db")
    links, profiles = LinkMeter(context, role, lambda _: None), StoredProfiles("a", context.directory)
    training = CalibrationHost(context, role, profiles, links, lambda: ["ppo-7"])
    wanted = config(HANGS)
    assert "ppo-7 trains on a" in (await training.reply(request(wanted))).text
    guests = GuestRuns("a", context.directory, db, lambda _: None, is_calibrating=lambda: role.is_calibrating)
    host = CalibrationHost(context, role, profiles, links)
    attach = m.AttachRun(rid="r", run="ppo-7", name="ppo", started_at=1.0, ranks=(m.GuestRank(0),))
    assert isinstance(await guests.reply(attach), m.RunKept)
    assert isinstance(await host.reply(request(wanted)), m.Calibration)
    refused = await guests.reply(msgspec.structs.replace(attach, run="ppo-8"))
    assert isinstance(refused, m.Refusal)
    assert refused.text == "a is being calibrated; attach the run again in about a minute"
    assert isinstance(await guests.reply(attach), m.RunKept), "its program has only lost its connection"
    await host.close()
    assert isinstance(await guests.reply(msgspec.structs.replace(attach, run="ppo-8")), m.RunKept)
    guests.close()
    db.close()


def test_what_a_killed_agent_left_is_removed(context):
    (context.directory / "calibration-x" / "deep").mkdir(parents=True)
    (context.directory / "profiles").mkdir()
    role = AgentRole()
    CalibrationHost(context, role, StoredProfiles("a", context.directory), LinkMeter(context, role, lambda _: None))
    assert [one.name for one in context.directory.iterdir()] == ["profiles"]
