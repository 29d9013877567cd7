"""cluster.toml: what it says, and the field that is named when it says something else."""

import os
from pathlib import Path

import pytest

from trainctl.protocol.config import cluster_file
from trainctl.protocol.errors import InvalidInputError


def written(folder: Path, text: str) -> Path:
    path = folder / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    for text, names in (
        ("nodes = 3", "nodes"),
        ("[nodes.A]\naddress = 'tcp://127.0.0.1:1'", "nodes"),
        ("[nodes.a]\n", "address"),
        ("[nodes.a]\naddress = 'somewhere'", "somewhere"),
        ("[nodes.a]\naddress = 'tcp://h:1'\ncolour = 'red'", "colour"),
        ("[nodes.a]\naddress = 'tcp://h:1'\n[nodes.b]\naddress = 'tcp://h:1'", "nodes.b.address"),
        ("[nodes", "TOML"),
        (f"a = {'[' * 100_000}", "nested too deeply"),
        ("".join(f"[nodes.n{i}]\n" for i in range(1025)), "nodes: 1,025 nodes are too many"),
        ("[alerts]\nwebhook = 'ftp://h/x'", "alerts.webhook: 'ftp://h/x' is not a URL such as http://"),
        ("[alerts]\ncommand = 'notify'", "alerts.command: must be a list"),
        ("[nodes.a]\naddress = 'tcp://h:1'\nprice_per_hour = -1", "nodes.a.price_per_hour: must be a number of at"),
        ("[nodes.a]\naddress = 'tcp://h:1'\nprice_per_hour = nan", "cluster.toml: nodes.a.price_per_hour: must be"),
        ("currency = 'US dollars'", "cluster.toml: currency: 'US dollars' is not a currency; write one word"),
    ):
        with pytest.raises(InvalidInputError, match=names):
            cluster_file.read(written(tmp_path, text))


def test_without_a_file_there_is_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINCTL_CLUSTER", str(tmp_path / "none.toml"))
    assert cluster_file.read_default().nodes == {}
    with pytest.raises(InvalidInputError, match="no such cluster file"):
        cluster_file.read(tmp_path / "none.toml")


def test_prices_are_of_the_nodes_that_have_one_also_in_added_files(tmp_path: Path) -> None:
    nodes = "[nodes.b]\naddress = 'tcp://h:2'\n[nodes.a]\naddress = 'tcp://h:1'\n"
    path = written(tmp_path, f"currency = '€'\n{nodes}price_per_hour = 2\n")
    added = cluster_file.added_directory(path)
    added.mkdir()
    (added / "c.toml").write_text("[nodes.c]\naddress = 'tcp://h:3'\nprice_per_hour = 0\n", encoding="utf-8")
    cluster = cluster_file.read(path)
    assert cluster.prices == cluster_file.Prices("€", {"a": 2.0, "c": 0.0})
    addresses = {name: entry.address for name, entry in cluster.nodes.items()}
    assert [*addresses.items()] == [("b", "tcp://h:2"), ("a", "tcp://h:1"), ("c", "tcp://h:3")]
    added.joinpath("c.toml").unlink()
    assert cluster_file.read(written(tmp_path, nodes)).prices == cluster_file.Prices("USD", {})


def test_hooks_that_others_could_write_are_refused_where_they_would_be_run(tmp_path: Path) -> None:
    path = written(tmp_path, "[alerts]\ncommand = ['notify']")
    path.chmod(0o644)
    link = tmp_path / "links" / "cluster.toml"
    link.parent.mkdir()
    link.symlink_to(path)
    for place, mode in ((path, 0o664), (tmp_path, 0o775), (link.parent, 0o777)):
        cluster_file.check_hooks(cluster_file.read(link), link)
        before = place.stat().st_mode
        place.chmod(mode)
        cluster = cluster_file.read(link)  # clients may: they run no hooks
        with pytest.raises(InvalidInputError, match=rf"alerts: other users can .*{mode:04o}.*chmod go-w {place}"):
            cluster_file.check_hooks(cluster, link)
        place.chmod(before)
    path.chmod(0o664)
    path.write_text("quorum = true", encoding="utf-8")
    cluster_file.check_hooks(cluster_file.read(link), link)  # without hooks it has no one run anything
    tmp_path.chmod(0o1777)  # as /tmp: others can't replace the file
    path.chmod(0o644)
    path.write_text("[alerts]\ncommand = ['notify']", encoding="utf-8")
    cluster_file.check_hooks(cluster_file.read(path), path)


@pytest.mark.needs("root")  # to give files away
def test_hooks_in_another_user_s_file_or_folder_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "[alerts]\ncommand = ['notify']")
    for place in (path, tmp_path):
        os.chown(place, 65534, -1)
        with pytest.raises(InvalidInputError, match=f"alerts: another user owns .*chown {os.getuid()} {place}"):
            cluster_file.check_hooks(cluster_file.read(path), path)
        os.chown(place, os.getuid(), -1)
