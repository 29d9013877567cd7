"""The contents that a power cut leaves of a folder, at each moment of a program that writes to it.

The kernel's page cache survives a kill, so no kill shows that an fsync is missing. Here a disk is modelled that has of
a file the bytes that it had at its last fsync, and of a folder the names at its last fsync. Everything else may be
lost; what the system does of its own accord comes in as `Also`.
"""

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import pytest

Also = Literal["nothing", "removals", "names"]
"""Ways in which a disk may have more than was synced: nothing more; that files and folders were removed (whatever still
has their name then finds nothing); or all names as they were, of files whose bytes were not synced too."""
ALSO: tuple[Also, ...] = get_args(Also)
Tree = dict[str, Any]
"""A folder's tree: for each name, a file's bytes or a folder's tree."""


@dataclass(frozen=True, eq=False)
class Node:
    """A file or folder, under whatever name."""

    is_folder: bool


Names = dict[Node, dict[str, Node]]


@dataclass(frozen=True)
class Moment:
    """After a call."""

    call: Literal["begin", "sync", "rename", "remove"]
    path: str  # from the root; of a rename, the one before it
    target: str  # of a rename
    root: Node
    content: dict[Node, bytes]  # as synced
    synced: Names
    names: Names
    gone: frozenset[Node]

    def after_a_cut(self, also: Also) -> Tree:
        """Return what is on the disk if the power goes now."""
        return self._tree(self.root, also)

    def _tree(self, folder: Node, also: Also) -> Tree:
        names = (self.names if also == "names" else self.synced).get(folder, {})
        left = {name: node for name, node in names.items() if also == "nothing" or node not in self.gone}
        return {
            name: self._tree(node, also) if node.is_folder else self.content.get(node, b"")
            for name, node in left.items()
        }


class SyncedDisk:
    """The disk of a folder and what is in it. All that is there at first is on the disk."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._nodes: dict[tuple[int, int], Node] = {}
        self._names: Names = {}
        self._paths: dict[Node, str] = {}
        self._gone: set[Node] = set()
        self._look()
        self._synced = {**self._names}
        self._content = {node: self._read(node) for node in self._paths if not node.is_folder}
        self.moments = list[Moment]()

    def holds(self, names: dict[str, str]) -> None:
        """Have the root's names on the disk be others, as after a rename that wasn't synced: the name on the disk, and
        the one in the folder."""
        root = self._names[self._node(self._root)]
        self._synced[self._node(self._root)] = {name: root[now] for name, now in names.items()}

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Note each call inside that has to do with what is on the disk."""
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(fcntl, "F_FULLFSYNC", raising=False)  # macOS takes os.fsync then
            patch.setattr(os, "fsync", self._syncing(os.fsync))
            for name in ("rename", "replace"):
                patch.setattr(os, name, self._renaming(getattr(os, name)))
            for name in ("unlink", "remove", "rmdir"):
                patch.setattr(os, name, self._removing(getattr(os, name)))
            self._note("begin", "")
            yield

    def _syncing(self, call: Any) -> Any:
        def fsync(descriptor: int) -> None:
            call(descriptor)
            self._look()
            node = self._nodes.get(_key(os.fstat(descriptor)))
            if node is None or node not in self._paths:  # elsewhere
                return
            if node.is_folder:
                self._synced[node] = self._names[node]
            else:
                self._content[node] = self._read(node)
            self._note("sync", self._paths[node])

        return fsync

    def _renaming(self, call: Any) -> Any:
        def rename(source: Any, target: Any) -> None:
            self._look()
            moved, replaced = self._known(source), self._known(target) if os.path.lexists(target) else None
            call(source, target)
            if replaced is not None:
                self._forget(replaced)
            if moved is not None:
                self._note("rename", self._paths[moved], os.path.relpath(target, self._root))

        return rename

    def _removing(self, call: Any) -> Any:
        def remove(path: Any, *, dir_fd: int | None = None) -> None:
            self._look()
            node = self._known(path, dir_fd)
            call(path, dir_fd=dir_fd)
            if node is not None:
                self._forget(node)
                self._note("remove", self._paths[node])

        return remove

    def _forget(self, node: Node) -> None:
        """The system may give its inode to another."""
        self._nodes = {key: known for key, known in self._nodes.items() if known is not node}
        self._gone.add(node)

    def _note(self, call: Any, path: str, target: str = "") -> None:
        self._look()
        self.moments.append(
            Moment(
                call, path, target, self._node(self._root), {**self._content}, {**self._synced}, self._names,
                frozenset(self._gone),
            )
        )  # fmt: skip

    def _look(self) -> None:
        self._names, self._paths = {}, {}
        self._visit(self._root)

    def _visit(self, path: Path) -> Node:
        node = self._node(path)
        self._paths[node] = path.relative_to(self._root).as_posix()
        if node.is_folder:
            self._names[node] = {each.name: self._visit(each) for each in path.iterdir()}
        return node

    def _node(self, path: Path) -> Node:
        found = path.lstat()
        return self._nodes.setdefault(_key(found), Node(stat.S_ISDIR(found.st_mode)))

    def _known(self, path: Any, dir_fd: int | None = None) -> Node | None:
        """None if it is elsewhere. Raises OSError."""
        node = self._nodes.get(_key(os.lstat(path, dir_fd=dir_fd)))
        return node if node in self._paths else None

    def _read(self, node: Node) -> bytes:
        return (self._root / self._paths[node]).read_bytes()


def _key(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def lay(tree: Tree, folder: Path) -> None:
    """Make a folder of a tree."""
    folder.mkdir()
    for name, content in tree.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            lay(content, folder / name)
