"""What release 0.1.0 has left still works: its state folder opens, replays, exports and goes on, its keys and cluster
file are read, and its messages are understood. See tests/golden/release-0.1.0/README.md."""

import contextlib
import csv
import hashlib
import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from tests.integration.conftest import until
from tests.integration.support.release import EXPECTED, FOLDER, RUNS, Frozen, run_named, unpack
from tests.tui.support.cli_calls import call, call_json
from tools.protocol_docs.conversations import DECODERS

from trainctl.protocol.errors import VersionError
from trainctl.protocol.messages.base import PROTOCOL_VERSION
from trainctl.protocol.wire import codec
from trainctl.tui.replay.replay_app import ReplayApp
from trainctl.tui.replay.replay_source import ReplaySource

WHEEL = "trainctl-0.1.0-py3-none-any.whl"
LIMIT_BYTES = 5_000_000
LOSS = 1e-4
"""Relative: a step made again from its checkpoint, perhaps by another version of a library."""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Frozen:
    """The state folder for tests that only read it."""
    return Frozen(tmp_path_factory.mktemp("kept"))


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[Frozen]:
    """A state folder of the test's own, for agents; they end with it."""
    made = Frozen(tmp_path / "own")
    yield made
    made.close()


# ---------------------------------------------------------------- the folder itself


def test_the_wheel_is_the_one_that_was_released() -> None:
    file = FOLDER / WHEEL
    assert hashlib.sha256(file.read_bytes()).hexdigest() == EXPECTED["sha256"][WHEEL]
    with zipfile.ZipFile(file) as wheel:
        metadata = wheel.read("trainctl-0.1.0.dist-info/METADATA").decode()
        scripts = wheel.read("trainctl-0.1.0.dist-info/entry_points.txt").decode()
    assert "\nName: trainctl\nVersion: 0.1.0\n" in metadata
    assert re.findall(r"^([a-z-]+) =", scripts, re.MULTILINE) == ["trainctl", "trainctl-agent"]


def test_the_folder_is_small() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < LIMIT_BYTES


def test_each_kind_of_event_is_in_a_record_or_said_to_be_missing() -> None:
    kinds: dict[str, dict[str, str]] = json.loads((FOLDER / "kinds.json").read_text("utf-8"))
    missing = {name for name, runs in EXPECTED["events"].items() if not runs}
    assert missing == {name for name, wanted in kinds.items() if "not_made" in wanted}
    assert {wanted["kind"] for wanted in kinds.values()} == {
        "command", "run", "rank", "checkpoint", "evaluation", "agent", "alert", "note", "record",
    }  # fmt: skip
    assert {EXPECTED["runs"][run]["state"] for run in RUNS} == {"finished", "failed", "stopped"}


# ---------------------------------------------------------------- messages


def test_each_wire_vector_is_refused_in_a_line_that_names_both_versions(tmp_path: Path) -> None:
    """And but for its events, each would still be understood: a field that was added since stands at its default, all
    others come out as they went in."""
    files = sorted((unpack("wire.tar.xz", tmp_path) / "wire").glob("*.json"))
    assert len(files) == EXPECTED["vectors"]
    for file in files:
        kept = json.loads(file.read_text("utf-8"))
        frame = bytes.fromhex(kept["frame"])
        decode = DECODERS[kept["conversation"]]
        with pytest.raises(VersionError, match=r"^protocol version 1 is not supported; this program uses 2$"):
            decode(frame)
        then = {**msgpack.unpackb(frame), "v": PROTOCOL_VERSION}
        if not holds_event(then):
            now = msgpack.unpackb(codec.encode(decode(msgpack.packb(then))))
            further(now, then, file.stem)


def holds_event(value: Any) -> bool:
    """Whether it is an event as 0.1.0 sent it, in words, or has one in it."""
    if isinstance(value, dict):
        return {"severity", "outcome"} <= value.keys() or any(map(holds_event, value.values()))
    return isinstance(value, list) and any(map(holds_event, value))


