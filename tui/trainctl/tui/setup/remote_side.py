"""The part of `trainctl cluster add` that runs on the machine that is added: called there over SSH, JSON in and JSON
out.

`python -m trainctl.tui.setup.remote_side join|start|stream`. Each can be called again: it changes only what isn't so
yet.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from trainctl.protocol.config import cluster_file, names
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.protocol.machine.speeds import exchange
from trainctl.protocol.security import keys

START_SECONDS, LEAVE_SECONDS = 30.0, 20.0
NO_MANAGER = 7
"""The exit code of `trainctl-agent install` where neither systemd nor launchd runs the machine."""


def join(given: dict[str, Any]) -> dict[str, Any]:
    """Keys, the nodes' files, and who may send commands. Raises InvalidInputError; nothing is changed then.

    `given`: name, address (this node's), nodes (others: name -> address, key), user (name, key), networks.
    """
    folder, file = keys.KeyFolder(), cluster_file.default_path()
    known = cluster_file.read_default()
    made = folder.make(given["name"])
    own = folder.agent().public
    nodes = {given["name"]: {"address": given["address"], "key": own}, **given["nodes"]}
    changed = [f"created the {which} key" for which in made]
    changed += add_nodes(file, known, nodes)
    changed += _trust(file, given["networks"])
    if folder.authorized().find(given["user"]["key"]) is None:
        folder.authorize(given["user"]["name"], given["user"]["key"], "operator")
        changed.append(f"authorised {given['user']['name']} as operator")
    return {"key": own, "user": {"name": folder.user().name, "key": folder.user().public}, "changed": changed}


def add_nodes(file: Path, known: cluster_file.Cluster, nodes: dict[str, dict[str, str]]) -> list[str]:
    """Write a file of cluster.d for each node that the cluster beside `file` hasn't; says what was written.

    Raises InvalidInputError, before anything is written, for one that it has otherwise.
    """
    missing = dict[str, dict[str, str]]()
    for name, entry in nodes.items():
        there = known.nodes.get(name)
        if there is None:
            missing[name] = entry
        elif (there.address, there.key or entry["key"]) != (entry["address"], entry["key"]):
            raise InvalidInputError(
                f"{file}: nodes.{name}",
                f"already exists with another address or key ({there.address}); remove it, "
                f"or give the other node a different --name",
            )
    written: list[Path] = []
    try:
        for name, entry in missing.items():
            target = cluster_file.added_directory(file) / f"{name}.toml"
            target.parent.mkdir(parents=True, exist_ok=True)
            keys.write_private(target, {"nodes": {name: entry}})
            written.append(target)
    except OSError:
        for target in written:
            target.unlink(missing_ok=True)
        raise
    return [f"wrote {target}" for target in written]


def _trust(file: Path, networks: list[str]) -> list[str]:
    """Write a cluster file that says in which networks gradients may travel, where there is no file yet."""
    if not networks or file.exists():
        return []
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("xb") as stream:
        tomli_w.dump({"trusted_networks": networks}, stream)
    return [f"wrote {file}"]


def start(given: dict[str, Any]) -> dict[str, Any]:
    """Have the agent run: as the user's service where there is a manager of services, else by itself.

    `given`: name, restart (whether one that runs must start again, for it has old settings). Raises TrainctlError.
    """
    agent = Path(sys.executable).with_name("trainctl-agent")
    words = ["install", "--user", "--name", given["name"], "--json"]
    if given["restart"]:
        _call(agent, ["uninstall", "--user", "--json"])
    status, said = _call(agent, words)
    if status == 0:
        changed, remarks = bool(said.get("changed", True)) or given["restart"], said.get("remarks", [])
        return {"how": "service", "changed": changed, "why": "", "remarks": remarks}
    if status != NO_MANAGER:  # what was begun would start a second agent some day
        _call(agent, ["uninstall", "--user", "--json"])
    why = said.get("error", {}).get("text", "") or "no service manager"
    changed = _start_detached(agent, given["name"], restart=given["restart"])
    return {"how": "detached", "changed": changed, "why": why, "remarks": []}


def _call(agent: Path, words: list[str]) -> tuple[int, dict[str, Any]]:
    done = subprocess.run([agent, *words], capture_output=True, text=True, timeout=150, check=False)
    with contextlib.suppress(ValueError):
        found = json.loads(done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "{}")
        if isinstance(found, dict):
            return done.returncode, found
    return done.returncode, {}


def _start_detached(agent: Path, name: str, *, restart: bool) -> bool:
    """Start the agent in a session of its own, its output in a file; False if it runs already. Raises TrainctlError."""
    folder = names.node_directory(name)
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / "detached.toml"
    process = running(note)
    if process is not None and not restart:
        return False
    if process is not None:
        process.terminate()
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(LEAVE_SECONDS)
    log = folder / "agent.log"
    begin = log.stat().st_size if log.exists() else 0
    with log.open("ab") as out:
        begun = subprocess.Popen(
            [agent, "run", "--name", name], stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    keys.write_private(note, {"pid": begun.pid, "started": psutil.Process(begun.pid).create_time()})
    _await_bound(begun, log, begin)
    return True


def _await_bound(begun: "subprocess.Popen[bytes]", log: Path, begin: int) -> None:
    """The agent's first line of JSON says that it listens."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        text = log.read_bytes()[begin:].decode("utf-8", "replace")
        if '"listen"' in text:
            return
        if begun.poll() is not None:
            last = [line for line in text.splitlines() if line.strip()]
            raise TrainctlError(last[-1] if last else f"the agent exited with {begun.returncode}")
        time.sleep(0.05)
    begun.send_signal(signal.SIGTERM)
    raise TrainctlError(f"the agent didn't respond for {START_SECONDS:g} s; see {log}")


def running(note: Path) -> psutil.Process | None:
    """Return the process that was started by itself before, if it lives."""
    with contextlib.suppress(OSError, ValueError, KeyError, psutil.Error):
        kept = tomllib.loads(note.read_text("utf-8"))
        process = psutil.Process(kept["pid"])
        if abs(process.create_time() - kept["started"]) < 1 and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def stream(given: dict[str, Any]) -> None:
    """Listen on this node's address, and exchange zeros with the first who knows the token, for a bounded time and
    count.

    `given`: host (where to listen), token. Prints the port, and then the bytes per second that arrived.
    """
    with socket.create_server((given["host"], 0)) as server:
        server.settimeout(15)
        print(json.dumps({"port": server.getsockname()[1]}), flush=True)
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(10)
            token = given["token"].encode()
            if connection.recv(len(token), socket.MSG_WAITALL) != token:
                return
            print(json.dumps({"bytes_per_second": exchange(connection)}), flush=True)


def main() -> int:
    """Return the exit status; a failure is one line on standard error."""
    given = json.loads(sys.stdin.read() or "{}")
    os.umask(0o077)
    try:
        match sys.argv[1:]:
            case ["join"]:
                print(json.dumps(join(given)))
            case ["start"]:
                print(json.dumps(start(given)))
            case ["stream"]:
                stream(given)
            case _:
                print("usage: there join|start|stream", file=sys.stderr)
                return 2
    except (TrainctlError, OSError) as error:
        print(str(error), file=sys.stderr)
        return getattr(error, "exit_code", 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
