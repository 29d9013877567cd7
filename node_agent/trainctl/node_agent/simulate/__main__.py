"""`python -m trainctl.node_agent.simulate`: simulates one run. Prints two JSON objects: where the record is once it can
be read, and what the simulation came to.
"""

import argparse
import contextlib
import gc
import json
import shutil
import signal
import sys
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from trainctl.node_agent.simulate import scenario
from trainctl.node_agent.simulate.scenario import Scenario
from trainctl.node_agent.simulate.simulation import Simulation, outcome
from trainctl.protocol.config.names import node_directory
from trainctl.protocol.errors import InvalidInputError, RefusedError, TrainctlError
from trainctl.protocol.machine.process_title import set_title
from trainctl.protocol.record.paths import RunPaths, runs_directory

NODE = "simulated"
"""Folder of simulated runs beside the nodes' folders."""


def main(arguments: list[str] | None = None) -> int:
    """Simulate as the arguments say, and return the exit status."""
    options = _parser().parse_args(arguments)
    gc.freeze()  # a run makes no cycles worth looking for
    gc.set_threshold(100_000)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        simulated = scenario.read(
            options.cluster, options.run, seed=options.seed, steps=options.steps, parameters=options.parameters
        )
        set_title("simulator", f"of {simulated.config.run.name}")
        return _play(simulated, options.output)
    except TrainctlError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        print(f"{error.filename or 'simulate'}: {error.strerror or error}", file=sys.stderr)
        return RefusedError.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainctl.node_agent.simulate", description="Simulate one run.")
    parser.add_argument("cluster", type=Path, help="cluster file with simulated nodes")
    parser.add_argument("run", type=Path, help="run file")
    parser.add_argument("--seed", type=int, default=0, help="seed of all chance")
    parser.add_argument("--steps", type=int, help="steps of the run, in place of the run file's")
    parser.add_argument("--parameters", type=int, help="trained parameters, where the model isn't on this machine")
    parser.add_argument("--output", type=Path, help="state folder that gets the run [the user's]")
    return parser


def _play(simulated: Scenario, root: Path | None) -> int:
    directory = _directory(simulated, root)
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, directory, ignore_errors=True)
        simulation = Simulation(simulated, directory)
        played = simulation.play(partial(_say, {"run_directory": str(directory)}))
        undo.pop_all()
    _say(outcome(simulated, played, RunPaths(directory)))
    return 0 if played.ended.state == "finished" else RefusedError.exit_code


def _directory(simulated: Scenario, root: Path | None) -> Path:
    """Made, with the first free name. Raises InvalidInputError if it can't be made."""
    runs = runs_directory(node_directory(NODE, root))
    name = f"{simulated.config.run.name}-simulated-{simulated.seed}"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        return next(made for number in count(1) if (made := _made(runs / (f"{name}-{number}" if number > 1 else name))))
    except OSError as error:
        raise InvalidInputError("--output", f"{runs}: {error.strerror or error}") from None


def _made(directory: Path) -> Path | None:
    """None if another simulation has that name: two may begin at once."""
    try:
        directory.mkdir()
    except FileExistsError:
        return None
    return directory


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    sys.exit(main())
