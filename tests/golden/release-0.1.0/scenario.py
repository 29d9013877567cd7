"""What is done to the frozen cluster, so that its records have every kind of event that 0.1.0 writes.

Started by make.py in the venv that has the 0.1.0 wheel; `python scenario.py [RUN ...]` leaves other runs out.
"""

import contextlib
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import nodes as n
from nodes import Run, client, held, in_touch, no_room, trainctl, until
from safetensors.numpy import load_file, save_file

from trainctl.trainer import demo_assets

MODEL, OTHER, TEXT = n.ROOT / "model", n.ROOT / "model-of-beta", n.ROOT / "text"
RUN_FILE = """\
[run]
name = "{name}"
steps = {steps}
seed = 3
orphan_seconds = 120.0
{run}
[model]
path = "model"
dtype = "{dtype}"

[data]
path = "text"
tokenizer = "bytes"
sequence_length = 48
held_out = 0.05

[batch]
global = {batch}
micro = 2

[optimizer]
learning_rate = {rate}
weight_decay = 0.1
warmup_steps = 5

[checkpoint]
every_steps = {checkpoint}
keep_last = 1
at_end = true

[evaluate]
every_steps = 100

[group]
first_shares = "timed"
sync_weights_every = {sync}

[alerts]
clear_seconds = 1.0
disk_free_gb = {disk}
disk_clear_gb = {disk}
silent_seconds = 4.0
stall_seconds = 2.0
stall_times = 1.0
loss_spike_steps = 1
loss_spike_mads = 4.0
throughput_drop_percent = 40.0
throughput_clear_percent = 30.0
"""
NODE = '\n[nodes.{node}]\nbackend = "{backend}"\ndevice = "cpu"\nthreads = 1\n{more}'


def assets() -> None:
    """A Llama of 6,832 parameters and text with some structure."""
    shape = demo_assets.llama_config(hidden=16, layers=1, heads=2, intermediate=32)
    assert demo_assets.make_model(MODEL, shape, seed=7) < 10_000
    shutil.copytree(MODEL, OTHER)
    words = ["def", "return", "import", "self", "value", "(", ")", ":", "\n    ", "for", "in", "range", "x"]
    TEXT.mkdir()
    (TEXT / "a.txt").write_text(" ".join(random.Random(5).choices(words, k=6000)), encoding="utf-8")


def keys() -> None:
    """A folder for each node, one for a viewer, one whose key was revoked, and one that nobody lets in."""
    for name in (*n.PORTS, "viewer", "revoked", "stranger"):
        trainctl("keys", "new", "--name", f"{name}.test-key", keys=name)
    user = {name: n.KeyFolder(n.KEYS / name).user().public for name in ("alpha", "viewer", "revoked")}
    for node in n.PORTS:
        if node != "alpha":
            trainctl("keys", "authorize", "operator.test-key", user["alpha"], "--role", "operator", keys=node)
        trainctl("keys", "authorize", "viewer.test-key", user["viewer"], "--role", "viewer", keys=node)
        trainctl("keys", "authorize", "revoked.test-key", user["revoked"], "--role", "operator", keys=node)
        trainctl("keys", "revoke", "revoked.test-key", keys=node)
    tables = "".join(
        f'\n[nodes.{node}]\naddress = "tcp://127.0.0.1:{port}"\nkey = "{n.KeyFolder(n.KEYS / node).agent().public}"\n'
        for node, port in n.PORTS.items()
    )
    n.CLUSTER.write_text(f"# Test keys, made for this folder and used nowhere else.\nquorum = true\n{tables}")


def start(
    name: str, ranks: dict[str, str], *, more: dict[str, str] | None = None, expect: int = 0, **options: object
) -> Run:
    given = {"steps": 100_000, "dtype": "float32", "batch": 24, "rate": 3e-3, "checkpoint": 200, "sync": 0,
             "disk": 5.0, "run": "", **options}  # fmt: skip
    file = n.ROOT / f"{name}.toml"
    tables = (
        NODE.format(node=node, backend=backend, more=(more or {}).get(node, "")) for node, backend in ranks.items()
    )
    file.write_text(RUN_FILE.format(name=name, **given) + "".join(tables))
    trainctl("check", str(file))
    made = Run(trainctl("run", str(file), expect=expect).strip(), tuple(ranks))
    print(f"=== {made.id}", flush=True)
    return made


