"""Mutated frames in every conversation: read, or refused in one line, in bounded time and memory."""

import contextlib
import gc
import tracemalloc

import pytest
from tests.protocol.support.mutations import Mutator
from tests.tiers import scale
from tools.protocol_docs import conversations

from trainctl.protocol import messages as m
from trainctl.protocol.errors import ProtocolError
from trainctl.protocol.wire import codec

FRAMES = scale("frames")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("talk", conversations.DECODERS)
def test_a_mutated_frame_is_read_or_refused_in_a_line(talk: str) -> None:
    read, others = 0, {*conversations.DECODERS.values(), codec.decode_control}
    for number, frame in enumerate(Mutator(talk, 1).frames(FRAMES)):
        for decode in others if number % 10 == 0 else ():
            with contextlib.suppress(ProtocolError):
                decode(frame)
        try:
            message = conversations.DECODERS[talk](frame)
        except ProtocolError as error:
            assert str(error) and "\n" not in str(error), (number, frame)
        else:
            read += isinstance(message, m.Message)
        assert len(codec.peek_rid(frame)) <= 64
    assert 0 < read < FRAMES / 2, "what is mutated is neither all the same nor all noise"


def test_refusals_leave_nothing_in_memory() -> None:
    frames = list(Mutator("client to agent", 2).frames(500))

    def refuse() -> None:
        for frame in frames:
            with contextlib.suppress(ProtocolError):
                codec.decode_control(frame)

    refuse()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(4):
            refuse()
        gc.collect()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 100_000
    assert peak - before < 2_000_000
