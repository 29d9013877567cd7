"""The blocking client: beside an event loop that already runs, as in a notebook, and without `with`."""

import contextlib
import threading

import pytest
from tests.tui.support.scripted import scripted

from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.errors import InvalidInputError, NotConnectedError
from trainctl.protocol.messages import Snapshot, SnapshotRequest


async def test_it_works_in_a_thread_whose_event_loop_runs() -> None:
    with scripted(lambda _: [agent.snapshot()]) as agent:
        client = BlockingClient(agent.address).connect()
        assert client.ask(SnapshotRequest, 0).node.node
        with contextlib.closing(client.attach(0)) as items:
            assert next(item for item in items if isinstance(item, Snapshot)).boot == client.ask(SnapshotRequest).boot
        client.close()


def test_nothing_is_left_of_a_client_that_closed_or_could_not_connect() -> None:
    before = threading.enumerate()
    with pytest.raises(NotConnectedError), BlockingClient("tcp://127.0.0.1:1", timeout_seconds=0.2) as client:
        client.ask(SnapshotRequest)
    with pytest.raises(InvalidInputError, match=r"192\.0\.2\.1"):
        BlockingClient("tcp://192.0.2.1:1").connect()  # elsewhere, and its key isn't known
    assert threading.enumerate() == before
