"""The agent's side of the keys: its sockets secured, who may connect, and what each message's sender may say."""

import asyncio
import contextlib
from typing import Any

import msgspec
import zmq
import zmq.asyncio
import zmq.auth
import zmq.auth.base

from trainctl.node_agent.auth.access_list import LIVE, REQUESTS, AccessList, Rights, claimed_node, what
from trainctl.node_agent.auth.audit import Audit, Subject
from trainctl.node_agent.auth.connections import Callers, ConnectionLog
from trainctl.protocol import messages as m
from trainctl.protocol.config import addresses
from trainctl.protocol.config.cluster_file import Cluster
from trainctl.protocol.errors import InvalidInputError, NotAuthorisedError
from trainctl.protocol.security.keyring import Credentials, Keyring
from trainctl.protocol.security.keys import KeyFolder
from trainctl.protocol.wire import sockets

DOMAINS = (REQUESTS, LIVE)


class _Arrivals:
    """Has the connections of one socket counted, and those that show no key audited."""

    def __init__(self, callers: Callers, audit: Audit, domain: str) -> None:
        self.opened, self.closed = callers.opened, callers.closed
        self._audit, self._domain = audit, domain

    def turned_away(self, why: str) -> None:
        self._audit.note(Subject("", "", f"connect {self._domain}", why))


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
        self._listeners, self._revoked = self.access.listeners, self.access.revoked

    # ------------------------------------------------------------ connections

    def open(self, context: Any) -> None:
        """Answer for all sockets of `context`; before any of them is bound."""
        self._authenticator = zmq.auth.base.Authenticator(context)
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
            asked = self._authenticator.zap_socket.recv_multipart()
            self._from = asked[3].decode("utf-8", "replace") if len(asked) > 3 else ""
            await self._authenticator.handle_zap_message(asked)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a key may connect: the authenticator's question. An exception here would end it."""
        try:
            public = key.decode("ascii")
            if self.access.lets_in(domain, public):
                return True
            rights = self.access.find(public)
            why = self.access.problem or (
                "its key is not authorised" if rights is None else f"the role {rights.role} may not"
            )
            self._audit.note(Subject(rights.name if rights else "", public, f"connect {domain}", why, self._from))
        except Exception as error:  # noqa: BLE001  whatever it is, the answer is no
            with contextlib.suppress(Exception):
                self._audit.note(Subject("", "", f"connect {domain}", f"{type(error).__name__}: {error}", self._from))
        return False

    def watch(self, context: Any, socket: Any, domain: str) -> None:
        """Take note of the connections to a socket, which is not bound yet, until `leave`."""
        self.leave(domain)
        callers = self._callers[domain] = Callers()
        self._logs[domain] = ConnectionLog(context, socket, _Arrivals(callers, self._audit, domain))

    def leave(self, domain: str) -> None:
        """A socket is about to be closed."""
        if domain in self._logs:
            self._logs.pop(domain).close()

    def look(self) -> None:
        """Keep up with what happens to connections; call it often."""
        for log in self._logs.values():
            log.read()

    def settle(self) -> None:
        """Keep all that was refused until now, for later queries."""
        self.look()
        self._audit.flush(force=True)

    def lost_listeners(self) -> bool:
        """Whether a key that could subscribe no longer may, since this was asked last."""
        before, self._listeners = self._listeners, self.access.listeners
        return bool(before - self._listeners)

    def lost_nodes(self) -> bool:
        """Whether a key was revoked, or let in again, since this was asked last."""
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

    def check(self, public: str, rights: Rights, message: m.ClientRequest | m.ToPeer, lead: str | None) -> None:
        """`lead`: the node that a message to a peer claims to be of. Raises NotAuthorisedError for what the sender may
        not say."""
        why = rights.objection(message)
        claimed = lead if isinstance(message, m.ToPeer) else claimed_node(message)
        if not why and claimed is not None and claimed not in rights.nodes:
            why = f"{rights.name}'s key may not act for {claimed}"
        if why:
            self._audit.note(Subject(rights.name, public, what(message), why))
            raise NotAuthorisedError(why)

    def signed(self, rights: Rights, request: m.ClientRequest) -> m.ClientRequest:
        """The request with its key's name as the sender, whatever name it gives."""
        if isinstance(request, m.Command | m.AttendRequest):
            return msgspec.structs.replace(request, by=rights.name)
        return request

    def reply_identity(self, caller: bytes) -> bytes | None:
        """The identity that replies to a caller go to; None if its connection is gone, or its key no longer let in."""
        self.look()
        found = self._callers[REQUESTS].find(caller)
        return found[0] if found is not None and self.access.find(found[1]) is not None else None

    # ------------------------------------------------------------ other agents

    def to_peer(self, node: str, address: str) -> Credentials | None:
        """What to speak to another node's agent with; None for one on loopback without keys. Raises
        InvalidInputError if its key isn't known, or was revoked."""
        public = self._cluster.nodes[node].key
        if public is None and addresses.is_near(address):
            return None
        if public is None:
            raise InvalidInputError(f"nodes.{node}.key", f"the cluster file has no key for {node}")
        if public in self.access.revoked:
            raise InvalidInputError(f"nodes.{node}.key", f"{node}'s key was revoked here")
        return Credentials(self.pair, public, "node")