BY_NAME = frozenset({"clip_scale", "memory_bytes", "memory_peak_bytes", "memory_cap_bytes"})
"""Fields of 0.1.0's reports and rank steps that go by name in `values` since."""


def further(now: Any, then: Any, where: str) -> int:
    """How many fields `now` has that `then` hasn't; nothing else may differ."""
    if isinstance(then, dict):
        then = {name: value for name, value in then.items() if name in now or name not in BY_NAME}
        assert now.keys() >= then.keys(), where
        nested = sum(further(now[name], value, f"{where}.{name}") for name, value in then.items())
        return len(now) - len(then) + nested
    if isinstance(then, list):
        assert len(now) == len(then), where
        return sum(further(one, other, f"{where}[{at}]") for at, (one, other) in enumerate(zip(now, then, strict=True)))
    assert now == then or (now != now and then != then), where  # NaN differs from itself
    return 0


# ---------------------------------------------------------------- the runs, from their folders


@pytest.mark.parametrize("name", sorted(run.partition("-2")[0] for run in RUNS))
def test_a_run_is_exported_as_0_1_0_exported_it(kept: Frozen, name: str, tmp_path: Path) -> None:
    run = run_named(name)
    known = EXPECTED["runs"][run]
    tables = {what: table_of(kept, run, tmp_path, what) for what in known["rows"]}
    assert {what: len(rows) for what, rows in tables.items()} == known["rows"]
    if tables["steps"]:
        last = tables["steps"][-1]
        assert (int(last["step"]), last["loss"]) == (known["last_step"], known["last_loss"])
    assert counted(tables["events"]) == {kind: runs[run] for kind, runs in EXPECTED["events"].items() if run in runs}


def table_of(frozen: Frozen, run: str, folder: Path, what: str = "steps") -> list[dict[str, str]]:
    """What `trainctl export` writes of a run."""
    file = folder / f"{what}.csv"
    told = call("export", run, "--format", "csv", "--what", what, "--output", file, **frozen.environment())
    assert told.returncode == 0, told.stderr
    return list(csv.DictReader(io.StringIO(file.read_text("utf-8"))))


REWORDED = {
    "rank: first shares by": {"text": r"\(first shares by measured samples per second"},
    "rank: halved": {"text": r"\(out of memory, it had last reported "},
    "rank: micro-batch run again": {"text": r"the micro-batch was run again\)$"},
    "run: step retracted": {"text": r"^step \d+ retracted and repeated: "},
    "agent: silent": {"text": r"^\w+'s agent is silent: "},
    "record written again": {"text": r"^recording works again$"},
    "alert cleared": {"text": r" cleared after "},
    "rank: started again": {"text": r"^\w+'s trainer restarts, attempt "},
    "rank: cannot join again": {"text": r" cannot rejoin: "},
    "rank: joins again": {"text": r" rejoins: "},
    "run: generation formed, a rank given the state": {"text": r" synced from "},
    "rank: the last one is silent": {"text": r", the last rank with the run's state, is silent: waited for"},
    "run: stopped without an answer": {"text": r"^stopped anyway: "},
    "run: stopped without the checkpoint": {"text": r"^stopped anyway: "},
    "rank: out of memory at the least": {"text": r"ran out of memory at a micro-batch of "},
    "run: weights levelled": {"text": r"^all ranks synced to "},
    "rank: drained, and its trainer ends": {"text": r" is drained; its trainer "},
    "run: no majority": {"text": r"^training is waiting: "},
    "agent: in touch": {"text": r"^\w+'s agent is connected$"},
    "run: a majority again": {"text": r"^enough nodes are reachable"},
    "agent: back in touch with a trainer": {"text": r"^reconnected to .+'s trainer$"},
    "agent: at another address": {"text": r"^\w+'s agent is now at tcp://"},
    "agent: conducts, ": {"text": r" now leads the run \(term "},
    "rank: hangs while it loads": {"text": r" while loading and is killed$"},
    "run: step skipped for an overflow": {"text": r"skipped its update: overflow$"},
    "run: step skipped for NaN": {"text": r"skipped its update: nan$"},
}
"""By how their names begin, kinds of 0.1.0's events that are in other words since: a change's reason is in brackets."""


