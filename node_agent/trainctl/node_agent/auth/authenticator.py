"""The agent's side of the keys: its sockets secured, who may connect, and what each message's sender may say."""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio
import zmq.auth
import zmq.auth.base

from trainctl.node_agent.auth.access_list import (
    LIVE,
    REQUESTS,
    AccessList,
    Audit,
    Rights,
    Subject,
    claimed_node,
    kind_of,
)
from trainctl.node_agent.auth.connections import Callers, ConnectionLog
from trainctl.node_agent.transport import bind
from trainctl.node_agent.transport.publisher import Publisher
from trainctl.protocol.config import addresses
from trainctl.protocol.config.cluster_file import Cluster
from trainctl.protocol.errors import InvalidInputError, NotAuthorisedError
from trainctl.protocol.messages import AttendRequest, ClientRequest, Command, ToPeer
from trainctl.protocol.security.keyring import Credentials, Keyring
from trainctl.protocol.security.keys import KeyFolder
from trainctl.protocol.wire import sockets

DOMAINS = (REQUESTS, LIVE)
LOOK_SECONDS = 0.25
"""Seconds between looks at the list of keys, which each message checks as well."""

MOST_CONNECTIONS = 32
"""Most connections of one key to the socket for requests that may have spoken; further ones are let in later."""
MOST_ARRIVALS, ARRIVALS_PER_SECOND = 16, 20.0
"""Connections of one key to one socket that are let in at once, and further ones each second."""
SILENT_SECONDS, HANG_UP_SECONDS = 60.0, 5.0
"""A connection that has said nothing for so long is hung up on, by a look every few seconds; a client connects again by
itself."""


HOLD_SECONDS = 0.8
"""Seconds before a connection is turned away for now: its socket tries again 0.2 s later, and each try costs."""
MOST_TOGETHER = 64
"""Most connections that are let in, or turned away, before others have a turn."""


class _Patience(zmq.auth.base.Authenticator):
    """Turns away for now (RFC 27, status 300) whoever connects too often, whose socket then tries again by itself; a
    refusal for good (400) would count as one of its key."""

    def __init__(self, context: Any, is_early: Callable[[], bool]) -> None:
        super().__init__(context)
        self._is_early = is_early
        self._envelope: list[bytes] = []

    def start(self) -> None:
        """Listen on a ROUTER, which may answer later than it takes the next question."""
        self.zap_socket = self.context.socket(zmq.ROUTER, socket_class=zmq.Socket)
        self.zap_socket.linger = 1
        self.zap_socket.bind("inproc://zeromq.zap.01")

    async def handle_zap_message(self, msg: list[bytes]) -> None:
        self._envelope, asked = msg[:2], msg[2:]
        await super().handle_zap_message(asked)

    def _send_zap_reply(
        self, request_id: bytes, status_code: bytes, status_text: bytes, user_id: str = "anonymous"
    ) -> None:
        reply = [*self._envelope, zmq.auth.base.VERSION, request_id]
        if status_code == b"400" and self._is_early():
            reply += [b"300", b"too many connections of this key", b"", b""]
            asyncio.get_running_loop().call_later(HOLD_SECONDS, self._send, reply)
        else:
            self._send([*reply, status_code, status_text, user_id.encode() if status_code == b"200" else b"", b""])

    def _send(self, reply: list[bytes]) -> None:
        if self.zap_socket is not None:
            with contextlib.suppress(zmq.ZMQError):  # who asked has gone
                self.zap_socket.send_multipart(reply, zmq.DONTWAIT)


