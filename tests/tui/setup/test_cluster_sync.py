"""Tests of what `cluster sync` copies where, decided without a node, and what it reads from rsync's output."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tests.protocol.support.run_files import good, with_value

from trainctl.protocol.config import data_files, run_file
from trainctl.protocol.config.cluster_file import Cluster, NodeEntry
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine.file_digests import data_digests
from trainctl.tui.setup import cluster_sync, rsync, sync_files
from trainctl.tui.setup.sync_files import NodeFiles


def config(model: str | Path, data: str | Path, **node: str) -> RunFile:
    """Return the tables of a run, as it is for the node `mbp`, which has `node` of its own."""
    raw = with_value(with_value(good(), "model.path", str(model)), "nodes.mbp", node)
    return run_file.parse(with_value(raw, "data", {"path": str(data), "tokenizer": "bytes"}))


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A model and data, with files around them that no run reads."""
    for name in ("m/config.json", "m/model.safetensors", "m/tokenizer.model", "m/.token.json", "m/optimizer.pt",
                 "d/x [1]/a.txt", "d/b.txt", "d/key.pem", f"d/{data_files.PARTIAL_FOLDER}/c.txt"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def test_only_files_that_a_run_reads_are_copied(here: Path) -> None:
    model, data = sync_files.sources(config(here / "m", here / "d"))
    assert (model.root, sorted(model.sizes)) == (here / "m", ["config.json", "model.safetensors", "tokenizer.model"])
    assert (data.root, sorted(data.sizes)) == (here / "d", ["b.txt", "x [1]/a.txt"])
    compared = data_digests(here / "d", "text").files
    assert [data.digests[name] for name in data.digests] == [file.digest for file in compared], "as nodes compare them"
    with pytest.raises(InvalidInputError, match="matches no"):
        sync_files.sources(config(here / "m", here / "*.csv"))


@pytest.mark.parametrize(
    ("data", "own", "root"),
    [
        ("d", None, "{here}/d"),
        ("d", "/there/e", "/there/e"),
        ("d", "/there/e/*.txt", "/there/e"),
        ("d/*.txt", None, "{here}/d"),
        ("d/*.txt", "/there/e", "/there/e"),
        ("d/b.txt", "/there/e", "/there/e"),
    ],
)
def test_where_data_go(here: Path, data: str, own: str | None, root: str) -> None:
    whole = config(here / "m", here / data, **({} if own is None else {"data_path": own}))
    source = sync_files.sources(whole)[1]
    target = sync_files.target(source, run_file.on_node(whole, "mbp"), "mbp")
    assert target.root == root.format(here=here)


def test_a_file_of_another_name_is_refused(here: Path) -> None:
    whole = config(here / "m", here / "d" / "b.txt", data_path="/there/c.txt")
    with pytest.raises(InvalidInputError, match=r"^nodes\.mbp\.data_path: the file must be named b\.txt"):
        sync_files.target(sync_files.sources(whole)[1], run_file.on_node(whole, "mbp"), "mbp")


def test_a_hub_id_needs_a_revision_of_the_cache(here: Path) -> None:
    (source, _) = sync_files.sources(config(here / "m", here / "d"))
    for_node = config("org/name", here / "d")
    with pytest.raises(InvalidInputError, match="hf download org/name"):
        sync_files.target(source, for_node, "mbp")
    cached = replace(source, root=Path("/cache/models--org--name/snapshots/0123abcd"))
    target = sync_files.target(cached, for_node, "mbp")
    assert (target.path, target.root, target.revision) == ("org/name", "", "0123abcd")
    own = run_file.on_node(config("org/name", here / "d", model_path="/there/m"), "mbp")
    assert sync_files.target(cached, own, "mbp").root == "/there/m", "a folder of its own"


def test_what_differs_there_is_lacking_and_what_is_more_is_named(here: Path, tmp_path: Path) -> None:
    whole = config(here / "m", here / "d", data_path=str(tmp_path / "there"))
    source = sync_files.sources(whole)[1]
    target = sync_files.target(source, run_file.on_node(whole, "mbp"), "mbp")
    assert (sync_files.look(target).extra, (tmp_path / "there").exists()) == ((), False)
    for name, text in (("b.txt", "D/B.TXT"), ("x [1]/a.txt", "d/x [1]/a.txt"), ("more.txt", "more")):
        (tmp_path / "there" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "there" / name).write_text(text)
    answer = sync_files.look(msgspec.structs.replace(target, digests=source.digests))
    assert (answer.differing, answer.extra) == (("b.txt",), ("more.txt",)), "same size, other contents"


def answer(free: int, disk: int) -> NodeFiles:
    return NodeFiles("/x", free_bytes=free, disk=disk)


@pytest.mark.parametrize(
    ("needs", "full"),
    [
        ([(10**10, 1, 9 * 10**9)], []),
        ([(10**10, 1, 9_600_000_000)], [1]),  # 5 % of it must stay free
        ([(150_000_000, 1, 60_000_000)], [1]),  # 100 MB must stay free
        ([(10**10, 1, 6 * 10**9), (10**10, 1, 6 * 10**9)], [1]),  # two folders of one disk
        ([(10**10, 1, 6 * 10**9), (10**10, 2, 6 * 10**9)], []),
    ],
)
def test_room_on_each_disk(needs: list[tuple[int, int, int]], full: list[int]) -> None:
    found = sync_files.without_room([(answer(free, disk), count) for free, disk, count in needs])
    assert list(found) == full
    assert all("free on that disk" in text for text in found.values())


CLUSTER = Cluster(
    nodes={
        "studio": NodeEntry("tcp://10.0.0.1:7474"),
        "mbp": NodeEntry("tcp://10.0.0.2:7474", ssh="anna@mbp"),
        "box": NodeEntry("tcp://[fe80::3]:7474"),
        "near": NodeEntry("tcp://127.0.0.1:7575"),
    }
)


def test_which_nodes_are_other_machines_and_how_ssh_reaches_them() -> None:
    here, others = cluster_sync.hosts([*CLUSTER.nodes], CLUSTER, "elsewhere", {"near": "me@tunnel"}, {"10.0.0.1"})
    assert (here, others) == ("studio", {"mbp": "anna@mbp", "box": "fe80::3", "near": "me@tunnel"})
    assert cluster_sync.hosts(["near", "box"], CLUSTER, "box", {}, ()) == ("box", {})
    assert cluster_sync.chosen(here, others, ["box"]) == {"box": "fe80::3"}
    assert rsync.place("anna@fe80::3", "/a b") == "anna@[fe80::3]:/a b/"
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: cluster_sync.chosen(here, others, ["studio"]), "--node: studio is this machine"),
        (lambda: cluster_sync.hosts(["x"], CLUSTER, "", {}, ()), "nodes.x: no such node; the cluster's are studio"),
        (lambda: cluster_sync.ssh_names(["mbp"], CLUSTER.nodes), "--ssh: 'mbp' must have the form"),
    ]
    for call, says in cases:
        with pytest.raises(InvalidInputError, match=says):
            call()


def test_what_rsync_prints() -> None:
    assert rsync.percent_of("      1,234,567  45%   10.00MB/s    0:00:10 (xfr#1, to-chk=3/5)") == 45
    assert rsync.percent_of("100003 100%   95.37MB/s    0:00:00") == 100
    assert rsync.percent_of("sending incremental file list") is None
    assert rsync.sent_of("Literal data: 1,500 bytes") == 1500
    assert rsync.sent_of("Matched data: 1500 bytes") is None
    assert rsync.version_of("rsync  version 3.2.7  protocol version 31\n") == (3, 2) >= rsync.OLDEST
    assert rsync.version_of("rsync  version 2.6.9  protocol version 29\n") < rsync.OLDEST
    assert rsync.version_of("openrsync: protocol version 29\n") < rsync.OLDEST