def counted(rows: list[dict[str, Any]]) -> dict[str, int]:
    """How often each kind of event is in a table of them."""
    kinds = json.loads((FOLDER / "kinds.json").read_text("utf-8"))
    found: Counter[str] = Counter()
    for row in rows:
        for name, wanted in kinds.items():
            wanted |= next((words for start, words in REWORDED.items() if name.startswith(start)), {})
            same = all(
                row[field] == wanted[field] for field in ("kind", "severity", "verb", "outcome") if field in wanted
            )
            found[name] += same and re.search(wanted.get("text", ""), row["text"]) is not None
    return {name: count for name, count in found.items() if count}


def test_exports_of_one_run_agree(kept: Frozen, tmp_path: Path) -> None:
    import pyarrow.parquet

    run = run_named("mixed")
    known, lines, parquet = EXPECTED["runs"][run], tmp_path / "steps.jsonl", tmp_path / "steps.parquet"
    for file, format_ in ((lines, "jsonl"), (parquet, "parquet")):
        told = call("export", run, "--format", format_, "--output", file, **kept.environment())
        assert told.returncode == 0, told.stderr
    told_lines = [json.loads(line) for line in lines.read_text("utf-8").splitlines()]
    for rows in (told_lines, pyarrow.parquet.read_table(parquet).to_pylist()):
        assert len(rows) == known["rows"]["steps"]
        assert (rows[-1]["step"], rows[-1]["loss"]) == (known["last_step"], float(known["last_loss"]))


