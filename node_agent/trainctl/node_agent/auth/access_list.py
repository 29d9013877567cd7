"""The access list: which key may do what at this agent, by the list of keys and the cluster's nodes."""

from typing import NamedTuple

from trainctl.protocol.config.cluster_file import Cluster
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import (
    AttachRun,
    AttendRequest,
    AuditRequest,
    CalibrateRequest,
    CalibrationsRequest,
    ClientRequest,
    Command,
    DiagnosisRequest,
    DigestsRequest,
    DiskRequest,
    DryRunRequest,
    EditRun,
    EndRun,
    EndWork,
    EventsRequest,
    FactsRequest,
    GapRequest,
    HistoryRequest,
    HookTestRequest,
    HostsRequest,
    HostWork,
    LinkRequest,
    LogRequest,
    OpenWork,
    PairsRequest,
    PeerClaim,
    PeerEnd,
    PeerHello,
    PeerHost,
    PeerKeep,
    PeerPing,
    PeerRelay,
    PeerTrainer,
    PoliciesRequest,
    RecordRequest,
    RunsRequest,
    RunSteps,
    SamplesRequest,
    SliceRequest,
    SnapshotRequest,
    StepProfilesRequest,
    StepsRequest,
    ToPeer,
    TraceRequest,
    WorkFileRequest,
    WorkResultsRequest,
    WorkRows,
    WorksRequest,
)
from trainctl.protocol.security.keys import Authorized, KeyFolder, Role

REQUESTS, LIVE = "requests", "live"
"""The authenticator's domains: the socket for requests and the one that publishes."""


class Rights(NamedTuple):
    """Rights of one key."""

    name: str
    role: Role
    nodes: frozenset[str] = frozenset()  # role node: those that it speaks for

    def objection(self, message: ClientRequest | ToPeer) -> str:
        """Why it may not say this, empty if it may."""
        is_node, allowed = self.role == "node", ""
        of_agents = f"{self.name} is a node's agent; agents send no requests"
        match message:
            case (
                PeerHello()
                | PeerHost()
                | PeerRelay()
                | PeerEnd()
                | PeerTrainer()
                | PeerKeep()
                | PeerClaim()
                | PeerPing()
                | HostWork()
                | WorkFileRequest()
                | SliceRequest()
                | LinkRequest()
            ):
                return allowed if is_node else f"{self.name} has the role {self.role}; only agents may send this"
            case LogRequest() | TraceRequest() | WorksRequest():
                return allowed
            case (
                Command()
                | AuditRequest()
                | DigestsRequest()
                | DiskRequest()
                | AttachRun()
                | RunSteps()
                | EndRun()
                | OpenWork()
                | WorkRows()
                | WorkResultsRequest()
                | EndWork()
                | CalibrateRequest()
                | HookTestRequest()
                | EditRun()
            ):
                if self.role == "viewer":
                    return f"{self.name} is a viewer here; only an operator may send {what(message)}"
                return of_agents if is_node else allowed
            case (
                SnapshotRequest()
                | HistoryRequest()
                | GapRequest()
                | RunsRequest()
                | EventsRequest()
                | StepsRequest()
                | HostsRequest()
                | SamplesRequest()
                | PairsRequest()
                | PoliciesRequest()
                | DryRunRequest()
                | DiagnosisRequest()
                | AttendRequest()
                | FactsRequest()
                | StepProfilesRequest()
                | CalibrationsRequest()
                | RecordRequest()
            ):
                return of_agents if is_node else allowed


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
    """The node that a request says it comes from, None if it says nothing."""
    match message:
        case SliceRequest() | LinkRequest():
            return message.node
        case HostWork():
            return message.lead
        case (
            SnapshotRequest()
            | HistoryRequest()
            | GapRequest()
            | RunsRequest()
            | EventsRequest()
            | StepsRequest()
            | HostsRequest()
            | SamplesRequest()
            | PairsRequest()
            | PoliciesRequest()
            | DryRunRequest()
            | DiagnosisRequest()
            | LogRequest()
            | AttendRequest()
            | FactsRequest()
            | StepProfilesRequest()
            | TraceRequest()
            | RecordRequest()
            | DigestsRequest()
            | DiskRequest()
            | AuditRequest()
            | CalibrateRequest()
            | CalibrationsRequest()
            | AttachRun()
            | RunSteps()
            | EndRun()
            | WorksRequest()
            | OpenWork()
            | WorkRows()
            | WorkResultsRequest()
            | EndWork()
            | WorkFileRequest()
            | Command()
            | HookTestRequest()
            | EditRun()
        ):
            return None


def what(message: ClientRequest | ToPeer) -> str:
    """A message's kind, for the audit: "command pause", "snapshot-request"."""
    kind = str(message.__struct_config__.tag)
    return f"{kind} {message.verb}" if isinstance(message, Command) else kind
