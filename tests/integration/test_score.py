"""Scoring on a cluster: every row once and as a plain loop scores it, whatever is killed meanwhile."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import until, wait_for_end
from tests.integration.support.clusters import NODES, Cluster, on
from tests.trainer.support.chat_model import make_chat_model, questions, write_rows
from tests.tui.support.cli_calls import assert_one_line, call_process, started
from tests.waiting import HANG_SECONDS

ROWS = 1500
STEPS = 4
MIXED = {"gamma": {"backend": "mlx"}}
ADAPTERS = {"full": {"kind": "full"}, "lora": {"kind": "lora", "rank": 4, "alpha": 16.0}}


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model`, rows to train on, and rows to score."""
    folder = tmp_path_factory.mktemp("scoring")
    make_chat_model(folder / "model")
    write_rows(folder / "train.jsonl", questions(60))
    write_rows(folder / "rows.jsonl", [{"id": f"r{n}", **row} for n, row in enumerate(questions(ROWS, seed=2))])
    return folder


@pytest.fixture(scope="module")
def trained(three_agents: Cluster, assets: Path, run_config: Callable[..., dict[str, Any]]) -> dict[str, str]:
    """The ids of finished runs on three nodes, by adapter."""
    found = {}
    three_agents.in_touch()
    for name, adapter in ADAPTERS.items():
        data = {"path": str(assets / "train.jsonl"), "kind": "rows", "sequence_length": 64, "held_out": 0.05}
        config = run_config(
            run__steps=STEPS, model__path=str(assets / "model"), data=data, adapter=adapter, nodes=on(*NODES, **MIXED),
            optimizer={"learning_rate": 1e-2, "schedule": "constant"}, checkpoint={"at_end": True},
        )  # fmt: skip
        with three_agents.client() as client:
            begun = client.send("start-run", {"config": config})
            assert begun.state == "applied", begun.reason
            assert wait_for_end(client).state == "finished"
        found[name] = begun.run or ""
    three_agents.settle()
    return found


@pytest.fixture
def scoring(cluster: Cluster, trained: dict[str, str], assets: Path, tmp_path: Path) -> Iterator[Any]:
    """A started `trainctl score` of all rows, which writes its output to `out` at the end."""
    words = ["score", trained["full"], str(assets / "rows.jsonl"), "--cluster", str(cluster.file)]
    with started(*words, "--output", str(tmp_path / "out")) as process:
        yield process
    until(lambda: not any(cluster.trainers().values()), 30, "the workers' end")


def journal_rows(cluster: Cluster) -> int:
    """Rows with a result, by the lead's journal."""
    import sqlite3

    found = list(cluster["alpha"].directory.glob("work/*/work.db"))
    if not found:
        return 0
    try:
        with sqlite3.connect(f"file:{found[0]}?mode=ro", uri=True) as journal:
            return int(journal.execute("SELECT count(*) FROM results").fetchone()[0])
    except sqlite3.Error:
        return 0


