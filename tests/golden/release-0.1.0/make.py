"""Make this folder's archives again: the wheel of 0.1.0, a state folder as its programs leave it, and its wire vectors.

    .venv/bin/python tests/golden/release-0.1.0/make.py

Run it at the release's commit, by the interpreter of a .venv with torch and MLX, on Linux as root (main threads are
held by ptrace); it takes some fifteen minutes. Everything happens below /tmp/trainctl-0.1.0, which it empties first, so
that no path in the records names another folder of the machine.
"""

import csv
import hashlib
import io
import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import msgpack

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
ROOT = Path("/tmp/trainctl-0.1.0")
VENV, STATE = ROOT / "venv", ROOT / "state"
KEPT = ("state", "keys", "logs", "model", "model-of-beta", "text")
LIMIT_BYTES = 5_000_000
ENV = {
    "HOME": str(ROOT / "home"), "PATH": f"{VENV}/bin:/usr/bin:/bin", "USER": "test-key", "LOGNAME": "test-key",
    "LANG": "C.UTF-8", "TZ": "UTC", "TRAINCTL_STATE": str(STATE), "PYTHONDONTWRITEBYTECODE": "1",
}  # fmt: skip


def main() -> None:
    shutil.rmtree(ROOT, ignore_errors=True)
    ROOT.mkdir()
    wheel = build()
    subprocess.run([VENV / "bin" / "python", HERE / "scenario.py"], env=ENV, check=True)
    keep(wheel)


def keep(wheel: Path) -> None:
    """Write what is kept in this folder."""
    wire = REPOSITORY / "tests" / "golden" / "wire"
    expected = {
        "sha256": {wheel.name: digest(wheel)}, "vectors": len(list(wire.glob("*.json"))), "runs": numbers(),
        "events": events(),
    }  # fmt: skip
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n", "utf-8")
    settle()
    kept = [path for path in sorted(ROOT.iterdir()) if path.name in KEPT or path.suffix == ".toml"]
    pack(HERE / "state.tar.xz", kept)
    pack(HERE / "wire.tar.xz", [wire])
    size = sum(path.stat().st_size for path in HERE.iterdir() if path.is_file())
    assert size < LIMIT_BYTES, f"{size:,} bytes"
    print(f"{size:,} bytes in {HERE}")


def build() -> Path:
    """The wheel, installed in a venv that has what it depends on from this interpreter."""
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", HERE, REPOSITORY], check=True)
    (wheel,) = HERE.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", VENV], check=True)
    install = [sys.executable, "-m", "pip", "--python", VENV / "bin" / "python", "install", "--quiet", "--no-deps"]
    subprocess.run([*install, wheel], check=True)
    (ROOT / "dependencies").symlink_to(sysconfig.get_paths()["purelib"])  # a link: logs name files of it
    (site,) = VENV.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{ROOT / 'dependencies'}\n")
    return wheel


def settle() -> None:
    """Databases without their logs, and nothing that names this machine."""
    for file in sorted(STATE.rglob("*.db")):
        with sqlite3.connect(file) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()
        for suffix in ("-wal", "-shm"):
            Path(f"{file}{suffix}").unlink(missing_ok=True)
    foreign = [b"/work", b"/root", str(Path.home()).encode(), str(REPOSITORY).encode()]
    host = re.compile(rb"(?<![\w-])" + re.escape(socket.gethostname().encode()) + rb"(?![\w-])")
    for file in (file for name in KEPT for file in sorted((ROOT / name).rglob("*")) if file.is_file()):
        content = file.read_bytes()
        found = [word for word in foreign if word in content]
        found += host.findall(words(file, content))
        assert not found, (file, found)


def words(file: Path, content: bytes) -> bytes:
    """What of a file is text, for a host's name may be short: in a database its texts and messages."""
    if file.suffix == ".safetensors" or file.suffix == ".status":
        return b""
    if file.suffix != ".db":
        return content
    with sqlite3.connect(file) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows = [row for name in tables for row in connection.execute(f"SELECT * FROM {name}")]
    connection.close()
    values = [value for row in rows for value in row]
    texts = [value if isinstance(value, str) else str(msgpack.unpackb(value)) for value in values
             if isinstance(value, str | bytes)]  # fmt: skip
    return "\n".join(texts).encode()


def numbers() -> dict[str, dict[str, object]]:
    """What 0.1.0's own command line says of each run."""
    found: dict[str, dict[str, object]] = {}
    for folder in sorted(STATE.glob("alpha/runs/*")):
        tables = {}
        for what in ("steps", "ranks", "events", "hosts"):
            command = [VENV / "bin" / "trainctl", "export", folder, "--format", "csv", "--what", what]
            said = subprocess.run(command, env=ENV, check=True, capture_output=True, text=True).stdout
            tables[what] = list(csv.DictReader(io.StringIO(said)))
        last = tables["steps"][-1] if tables["steps"] else {}
        found[folder.name] = {
            "state": ledger(folder.name), "shown": shown(folder),
            "rows": {what: len(rows) for what, rows in tables.items()},
            "last_step": int(last.get("step", 0)), "last_loss": last.get("loss", ""),
        }  # fmt: skip
    return found


def shown(folder: Path) -> str:
    """The state by the last view in the run's own record: one that cannot go back to its checkpoint is left as it was
    while it waited."""
    with sqlite3.connect(folder / "record.db") as connection:
        ((view,),) = connection.execute("SELECT value FROM meta WHERE key = 'view'").fetchall()
    connection.close()
    return str(json.loads(view)["state"])


def ledger(run: str) -> str:
    with sqlite3.connect(STATE / "alpha" / "agent.db") as connection:
        ((state,),) = connection.execute("SELECT state FROM runs WHERE run = ?", (run,)).fetchall()
    connection.close()
    return str(state)


def events() -> dict[str, dict[str, int]]:
    """How often each kind of event that 0.1.0 writes is in the record of each run; those of kinds.json."""
    kinds = json.loads((HERE / "kinds.json").read_text("utf-8"))
    found: dict[str, dict[str, int]] = {name: {} for name in kinds}
    for folder in sorted(STATE.glob("alpha/runs/*")):
        with sqlite3.connect(folder / "record.db") as connection:
            rows = connection.execute("SELECT kind, severity, text, verb, outcome FROM events ORDER BY id").fetchall()
        connection.close()
        for row in rows:
            matching = [name for name, wanted in kinds.items() if matches(wanted, *row)]
            assert matching, f"{folder.name}: no kind of event in kinds.json is like {row}"
            for name in matching:
                found[name][folder.name] = found[name].get(folder.name, 0) + 1
    missing = [name for name, runs in found.items() if not runs and not kinds[name].get("not_made")]
    assert not missing, f"no run has {missing}"
    return found


def matches(wanted: dict[str, str], kind: str, severity: str, text: str, verb: str | None, outcome: str | None) -> bool:
    row = {"kind": kind, "severity": severity, "verb": verb, "outcome": outcome}
    same = all(row[field] == wanted[field] for field in row if field in wanted)
    return same and re.search(wanted.get("text", ""), text) is not None


def pack(archive: Path, paths: list[Path]) -> None:
    def neutral(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for path in paths:
            tar.add(path, path.name, filter=neutral)


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


if __name__ == "__main__":
    os.umask(0o022)
    main()
