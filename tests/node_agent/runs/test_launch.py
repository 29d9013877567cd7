"""What ranks on other nodes say before their run is open."""

from types import SimpleNamespace
from typing import Any

from trainctl.node_agent.runs.launch import Launch
from trainctl.protocol import messages as m

RUN = "r-20260101-000000-0000"


def test_an_exit_told_before_a_node_hosts_its_rank_is_of_an_earlier_life() -> None:
    own: Any = SimpleNamespace(db=None)
    launch = Launch(own, own, lambda run: None)
    gone = m.PeerExit(link="l", seq=1, run=RUN, rank=1, clean=True, why="exited with 0")
    alive = m.PeerAnswer(link="l", seq=2, answer=m.Alive(run=RUN, rank=1, generation=None, step=0, phase="load"))
    launch.early = [("beta", gone), ("beta", alive), ("gamma", gone)]
    launch.forget_exits("beta")
    assert launch.done() == [("beta", alive), ("gamma", gone)]
    assert launch.early == []
