"""Scoring and answering on a cluster: every row once and as a plain loop has it, whatever is killed meanwhile."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.run_files import NODES, on
from tests.cluster.waits import wait_for_end
from tests.integration.support.clusters import Cluster
from tests.trainer.support.chat_model import make_chat_model, questions, write_rows
from tests.tui.support.cli_calls import assert_one_line, call_process, started
from tests.waiting import HANG_SECONDS, until

from trainctl.protocol.messages import WorksRequest

ROWS = 900
STEPS = 4
MIXED = {"gamma": {"backend": "mlx"}}
ADAPTER = {"kind": "lora", "rank": 4, "alpha": 16.0}
PROMPTS, ANSWER_TOKENS = 24, 6


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model`, rows to train on, and rows to score."""
    folder = tmp_path_factory.mktemp("scoring")
    make_chat_model(folder / "model")
    write_rows(folder / "train.jsonl", questions(60))
    write_rows(folder / "rows.jsonl", [{"id": f"r{n}", **row} for n, row in enumerate(questions(ROWS, seed=2))])
    return folder


@pytest.fixture(scope="module")
def trained(three_agents: Cluster, assets: Path, run_config: Callable[..., dict[str, Any]]) -> str:
    """The id of a finished run on three nodes."""
    three_agents.in_touch()
    data = {"path": str(assets / "train.jsonl"), "kind": "rows", "sequence_length": 64, "held_out": 0.05}
    config = run_config(
        run__steps=STEPS, model__path=str(assets / "model"), data=data, adapter=ADAPTER, nodes=on(*NODES, **MIXED),
        optimizer={"learning_rate": 1e-2, "schedule": "constant"}, checkpoint={"at_end": True},
    )  # fmt: skip
    with three_agents.client() as client:
        begun = client.send("start-run", {"config": config})
        assert begun.state == "applied", begun.reason
        assert wait_for_end(client).state == "finished"
    three_agents.settle()
    return begun.run or ""


@pytest.fixture
def scoring(cluster: Cluster, trained: str, assets: Path, tmp_path: Path) -> Iterator[Any]:
    """A started `trainctl score` of all rows, which writes its output to `out` at the end."""
    words = ["score", trained, str(assets / "rows.jsonl"), "--cluster", str(cluster.file)]
    with started(*words, "--output", str(tmp_path / "out")) as process:
        yield process
    until(lambda: not any(cluster.trainers().values()), 30, "the workers' end")


@pytest.fixture(scope="module")
def model(three_agents: Cluster, trained: str, assets: Path) -> Any:
    """The trained model, by peft alone."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base: Any = AutoModelForCausalLM.from_pretrained(assets / "model")  # type: ignore[no-untyped-call]
    checkpoint = three_agents.run_paths("alpha", trained).checkpoint(STEPS)
    return PeftModel.from_pretrained(base, str(checkpoint)).eval()


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


def answers_of(model: Any, assets: Path, prompts: list[str]) -> list[tuple[str, int]]:
    """Greedy answers and their numbers of tokens, prompt by prompt, by transformers alone."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(assets / "model")
    found = []
    for prompt in prompts:
        asked = tokenizer(prompt, return_tensors="pt")
        whole = model.generate(**asked, max_new_tokens=ANSWER_TOKENS, do_sample=False)[0]
        made = whole[asked["input_ids"].shape[1] :]
        found.append((tokenizer.decode(made, skip_special_tokens=True), len(made)))
    return found


def test_killed_workers_and_agents_cost_no_row(
    cluster: Cluster, model: Any, trained: str, assets: Path, scoring: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    until(lambda: journal_rows(cluster) > ROWS // 10 and cluster.trainers()["beta"], 60, "results")
    for node in ("alpha", "beta"):  # the lead, and one that only takes part
        with cluster.client(node) as client:
            (work,) = client.ask(WorksRequest).works
        assert (work.lead, work.file, work.view.run, work.view.checkpoint) == ("alpha", "rows.jsonl", trained, STEPS)
        assert work.is_active and 0 < work.view.answered <= ROWS and work.slices >= work.slices_answered > 0
        assert work.seconds_left is not None and {one.node for one in work.view.nodes} == set(NODES)
    for pid in cluster.trainers()["beta"]:
        os.kill(pid, signal.SIGKILL)
    cluster["gamma"].kill()
    cluster.start("gamma")
    until(lambda: journal_rows(cluster) > ROWS // 5, 60, "more results")
    cluster["alpha"].kill()
    cluster.start("alpha")
    output, said = scoring.communicate(timeout=HANG_SECONDS)
    assert scoring.returncode == 0, output + said
    with cluster.client() as client:
        assert client.ask(WorksRequest).works == ()
    lines = result_lines((tmp_path / "out").read_text())
    assert [line["row"] for line in lines] == list(range(1, ROWS + 1))
    assert [line["id"] for line in lines] == [f"r{number}" for number in range(ROWS)]
    for line, (logprob, tokens) in zip(lines, plain_loop(model, assets), strict=True):
        assert line["tokens"] == tokens
        assert line["logprob"] == pytest.approx(logprob, abs=1e-4)
        assert line["mean"] == pytest.approx(logprob / tokens, abs=1e-4)


def test_answers_are_the_library_s_own(
    cluster: Cluster, trained: str, model: Any, assets: Path, tmp_path: Path
) -> None:
    rows: list[Any] = [{**row, "id": f"q{number}"} for number, row in enumerate(questions(PROMPTS, seed=7))]
    file = write_rows(tmp_path / "prompts.jsonl", [*rows, {"prompt": "long " * 2000}])
    words = ["--answers", "--max-tokens", str(ANSWER_TOKENS), "--cluster", str(cluster.file)]
    done = call_process("score", trained, file, *words)
    assert done.returncode == 3, done.stderr
    *lines, last = result_lines(done.stdout)
    assert last["row"] == PROMPTS + 1 and "the model's context has" in last["error"]
    expected = answers_of(model, assets, [row["prompt"] for row in rows])
    assert [(line["id"], line["answer"], line["tokens"]) for line in lines] == [
        (row["id"], *answer) for row, answer in zip(rows, expected, strict=True)
    ]


def test_work_excludes_runs_until_an_interrupt_cancels_it_on_all_nodes(
    cluster: Cluster, run_config: Callable[..., dict[str, Any]], scoring: "subprocess.Popen[str]"
) -> None:
    until(lambda: journal_rows(cluster) > 0, 60, "results")
    with cluster.client() as client:
        refused = client.send("start-run", {"config": run_config(nodes=on("alpha"))})
    assert refused.state == "rejected" and "separate work" in refused.reason
    scoring.send_signal(signal.SIGINT)
    scoring.communicate(timeout=HANG_SECONDS)
    assert scoring.returncode == 130
    until(lambda: not any(cluster.trainers().values()), 30, "the workers' end")
    assert not [*cluster["alpha"].directory.glob("work/*/work.db")]


def test_what_is_refused(cluster: Cluster, trained: str, tmp_path: Path) -> None:
    words = ["--cluster", str(cluster.file)]
    bad = write_rows(tmp_path / "bad.jsonl", [{"text": "fine"}, {"prompt": "a", "completion": ""}])
    assert_one_line(call_process("score", trained, bad, *words), 2, "line 2", "completion: is empty")
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "short"}])
    for extra, says in ((["--step", "99"], "no complete checkpoint of step 99"), (["--nodes", "delta"], "delta")):
        refused = call_process("score", trained, rows, *words, *extra)
        assert refused.returncode == 3 and says in refused.stderr, refused.stderr