def ended(run: Run, state: str) -> None:
    until(lambda: kept_state(run) == state, f"the state {state}")
    until(lambda: not any(trainers(run)), "the trainers' end")


def kept_state(run: Run) -> str:
    """As the lead's agent keeps it for good, which is later than it shows it."""
    with client(run.lead) as asked:
        return next(known.state for known in asked.runs().runs if known.run == run.id)


def trainers(run: Run) -> list[int]:
    found = []
    for node in run.ranks:
        with contextlib.suppress(OSError):  # none was started in the run's last life
            found.append(run.trainer(node))
    return [pid for pid in found if n.psutil.pid_exists(pid)]


# ---------------------------------------------------------------- the mixed run, which finishes


def mixed(nodes: n.Nodes) -> None:
    run = start(
        "mixed", {"alpha": "torch", "beta": "mlx", "gamma": "torch"}, steps=1200, sync=150, disk=1e7, checkpoint=300
    )
    run.more(10)
    edits(run)
    refused(run)
    drained(run)
    killed(nodes, run)
    alerts(run)
    silent(nodes, run)
    retracted(run)
    handed_over(nodes, run)
    record_refused(nodes, run)
    run.send("resume", expect=None)
    ended(run, "finished")
    run.send("note", "text=looks good: kept for the paper")


def edits(run: Run) -> None:
    run.send("resize-batch", "micro=4", node="beta")
    run.send("rebalance", "alpha=10", "beta=4", "gamma=10")
    run.send("rebalance", "beta=25%")
    run.send("rebalance", "auto=true")
    run.send("set-lr", "value=0.002", "schedule=scale")
    run.send("set-global-batch", "value=30", "schedule=scale")
    run.send("note", "text=a larger batch from here on, ∑ = 30")
    run.send("checkpoint")
    run.send("evaluate")
    run.send("pause")
    run.send("resize-batch", "micro=1", node="gamma")
    run.send("resume")


def refused(run: Run) -> None:
    """Rejected, expired and failed commands, and one that was sent twice."""
    run.send("rebalance", "delta=4", expect=3)
    run.send("resize-batch", "micro=3", if_plan="1", expect=3)
    run.send("resume", expect=3)
    run.send("note", "text=never to be seen", run="no-such-run", expect=3)
    one = "0a0b0c0d-0000-4000-8000-000000000010"
    run.send("resize-batch", "micro=2", node="gamma", id=one)
    run.send("resize-batch", "micro=2", node="gamma", id=one)
    run.send("resize-batch", "micro=1", node="gamma", id=one, expect=3)
    for node in run.ranks:
        run.signal(node, signal.SIGSTOP)
    try:
        with client() as asked:
            with contextlib.suppress(Exception):
                asked.send("evaluate", {}, ttl_seconds=0.3, timeout_seconds=2)
            asked.send("pause", {}, wait="accepted")
            asked.send("resume", {}, wait="accepted")
    finally:
        for node in run.ranks:
            run.signal(node, signal.SIGCONT)
    run.event("evaluate expired")
    run.event("pause failed")
    run.more(2)


def drained(run: Run) -> None:
    run.send("drain", node="beta")
    run.send("admit", node="beta")
    run.send("drain", node="gamma")
    run.send("pause")
    run.signal("gamma", signal.SIGKILL)
    run.event("gamma is drained, and its trainer")
    run.send("admit", node="gamma", expect=None, wait="accepted")
    run.whole()


