"""Short forms of the requests that tests make most often."""

from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.messages import Event, EventsRequest, RunView, SnapshotRequest


def run_of(client: BlockingClient) -> RunView | None:
    """Return the active run, or the newest, as an agent has it now."""
    return client.ask(SnapshotRequest, 0).run


def events_of(client: BlockingClient, run: str | None = None) -> tuple[Event, ...]:
    """Return the first 500 events of a run, oldest first."""
    return client.ask(EventsRequest, run, limit=500).events


def newest_events(client: BlockingClient) -> tuple[Event, ...]:
    """Return the newest 200 events of the active run, or else of the newest, oldest first."""
    return client.ask(EventsRequest, newest=True).events
