"""The commands of docs/scripting.md and the programs of examples/, against a run of two nodes that goes on."""

import contextlib
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
from tests.asking import run_of
from tests.cluster.in_process import BlockingAgent, BlockingCluster
from tests.cluster.run_files import FOREVER, RING, on
from tests.cluster.waits import wait_for_step
from tests.tui.support.cli_calls import COMMAND, ENVIRONMENT
from tests.tui.support.scripted import SNAPSHOT, scripted
from tests.waiting import HANG_SECONDS, until

from trainctl.protocol import messages as m
from trainctl.protocol.security.keys import KeyFolder

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.tier("all")  # it starts many processes
NODES = ("studio", "mbp")
SAMPLES = 24
NODE_STEER = ("node", str(EXAMPLES / "nodejs" / "steer.mjs"))
PYTHON_STEER = (sys.executable, str(EXAMPLES / "python" / "steer.py"))
STEERS = [
    pytest.param(PYTHON_STEER, id="python"),
    pytest.param((*NODE_STEER, "--answer", "30", "--own-agent"), id="nodejs", marks=pytest.mark.needs("nodejs")),
]


class Studio:
    """The agent that leads a run of two nodes, and how a script is called so that it talks to it."""

    def __init__(self, lead: BlockingAgent, run: str, keys: dict[str, KeyFolder]) -> None:
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
            run = run_of(client)
        assert run is not None
        return {rank.node: rank.share for rank in run.ranks}


@pytest.fixture
def studio(tmp_path: Path, run_config: Any) -> Iterator[Studio]:
    """Two agents that let nobody in without keys, and a run over both. What a script finds by default are the keys of a
    person on the lead's machine."""
    keys = {node: KeyFolder(tmp_path / "keys" / node) for node in NODES}
    for node, folder in keys.items():
        folder.make(node)
    mine = {"TRAINCTL_KEYS": str(keys[NODES[0]].path), "TRAINCTL_CLUSTER": str(tmp_path / "cluster.toml")}
    with (
        patch.dict(os.environ, mine),
        contextlib.closing(BlockingCluster(tmp_path, NODES, keys=keys.__getitem__)) as cluster,
        cluster.client(NODES[0]) as client,
    ):
        until(lambda: client.ask(m.SnapshotRequest, 0).peers[0].state == "connected", what="the other agent")
        whole = {"batch": {"global": SAMPLES, "micro": 4}, "nodes": on(*NODES), "group": RING}
        started = client.send("start-run", {"config": run_config(run__steps=FOREVER, **whole)})
        assert started.state == "applied" and started.run is not None, started.reason
        wait_for_step(client, 5)
        yield Studio(cluster[NODES[0]], started.run, keys)


# ---------------------------------------------------------------- the page


def test_what_the_page_says_of_the_python_client_is_so(studio: Studio) -> None:
    page = ROOT / "docs" / "scripting.md"
    text = re.sub(r"^```.*$", "", page.read_text("utf-8"), flags=re.MULTILINE)
    parsed = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    assert len(parsed.examples) > 20
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    with patch.dict(os.environ, {"TRAINCTL_CONNECT": studio.lead.address}):
        failed, _ = runner.run(parsed, out=said.append)
    assert failed == 0, "".join(said)


# ---------------------------------------------------------------- examples


@pytest.mark.parametrize("steer", STEERS)
def test_it_shows_the_run_and_moves_samples_at_a_step_that_it_names(studio: Studio, steer: tuple[str, ...]) -> None:
    for shares in ({"studio": 17, "mbp": 7}, {"studio": 15, "mbp": 9}):
        before = studio.shares()
        words = [f"{node}={share}" for node, share in shares.items()]
        done = studio.call(*steer, *words)
        assert (done.returncode, done.stderr) == (0, "")
        head, *ranks, last = done.stdout.splitlines()
        assert re.fullmatch(rf"{studio.run} running, step \d+/{FOREVER}, plan \d+, batch {SAMPLES}", head)
        assert ranks == [f"  {node} run: {before[node]} samples" for node in NODES]
        applied = re.fullmatch(r"rebalance applied at step (\d+): .* -> (.*)", last)
        assert applied, last
        assert sorted(applied[2].split()) == sorted(words)
        assert studio.shares() == shares


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


def test_the_asyncio_example_follows_steps_in_order(studio: Studio) -> None:
    done = studio.call(sys.executable, str(EXAMPLES / "python" / "watch.py"), "--steps", "5")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("line: connecting\nline: connected\n")
    steps = [int(step) for step in re.findall(r"^step (\d+)  loss \d", done.stdout, re.MULTILINE)]
    assert steps == list(range(steps[0], steps[0] + 5))


def test_the_shell_example_says_how_each_command_ended(studio: Studio) -> None:
    trainctl = {"TRAINCTL": shlex.join(COMMAND)}
    script = str(EXAMPLES / "shell" / "steer.sh")
    done = studio.call(script, "studio", "2", **trainctl)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^resize-batch applied at step [\d,]+: .*2$", done.stdout, re.MULTILINE)
    assert re.search(r"^checkpoint applied at step [\d,]+", done.stdout, re.MULTILINE)
    refused = studio.call(script, "nowhere", "2", **trainctl)
    assert (refused.returncode, refused.stderr.count("\n")) == (3, 1)
    assert refused.stderr.startswith("trainctl: resize-batch rejected: ")
