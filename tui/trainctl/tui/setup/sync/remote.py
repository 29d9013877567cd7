"""What `trainctl cluster sync` runs on the machine that it copies to: called there over SSH, JSON in and JSON out.

`python -m trainctl.tui.setup.sync.remote look|verify` takes a list of questions and gives a list of answers. Only
`verify` changes anything: it names a revision in the Hugging Face cache.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from trainctl.protocol.config.data_files import data_files
from trainctl.protocol.config.model_facts import INDEX_FILE, SINGLE_FILE
from trainctl.protocol.errors import InvalidInputError, TrainctlError, installing
from trainctl.protocol.files.durable_files import make_folder, write_file
from trainctl.protocol.machine.file_digests import file_digest
from trainctl.tui.setup.sync import rsync
from trainctl.tui.setup.sync.plan import data_root


def look(given: dict[str, Any]) -> dict[str, Any]:
    """What is here of the files asked about, as `plan.NodeFiles`, and where rsync is. Raises TrainctlError.

    `given`: a `plan.Target.request`.
    """
    root = _root(given)
    there = _nearest(root)
    return {
        "root": str(root), "lacking": list(_lacking(root, given)), "extra": sorted(_extra(root, given)),
        "current": _is_current(given), "free_bytes": shutil.disk_usage(there).free, "disk": there.stat().st_dev,
        "rsync": rsync.usable(),
    }  # fmt: skip


def verify(given: dict[str, Any]) -> dict[str, Any]:
    """Which files still differ. If none does, a model of the Hugging Face cache gets this revision as its newest one.

    `given`: a `plan.Target.request`.
    """
    answer = look(given)
    if given["revision"] and not answer["lacking"]:
        _make_current(given)
        answer["current"] = True
    return answer


def _root(given: dict[str, Any]) -> Path:
    if not given["revision"]:
        return Path(given["root"])
    return _cached(given) / "snapshots" / str(given["revision"])


def _cached(given: dict[str, Any]) -> Path:
    """The folder of the model in this machine's Hugging Face cache."""
    if importlib.util.find_spec("huggingface_hub") is None:
        problem = f"a Hugging Face id needs huggingface_hub on that machine; {installing('torch', 'mlx')}"
        raise InvalidInputError(given["path"], problem)
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    return Path(HF_HUB_CACHE) / repo_folder_name(repo_id=given["path"], repo_type="model")


def _is_current(given: dict[str, Any]) -> bool:
    if not given["revision"]:
        return True
    with contextlib.suppress(OSError):
        return _reference(given).read_text("ascii", "replace").strip() == str(given["revision"])
    return False


def _make_current(given: dict[str, Any]) -> None:
    """As huggingface_hub notes which revision it has downloaded last."""
    file = _reference(given)
    make_folder(file.parent)
    write_file(file, given["revision"].encode("ascii"))


def _reference(given: dict[str, Any]) -> Path:
    return _cached(given) / "refs" / "main"


def _nearest(folder: Path) -> Path:
    """The folder itself, or the lowest one above it that exists."""
    return next(one for one in (folder, *folder.parents) if one.is_dir())


def _lacking(root: Path, given: dict[str, Any]) -> Iterable[str]:
    """Those that aren't there or have another size, and of the others those with another digest."""
    for name, digest in given["digests"].items():
        file = root / name
        if not file.is_file() or file.stat().st_size != given["sizes"][name] or file_digest(file) != digest:
            yield name


def _extra(root: Path, given: dict[str, Any]) -> Iterable[str]:
    """What the run would read here besides the files asked about."""
    path = Path(given["path"])
    if given["what"] == "model":
        found = (root / name for name in (SINGLE_FILE, INDEX_FILE) if (root / name).is_file())  # they decide
    elif data_root(path) == root:
        found = (file for file in data_files(path, given["kind"]) if file.is_file())
    else:
        return set()
    return {file.relative_to(root).as_posix() for file in found} - set(given["digests"])


def answers(call: Callable[[dict[str, Any]], dict[str, Any]], items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each item, what the call gives or the problem that it has."""
    found: list[dict[str, Any]] = []
    for given in items:
        try:
            found.append(call(given))
        except OSError as error:
            found.append({"problem": f"{error.filename or given['root']}: {error.strerror or error}"})
        except TrainctlError as error:
            found.append({"problem": str(error)})
    return found


def main() -> int:
    """The exit status."""
    call = {"look": look, "verify": verify}.get(" ".join(sys.argv[1:]))
    if call is None:
        print("usage: trainctl.tui.setup.sync.remote look|verify", file=sys.stderr)
        return 2
    os.umask(0o022)
    print(json.dumps(answers(call, json.loads(sys.stdin.read()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
