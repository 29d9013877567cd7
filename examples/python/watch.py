"""Follows a run with the asyncio client: committed steps in order, events, and the connection's state.

    python watch.py --steps 20
    python watch.py --connect tcp://studio:7474

No step is missed while it is attached. The client fetches lost messages. If the agent no longer has them, or was
restarted, a new snapshot gives the run's step, and the steps in between come from the record.
"""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

from trainctl.protocol import messages as m
from trainctl.protocol.client import Client, Connection
from trainctl.protocol.errors import TrainctlError


async def main() -> int:
    """Print until `--steps` steps were seen, or until Ctrl-C; return the exit code."""
    given = arguments()
    try:
        async with Client(given.connect, by="watch.py") as client:
            seen = 0
            async with contextlib.aclosing(lines(client)) as items:
                async for item in items:
                    print(item if isinstance(item, str) else step_line(item), flush=True)
                    seen += isinstance(item, m.StepCommitted)
                    if seen == given.steps:
                        break
    except TrainctlError as error:
        print(f"watch.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


async def lines(client: Client) -> AsyncIterator[m.StepCommitted | str]:
    """All steps from the first snapshot on, and everything else as text."""
    newest: m.StepCommitted | None = None
    async with contextlib.aclosing(client.attach(columns=0)) as items:
        async for item in items:
            match item:
                case Connection(state=state, why=why):
                    yield f"line: {state} {why}".rstrip()
                case m.Snapshot(run=m.RunView() as run):
                    yield f"{run.run} {run.state} at step {run.step} of {run.steps}"
                    if newest is not None and newest.run == run.run:
                        async for step in recorded(client, run, newest.step):
                            yield step
                    newest = item.last_step
                case m.StepCommitted():
                    yield (newest := item)
                case m.Event():
                    yield f"event: {item.text}"
                case m.RunView():
                    yield f"{item.run} {item.state}"


async def recorded(client: Client, run: m.RunView, after_step: int) -> AsyncIterator[m.StepCommitted]:
    """Recorded steps up to the run's current one, page by page; later ones arrive live."""
    while after_step < run.step:
        page = (await client.ask(m.StepsRequest, run.run, after_step)).steps
        for step in page:
            if step.step <= run.step:
                yield step
        after_step = page[-1].step if page else run.step


def step_line(step: m.StepCommitted) -> str:
    """One line per step: loss in nats per token, rate in tokens per second."""
    loss = "n/a" if step.loss is None else f"{step.loss:.4f}"
    return f"step {step.step}  loss {loss}  {step.tokens_per_second or 0.0:,.0f} tokens/s"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Follow a run.")
    parser.add_argument("--connect", help="the agent [the one on this machine]")
    parser.add_argument("--steps", type=int, default=0, help="stop after this many steps [never]")
    return parser.parse_args()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(asyncio.run(main()))
