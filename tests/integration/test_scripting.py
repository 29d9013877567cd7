"""What docs/scripting.md and examples/ say and do, against a run of two nodes that goes on meanwhile."""

import doctest
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import tomli_w
from tests.cluster.run_files import FOREVER, RING, on_mlx
from tests.cluster.waits import wait_for_end, wait_for_step
from tests.conftest import SHARED_PIDS
from tests.integration.conftest import AgentProcess, keep_processes
from tests.integration.support.ports import free_addresses
from tests.tui.support.cli_calls import COMMAND, ENVIRONMENT
from tests.tui.support.scripted import SNAPSHOT, scripted
from tests.waiting import HANG_SECONDS, until

from trainctl.protocol import messages as m
from trainctl.protocol.security.keys import KeyFolder

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NODES = ("studio", "mbp")
SAMPLES = 24
WRITTEN_ADDRESS = "tcp://127.0.0.1:7474"
NODE_STEER = ("node", str(EXAMPLES / "nodejs" / "steer.mjs"))
PYTHON_STEER = (sys.executable, str(EXAMPLES / "python" / "steer.py"))
STEERS = [
    pytest.param(PYTHON_STEER, id="python"),
    pytest.param((*NODE_STEER, "--answer", "30", "--own-agent"), id="nodejs", marks=pytest.mark.needs("nodejs")),
]


class Studio:
    """The agent that leads a run of two nodes, and how a script is called so that it talks to it."""

    def __init__(self, lead: AgentProcess, run: str, keys: dict[str, KeyFolder]) -> None:
        self.lead, self.run, self.keys = lead, run, keys

    def call(self, *words: str, **env: str) -> "subprocess.CompletedProcess[str]":
        """A script to its end, with the keys that are found by default."""
        own = {name: os.environ[name] for name in ("TRAINCTL_KEYS", "TRAINCTL_CLUSTER")}
        own["TRAINCTL_CONNECT"] = self.lead.address
        return subprocess.run(
            words, env={**ENVIRONMENT, **own, **env}, capture_output=True, text=True,
            check=False, stdin=subprocess.DEVNULL, timeout=HANG_SECONDS,
        )  # fmt: skip

    def shares(self) -> dict[str, int]:
        with self.lead.client() as client:
            run = client.snapshot(0).run
        assert run is not None
        return {rank.node: rank.share for rank in run.ranks}


def _start(agent: AgentProcess, keys: KeyFolder) -> AgentProcess:
    """With the keys of its own machine."""
    with patch.dict(os.environ, TRAINCTL_KEYS=str(keys.path)):
        return agent.start()


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory, run_config: Any) -> Iterator[Studio]:
    """Two agents that let nobody in without keys, and a run over both that the tests of this module share: it is
    paused but for those that want `training`. What a script finds by default are the keys of a person on the lead's
    machine."""
    folder = tmp_path_factory.mktemp("scripting")
    file = folder / "cluster.toml"
    keys = {node: KeyFolder(folder / "keys" / node) for node in NODES}
    tables = {}
    for (node, own), address in zip(keys.items(), free_addresses(len(NODES)), strict=True):
        own.make(node)
        tables[node] = {"address": address, "key": own.agent().public}
    file.write_text(tomli_w.dumps({"nodes": tables}))
    agents = [_start(AgentProcess(folder / "state", node, file), own) for node, own in keys.items()]
    SHARED_PIDS.update(agent.process.pid for agent in agents if agent.process is not None)
    mine = {"TRAINCTL_KEYS": str(keys[NODES[0]].path), "TRAINCTL_CLUSTER": str(file)}
    with patch.dict(os.environ, mine), agents[0].client() as client:
        until(lambda: all(peer.state == "connected" for peer in client.snapshot(0).peers), 20, "the other agent")
        whole = {"batch": {"global": SAMPLES, "micro": 4}, "nodes": on_mlx(*NODES), "group": RING}
        config = run_config(run__steps=FOREVER, **whole)
        started = client.send("start-run", {"config": config})
        assert started.state == "applied", started.reason
        assert started.run is not None
        wait_for_step(client, 5)
        assert client.send("pause", {}).state == "applied"
        keep_processes()
        yield Studio(agents[0], started.run, keys)
        client.send("stop", {"checkpoint": False})
        assert wait_for_end(client).state == "stopped"
    for agent in agents:
        agent.clean_up()


@pytest.fixture
def training(studio: Studio) -> Iterator[Studio]:
    """The same, its run making steps."""
    with studio.lead.client() as client:
        assert client.send("resume", {}).state == "applied"
        yield studio
        assert client.send("pause", {}).state == "applied"


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    """Reducers that the shared run makes while a test goes on are not that test's."""
    yield
    keep_processes()


# ---------------------------------------------------------------- the page


def test_what_the_page_says_of_the_python_client_is_so(training: Studio) -> None:
    page = ROOT / "docs" / "scripting.md"
    text = re.sub(r"^```.*$", "", page.read_text("utf-8"), flags=re.MULTILINE)
    text = text.replace(WRITTEN_ADDRESS, training.lead.address)
    parsed = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    assert len(parsed.examples) > 20
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    failed, _ = runner.run(parsed, out=said.append)
    assert failed == 0, "".join(said)


