"""The access list: which key may do what at this agent, by the list of keys and the cluster's nodes; and the audit of
what was refused, which agent.db gets at most once a second, bounded."""

import time
from dataclasses import astuple, dataclass

from trainctl.node_agent.records.agent_db import AgentDb
from trainctl.protocol.config.cluster_file import Cluster
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import (
    AttendRequest,
    CalibrationsRequest,
    ClientRequest,
    Command,
    DiagnosisRequest,
    DryRunRequest,
    EventsRequest,
    FactsRequest,
    GapRequest,
    HistoryRequest,
    HostsRequest,
    HostWork,
    LinkRequest,
    LogRequest,
    PairsRequest,
    PoliciesRequest,
    RecordRequest,
    RunsRequest,
    SamplesRequest,
    SliceRequest,
    SnapshotRequest,
    StepProfilesRequest,
    StepsRequest,
    ToPeer,
    TraceRequest,
    WorkFileRequest,
    WorksRequest,
)
from trainctl.protocol.security.keys import Authorized, KeyFolder, Role

REQUESTS, LIVE = "requests", "live"
"""The authenticator's domains: the socket for requests and the one that publishes."""
FLUSH_SECONDS = 1.0
SAME_SECONDS = 60.0
"""Seconds within which refusals of the same thing are one entry with a count."""
MOST_ENTRIES = 256
"""Most different entries within that time, enough for every request and verb of three keys; further ones are counted in
one."""

Viewed = (
    SnapshotRequest
    | HistoryRequest
    | GapRequest
    | RunsRequest
    | EventsRequest
    | StepsRequest
    | HostsRequest
    | SamplesRequest
    | PairsRequest
    | PoliciesRequest
    | DryRunRequest
    | DiagnosisRequest
    | AttendRequest
    | FactsRequest
    | StepProfilesRequest
    | CalibrationsRequest
    | RecordRequest
)
"""Requests of viewers. All that is in none of these unions is for operators alone."""
Shared = LogRequest | TraceRequest | WorksRequest
"""Requests of viewers, operators and agents."""
OfAgents = ToPeer | HostWork | WorkFileRequest | SliceRequest | LinkRequest
"""Messages of agents alone."""


@dataclass(frozen=True)
class Rights:
    """Rights of one key."""

    name: str
    role: Role
    nodes: frozenset[str] = frozenset()  # role node: those that it speaks for

    def objection(self, message: ClientRequest | ToPeer) -> str:
        """Return why it may not send this; empty if it may."""
        is_node = self.role == "node"
        if isinstance(message, OfAgents):
            return "" if is_node else f"{self.name} has the role {self.role}; only agents may send this"
        if isinstance(message, Shared):
            return ""
        if self.role == "viewer" and not isinstance(message, Viewed):
            return f"{self.name} is a viewer here; only an operator may send {kind_of(message)}"
        return f"{self.name} is a node's agent; agents send no requests" if is_node else ""


class AccessList:
    """The keys as they count now; the file is read again whenever it has changed.

    A file that can't be read lets no one in: `problem` says why.
    """

    def __init__(self, folder: KeyFolder, cluster: Cluster) -> None:
        self._folder, self._cluster = folder, cluster
        self._seen: tuple[int, ...] | None = None
        self._rights: dict[str, Rights] = {}
        self._revoked: frozenset[str] = frozenset()
        self.problem = ""

    def find(self, public: str) -> Rights | None:
        """Return what a key may do, None if nothing."""
        self._keep_up()
        return self._rights.get(public)

    @property
    def revoked(self) -> frozenset[str]:
        """The keys that may do nothing, whatever names them."""
        self._keep_up()
        return self._revoked

    def lets_in(self, domain: str, public: str) -> bool:
        """Return whether a key may connect."""
        rights = self.find(public)
        return rights is not None and (domain == REQUESTS or (domain == LIVE and rights.role != "node"))

    @property
    def listeners(self) -> frozenset[str]:
        """The keys that may subscribe."""
        self._keep_up()
        return frozenset(public for public, rights in self._rights.items() if rights.role != "node")

    def _keep_up(self) -> None:
        try:
            now = self._folder.authorized_path.lstat()
            seen: tuple[int, ...] = (now.st_mtime_ns, now.st_ctime_ns, now.st_ino, now.st_size, now.st_mode)
        except OSError:
            seen = ()
        if seen == self._seen:
            return
        self._seen, self.problem = seen, ""
        try:
            table = self._folder.authorized()
        except InvalidInputError as error:
            self._rights, self._revoked, self.problem = {}, frozenset(), str(error)
            return
        self._revoked = frozenset(entry.public for entry in table.revoked.values())
        self._rights = _all_rights(table, self._cluster, self._revoked)


