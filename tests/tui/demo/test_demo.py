"""The demo's own decisions: when it is over, what it leaves, what it says, and which folders it drops."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tools.protocol_docs import examples

from trainctl.protocol.config import cluster_file
from trainctl.protocol.config.names import node_name
from trainctl.protocol.errors import InvalidInputError
from trainctl.tui.cli import demo
from trainctl.tui.demo import agents, folder, supervisor


def view(state: str) -> Any:
    return msgspec.structs.replace(examples.EXAMPLES["published by an agent"]["run-view"], state=state)


def test_a_demo_is_over_once_its_run_has_ended_and_nobody_watches() -> None:
    watch = supervisor.Watch()
    assert not watch.over
    watch.see(view("running"))
    watch.note(nobody_watches=True)
    assert not watch.over, "a run outlives its watchers"
    watch.see(view("finished"))
    assert watch.over
    watch.see(view("running"))
    assert not watch.over, "taken up again"
    watched = supervisor.Watch()
    watched.see(view("finished"))
    assert not watched.over


@pytest.mark.parametrize("flag", ["asked_to_end", "agent_lost"])
def test_what_ends_a_demo_at_once(flag: str) -> None:
    watch = supervisor.Watch()
    watch.see(view("running"))
    watch.note(**{flag: True})
    assert watch.over


def test_an_agent_that_is_not_heard_of_hangs_but_not_when_nobody_listened() -> None:
    pulse = agents.HeartbeatWatch(0.0)
    assert not any(pulse.is_lost(second) for second in range(30)), "it is still starting"
    pulse.beat(30.0)
    assert [pulse.is_lost(30.0 + second) for second in range(7)] == [False] * 5 + [True] * 2
    pulse.beat(37.0)
    assert not pulse.is_lost(400.0), "the machine slept"
    assert not pulse.is_lost(401.0)
    assert [pulse.is_lost(401.0 + second) for second in range(1, 6)] == [False] * 3 + [True] * 2
    assert agents.HeartbeatWatch(0.0).is_lost(1.9) is False


def test_an_agent_that_never_says_a_word_is_waited_for_as_long_as_a_start_may_take() -> None:
    pulse = agents.HeartbeatWatch(0.0)
    assert next(second for second in range(40) if pulse.is_lost(float(second))) == agents.FIRST_SECONDS


def test_folders_of_demos_that_are_over_are_dropped(tmp_path: Path) -> None:
    names = ("1-over", "kept", "live", "young", "2-over", "3-over", "4-over")
    old = [folder.Session(tmp_path / f"demo-{name}") for name in names]
    for session in old:
        session.folder.mkdir()
        (session.folder / "demo.lock").touch()
        os.utime(session.folder / "demo.lock", (0, 0))
    (tmp_path / "demo-kept" / "keep").touch()
    os.utime(tmp_path / "demo-young" / "demo.lock")
    (tmp_path / "demo-foreign").mkdir()
    (tmp_path / "model").mkdir()
    with old[2].locked():
        os.utime(old[2].folder / "demo.lock", (0, 0))
        folder.drop_ended(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    others = {"demo-kept", "demo-live", "demo-young", "demo-foreign", "model"}
    assert left == others | {"demo-2-over", "demo-3-over", "demo-4-over"}


def test_a_backend_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(demo.NEEDED, "mlx", ("no_such_module",))
    with pytest.raises(InvalidInputError, match=r"mlx not installed; in a trainctl checkout.*'\.\[mlx\]'"):
        demo.ranks_of(demo.DemoOptions(steps=1, backend="mlx"))
    monkeypatch.setitem(demo.NEEDED, "torch", ("no_such_module",))
    with pytest.raises(InvalidInputError, match=r"pip install '\.\[torch\]' or '\.\[mlx\]'"):
        demo.ranks_of(demo.DemoOptions(steps=1))


def test_qlora_says_at_once_that_it_needs_mlx_lm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(demo.NEEDED, "torch", TORCH)
    monkeypatch.setitem(demo.NEEDED, "mlx", MISSING)
    wanted = demo.DemoOptions(steps=1, nodes=1, objective="qlora")
    with pytest.raises(InvalidInputError, match=r"^objective: qlora needs mlx-lm.*install '\.\[mlx\]'"):
        demo.ranks_of(wanted)
    demo.ranks_of(replace(wanted, objective="sft"))


TORCH, MLX = ("numpy",), ("msgspec",)
"""Stand for what is installed."""
MISSING = ("no_such_module",)


@pytest.mark.parametrize(
    ("torch", "mlx", "backend", "nodes", "ranks"),
    [
        (TORCH, MLX, "auto", None, {"torch-a": "torch", "torch-b": "torch", "mlx-c": "mlx"}),
        (TORCH, MISSING, "auto", None, {"torch-a": "torch", "torch-b": "torch"}),
        (TORCH, MLX, "mlx", 3, {"mlx-a": "mlx", "mlx-b": "mlx", "mlx-c": "mlx"}),
        (TORCH, MLX, "auto", 1, {node_name(): "auto"}),
    ],
)
def test_which_ranks_a_demo_has(
    monkeypatch: pytest.MonkeyPatch, torch: tuple[str], mlx: tuple[str], backend: str, nodes: int | None,
    ranks: dict[str, str],
) -> None:  # fmt: skip
    monkeypatch.setitem(demo.NEEDED, "torch", torch)
    monkeypatch.setitem(demo.NEEDED, "mlx", mlx)
    found = demo.ranks_of(demo.DemoOptions(steps=1, backend=backend, nodes=nodes))
    assert list(found.items()) == list(ranks.items())


def test_a_demo_s_cluster_file_names_every_agent_at_a_socket_of_its_own(tmp_path: Path) -> None:
    session = folder.Session.create(tmp_path, keep=False)
    given = session.write_cluster(("torch-a", "torch-b", "mlx-c"))
    assert {node: entry.address for node, entry in cluster_file.read(session.cluster_file).nodes.items()} == given
    assert len(set(given.values())) == 3


@pytest.mark.parametrize("objective", ["pretrain", "sft", "dpo", "qlora"])
def test_each_objective_has_a_run_file_on_its_own_data(tmp_path: Path, objective: Any) -> None:
    made = folder.run_config(tmp_path, {"a": "torch", "b": "mlx"}, 150, objective)
    assert Path(made["data"]["path"]).name == {"pretrain": "data", "dpo": "pairs"}.get(objective, "rows")
    assert made["adapter"]["kind"] == ("lora" if objective in ("dpo", "qlora") else "full")
    assert made["model"]["base"] == ("mlx-4bit" if objective == "qlora" else "stored")
    assert made["batch"]["global"] == (8 if objective == "dpo" else folder.SAMPLES_PER_STEP)
    assert made["group"]["first_shares"] == "timed" and {table["threads"] for table in made["nodes"].values()} == {1}
    assert folder.run_config(tmp_path, {"a": "auto"}, 1, objective)["optimizer"]["warmup_steps"] < 1
