"""A run that a node's next agent finds as one that has ended there."""

from pathlib import Path

from trainctl.node_agent.records.agent_db import AgentDb
from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol.record.paths import RunPaths


def run_file(folder: Path, data: Path | None = None, nodes: str = "", name: str = "r") -> str:
    """Return the text of a run file whose model is `folder`/model, and whose data is `folder`/data if not `data`."""
    return f"""
[run]
name = "{name}"
steps = 10
[model]
path = "{folder}/model"
[data]
path = "{data or folder / "data"}"
tokenizer = "bytes"
[batch]
global = 8
[optimizer]
learning_rate = 1e-3
{nodes}"""


def make_known(node: Path, run: str, run_file: str) -> RunPaths:
    """In the folder `node`, with this text as its run file."""
    paths = RunPaths(node / "runs" / run)
    paths.logs.mkdir(parents=True)
    paths.run_file.write_text(run_file)
    RunDb(paths).close()
    with AgentDb(node / "agent.db") as db:
        db.add_run(run, run, 1.0, "finished")
    return paths
