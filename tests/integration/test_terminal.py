"""The program in a real terminal: tmux at the two designed sizes, over a real agent, trainer and model."""

import psutil
import pytest
from tests.asking import newest_events, run_of
from tests.cluster.waits import wait_for_step
from tests.integration.support.terminals import TRAINCTL, Terminal, needs_tmux
from tests.waiting import HANG_SECONDS

from trainctl.protocol.messages import SnapshotRequest

pytestmark = [pytest.mark.tier("test"), needs_tmux]


@pytest.fixture
def running(live):
    """A live run of many small steps, and a client of its agent."""
    with live.client() as client:
        yield live, client


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (120, 40)])
def test_b_changes_the_micro_batch_and_events_names_the_step(running, tmp_path, columns, lines):
    agent, client = running
    terminal = Terminal(tmp_path, columns, lines, f"{TRAINCTL} --connect {agent.address}")
    try:
        terminal.wait_for(r"RUNNING")
        terminal.wait_for(r"4×3")
        terminal.keys("b")
        terminal.wait_for(r"resize micro-batch")
        terminal.keys("BSpace", "2", "Enter")
        shown = terminal.wait_for(r"applied @ step [\d,]+")
        terminal.wait_gone(r"esc closes")
        terminal.wait_for(r"2×6")
        events = newest_events(client)
        resized = [event for event in events if event.verb == "resize-batch"][-1]
        assert (resized.before, resized.after) == ("4", "2")
        assert f"{resized.step:,}" in shown
        screen = terminal.wait_for(rf"micro-batch: .*@{resized.step:,}\b")  # there may be an older one
        assert all(len(line) <= columns for line in screen.splitlines())
        terminal.keys("q")
        assert terminal.exit_status() == "status=0"
        assert "continues" in terminal.wait_for(r"continues")
        wait_for_step(client, run_of(client).step + 5)
    finally:
        terminal.close()


def test_killing_the_terminal_changes_nothing_for_the_run(running, tmp_path):
    agent, client = running
    terminal = Terminal(tmp_path, 80, 24, f"{TRAINCTL} --connect {agent.address}")
    terminal.wait_for(r"RUNNING")
    (pid,) = agent.trainer_pids()
    program = terminal.program()
    terminal.close()
    assert not psutil.wait_procs([program], timeout=HANG_SECONDS)[1], "the program goes on without its terminal"
    step = run_of(client).step
    wait_for_step(client, step + 20)
    assert agent.trainer_pids() == [pid]
    assert run_of(client).generation == client.ask(SnapshotRequest, 0).last_step.generation


def test_the_screen_survives_its_agent(running, tmp_path):
    """The agent is killed and comes back: the screen says so meanwhile, answers keys, and goes on by itself."""
    agent, client = running
    before = run_of(client).generation
    terminal = Terminal(tmp_path, 120, 40, f"{TRAINCTL} --connect {agent.address}")
    try:
        terminal.wait_for(r"RUNNING")
        agent.kill()
        terminal.wait_for(r"(?i)silent|no message|no answer|WAITING FOR box.s AGENT")
        terminal.keys("?")
        terminal.wait_for(r"the rank's own speed")
        terminal.keys("Escape")
        terminal.wait_gone(r"the rank's own speed")
        agent.start()
        terminal.wait_for("|".join(rf"g1\.{n}\b" for n in range(before.n + 1, before.n + 9)))
        terminal.keys("q")
        assert terminal.exit_status() == "status=0"
    finally:
        terminal.close()


def test_without_an_agent_it_says_what_to_do_and_leaves_a_clean_terminal(tmp_path):
    terminal = Terminal(tmp_path, 80, 24, f"{TRAINCTL} status --connect tcp://127.0.0.1:9")
    try:
        screen = terminal.wait_for(r"no agent|unreachable|nothing answered")
        assert "Traceback" not in screen
        assert terminal.exit_status() == "status=5"
    finally:
        terminal.close()