async def test_each_run_is_replayed(kept: Frozen) -> None:
    for run in (run for run in RUNS if EXPECTED["runs"][run]["last_step"]):
        known = EXPECTED["runs"][run]
        with contextlib.closing(ReplaySource(kept.directory(run))) as source:
            for step in (1, known["last_step"] // 2, known["last_step"]):
                source.seek(step)
                seen = await source.snapshot(80)
                assert seen.run is not None and seen.last_step is not None
                assert (seen.run.run, seen.run.step, seen.last_step.step) == (run, step, step)
            assert seen.run.state == known["shown"]
            assert repr(seen.last_step.loss) == known["last_loss"] or known["last_loss"] in ("", "nan")


def test_each_run_has_a_report_and_differs_in_nothing_from_itself(kept: Frozen) -> None:
    for run in RUNS:
        known, env = EXPECTED["runs"][run], kept.environment()
        facts = call_json("report", run, **env)
        assert facts["view"]["state"] == known["shown"]
        assert (facts["last"]["step"] if facts["last"] else 0) == known["last_step"]
        kinds = [one["kind"] for one in facts["interventions"]]
        assert kinds.count("note") == EXPECTED["events"]["note"].get(run, 0), run
        assert call_json("diff", run, run, **env)["same"] is True
    mixed = call("report", run_named("mixed"), **kept.environment()).stdout
    assert "drained beta" in mixed and "beta is lost: was ended by signal 9" in mixed and "1 step made again" in mixed


async def test_the_screens_show_the_mixed_run(kept: Frozen) -> None:
    run = run_named("mixed")
    with contextlib.closing(ReplaySource(kept.directory(run))) as source:
        source.seek(EXPECTED["runs"][run]["last_step"])
        app = ReplayApp(source)
        async with app.run_test(size=(120, 40)) as pilot:
            for key in ("1", "2", "3", "4", "5", "a", "0"):
                await pilot.press(key)
                await pilot.pause()
            assert app.live.run is not None
            assert (app.live.run.run, {rank.backend for rank in app.live.run.ranks}) == (run, {"torch", "mlx"})


# ---------------------------------------------------------------- keys, the cluster file, and an agent on that state


def test_the_cluster_file_and_the_keys_are_read(kept: Frozen) -> None:
    env = kept.environment()
    listed = call_json("cluster", "list", **env)
    assert [node["node"] for node in listed["nodes"]] == ["alpha", "beta", "gamma"]
    assert len({node["fingerprint"] for node in listed["nodes"]}) == 3
    keys = call_json("keys", "list", **env)
    roles = {one["name"]: one["role"] for one in keys["keys"]}
    assert roles == {"test-key@alpha.test-key": "operator", "viewer.test-key": "viewer"}
    assert [one["name"] for one in keys["revoked"]] == ["revoked.test-key"]
    assert keys["own"]["agent"]["name"] == "alpha.test-key"
    assert call("check", kept.root / "failed.toml", **env).returncode == 0


@pytest.mark.timeout(180)
def test_an_agent_opens_its_state_and_lets_in_who_was_let_in(frozen: Frozen) -> None:
    frozen.start("alpha")
    at = ("--connect", frozen.agents["alpha"].address)
    env = frozen.environment()
    listed = {one["run"]: one for one in call_json("ls", *at, **env)["runs"]}
    assert {run: one["state"] for run, one in listed.items()} == {run: EXPECTED["runs"][run]["state"] for run in RUNS}
    for run, known in EXPECTED["runs"].items():
        assert listed[run]["step"] == known["last_step"]
        assert call_json("status", "--run", run, *at, **env)["run"]["state"] == known["state"]
        told = call_json("events", "--run", run, "--last", "500", *at, **env)["events"]
        assert counted(told) == {kind: runs[run] for kind, runs in EXPECTED["events"].items() if run in runs}
        log = call("logs", "--run", run, *at, **env)
        assert log.returncode == 0 and bool(log.stdout) == bool(known["last_step"]), (run, log.stderr)
    for who, what, status in (
        ("alpha", ("keys", "audit"), 0), ("viewer", ("ls",), 0), ("viewer", ("send", "pause"), 6),
        ("stranger", ("ls",), 6), ("revoked", ("ls",), 6),
    ):  # fmt: skip
        assert call(*what, *at, **frozen.environment(who)).returncode == status, (who, what)
    refused = call_json("keys", "audit", *at, **env)["refused"]
    assert Counter(one["what"] for one in refused)["command pause"] == 2, "one of them by 0.1.0"


# ---------------------------------------------------------------- going on


@pytest.mark.tier("test")
@pytest.mark.timeout(300)
def test_a_run_that_failed_goes_on_from_its_checkpoint(frozen: Frozen, tmp_path: Path) -> None:
    """By real trainers, torch and MLX; a step that is made again has the loss that it had."""
    run, env = run_named("failed"), frozen.environment()
    before = {int(row["step"]): row for row in table_of(frozen, run, tmp_path)}
    frozen.start("alpha", "beta")
    at = ("--connect", frozen.agents["alpha"].address)
    until(lambda: {"connected"} <= {peer["state"] for peer in status(at, env)["peers"]}, 30, "the agents' greeting")
    begun = call_json("run", "--resume", run, "--timeout", "150", *at, **env)
    assert (begun["run"], begun["state"]) == (run, "applied")
    first = begun["step"]
    until(lambda: status(at, env)["run"]["step"] >= first + 4, 60, "some steps more")
    assert {rank["backend"] for rank in status(at, env)["run"]["ranks"]} == {"torch", "mlx"}
    assert call_json("send", "stop", "checkpoint=false", *at, **env)["state"] == "applied"
    until(lambda: status(at, env, run)["run"]["state"] == "stopped", 30, "its end")
    after = {int(row["step"]): row for row in table_of(frozen, run, tmp_path)}
    assert list(after) == list(range(1, len(after) + 1))
    assert {step: row["loss"] for step, row in after.items() if step < first} == {
        step: row["loss"] for step, row in before.items() if step < first
    }
    again = [step for step in after if step >= first and step in before]
    assert again
    assert float(after[again[0]]["loss"]) == pytest.approx(float(before[again[0]]["loss"]), rel=LOSS)


def status(at: tuple[str, ...], env: dict[str, str], run: str | None = None) -> dict[str, Any]:
    return call_json("status", *(("--run", run) if run else ()), *at, **env)