def killed(nodes: n.Nodes, run: Run) -> None:
    run.signal("gamma", signal.SIGKILL)
    run.event("gamma is lost")
    run.whole()
    run.event("gamma joins again", times=2)
    left = sum(" left: " in text for text in run.texts())
    run.reducers("alpha")[0].kill()
    with contextlib.suppress(AssertionError):
        run.event(" left: ", 10, left + 1)
    for child in run.reducers("alpha"):
        child.kill()
    run.event(" left: ", 30)
    run.whole()
    nodes.restart("alpha")
    in_touch()
    run.whole()
    nodes.restart("gamma")
    run.event("back in touch with gamma's trainer")
    run.whole()


def alerts(run: Run) -> None:
    """The disk's are open all the time."""
    run.send("acknowledge", "id=disk:beta")
    run.send("acknowledge", "id=disk:nowhere", expect=3)
    run.send("mute", "kind=disk", "minutes=600", node="gamma")
    run.send("mute", "kind=clock", "minutes=60")
    run.send("mute", "kind=clock", "minutes=0")
    for node in run.ranks:
        run.signal(node, signal.SIGSTOP)
    time.sleep(3.5)
    for node in run.ranks:
        run.signal(node, signal.SIGCONT)
    run.event("no step")
    run.event("stall is over")
    run.more(20)
    run.send("set-lr", "value=0.5", "schedule=set")
    run.event("by its trend")
    run.send("set-lr", "value=0.001", "schedule=set")
    run.more(5)


def silent(nodes: n.Nodes, run: Run) -> None:
    """Two of three agents away, so that no majority is left; then one of them, for long, and back elsewhere."""
    nodes.end("beta")
    nodes.end("gamma")
    run.event("no more steps")
    run.event("the agent of beta is silent")
    nodes.start("beta")
    nodes.start("gamma")
    run.event("enough nodes are in reach")
    in_touch()
    run.whole()
    run.send("pause")
    nodes.end("beta")
    run.event("the agent of beta is silent", times=2)
    nodes.start("beta", moved())
    run.event("the agent of beta is at tcp://127.0.0.1:27440 now")
    nodes.restart("beta")
    run.event("the agent of beta is at tcp://127.0.0.1:27420 now")
    run.whole()


def moved() -> Path:
    """The cluster file as a machine has it that has come back at another address."""
    file = n.ROOT / "moved.toml"
    file.write_text(n.CLUSTER.read_text().replace(str(n.PORTS["beta"]), "27440"))
    return file


def retracted(run: Run) -> None:
    """One rank alone applies a step, and dies: the others' main threads are held while they wait for the sum."""
    for _ in range(10):
        run.signal("beta", signal.SIGSTOP)
        time.sleep(0.4)
        if {run.phase("alpha"), run.phase("gamma")} == {"sync"}:
            before = run.step()
            with held(run.trainer("alpha")), held(run.trainer("gamma")):
                run.signal("beta", signal.SIGCONT)
                until(lambda before=before: run.step() > before, "a step of beta's own", 4)
                run.signal("beta", signal.SIGKILL)
                time.sleep(1.2)
            run.event(" retracted: ", 30)
            run.whole()
            return
        run.signal("beta", signal.SIGCONT)
        time.sleep(0.1)
    raise AssertionError("no moment for a retraction")


def handed_over(nodes: n.Nodes, run: Run) -> None:
    trainctl("promote", "gamma")
    run.lead = "gamma"
    run.event("gamma conducts the run from here on, in term")
    run.more(5)
    nodes.end("gamma")
    time.sleep(4)
    trainctl("promote", "alpha", "--timeout", "90")
    run.lead = "alpha"
    run.event("alpha conducts the run from here on, in term")
    nodes.start("gamma")
    in_touch()
    run.whole()


def record_refused(nodes: n.Nodes, run: Run) -> None:
    """The disk of the lead takes nothing for a while; then it takes no checkpoint."""
    with no_room(nodes.pid("alpha")):
        time.sleep(3)
    run.event("the record is being written again", 60)
    run.whole()
    writers = [run.folder(node) / "checkpoints" for node in run.ranks]
    for folder in writers:
        if folder.exists():
            folder.rename(folder.with_name("away"))
        folder.write_text("not a folder")
    run.send("checkpoint", expect=3)
    run.event("no checkpoint on")
    for folder in writers:
        folder.unlink()
        if folder.with_name("away").exists():
            folder.with_name("away").rename(folder)


