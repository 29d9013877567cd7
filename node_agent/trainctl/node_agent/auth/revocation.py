"""Revocation of keys: subscribers present theirs again, links to agents start again, and the audit is written."""

import asyncio
from collections.abc import Callable
from typing import Any

import zmq

from trainctl.node_agent.auth.access_list import LIVE
from trainctl.node_agent.auth.audit import Audit
from trainctl.node_agent.auth.authenticator import Authenticator
from trainctl.node_agent.transport import bind
from trainctl.node_agent.transport.publisher import Publisher
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.wire import sockets

LOOK_SECONDS = 0.25
"""Seconds between looks at the list of keys, which each message checks as well."""


class Revocation:
    """Looks after who is let in by one agent; `serve` runs as long as the agent."""

    def __init__(
        self, authenticator: Authenticator, audit: Audit, publisher: Publisher, context: Any, renew: Callable[[], None]
    ) -> None:
        """`context`: of all the agent's sockets. `renew` begins the conversations with other agents again."""
        self._authenticator, self._audit, self._publisher = authenticator, audit, publisher
        self._context, self._renew = context, renew

    async def serve(self, live_address: str) -> None:
        while True:
            self._authenticator.look()
            self._audit.flush()
            if self._authenticator.lost_listeners():
                self._end_live()
            if self._publisher.socket is None:
                self._bind_live(live_address)
            if self._authenticator.lost_nodes():
                self._renew()
            await asyncio.sleep(LOOK_SECONDS)

    def _end_live(self) -> None:
        """A socket that is bound keeps whom it let in once, so it goes, and a new one asks everybody for a key. What
        is published meanwhile subscribers ask for by its numbers."""
        socket = self._publisher.turn_to(None)
        self._authenticator.leave(LIVE)
        if socket is not None:
            socket.close(linger=0)

    def _bind_live(self, address: str) -> None:
        """The old socket lets go of the address a moment after it is closed; until then this is tried again."""
        socket = new_live_socket(self._context, self._authenticator)
        try:
            bind.bind(socket, address)
        except InvalidInputError:
            self._authenticator.leave(LIVE)
            socket.close(linger=0)
            return
        self._publisher.turn_to(socket)


def new_live_socket(context: Any, authenticator: Authenticator | None) -> Any:
    """A socket that publishes, not bound yet; behind the authenticator, if there is one."""
    socket = sockets.new_socket(context, zmq.XPUB, socket_class=zmq.Socket)
    if authenticator is not None:
        sockets.secure_server(socket, authenticator.pair, LIVE)
        authenticator.watch(context, socket, LIVE)
    return socket
