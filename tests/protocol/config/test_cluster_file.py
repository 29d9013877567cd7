"""cluster.toml, its addresses and names: what they say, and the field that is named when they say something else."""

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from trainctl.protocol.config import addresses, cluster_file, env_policy, names
from trainctl.protocol.config.names import NAME_PATTERN
from trainctl.protocol.errors import InvalidInputError


def written(folder: Path, text: str) -> Path:
    path = folder / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    for text, words in (
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
        with pytest.raises(InvalidInputError, match=words):
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


def test_a_unix_socket_needs_no_keys_and_loopback_only_the_wish_for_none() -> None:
    addresses.check_bind("ipc:///tmp/a.sock", keys=False)
    for address in ("tcp://127.8.9.1:0", "tcp://localhost:1", "tcp://[::1]:7474"):
        with pytest.raises(InvalidInputError, match=r"TCP needs keys: .*keys new.*keys authorize.*Unix.*--no-keys"):
            addresses.check_bind(address, keys=False)
        addresses.check_bind(address, keys=False, no_keys=True)


def test_nothing_else_can_without_keys_and_with_keys_only_one_address() -> None:
    everywhere = ("0.0.0.0", "*", "[::]")
    single = ("192.168.1.4", "studio.local", "127.0.0.1.example.org", "2130706433", "eth0")
    for host in everywhere + single:
        with pytest.raises(InvalidInputError, match=r"TCP needs keys: .*keys new .*keys authorize NAME KEY$"):
            addresses.check_bind(f"tcp://{host}:7474", keys=False, no_keys=host in single)
    for host in single:
        addresses.check_bind(f"tcp://{host}:7474", keys=True)
    for host in everywhere:
        with pytest.raises(InvalidInputError, match="the address that other"):
            addresses.check_bind(f"tcp://{host}:7474", keys=True)


@pytest.mark.parametrize("call", [addresses.split, partial(addresses.check_bind, keys=True)])
def test_what_is_no_address_is_told_what_one_looks_like(call: Callable[[str], object]) -> None:
    for address in (
        "", "7474", "127.0.0.1:7474", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://127.0.0.1:x",
        "tcp://127.0.0.1:70000", "udp://127.0.0.1:7474", "ipc://", "ipc://@a", "ipc://a.sock", "ipc://*", "ipc:///",
        "inproc://a", "http://127.0.0.1:80",
    ):  # fmt: skip
        with pytest.raises(InvalidInputError, match="tcp://host:port"):
            call(address)


def test_a_path_that_fits_no_unix_socket_is_refused(tmp_path: Path) -> None:
    longest = "ipc://" + str(tmp_path / "s").ljust(addresses.MAX_PATH_BYTES, "s")
    addresses.split(longest)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(addresses.live_beside(longest))
    with pytest.raises(InvalidInputError, match="choose a shorter one"):
        addresses.split(f"{longest}s")


@given(st.text(max_size=100))
def test_any_machine_has_a_node_s_name(host: str) -> None:
    assert re.fullmatch(NAME_PATTERN, names.node_name(host))
    known = {"Studio.local": "studio", "büro-7": "b-ro-7", "a-" * 40: "a-" * 31 + "a", "": "node", "_x_1_": "x_1"}
    assert {name: names.node_name(name) for name in known} == known


LOADERS = (
    "LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "DYLD_INSERT_LIBRARIES", "DYLD_LIBRARY_PATH", "PATH", "HOME", "TMPDIR",
    "PYTHONPATH", "PYTHONSTARTUP", "PYTHONHOME", "PYTHONUSERBASE", "OPENSSL_CONF", "OPENSSL_MODULES", "GCONV_PATH",
    "TORCHINDUCTOR_CACHE_DIR", "TORCH_LOGS_OUT", "TORCH_EXTENSIONS_DIR", "TORCH_HOME", "TRITON_CACHE_DIR",
    "TRITON_PTXAS_PATH", "TRITON_OVERRIDE_DIR", "CUDA_HOME", "CUDA_PATH", "CUDA_INJECTION64_PATH", "CPATH", "CC", "CXX",
    "LIBRARY_PATH", "HF_HOME", "HF_MODULES_CACHE", "XDG_CACHE_HOME", "NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN",
    "KINETO_CONFIG", "PYTORCH_JIT_LOG_LEVEL", "BASH_ENV", "GIO_EXTRA_MODULES", "LOCPATH", "MALLOC_CONF",
)  # fmt: skip


@pytest.mark.parametrize("name", LOADERS)
def test_a_variable_by_which_code_is_found_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"^nodes\.a\.env\.{name}: a run file may not set it"):
        env_policy.of_trainers({}, {"OMP_NUM_THREADS": "1", name: "/planted"}, "nodes.a.env")


def test_a_machine_s_owner_allows_more() -> None:
    owner = {"TRAINCTL_ALLOWED_VARIABLES": "HF_HOME, MY_SETTING", "HF_HOME": "/theirs"}
    found = env_policy.of_trainers(owner, {"HF_HOME": "/mine", "MY_SETTING": "ü=$x"})
    assert (found["HF_HOME"], found["MY_SETTING"]) == ("/mine", "ü=$x")
    assert env_policy.of_trainers(owner, {})["HF_HOME"] == "/theirs", "what the owner sets is inherited"
    with pytest.raises(InvalidInputError, match="TORCH_HOME"):
        env_policy.of_trainers(owner, {"TORCH_HOME": "/planted"})


def test_the_page_lists_them_all() -> None:
    page = (Path(__file__).parents[3] / "docs" / "services.md").read_text("utf-8")
    assert all(f"`{name}`" in page for name in env_policy.ALLOWED)
