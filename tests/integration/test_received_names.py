"""Names from other machines: whatever they are and whose key sends them, an agent touches nothing beside its runs."""

import contextlib
import hashlib
import os
import random
import threading
import tomllib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import msgspec
import pytest
import zmq
from tests import tiers
from tests.conftest import SHARED_PIDS
from tests.integration.conftest import AgentProcess
from tests.integration.support.file_watch import FileWatch
from tests.integration.support.known_run import make_known, run_file
from tests.integration.support.ports import free_addresses
from tests.waiting import HANG_SECONDS, PATIENT_MILLISECONDS, until
from tools.protocol_docs import examples

from trainctl.node_agent.records import replication
from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.client.downloads import download_trace
from trainctl.protocol.config.cluster_file import Cluster
from trainctl.protocol.errors import InvalidInputError, ProtocolError, RefusedError
from trainctl.protocol.machine.file_digests import file_digest
from trainctl.protocol.messages import events as e
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.security.keyring import Keyring
from trainctl.protocol.security.keys import KeyFolder
from trainctl.protocol.wire import codec, sockets
from trainctl.tui.cli import runs

NAMES = tiers.scale("names of each kind")
AT_ONCE = 8
"""Requests that wait for a reply at a time; an agent takes 64."""
RUN, WORK, SECRET = "r-1", "work-0001", "what nobody may read or change"
pytestmark = pytest.mark.needs("linux")  # inotify tells who opens a file


def run_text(root: Path) -> str:
    return run_file(root, nodes=f'[nodes.box]\ncache_path = "{root}/caches"\n')


class Scene:
    """An agent with keys and a run that has ended, and beside its folder one with what is not the agent's."""

    def __init__(self, root: Path) -> None:
        self.root, self.state, self.canary = root, root / "state", root / "canary"
        self.folders = {who: KeyFolder(root / "keys" / who) for who in ("box", "mbp", "anna", "vera")}
        for name, folder in self.folders.items():
            folder.make(name)
        self.folders["box"].authorize("anna", self.folders["anna"].user().public, "operator")
        self.folders["box"].authorize("vera", self.folders["vera"].user().public, "viewer")
        self.addresses = dict(zip(("box", "mbp"), free_addresses(2), strict=True))
        tables = (
            f'[nodes.{node}]\naddress = "{at}"\nkey = "{self.folders[node].agent().public}"\n'
            for node, at in self.addresses.items()
        )
        (root / "cluster.toml").write_text("".join(tables))
        self.canary.mkdir()
        (self.canary / "secret.txt").write_text(SECRET)
        os.mkfifo(self.canary / "pipe.txt")
        self._make_run()
        self.agent = AgentProcess(self.state, "box", root / "cluster.toml", self.folders["box"].path)

    def _make_run(self) -> None:
        """With links out of its folder, as only a person on the machine could have made them."""
        for name in ("model", "data"):
            (self.root / name).mkdir()
        (self.root / "model" / "config.json").write_text("{}")
        (self.root / "data" / "a.txt").write_text("text")
        paths = make_known(self.state / "box", RUN, run_text(self.root))
        paths.profiles.mkdir()
        (paths.logs / "rank-7.log").symlink_to(self.canary / "secret.txt")
        (paths.profiles / "link").symlink_to(self.canary / "secret.txt")
        (paths.profiles / "folder").symlink_to(self.canary)
        os.mkfifo(paths.profiles / "pipe")
        (paths.directory.parent / "outside").symlink_to(self.canary)
        (self.state / "box" / "work").mkdir()
        (self.state / "box" / "work" / "outside").symlink_to(self.canary)

    def start(self) -> None:
        self.agent.start()
        assert self.agent.process is not None
        SHARED_PIDS.add(self.agent.process.pid)

    def ring(self, who: str) -> Keyring:
        return Keyring(self.folders[who], Cluster(), self.folders["box"].agent().public)

    def client(self, who: str) -> BlockingClient:
        return BlockingClient(self.agent.address, keys=self.ring(who), timeout_seconds=HANG_SECONDS)

    @contextlib.contextmanager
    def dealer(self, who: str) -> Iterator[Any]:
        """A socket with a user's key, or with that of mbp's agent."""
        context = zmq.Context()
        try:
            dealer = sockets.new_socket(context, zmq.DEALER)
            pair = self.folders[who].agent() if who == "mbp" else self.folders[who].user()
            sockets.secure_client(dealer, pair, self.folders["box"].agent().public)
            dealer.connect(self.agent.address)
            yield dealer
        finally:
            context.destroy(linger=0)

    def others(self) -> dict[str, bytes]:
        """All files but those of runs and of separate work, and what those hold that is not the agent's. What the agent
        itself keeps of requests is in its database and log."""
        own, kept = self.state / "box", dict[str, bytes]()
        for folder, folders, files in os.walk(self.root):
            folders[:] = [name for name in folders if Path(folder, name) not in (own, self.canary)]
            for path in (Path(folder, name) for name in (*folders, *files)):
                is_link = path.is_symlink() or not path.is_file()
                kept[str(path.relative_to(self.root))] = b"" if is_link else path.read_bytes()
        return kept | {f"own {path.name}": b"" for path in own.iterdir() if not path.name.startswith("agent.")}

    def secrets(self) -> tuple[bytes, ...]:
        """Return what no reply may have."""
        plain = hashlib.sha256(SECRET.encode()).hexdigest()
        return SECRET.encode(), plain.encode(), file_digest(self.canary / "secret.txt").encode()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    made = Scene(tmp_path_factory.mktemp("names"))
    made.start()
    yield made
    made.agent.clean_up()


