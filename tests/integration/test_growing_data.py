"""Runs whose data grow while they train: they wait, go on, survive a kill, and make the steps of the finished file."""

import json
import os
import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w
from tests.asking import run_of
from tests.cluster.run_files import RING, on_mlx
from tests.cluster.waits import all_steps, wait_for_end, wait_for_step
from tests.integration.support.clusters import Cluster
from tests.tui.support.cli_calls import COMMAND, ENVIRONMENT, call
from tests.waiting import HANG_SECONDS, until

from trainctl.protocol.client.blocking import BlockingClient

CHUNK, G, STEPS = 16, 12, 8
Make = Callable[..., dict[str, Any]]


def rows(count: int) -> list[bytes]:
    chance = random.Random(2)
    texts = (" ".join(chance.choices(["def", "return", "x", "value"], k=chance.randrange(2, 9))) for _ in range(count))
    return [json.dumps({"text": text}).encode() + b"\n" for text in texts]


def config_of(run_config: Make, path: Path, *nodes: str, **changes: Any) -> dict[str, Any]:
    data = {
        "path": str(path), "kind": "rows", "tokenizer": "bytes", "sequence_length": 24, "growing": True,
        "chunk_samples": CHUNK,
    }  # fmt: skip
    shares = {node: {"share": G // len(nodes)} for node in nodes}
    return run_config(run__steps=STEPS, data=data, nodes=on_mlx(*nodes, **shares), group=RING, **changes)


def wait_for_data(client: BlockingClient, sealed: int, needed: int) -> None:
    """The run says that it waits for so many samples, and is running."""
    said = f"waiting for data: {sealed} samples sealed, the next step needs {needed}"

    def waits() -> bool:
        run = run_of(client)
        return run is not None and (run.state, run.reason, run.samples) == ("running", said, sealed)

    until(waits, what=said)


def losses(client: BlockingClient, run: str) -> list[float | None]:
    return [step.loss for step in all_steps(client, run)]


def test_two_ranks_wait_for_data_and_make_the_steps_of_the_finished_file(
    cluster: Cluster, run_config: Make, tmp_path: Path
) -> None:
    """Killed while it waits, it goes back to its checkpoint and waits there again."""
    path, made = tmp_path / "rows.jsonl", rows(60)
    path.write_bytes(b"".join(made[:20]))
    with cluster.client() as client, path.open("ab", buffering=0) as file:
        begun = client.send("start-run", {"config": config_of(run_config, path, "alpha", "beta")})
        assert begun.state == "applied", begun.reason
        wait_for_data(client, 16, 2 * G)
        assert client.send("checkpoint", {}).state == "applied"
        file.write(b"".join(made[20:40])[:-3])  # half a line at its end
        wait_for_data(client, 32, 3 * G)
        before = wait_for_step(client, 2).run  # a rank may wait before its report has arrived
        assert before.step == 2
        for pids in cluster.trainers().values():
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        until(
            lambda: run_of(client).generation > before.generation,
            what="the return to the checkpoint",
        )
        wait_for_data(client, 32, 3 * G)
        file.write(b"".join(made)[len(b"".join(made[:40])) - 3 :])
        wait_for_data(client, 48, 5 * G)
        path.with_name("rows.jsonl.end").touch()
        view = wait_for_end(client)
        assert (view.state, view.step, view.samples) == ("finished", STEPS, 60), view.reason
        again = client.send("start-run", {"config": config_of(run_config, path, "alpha", "beta")})
        assert again.state == "applied", again.reason
        assert wait_for_end(client).state == "finished"
        assert losses(client, begun.run) == losses(client, again.run)


def test_standard_input_is_trained_on_and_its_end_is_marked_when_its_reader_is_ended(
    cluster: Cluster, run_config: Make, tmp_path: Path
) -> None:
    config, made = config_of(run_config, Path("-"), "alpha"), rows(40)
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(config | {"data": config["data"] | {"growing": False}}), encoding="utf-8")
    state = {"TRAINCTL_STATE": str(tmp_path / "state")}
    command = [*COMMAND, "run", str(file), "--connect", cluster["alpha"].address]
    with (
        subprocess.Popen(
            command, env=ENVIRONMENT | state, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as reader,
        cluster.client() as client,
    ):
        assert reader.stdin is not None and reader.stdout is not None and reader.stderr is not None
        reader.stdin.write(b"".join(made[:30]) + made[30][:-2])
        reader.stdin.flush()
        run = reader.stdout.readline().decode().strip()
        wait_for_step(client, 1)
        wait_for_data(client, 16, 2 * G)
        reader.send_signal(signal.SIGTERM)
        assert reader.wait(HANG_SECONDS) == 128 + signal.SIGTERM
        said = reader.stderr.read().decode()
        assert "stopped after 30 lines" in said, said
        view = wait_for_end(client)
        assert (view.run, view.state, view.step, view.samples) == (run, "finished", STEPS, 30), view.reason
    (copy,) = (tmp_path / "state" / ".inputs").glob("*.jsonl")
    assert copy.read_bytes() == b"".join(made[:30])
    assert copy.with_name(f"{copy.name}.end").exists()


def test_a_growing_file_that_is_bad_ends_the_run_by_its_line(
    cluster: Cluster, run_config: Make, tmp_path: Path
) -> None:
    path, made = tmp_path / "rows.jsonl", rows(60)
    path.write_bytes(b"".join(made[:32]))
    with cluster.client() as client, path.open("ab", buffering=0) as file:
        begun = client.send("start-run", {"config": config_of(run_config, path, "beta")})
        assert begun.state == "applied", begun.reason
        wait_for_data(client, 32, 3 * G)
        file.write(b'{"prompt": "a", "completion": ""}\n' + b"".join(made[33:50]))
        view = wait_for_end(client)
        assert view.state == "failed"
        assert f"{path}: line 33: completion: is empty" in view.reason


def test_standard_input_needs_an_agent_on_this_machine(run_config: Make, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(config_of(run_config, Path("-"), "alpha")), encoding="utf-8")
    done = call("run", file, "--connect", "tcp://192.0.2.1:7474", TRAINCTL_STATE=str(tmp_path))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
