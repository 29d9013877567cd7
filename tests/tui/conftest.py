"""Fixtures of the tests of the screens."""

import pytest
from syrupy.assertion import SnapshotAssertion
from tests.tui.support.pictures import Pictures


@pytest.fixture
def pictures(snapshot: SnapshotAssertion) -> Pictures:
    """Pictures of the app, compared with those kept for the test."""
    return Pictures(snapshot)
