"""A program that has the client alone."""

BLOCKED = ("textual", "numpy", "psutil", "torch", "typer", "mlx", "setproctitle")
DRIVE = """
import json
from trainctl.protocol.client import BlockingClient
from trainctl.protocol import messages as m

with BlockingClient(sys.argv[1], by="script") as client:
    attached = client.attach()
    snapshot = next(item for item in attached if isinstance(item, m.Snapshot))
    reply = client.send("resize-batch", {"micro": 3})
    committed = next(item for item in attached if isinstance(item, m.StepCommitted) and item.step >= reply.step)
    attached.close()
    history = client.ask(m.HistoryRequest, snapshot.run.run, ("loss", "busy_seconds"))
    runs = client.ask(m.RunsRequest)
print(json.dumps({
    "state": reply.state, "step": reply.step, "committed": committed.step, "run": snapshot.run.run,
    "points": {series.metric: len(series.steps) for series in history.series}, "runs": [run.run for run in runs.runs],
}))
"""