class Authenticator:
    """Belongs to the agent's loop. `serve` must run for anybody to be let in."""

    def __init__(self, folder: KeyFolder, cluster: Cluster, node: str, audit: Audit) -> None:
        """Raises InvalidInputError for a lack of keys, or if the cluster file names another key for this node."""
        self.pair, self.access, self._audit = folder.agent(), AccessList(folder, cluster), audit
        self._cluster, self._own_node = cluster, node
        self.keyring = Keyring(folder, cluster, which="agent")
        entry = cluster.nodes.get(node)
        if entry is not None and entry.key not in (None, self.pair.public):
            problem = f"is not this machine's key; change it to {self.pair.public}"
            raise InvalidInputError(f"cluster file: nodes.{node}.key", problem)
        self._callers = {domain: Callers() for domain in DOMAINS}
        self._logs: dict[str, ConnectionLog] = {}
        self._from = ""  # address of the client that is being authenticated
        self._is_early = False  # it may come in later
        self._hang_up_at = 0.0
        self._arrivals: dict[tuple[str, str], tuple[float, float]] = {}  # by domain and key: how many, counted when
        self._listeners, self._revoked = self.access.listeners, self.access.revoked

    # ------------------------------------------------------------ connections

    def open(self, context: Any) -> None:
        """Answer for all sockets of `context`; before any of them is bound."""
        self._authenticator = _Patience(context, lambda: self._is_early)
        for domain in DOMAINS:
            self._authenticator.configure_curve_callback(domain, self)
        self._authenticator.start()

    def close(self) -> None:
        for domain in DOMAINS:
            self.leave(domain)
        self._authenticator.stop()

    async def serve(self) -> None:
        """Authenticate. Should this end, no one is let in any more."""
        poller = zmq.asyncio.Poller()
        poller.register(self._authenticator.zap_socket, zmq.POLLIN)
        while True:
            await asyncio.sleep(0)  # others have a turn, however many come
            await poller.poll()
            self.look()
            with contextlib.suppress(zmq.Again):
                for _ in range(MOST_TOGETHER):
                    asked = self._authenticator.zap_socket.recv_multipart(zmq.DONTWAIT)
                    self._from = asked[5].decode("utf-8", "replace") if len(asked) > 5 else ""
                    await self._authenticator.handle_zap_message(asked)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a key may connect: the authenticator's question. An exception here would end it."""
        self._is_early = False
        try:
            public = key.decode("ascii")
            if self.access.lets_in(domain, public):
                self._is_early = not self._has_room(domain, public)
                return not self._is_early
            rights = self.access.find(public)
            why = self.access.problem or (
                "its key is not authorised" if rights is None else f"the role {rights.role} may not"
            )
            self._audit.note(Subject(rights.name if rights else "", public, f"connect {domain}", why, self._from))
        except Exception as error:  # noqa: BLE001  whatever it is, the answer is no
            with contextlib.suppress(Exception):
                self._audit.note(Subject("", "", f"connect {domain}", f"{type(error).__name__}: {error}", self._from))
        return False

    def _has_room(self, domain: str, public: str) -> bool:
        """Return whether one more connection of a key is let in; if so, it counts."""
        now = time.monotonic()
        count, at = self._arrivals.get((domain, public), (0.0, now))
        count = max(0.0, count - (now - at) * ARRIVALS_PER_SECOND)
        if count + 1 > MOST_ARRIVALS or self._callers[domain].of_key[public] >= MOST_CONNECTIONS:
            return False
        self._arrivals[domain, public] = count + 1, now
        return True

    def watch(self, context: Any, listening: Any, domain: str) -> None:
        """Take note of the connections to a socket, which is not bound yet, until `leave`."""
        self.leave(domain)
        callers = self._callers[domain] = Callers()
        self._logs[domain] = ConnectionLog(
            context, listening, callers, lambda why: self._audit.note(Subject("", "", f"connect {domain}", why))
        )

    def leave(self, domain: str) -> None:
        """A socket is about to be closed."""
        if domain in self._logs:
            self._logs.pop(domain).close()

    def look(self) -> None:
        """Keep up with what happens to connections; call it often."""
        for log in self._logs.values():
            log.read()
        now = time.monotonic()
        if now > self._hang_up_at:
            self._hang_up_at = now + HANG_UP_SECONDS
            for descriptor in self._callers[REQUESTS].silent(now - SILENT_SECONDS):
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)

    def settle(self) -> None:
        """Keep all that was refused until now, for later queries."""
        self.look()
        self._audit.flush(force=True)

    def lost_listeners(self) -> bool:
        """Return whether a key that could subscribe no longer may, since this was asked last."""
        before, self._listeners = self._listeners, self.access.listeners
        return bool(before - self._listeners)

    def lost_nodes(self) -> bool:
        """Return whether a key was revoked, or let in again, since this was asked last."""
        before, self._revoked = self._revoked, self.access.revoked
        return before != self._revoked

    # ------------------------------------------------------------ messages

    def enter(self, identity: bytes, sender: sockets.Sender) -> tuple[bytes, Rights]:
        """The caller, to be answered as that, and what it may do. Raises NotAuthorisedError if nothing."""
        rights = self.access.find(sender.public)
        if rights is None:
            self._audit.note(Subject("", sender.public, "any request", "its key is no longer authorised"))
            raise NotAuthorisedError(f"the key {sender.public} is no longer authorised here")
        self.look()
        caller = self._callers[REQUESTS].speak(identity, sender.descriptor, sender.public)
        if caller is None:
            self._audit.note(Subject(rights.name, sender.public, "any request", "its socket set its own identity"))
            raise NotAuthorisedError("a client's socket must not set its own identity")
        return caller, rights

    def check(self, public: str, rights: Rights, message: ClientRequest | ToPeer, lead: str | None) -> None:
        """`lead`: the node that a message to a peer claims to be of. Raises NotAuthorisedError for what the sender may
        not say."""
        why = rights.objection(message)
        claimed = lead if isinstance(message, ToPeer) else claimed_node(message)
        if not why and claimed is not None and claimed not in rights.nodes:
            why = f"{rights.name}'s key may not act for {claimed}"
        if why:
            self._audit.note(Subject(rights.name, public, kind_of(message), why))
            raise NotAuthorisedError(why)

    def signed(self, rights: Rights, request: ClientRequest) -> ClientRequest:
        """The request with its key's name as the sender, whatever name it gives."""
        if isinstance(request, Command | AttendRequest):
            return msgspec.structs.replace(request, by=rights.name)
        return request

    def reply_identity(self, caller: bytes) -> bytes | None:
        """The identity that replies to a caller go to; None if its connection is gone, or its key no longer let in."""
        self.look()
        found = self._callers[REQUESTS].find(caller)
        return found[0] if found is not None and self.access.find(found[1]) is not None else None

    # ------------------------------------------------------------ other agents

    def to_peer(self, node: str, address: str) -> Credentials | None:
        """Return what to speak to another node's agent with; None for one on loopback without keys. Raises
        InvalidInputError if its key isn't known, or was revoked."""
        public = self._cluster.nodes[node].key
        if public is None and addresses.is_near(address):
            return None
        if public is None:
            raise InvalidInputError(f"nodes.{node}.key", f"the cluster file has no key for {node}")
        if public in self.access.revoked:
            raise InvalidInputError(f"nodes.{node}.key", f"{node}'s key was revoked here")
        return Credentials(self.pair, public, "node")


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
