"""Who is attached: those who say so, for as long as they say so, and no more of them than there is room for."""

from trainctl.node_agent.clients.query_context import EXPIRY_SECONDS, MAX_VIEWERS, Presence
from trainctl.protocol import messages as m


def names(found: tuple[m.Viewer, ...]) -> list[str]:
    return [viewer.by for viewer in found]


def said(viewer: str, by: str = "", **other: bool) -> m.AttendRequest:
    return m.AttendRequest(rid="r", viewer=viewer, by=by or viewer, **other)


def test_each_learns_of_the_others_and_whoever_only_asks_of_all() -> None:
    presence = Presence()
    assert presence.hear(said("a", "anna"), 0.0, 100.0) == ()
    assert names(presence.hear(said("b", "cron", read_only=True), 1.0, 101.0)) == ["anna"]
    assert presence.hear(said("a", "anna"), 5.0, 105.0) == (m.Viewer(by="cron", since_at=101.0, read_only=True),)
    assert names(presence.hear(m.AttendRequest(rid="r"), 6.0, 106.0)) == ["anna", "cron"]


def test_they_are_forgotten_when_they_leave_or_fall_silent() -> None:
    presence = Presence()
    presence.hear(said("a", "anna"), 0.0, 100.0)
    presence.hear(said("b", "cron"), EXPIRY_SECONDS / 2, 110.0)
    presence.hear(said("a", "anna"), EXPIRY_SECONDS - 1, 119.0)
    (anna,) = presence.hear(m.AttendRequest(rid="r"), EXPIRY_SECONDS * 1.5, 130.0)
    assert (anna.by, anna.since_at) == ("anna", 100.0)
    assert presence.hear(said("a", leaving=True), EXPIRY_SECONDS * 1.5, 130.0) == ()
    assert presence.hear(m.AttendRequest(rid="r"), EXPIRY_SECONDS * 1.5, 130.0) == ()


def test_there_is_room_for_so_many() -> None:
    presence = Presence()
    for index in range(MAX_VIEWERS + 10):
        presence.hear(said(f"v{index}"), 0.0, float(index))
    assert len(presence.hear(m.AttendRequest(rid="r"), 0.0, 0.0)) == MAX_VIEWERS
    assert len(presence.hear(said("v0"), 1.0, 1.0)) == MAX_VIEWERS - 1