class Names:
    """Endless names, made from a seed: most of them lead to the canary by some way, some are right."""

    def __init__(self, scene: Scene, seed: str) -> None:
        self._chance, self._scene = random.Random(seed), scene

    def next(self) -> str:
        chance = self._chance
        target = chance.choice(("secret.txt", "pipe.txt", "new", ".", ""))
        place = str(self._scene.canary / target)
        made = chance.choice((
            place, f"file://{place}", f"./{place}", f"~/{place}", f"{place}\0", f"a\0{place}", f"{place}\n",
            f"{'../' * chance.randrange(1, 9)}canary/{target}", f"x/{'../' * chance.randrange(1, 9)}canary/{target}",
            f"{RUN}/{'../' * chance.randrange(1, 9)}canary/{target}", f"{'../' * 20}{place[1:]}",
            f"outside/{target}", "outside", f"../{WORK}", f"..\\canary\\{target}", "..", ".", "", "/", "//",
            f"%2e%2e/canary/{target}", f"\u2025/canary/{target}", f"{RUN}/../outside/{target}", "link", "folder",
            f"folder/{target}", "pipe", "../agent.db", f"/proc/self/root{place}", "/dev/zero", "/etc/shadow", "-", "~",
            "name", f"name-{chance.randrange(9)}", "x" * 200, "x" * 5000, "\x1b[2J", "CON", "a.b", RUN, WORK, "box",
        ))  # fmt: skip
        if made and chance.random() < 0.2:
            at = chance.randrange(len(made))
            made = made[:at] + chance.choice(("/", "..", "\0", "\x07", ".", "é", "%00", "\\")) + made[at:]
        return made


