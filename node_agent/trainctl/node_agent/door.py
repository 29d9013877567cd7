"""The agent's side of the keys: its sockets secured, who may connect, and what each message's sender may say."""

import contextlib
from collections import OrderedDict
from typing import Any

import msgspec
import zmq
import zmq.asyncio
import zmq.auth
from zmq.auth.base import Authenticator
from zmq.utils.monitor import parse_monitor_message

from trainctl.node_agent.access import LIVE, REQUESTS, AccessList, Rights, what
from trainctl.node_agent.audit import Audit, Subject
from trainctl.protocol import messages as m
from trainctl.protocol import sockets
from trainctl.protocol.cluster import Cluster
from trainctl.protocol.errors import InvalidInputError, NotAuthorisedError
from trainctl.protocol.handshake import MECHANISM_MISMATCH
from trainctl.protocol.keyring import Credentials, Keyring
from trainctl.protocol.keys import KeyFolder

DOMAINS = (REQUESTS, LIVE)
IDENTITY_BYTES = 5
"""Of an identity that the socket gave a connection: a zero and a number. One that a client chose could be another's."""
MAX_IDENTITIES = 4096


class Door:
    """Belongs to the agent's loop. `serve` must run for anybody to be let in."""

    def __init__(self, folder: KeyFolder, cluster: Cluster, node: str, audit: Audit) -> None:
        """Raises InvalidInputError for a lack of keys, or if the cluster file names another key for this node."""
        self.pair, self.access, self._audit = folder.agent(), AccessList(folder, cluster), audit
        self._cluster, self._own_node = cluster, node
        self.keyring = Keyring(folder, cluster, which="agent")
        entry = cluster.nodes.get(node)
        if entry is not None and entry.key not in (None, self.pair.public):
            problem = f"names another key than this machine's agent has, {self.pair.public}"
            raise InvalidInputError(f"cluster file: nodes.{node}.key", problem)
        self._owners: OrderedDict[bytes, str] = OrderedDict()  # identity -> key, those that spoke last
        self._from = ""  # address of whoever is being authenticated
        self._listeners, self._revoked = self.access.listeners, self.access.revoked

    # ------------------------------------------------------------ connections

    def open(self, context: Any) -> None:
        """Answer for all sockets of `context`; before any of them is bound."""
        self._authenticator = Authenticator(context)
        for domain in DOMAINS:
            self._authenticator.configure_curve_callback(domain, self)
        self._authenticator.start()

    def close(self) -> None:
        self._authenticator.stop()

    async def serve(self) -> None:
        """Authenticate. Should this end, nobody is let in any more."""
        poller = zmq.asyncio.Poller()
        poller.register(self._authenticator.zap_socket, zmq.POLLIN)
        while True:
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
            why = self.access.problem or ("its key is not let in" if rights is None else f"{rights.role} may not")
            self._audit.note(Subject(rights.name if rights else "", public, f"connect {domain}", why, self._from))
        except Exception as error:  # noqa: BLE001  whatever it is, the answer is no
            with contextlib.suppress(Exception):
                self._audit.note(Subject("", "", f"connect {domain}", f"{type(error).__name__}: {error}", self._from))
        return False

    async def watch(self, socket: Any, domain: str) -> None:
        """Note who comes to a socket without keys, or for another agent; it ends by being cancelled."""
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        try:
            while True:
                value = int(parse_monitor_message(await monitor.recv_multipart())["value"])
                why = "it has no keys" if value == MECHANISM_MISMATCH else "it expects another agent's key"
                self._audit.note(Subject("", "", f"connect {domain}", why))
        finally:
            if not socket.closed:
                socket.disable_monitor()

    def lost_listeners(self) -> bool:
        """Whether a key that could subscribe no longer may, since this was asked last."""
        before, self._listeners = self._listeners, self.access.listeners
        return bool(before - self._listeners)

    def lost_nodes(self) -> bool:
        """Whether a key was revoked, or let in again, since this was asked last."""
        before, self._revoked = self._revoked, self.access.revoked
        return before != self._revoked

    # ------------------------------------------------------------ messages

    def rights(self, identity: bytes, public: str) -> Rights:
        """What the sender of a message may do. Raises NotAuthorisedError if nothing."""
        rights = self.access.find(public)
        if rights is None:
            self._audit.note(Subject("", public, "any request", "its key is not let in any more"))
            raise NotAuthorisedError(f"the key {public} is not let in here any more")
        if len(identity) != IDENTITY_BYTES or identity[:1] != b"\0" or self._owners.get(identity, public) != public:
            self._audit.note(Subject(rights.name, public, "any request", "it chose its own identity"))
            raise NotAuthorisedError("a client's socket has no identity of its own choice here")
        self._owners[identity] = public
        self._owners.move_to_end(identity)
        if len(self._owners) > MAX_IDENTITIES:
            self._owners.popitem(last=False)
        return rights

    def check(self, public: str, rights: Rights, message: m.ClientRequest | m.ToPeer, lead: str | None) -> None:
        """`lead`: the node that an agent's message claims to be of. Raises NotAuthorisedError for what the sender may
        not say."""
        why = rights.objection(message)
        if not why and isinstance(message, m.ToPeer) and lead is not None and lead not in rights.nodes:
            why = f"the key of {rights.name} doesn't speak for {lead}"
        if why:
            self._audit.note(Subject(rights.name, public, what(message), why))
            raise NotAuthorisedError(why)

    def signed(self, rights: Rights, request: m.ClientRequest) -> m.ClientRequest:
        """The request as by its key's name, whoever its sender says it is."""
        if isinstance(request, m.Command | m.AttendRequest):
            return msgspec.structs.replace(request, by=rights.name)
        return request

    def may_hear(self, identity: bytes) -> bool:
        """Whether what answers a client may be sent to it still."""
        public = self._owners.get(identity)
        return public is not None and self.access.find(public) is not None

    # ------------------------------------------------------------ other agents

    def to_peer(self, node: str, address: str) -> Credentials | None:
        """What to speak to another node's agent with; None for one on loopback without keys. Raises
        InvalidInputError if its key isn't known, or was revoked."""
        public = self._cluster.nodes[node].key
        if public is None and sockets.is_near(address):
            return None
        if public is None:
            raise InvalidInputError(f"nodes.{node}.key", f"the cluster file names no key for {node}")
        if public in self.access.revoked:
            raise InvalidInputError(f"nodes.{node}.key", f"the key of {node} was revoked here")
        return Credentials(self.pair, public, "node")
