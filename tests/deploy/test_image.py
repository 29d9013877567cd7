"""Images that tools/image.py builds: size, time, and what an edit builds again."""

import os
import stat
from pathlib import Path

import pytest
from tests.deploy.support.builds import Build, Builds, mounts_under
from tests.deploy.support.containers import Containers, Image
from tests.waiting import slowness

from trainctl import protocol

pytestmark = [pytest.mark.tier("soak"), pytest.mark.needs("buildah"), pytest.mark.timeout(3600)]
MOST_WATCH_BYTES = 150e6
MOST_COLD_SECONDS, MOST_EDIT_SECONDS = 600.0, 20.0
EDIT = "PLANTED = 1\n"


def shown(target: str, sizes: list[int], first: Build) -> None:
    parts = ", ".join(f"{size / 1e6:.1f}" for size in sizes)
    print(
        f"\n{target}: {sum(sizes) / 1e6:.0f} MB compressed (base and layers: {parts}), cold in {first.seconds:.0f} s,"
        f" load {slowness():.1f}"
    )


@pytest.mark.parametrize("target", ["watch", "torch"])
def test_an_image_is_built_without_a_registry(builds: Builds, target: str, tmp_path: Path) -> None:
    built = builds[target]
    sizes = builds.compressed(built.name, tmp_path)
    shown(target, sizes, built)
    assert built.seconds < MOST_COLD_SECONDS * slowness()
    assert target != "watch" or sum(sizes) < MOST_WATCH_BYTES
    with Image.mounted(built.name, **builds.env) as image:
        assert not (image.root / "opt" / "uv").exists() and not [*(image.root / "src").glob("*")]
        assert not [*(image.root / "var/lib/apt/lists").glob("*")] and not [*(image.root / "root").glob(".cache/*")]
        assert image.user == [1000, 1000] and (image.root / "opt/trainctl/bin/trainctl").stat().st_uid == 0
        assert [path for path in _others_write(image.root) if path.name not in ("tmp", "lock")] == []


def _others_write(root: Path) -> list[Path]:
    """The folders of an image in which each user may write."""
    folders = [Path(folder) for folder, _, _ in os.walk(root)]
    return [folder for folder in folders if folder.stat().st_mode & stat.S_IWOTH]


@pytest.mark.parametrize("target", ["watch", "torch"])
def test_an_edit_of_the_source_builds_only_the_last_layer_again(builds: Builds, target: str) -> None:
    before = builds.layers(builds[target].name)
    file = builds.source / "tui" / "trainctl" / "tui" / "__init__.py"
    text = file.read_text("utf-8")
    file.write_text(text + EDIT, "utf-8")
    try:
        again = builds.build(target)
    finally:
        file.write_text(text, "utf-8")
    print(f"\n{target}: built again after an edit in {again.seconds:.1f} s, load {slowness():.1f}")
    after = builds.layers(again.name)
    assert len(after) == len(before) and [old == new for old, new in zip(before, after, strict=True)].count(False) == 1
    with Image.mounted(again.name, **builds.env) as image:
        (copied,) = image.root.glob("opt/trainctl/lib/python3*/site-packages/trainctl/tui/__init__.py")
        assert copied.read_text("utf-8") == text + EDIT
    assert again.seconds < MOST_EDIT_SECONDS * slowness()


@pytest.mark.needs("runc", "namespaces")
def test_the_watch_image_runs_trainctl_and_nothing_of_it_is_left(builds: Builds, tmp_path: Path) -> None:
    words = ["tini", "--", "trainctl", "--version"]
    with Image.mounted(builds["watch"].name, **builds.env) as image:
        containers = Containers(tmp_path)
        try:
            process = containers.start("watch", image.configuration(words, {}, [], Path("/proc/self/ns/net")))
            assert process.wait(600) == 0, containers.said("watch")
        finally:
            containers.close()
        assert containers.said("watch") == f"trainctl {protocol.__version__}\n"
        assert containers.left() == []
        root = image.root
    assert mounts_under(root) == []