def texts(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a message has a text, or a key that is one. The paths in a run file are its author's: see security.md."""
    if isinstance(value, str):
        yield place
    elif isinstance(value, dict):
        for key, part in value.items():
            if key in ("type", "rid", "v", "config"):
                continue
            if place and place[-1] in ("files", "args", "values"):
                yield (*place, key, "key")
            yield from texts(part, (*place, key))
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from texts(part, (*place, number))


def put(value: Any, place: tuple[Any, ...], name: str) -> Any:
    """A copy of a message with a name at this place."""
    if not place:
        return name
    first, *rest = place
    if rest == ["key"]:
        return {name if key == first else key: part for key, part in value.items()}
    if isinstance(value, dict):
        return {**value, first: put(value[first], tuple(rest), name)}
    return [put(part, tuple(rest), name) if number == first else part for number, part in enumerate(value)]


def plain(message: m.Message, **fields: Any) -> dict[str, Any]:
    """A message of the examples that the agent would otherwise take."""
    made: dict[str, Any] = msgspec.to_builtins(message)
    right = {"run": RUN, "work": WORK, "lead": "mbp", "node": "box", **fields}
    if made["type"] in ("slice-request", "link-request"):
        right["node"] = "mbp"
    return {key: right[key] if key in right and isinstance(part, str) else part for key, part in made.items()}


def fuzzed(scene: Scene, message: dict[str, Any], seed: str) -> Iterator[bytes]:
    """As many frames as asked for, each with a name in place of one text."""
    names, chance, places = Names(scene, seed), random.Random(seed), [*texts(message)]
    for _ in range(NAMES if places else 0):
        yield msgpack.packb(put(message, chance.choice(places), names.next()))


def check_untouched(scene: Scene, watch: FileWatch, before: dict[str, bytes], what: str) -> None:
    assert watch.touched() == [], what
    assert scene.others() == before, what


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("who", ["mbp", "anna", "vera"])
def test_no_request_reaches_a_file_that_is_not_the_agents(scene: Scene, who: str) -> None:
    before, secrets, asked = scene.others(), scene.secrets(), 0
    with FileWatch(scene.canary) as watch, scene.dealer(who) as dealer:
        for kind, message in examples.EXAMPLES["client to agent"].items():
            waiting = 0
            for frame in (*fuzzed(scene, plain(message), f"{who} {kind}"), None):
                while waiting == AT_ONCE or (frame is None and waiting):
                    assert dealer.poll(PATIENT_MILLISECONDS), f"no answer to a {kind}"
                    reply = dealer.recv()
                    assert not any(secret in reply for secret in secrets), kind
                    waiting, asked = waiting - 1, asked + 1
                if frame is not None:
                    dealer.send(frame)
                    waiting += 1
            check_untouched(scene, watch, before, kind)
    assert asked >= 25 * NAMES, "kinds of messages that have a text"


@pytest.mark.timeout(3600)
def test_no_message_of_a_lead_reaches_a_file_that_is_not_the_agents(scene: Scene) -> None:
    """With a node's key, in a conversation that is begun again whenever a message has ended it."""
    before, secrets, links = scene.others(), scene.secrets(), 0
    with FileWatch(scene.canary) as watch, scene.dealer("mbp") as dealer:

        def heard(*kinds: type[m.Message]) -> m.Message:
            while True:
                assert dealer.poll(PATIENT_MILLISECONDS), f"none of {kinds}"
                frame = dealer.recv()
                assert not any(secret in frame for secret in secrets)
                with contextlib.suppress(msgspec.DecodeError):
                    reply = codec.decode_peer(frame) if b"peer-" in frame else codec.decode_reply(frame)
                    if isinstance(reply, kinds):
                        return reply

        def greet() -> str:
            nonlocal links
            links += 1
            hello = m.PeerHello(link=f"link-{links}", lead="mbp", address=scene.addresses["mbp"])
            dealer.send(codec.encode(hello))
            while heard(m.PeerWelcome).link != hello.link:  # type: ignore[attr-defined]
                pass
            return hello.link

        link, seq = greet(), 0
        for kind, message in examples.EXAMPLES["lead to follower"].items():
            asked = plain(message, lead="mbp")
            asked |= {"resume_step": 5, "config": config_of(scene)} if kind == "peer-host" else {}
            for frame in fuzzed(scene, asked, kind):
                fields = msgpack.unpackb(frame)
                numbered = {"link": link} if fields["link"] == asked["link"] else {}
                numbered |= {"seq": seq + 1} if "seq" in fields else {}
                dealer.send(msgpack.packb({**fields, **numbered}))
                seq += 1
                dealer.send(codec.encode(m.PeerPing(link=link, seq=seq, sent_monotonic=float(links * 10**6 + seq))))
                while True:
                    reply = heard(m.PeerBeat, m.PeerRefusal)
                    if isinstance(reply, m.PeerRefusal) and reply.link == link:
                        link, seq = greet(), 0
                        break
                    if isinstance(reply, m.PeerBeat) and reply.sent_monotonic == float(links * 10**6 + seq):
                        break
            check_untouched(scene, watch, before, kind)


@pytest.mark.timeout(3600)
def test_no_item_of_a_leads_record_reaches_a_file_beside_the_copy(scene: Scene, tmp_path: Path) -> None:
    """Items are messages in a message, for the copy that a follower keeps."""
    paths = RunPaths(tmp_path / "runs" / RUN)
    paths.directory.mkdir(parents=True)
    kept = refused = 0
    with FileWatch(scene.canary) as watch, RunDb(paths) as recorder:
        before = sorted(tmp_path.rglob("*"))
        for kind, message in examples.EXAMPLES["kept by followers"].items():
            for frame in fuzzed(scene, msgspec.to_builtins(message), kind):
                try:
                    replication.keep_all(recorder, [frame])
                    kept += 1
                except ProtocolError:
                    refused += 1
        assert watch.touched() == []
        assert sorted(tmp_path.rglob("*")) == before
    assert kept and refused


@pytest.mark.timeout(3600)
async def test_no_reply_of_an_agent_leads_a_client_to_another_file(scene: Scene, tmp_path: Path) -> None:
    """The trace of `trainctl profile --out`, and the directory that `runs` gives for a run."""
    output, content, copied = tmp_path / "output", b"a trace", 0
    output.mkdir()
    plain_trace = e.Profiled(
        node="box", rank=0, file="t.json.gz", first_step=1, last_step=2, size_bytes=len(content),
        digest=hashlib.sha256(content).hexdigest(), phases=(),
    )  # fmt: skip
    source: Any = SimpleNamespace(ask=part_of(content))
    names = Names(scene, "replies")
    with FileWatch(scene.canary) as watch:
        for number in range(4 * NAMES):
            changed = {("node", "file")[number % 2]: names.next()}
            with contextlib.suppress(InvalidInputError):
                path = await download_trace(source, RUN, msgspec.structs.replace(plain_trace, **changed), output)
                assert path.parent == output
                copied += 1
            given = m.RunSummary(
                run=RUN, name="r", state="finished", step=1, steps=None, last_loss=None, started_at=0.0,
                directory=names.next(),
            )  # fmt: skip
            with contextlib.suppress(InvalidInputError):
                directory = runs.directory_of(given)
                assert directory is None or (directory.is_absolute() and directory.name == RUN)
        assert watch.touched() == []
    assert copied
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


def part_of(content: bytes) -> Callable[..., Awaitable[m.TracePart]]:
    async def ask(request: Any, run: str, node: str, file: str, offset_bytes: int) -> m.TracePart:
        data = content[offset_bytes:]
        return m.TracePart(rid="r", offset_bytes=offset_bytes, size_bytes=len(content), data=data)

    return ask


def config_of(scene: Scene) -> dict[str, Any]:
    return tomllib.loads(run_text(scene.root))


# ------------------------------------------------------------ what did it


@contextlib.contextmanager
def false_lead(scene: Scene, content: bytes) -> Iterator[list[m.ClientRequest]]:
    """An agent with mbp's key that gives `content` for every file; the requests that it has heard."""
    heard: list[m.ClientRequest] = []
    over, context = threading.Event(), zmq.Context()
    router = sockets.new_socket(context, zmq.ROUTER)
    router.curve_server, pair = True, scene.folders["mbp"].agent()
    router.curve_publickey, router.curve_secretkey = pair.public.encode(), pair.secret.encode()
    router.bind(scene.addresses["mbp"])

    def serve() -> None:
        while not over.is_set():
            if not router.poll(20):
                continue
            identity, frame = router.recv_multipart()
            with contextlib.suppress(Exception):
                request = codec.decode_control(frame)
                heard.append(request)
                reply: m.AgentReply = m.SliceReply(rid=request.rid)
                if isinstance(request, m.WorkFileRequest):
                    part = content if request.offset_bytes == 0 else b""
                    reply = m.WorkFilePart(rid=request.rid, data=part)
                router.send_multipart([identity, codec.encode(reply)])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield heard
    finally:
        over.set()
        thread.join(HANG_SECONDS)
        context.destroy(linger=0)


@pytest.mark.parametrize("place", ["absolute", "relative", "in a linked folder"])
def test_a_nodes_key_writes_no_file_beside_the_works_folder(scene: Scene, place: str) -> None:
    content, before = b"from another node", scene.others()
    target = scene.root / "written.safetensors"
    name = {
        "absolute": str(target),
        "relative": os.path.relpath(target, scene.state / "box" / "work" / WORK / "checkpoint"),
        "in a linked folder": "adapter_model.safetensors",
    }[place]
    work = "outside" if place == "in a linked folder" else WORK
    order = {
        "type": "host-work", "rid": "r", "work": work, "kind": "answers", "run": RUN, "lead": "mbp",
        "config": config_of(scene), "checkpoint": 5, "files": {name: hashlib.sha256(content).hexdigest()}, "v": 2,
    }  # fmt: skip
    with FileWatch(scene.canary) as watch, false_lead(scene, content) as heard, scene.dealer("mbp") as dealer:
        dealer.send(msgpack.packb(order))
        assert dealer.poll(PATIENT_MILLISECONDS)
        reply = codec.decode_reply(dealer.recv())
        problem = reply.text if isinstance(reply, m.Refusal) else reply.problem  # type: ignore[attr-defined]
        if not problem:  # it has begun
            until(lambda: any(isinstance(one, m.SliceRequest) and one.state == "gone" for one in heard), 30, "its end")
        check_untouched(scene, watch, before, place)
        assert problem


def test_a_right_name_is_copied_into_the_works_folder(scene: Scene) -> None:
    """An order with a file name that a checkpoint has: the worker is started, and ends for lack of a model."""
    content, name = b"from another node", "adapter_model.safetensors"
    digests = {name: hashlib.sha256(content).hexdigest()}
    order = m.HostWork(
        rid="r", work="work-0002", kind="answers", run=RUN, lead="mbp", config=config_of(scene), checkpoint=5,
        files=digests,
    )  # fmt: skip
    with false_lead(scene, content) as heard, scene.dealer("mbp") as dealer:
        dealer.send(codec.encode(order))
        assert dealer.poll(PATIENT_MILLISECONDS)
        assert codec.decode_reply(dealer.recv()) == m.WorkHosted(rid="r")
        until(lambda: any(isinstance(one, m.SliceRequest) and one.state == "gone" for one in heard), 30, "its end")
    assert (scene.state / "box" / "work" / "work-0002" / "checkpoint" / name).read_bytes() == content


def test_a_link_in_a_runs_folder_is_not_followed(scene: Scene) -> None:
    with FileWatch(scene.canary) as watch, scene.client("anna") as client:
        for file in ("link", "folder", "pipe"):
            with pytest.raises(RefusedError, match="can't read"):
                client.ask(m.TraceRequest, RUN, "box", file, 0)
        with pytest.raises(RefusedError, match="link"):
            client.ask(m.LogRequest, RUN, 7)
        assert watch.touched() == []


def test_digests_are_of_what_a_run_file_names_and_of_regular_files(scene: Scene) -> None:
    with FileWatch(scene.canary) as watch, scene.client("anna") as client:
        assert [file.name for file in client.ask(m.DigestsRequest, "model", str(scene.root / "model")).files] == [
            "config.json"
        ]
        assert [file.name for file in client.ask(m.DigestsRequest, "data", str(scene.root / "data")).files] == ["a.txt"]
        assert client.ask(m.DiskRequest, str(scene.root / "caches")).problem == ""
        for path in (scene.canary / "secret.txt", scene.canary, Path("/etc/shadow"), Path("/dev/zero"), scene.root):
            for what in ("model", "data"):
                assert not client.ask(m.DigestsRequest, what, str(path)).named  # type: ignore[arg-type]
            assert not client.ask(m.DiskRequest, str(path)).named
        assert client.ask(m.DigestsRequest, "data", str(scene.root / "data"), "rows").named is False
        os.mkfifo(scene.root / "data" / "b.txt")
        (scene.root / "data" / "c.txt").symlink_to("/dev/zero")
        try:
            assert "not a regular file" in client.ask(m.DigestsRequest, "data", str(scene.root / "data")).problem
        finally:
            for name in ("b.txt", "c.txt"):
                (scene.root / "data" / name).unlink()
        assert watch.touched() == []