# ---------------------------------------------------------------- the run that fails, and can be taken up


def failed(nodes: n.Nodes) -> None:
    own = {"alpha": "share = 8\n", "beta": f'share = 4\nmodel_path = "{OTHER}"\n'}
    run = start("failed", {"alpha": "torch", "beta": "mlx"}, more=own, batch=12)
    run.more(15)
    never_back(run)
    run.send("checkpoint")
    run.send("set-lr", "value=0.001", "schedule=set")
    for node in ("beta", "alpha"):
        run.signal(node, signal.SIGKILL)
    run.event("going back to the newest checkpoint")
    run.event("taken up again from step")
    run.whole()
    run.send("pause")
    run.send("checkpoint")
    run.send("resume")
    run.more(12)
    run.send("resize-batch", "micro=1", node="beta")
    run.more(3)
    MODEL.rename(n.ROOT / "model-away")
    for node in ("beta", "alpha"):
        run.signal(node, signal.SIGKILL)
    try:
        ended(run, "failed")
    finally:
        (n.ROOT / "model-away").rename(MODEL)


def never_back(run: Run) -> None:
    """beta's model is another one for a while, and then is not there for longer than five starts."""
    run.send("pause")
    weights = load_file(OTHER / "model.safetensors")
    save_file({name: values * 1.001 for name, values in weights.items()}, OTHER / "model.safetensors")
    run.signal("beta", signal.SIGKILL)
    run.event("beta is lost")
    run.send("resume", expect=None)
    run.event("beta cannot join again")
    run.send("pause")
    save_file(weights, OTHER / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(MODEL / "model.safetensors", OTHER / "model.safetensors")
    run.signal("beta", signal.SIGKILL)
    time.sleep(2)
    run.send("admit", node="beta", expect=None, wait="accepted")
    run.whole()
    run.send("pause")
    OTHER.rename(n.ROOT / "other-away")
    run.signal("beta", signal.SIGKILL)
    run.event("failed: started 5 times", 240)
    (n.ROOT / "other-away").rename(OTHER)
    run.send("admit", node="beta", expect=None, wait="accepted")
    run.whole()


def memory(nodes: n.Nodes) -> None:
    """A rank dies near its cap, once with a micro-batch that can be halved; and runs short of memory within a step. The
    program that is called about alerts fails."""
    nodes.restart("alpha", "--alert-command", "false")
    in_touch()
    more = {"alpha": "memory_limit_gb = 0.45\n"}
    run = start("memory", {"alpha": "torch", "gamma": "torch"}, more=more, batch=400, checkpoint=0, disk=1e7)
    run.event("alert command failed")
    run.more(8)
    run.send("rebalance", "alpha=390", "gamma=10")
    with short_of_memory(run.trainer("alpha")):
        run.send("resize-batch", "micro=390", node="alpha")
        with contextlib.suppress(AssertionError):
            run.event("the micro-batch was run again", 20)
    run.whole()
    run.send("rebalance", "alpha=200", "gamma=200")
    run.send("set-global-batch", "value=12")
    run.send("resize-batch", "micro=2", node="alpha")
    for words in ("resize-batch alpha 2 → 1: out of memory", "is out of memory at a micro-batch of 1"):
        run.signal("alpha", signal.SIGKILL)
        run.event(words)
        run.whole()
    run.send("stop", "checkpoint=false")
    ended(run, "stopped")
    nodes.restart("alpha")
    in_touch()


@contextlib.contextmanager
def short_of_memory(pid: int, room_bytes: int = 6_000_000) -> Iterator[None]:
    """A process gets little more private memory than it has."""
    before = resource.prlimit(pid, resource.RLIMIT_DATA)
    status = Path(f"/proc/{pid}/status").read_text()
    data_bytes = 1024 * int(next(line for line in status.splitlines() if line.startswith("VmData")).split()[1])
    resource.prlimit(pid, resource.RLIMIT_DATA, (data_bytes + room_bytes, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_DATA, before)


# ---------------------------------------------------------------- runs of one rank


def stopped(nodes: n.Nodes) -> None:
    """It hangs for long, and is stopped with a checkpoint; the steps of its life before it was resumed don't stand."""
    run = start("stopped", {"alpha": "torch"}, batch=8, checkpoint=0)
    run.more(30)
    run.send("checkpoint")
    run.in_phase("alpha", "forward", "backward")
    with held(run.trainer("alpha")):
        run.event("part of step", 60)
    run.more(5)
    run.signal("alpha", signal.SIGSTOP)
    run.event("the last with the run's state, is silent")
    run.signal("alpha", signal.SIGCONT)
    run.more(5)
    run.send("set-lr", "value=0.0005", "schedule=set")
    run.send("stop", "checkpoint=false")
    ended(run, "stopped")
    trainctl("run", "--resume", run.id)
    run.event("settings are those of step")
    run.more(10)
    run.send("stop")
    ended(run, "stopped")


def stopped_hard(nodes: n.Nodes) -> None:
    """Stopped while its trainer says nothing: without its checkpoint, and where none was wanted."""
    for wanted in ("true", "false"):
        run = start(f"hard-{wanted}", {"alpha": "torch"}, batch=8, checkpoint=0)
        run.more(5)
        run.signal("alpha", signal.SIGSTOP)
        run.send("stop", f"checkpoint={wanted}", expect=None, timeout="90")
        run.event("stopped all the same")
        run.signal("alpha", signal.SIGCONT)
        ended(run, "stopped")


def overflow(nodes: n.Nodes) -> None:
    """float16, which overflows at a huge learning rate; its trainer hung while it loaded, and was started again."""
    with hung_at_start("overflow", signal.SIGSTOP):
        run = start("overflow", {"alpha": "torch"}, batch=8, checkpoint=0, dtype="float16", run="load_seconds = 6.0\n")
    run.event("while it loads: it is ended")
    run.more(25)
    run.send("checkpoint")
    run.send("set-lr", "value=1", "schedule=set")
    run.event("left the parameters alone")
    run.send("set-lr", "value=100", "schedule=set")
    run.event("the step is skipped")
    run.send("stop")
    ended(run, "stopped")


def early(nodes: n.Nodes) -> None:
    """Its trainer dies before it has loaded."""
    with hung_at_start("early", signal.SIGKILL):
        start("early", {"alpha": "torch"}, batch=8, expect=3)


@contextlib.contextmanager
def hung_at_start(name: str, number: signal.Signals) -> Iterator[None]:
    """The first trainer of a run that is started meanwhile is sent a signal while it loads."""
    over = threading.Event()

    def strike() -> None:
        while not over.wait(0.02):
            for file in n.STATE.glob(f"alpha/runs/{name}-*/rank-0.process.json"):
                with contextlib.suppress(ValueError, KeyError, OSError):
                    os.kill(n.json.loads(file.read_text())["pid"], number)
                    return

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


RUNS = {
    "mixed": mixed,
    "failed": failed,
    "memory": memory,
    "stopped": stopped,
    "hard": stopped_hard,
    "overflow": overflow,
    "early": early,
}


def main(wanted: list[str]) -> None:
    for folder in (n.STATE, n.KEYS, n.LOGS, n.ROOT / "home"):
        folder.mkdir()
    assets()
    keys()
    nodes = n.Nodes()
    try:
        for node in n.PORTS:
            nodes.start(node)
        in_touch()
        trainctl("ls", "--connect", f"tcp://127.0.0.1:{n.PORTS['alpha']}", keys="stranger", expect=6)
        trainctl("send", "pause", "--connect", f"tcp://127.0.0.1:{n.PORTS['alpha']}", keys="viewer", expect=6)
        for name in wanted or RUNS:
            begun = time.monotonic()
            RUNS[name](nodes)
            print(f"=== {name} took {time.monotonic() - begun:.0f} s", flush=True)
    finally:
        for node in list(nodes.agents):
            nodes.end(node, signal.SIGTERM)


if __name__ == "__main__":
    main(sys.argv[1:])