# ---------------------------------------------------------------- examples


@pytest.mark.parametrize("steer", STEERS)
def test_it_shows_the_run_and_moves_samples_at_a_step_that_it_names(training: Studio, steer: tuple[str, ...]) -> None:
    for shares in ({"studio": 17, "mbp": 7}, {"studio": 15, "mbp": 9}):
        before = training.shares()
        words = [f"{node}={share}" for node, share in shares.items()]
        done = training.call(*steer, *words)
        assert (done.returncode, done.stderr) == (0, "")
        head, *ranks, last = done.stdout.splitlines()
        assert re.fullmatch(rf"{training.run} running, step \d+/{FOREVER}, plan \d+, batch {SAMPLES}", head)
        assert ranks == [f"  {node} run: {before[node]} samples" for node in NODES]
        applied = re.fullmatch(r"rebalance applied at step (\d+): .* -> (.*)", last)
        assert applied, last
        assert sorted(applied[2].split()) == sorted(words)
        assert training.shares() == shares


@pytest.mark.parametrize("steer", STEERS)
def test_a_refusal_is_its_reason_and_exit_code_3_and_wrong_words_are_2(studio: Studio, steer: tuple[str, ...]) -> None:
    before = studio.shares()
    refused = studio.call(*steer, "studio=24", "mbp=24")
    assert refused.returncode == 3
    assert "rebalance rejected: " in refused.stderr
    assert refused.stderr.count("\n") == 1
    wrong = studio.call(*steer, "studio=many")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert studio.shares() == before


@pytest.mark.needs("nodejs")
@pytest.mark.parametrize(
    ("case", "words", "says"),
    [
        ("no keys", (), "the agent requires keys"),
        ("a stranger's", ("--own-agent",), "the agent's key differs from the one that this client expects"),
        ("unknown here", ("--server-key", "lead"), "the agent has not authorised this key"),
        ("another's", ("--server-key", "lead"), "viewer"),
    ],
)
def test_the_nodejs_example_without_the_right_keys_is_told_so_and_ends_with_6(
    studio: Studio, tmp_path: Path, case: str, words: tuple[str, ...], says: str
) -> None:
    lead = studio.keys[NODES[0]]
    stranger = KeyFolder(tmp_path / "keys")
    stranger.make("stranger")
    if case == "another's":
        lead.authorize("looker", stranger.user().public, "viewer")
    given = [lead.agent().public if word == "lead" else word for word in words]
    before = studio.shares()
    done = studio.call(*NODE_STEER, *given, "studio=20", "mbp=4", TRAINCTL_KEYS=str(stranger.path))
    assert (done.returncode, studio.shares()) == (6, before), done.stderr
    assert says in done.stderr


@pytest.mark.needs("nodejs")
def test_the_nodejs_client_asks_again_under_the_same_id_when_its_command_or_the_reply_is_lost() -> None:
    lost = 2

    def answer(request: m.ClientRequest) -> list[Any]:
        if not isinstance(request, m.Command):
            return [agent.snapshot(run=SNAPSHOT.run)]
        if len(agent.heard) <= lost:
            return []
        return [m.CommandReply(rid="", id=request.id, state="rejected", reason="no", field="shares")]

    with scripted(answer) as agent:
        words = ("--connect", agent.address, "--answer", "0.4", "studio=16")
        done = subprocess.run([*NODE_STEER, *words], capture_output=True, text=True, check=False, timeout=HANG_SECONDS)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (3, "steer.mjs: rebalance rejected: shares: no")
    assert len(agent.heard) == lost + 1
    assert len({command.id for command in agent.heard}) == 1
    assert done.stderr.count(f"retrying with id {agent.heard[0].id}") == lost


def test_the_asyncio_example_follows_steps_in_order(training: Studio) -> None:
    done = training.call(sys.executable, str(EXAMPLES / "python" / "watch.py"), "--steps", "5")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("line: connecting\nline: connected\n")
    steps = [int(step) for step in re.findall(r"^step (\d+)  loss \d", done.stdout, re.MULTILINE)]
    assert steps == list(range(steps[0], steps[0] + 5))


def test_the_shell_example_says_how_each_command_ended(training: Studio) -> None:
    trainctl = {"TRAINCTL": shlex.join(COMMAND)}
    script = str(EXAMPLES / "shell" / "steer.sh")
    done = training.call(script, "studio", "2", **trainctl)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^resize-batch applied at step [\d,]+: .*2$", done.stdout, re.MULTILINE)
    assert re.search(r"^checkpoint applied at step [\d,]+", done.stdout, re.MULTILINE)
    refused = training.call(script, "nowhere", "2", **trainctl)
    assert (refused.returncode, refused.stderr.count("\n")) == (3, 1)
    assert refused.stderr.startswith("trainctl: resize-batch rejected: ")