def _all_rights(table: Authorized, cluster: Cluster, revoked: frozenset[str]) -> dict[str, Rights]:
    """By key. One that is listed as a person's stays that, whatever else names it."""
    found: dict[str, Rights] = {}
    named = {entry.key: cluster.nodes_of(entry.key) for entry in cluster.nodes.values() if entry.key is not None}
    for name, entry in table.keys.items():
        if entry.role == "node":
            named[entry.public] = named.get(entry.public, frozenset()) | {name}
    for public, nodes in named.items():
        found[public] = Rights(", ".join(sorted(nodes)), "node", nodes)
    found |= {entry.public: Rights(name, entry.role) for name, entry in table.keys.items() if entry.role != "node"}
    return {public: rights for public, rights in found.items() if public not in revoked}


def claimed_node(message: ClientRequest) -> str | None:
    """Return the node that a request says it comes from; None if it says nothing."""
    match message:
        case SliceRequest() | LinkRequest():
            return message.node
        case HostWork():
            return message.lead
        case _:
            return None


def kind_of(message: ClientRequest | ToPeer) -> str:
    """Return a message's kind, for the audit: "command pause", "snapshot-request"."""
    kind = str(message.__struct_config__.tag)
    return f"{kind} {message.verb}" if isinstance(message, Command) else kind


# ---------------------------------------------------------------- refusals


@dataclass(frozen=True)
class Subject:
    """A refused key or address, and what it was refused."""

    name: str  # of the key; empty: it has none here
    key: str  # Z85; empty: none was shown
    what: str  # "command pause", "connect"
    why: str
    address: str = ""  # where from, as far as it is known


OTHERS = Subject("", "", "connect", "too many to list one by one")


class _Entry:
    def __init__(self, number: int, now: float) -> None:
        self.number, self.first_at, self.last_at, self.count, self.kept = number, now, now, 0, False


class Audit:
    """Belongs to the agent's loop."""

    def __init__(self, db: AgentDb) -> None:
        self._ledger = db
        self._last_number = db.last_refusal()
        self._entries: dict[Subject, _Entry] = {}
        self._flushed_monotonic = 0.0

    def note(self, subject: Subject) -> None:
        """One refusal, now."""
        now = time.time()
        entry = self._entries.get(subject)
        if entry is None and len(self._entries) >= MOST_ENTRIES:
            subject = OTHERS
            entry = self._entries.get(subject)
        if entry is None:
            self._last_number += 1
            entry = self._entries[subject] = _Entry(self._last_number, now)
        entry.last_at, entry.count, entry.kept = now, entry.count + 1, False

    def flush(self, *, force: bool = False) -> None:
        """Keep what was noted; call it often. What the disk refuses is tried again with the next."""
        new = {subject: entry for subject, entry in self._entries.items() if not entry.kept}
        if not new or (not force and time.monotonic() - self._flushed_monotonic < FLUSH_SECONDS):
            return
        self._flushed_monotonic, now = time.monotonic(), time.time()
        rows = [(one.number, one.first_at, one.last_at, one.count, *astuple(subject)) for subject, one in new.items()]
        if self._ledger.keep_refusals(rows):
            for entry in new.values():
                entry.kept = True
            recent = {who: entry for who, entry in self._entries.items() if now - entry.first_at < SAME_SECONDS}
            self._entries = recent