def result_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def plain_loop(model: Any, assets: Path) -> list[tuple[float, int]]:
    """Sum and number of the completions' log-probabilities, row by row, by transformers alone."""
    import torch
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(assets / "model")
    found = []
    for row in result_lines((assets / "rows.jsonl").read_text()):
        before = tokenizer(row["prompt"])["input_ids"]
        whole = [*tokenizer(row["prompt"] + row["completion"])["input_ids"], tokenizer.eos_token_id]
        start = next((n for n, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
        with torch.no_grad():
            logits = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
        chosen = [float(logits[place - 1, whole[place]]) for place in range(max(start, 1), len(whole))]
        found.append((sum(chosen), len(chosen)))
    return found


def check(lines: list[dict[str, Any]], expected: list[tuple[float, int]]) -> None:
    assert [line["row"] for line in lines] == list(range(1, ROWS + 1))
    assert [line["id"] for line in lines] == [f"r{number}" for number in range(ROWS)]
    for line, (logprob, tokens) in zip(lines, expected, strict=True):
        assert line["tokens"] == tokens
        assert line["logprob"] == pytest.approx(logprob, abs=1e-4)
        assert line["mean"] == pytest.approx(logprob / tokens, abs=1e-4)


def checkpoint(cluster: Cluster, run: str) -> Path:
    return cluster.run_paths("alpha", run).checkpoint(STEPS)


def full_model(cluster: Cluster, run: str) -> Any:
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    return loader.from_pretrained(checkpoint(cluster, run))


def test_a_killed_worker_costs_no_row(
    cluster: Cluster, trained: dict[str, str], assets: Path, scoring: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    until(lambda: journal_rows(cluster) > ROWS // 10 and cluster.trainers()["beta"], 60, "results")
    for pid in cluster.trainers()["beta"]:
        os.kill(pid, signal.SIGKILL)
    output, said = scoring.communicate(timeout=HANG_SECONDS)
    assert scoring.returncode == 0, output + said
    check(result_lines((tmp_path / "out").read_text()), plain_loop(full_model(cluster, trained["full"]), assets))


def test_the_lead_s_agent_is_killed_and_returns(
    cluster: Cluster, trained: dict[str, str], assets: Path, scoring: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    until(lambda: journal_rows(cluster) > ROWS // 10, 60, "results")
    cluster["alpha"].kill()
    cluster.start("alpha")
    output, said = scoring.communicate(timeout=HANG_SECONDS)
    assert scoring.returncode == 0, output + said
    check(result_lines((tmp_path / "out").read_text()), plain_loop(full_model(cluster, trained["full"]), assets))


def test_adapters_and_a_follower_s_agent_that_dies(cluster: Cluster, trained: dict[str, str], assets: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run, loader = trained["lora"], AutoModelForCausalLM
    with started("score", run, str(assets / "rows.jsonl"), "--cluster", str(cluster.file)) as process:
        until(lambda: journal_rows(cluster) > ROWS // 10, 60, "results")
        cluster["gamma"].kill()
        cluster.start("gamma")
        output, said = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0, said
    base: Any = loader.from_pretrained(assets / "model")  # type: ignore[no-untyped-call]
    model = PeftModel.from_pretrained(base, str(checkpoint(cluster, run)))
    check(result_lines(output), plain_loop(model, assets))


def test_an_interrupt_cancels_the_work_on_all_nodes(cluster: Cluster, scoring: "subprocess.Popen[str]") -> None:
    until(lambda: journal_rows(cluster) > 0, 60, "results")
    scoring.send_signal(signal.SIGINT)
    scoring.communicate(timeout=HANG_SECONDS)
    assert scoring.returncode == 130
    until(lambda: not any(cluster.trainers().values()), 30, "the workers' end")
    assert not [*cluster["alpha"].directory.glob("work/*/work.db")]


def test_bad_rows_are_refused_and_long_ones_reported(cluster: Cluster, trained: dict[str, str], tmp_path: Path) -> None:
    words = ["--cluster", str(cluster.file), "--nodes", "alpha"]
    bad = write_rows(tmp_path / "bad.jsonl", [{"text": "fine"}, {"prompt": "a", "completion": ""}])
    assert_one_line(call_process("score", trained["full"], bad, *words), 2, "line 2", "completion: is empty")
    assert_one_line(call_process("score", trained["full"], tmp_path / "none.jsonl", *words), 2, "no such file")
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "short"}, {"text": "long " * 2000}])
    done = call_process("score", trained["full"], rows, *words)
    assert done.returncode == 3
    first, second = result_lines(done.stdout)
    assert first["tokens"] > 0 and "error" not in first
    assert "tokens long; the model allows" in second["error"]
    for extra, says in ((["--step", "99"], "no complete checkpoint of step 99"), (["--nodes", "delta"], "delta")):
        refused = call_process("score", trained["full"], rows, "--cluster", str(cluster.file), *extra)
        assert refused.returncode == 3 and says in refused.stderr, refused.stderr
    assert call_process("score", "no-such-run", rows, *words).returncode == 3


def test_work_and_a_run_exclude_each_other(
    cluster: Cluster, trained: dict[str, str], assets: Path, run_config: Callable[..., dict[str, Any]],
    scoring: "subprocess.Popen[str]",
) -> None:  # fmt: skip
    until(lambda: journal_rows(cluster) > 0, 60, "results")
    with cluster.client() as client:
        refused = client.send("start-run", {"config": run_config(nodes=on("alpha"))})
        assert refused.state == "rejected" and "separate work" in refused.reason
        scoring.send_signal(signal.SIGINT)
        scoring.communicate(timeout=HANG_SECONDS)
        until(lambda: not any(cluster.trainers().values()), 30, "the workers' end")
        config = run_config(run__steps=100_000, nodes=on("alpha"))
        until(lambda: client.send("start-run", {"config": config}).state == "applied", 30, "the end of the work")
        done = call_process("score", trained["full"], assets / "rows.jsonl", "--cluster", str(cluster.file))
        assert done.returncode == 3 and "takes part in a run" in done.stderr
        assert client.send("stop", {"checkpoint": False}).state == "applied"
        wait_for_end(client)
