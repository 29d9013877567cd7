"""An agent advertises itself over real multicast sockets on loopback, tells no secret, and works on when that fails."""

import asyncio
import threading
from typing import Any

import zeroconf
from tests.waiting import HANG_SECONDS

from trainctl.protocol.machine import discovery
from trainctl.protocol.machine.discovery import Advertisement
from trainctl.protocol.messages.base import PROTOCOL_VERSION
from trainctl.tui.cli import cluster

PUBLIC = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"
ADDRESS = "tcp://127.0.0.1:17474"


def heard(advertisement: Advertisement, name: str) -> discovery.Advert:
    """Return what somebody who listens learns about a node."""

    async def both() -> tuple[discovery.Advert, ...]:
        serving = asyncio.create_task(advertisement.serve())
        try:
            for _ in range(10):
                found = await asyncio.to_thread(cluster.listen, 2.0)
                if any(one.node == name for one in found):
                    return found
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        raise AssertionError(f"{name} was not heard: {found}")

    return next(one for one in asyncio.run(both()) if one.node == name)


def test_who_listens_hears_where_it_is_and_no_key() -> None:
    found = heard(Advertisement("studio.one", ADDRESS, "0.1.0", PUBLIC), "studio.one")
    assert found == discovery.Advert(
        "studio.one", ADDRESS, "0.1.0", str(PROTOCOL_VERSION), discovery.fingerprint(PUBLIC)
    )
    assert PUBLIC not in str(found)


class Hanging:
    """A library that hangs in its constructor until it is let go, and then fails."""

    let_go = threading.Event()

    def __init__(self, **_: Any) -> None:
        assert self.let_go.wait(HANG_SECONDS)
        raise OSError("no multicast here")


async def test_a_library_that_hangs_and_fails_holds_nobody_up(monkeypatch, capsys):
    monkeypatch.setattr(zeroconf, "Zeroconf", Hanging)
    serving = asyncio.create_task(Advertisement("studio", ADDRESS, "0.1.0").serve())
    for _ in range(100):
        await asyncio.sleep(0)  # the loop turns although the library hangs
    Hanging.let_go.set()
    async with asyncio.timeout(HANG_SECONDS):
        while "not advertised" not in capsys.readouterr().err:
            await asyncio.sleep(0.02)
    assert not serving.done(), "a worker that ends would end the agent"
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
