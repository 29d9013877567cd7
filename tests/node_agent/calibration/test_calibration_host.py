"""Calibrations that an agent is asked for: how they end when the measuring process misbehaves."""

import asyncio
from types import SimpleNamespace

import pytest

from trainctl.node_agent.calibration.calibration_host import CalibrationHost
from trainctl.node_agent.calibration.link_meter import LinkMeter
from trainctl.node_agent.calibration.stored_profiles import StoredProfiles
from trainctl.node_agent.roles.role import AgentRole
from trainctl.protocol import messages as m


@pytest.fixture
def context(tmp_path):
    return SimpleNamespace(node="a", directory=tmp_path)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Of a process that runs what `code` says as it starts."""

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


def request(config):
    return m.CalibrateRequest(rid="1", calibration="calibration-abcd", config=config)


async def end_of(host, config):
    while getattr(reply := await host.reply(request(config)), "state", "") == "running":
        await asyncio.sleep(0.1)
    return reply


async def test_a_line_that_is_too_long_fails_the_calibration(context, config):
    role = AgentRole()
    links = LinkMeter(context, role, lambda _: None)
    host = CalibrationHost(context, role, StoredProfiles("a", context.directory), links)
    reply = await asyncio.wait_for(end_of(host, config("print('x' * (2 << 20), flush=True)")), 60)
    assert isinstance(reply, m.Calibration), reply
    assert reply.state == "failed"
    assert "ValueError" in reply.problem
    assert not role.is_calibrating
    assert not [*context.directory.glob("calibration-*")]
