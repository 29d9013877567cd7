"""A writer killed by SIGKILL at any point: a complete checkpoint loads, and nothing went that was still needed.

Forks of one interpreter write step 4 beside steps 1 to 3, of which two are kept. A point is the N-th operation on the
file system (audit events of Python) or piece written.
"""

import contextlib
import json
from typing import get_args

import pytest
from tests.tiers import scale

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record import checkpoints
from trainctl.trainer.checkpoints import files
from trainctl.trainer.checkpoints.chunked_tensors import ZSTD_SUFFIX

COMPRESSIONS = get_args(files.Compression)
KILLS = scale("checkpoint kills")
"""With more than three, a writer is killed after each operation, else after each twelfth."""

_PROGRAM = """
import json, os, signal, sys
from pathlib import Path
import numpy as np
from trainctl.trainer.checkpoints import files, retention
from trainctl.trainer.backends.base import State
root, model = Path({root!r}), Path(sys.argv[1]) / "model"

def write(folder, step):
    array = {{"w": np.full(2000, step, np.float32)}}
    loop = files.LoopState(step=step, cursor=step, updates=step, loss_scale=1.0, loss_scale_good_steps=0, seed=0,
                           samples=9, layout_digest="l", data_digest="d")
    state = State(array, {{"exp_avg": array, "exp_avg_sq": array}}, step)
    about = files.About(meter=lambda _: passed(), compression={compression!r})
    files.write(folder / f"step-{{step}}", "r", loop, state, model, about)
    retention.prune(folder, 2, [folder / f"step-{{step}}"])

def passed():
    pass

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def at_operation(number, folder):
    "Counts them; dies at one. Returns the count so far."
    global passed
    count = [0]
    def one():
        count[0] += 1
        if count[0] == number:
            die()
    def hook(event, arguments):
        if event.startswith(("open", "os.", "shutil.")) and any(str(folder) in str(each) for each in arguments):
            one()
    sys.addaudithook(hook)
    passed = one
    return count

def child(folder, prepare):
    if (pid := os.fork()) == 0:
        try:
            for step in (1, 2, 3):
                write(folder, step)
            count = prepare()
            write(folder, 4)
            if count is not None:
                (root / "count").write_text(str(count[0]))
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0, status
    return os.WIFSIGNALED(status)
"""


def check(folder, compression):
    """Step 4 or the one before it loads, and two are complete; the next start clears the rest away."""
    complete = []
    for path in checkpoints.listed(folder):
        with contextlib.suppress(InvalidInputError):
            checkpoints.verify(path)
            complete.append(path)
    assert len(complete) >= 2, sorted(path.name for path in folder.iterdir())
    newest = checkpoints.newest_complete(folder)
    assert newest is not None
    step = files.read(newest).loop.step
    assert step in (3, 4)
    packed = newest / (files.OPTIMIZER + ZSTD_SUFFIX)
    assert packed.exists() == (compression == "zstd")
    assert {checkpoints.read_manifest(path).step for path in complete} >= ({3, 4} if step == 4 else {2, 3})
    files.tidy(folder)
    assert all(path.name.startswith("step-") for path in folder.iterdir())


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_killed_after_each_prefix_of_operations(run_python, tmp_path, compression):
    every = 12 if KILLS <= 3 else 1
    said = run_python(
        _PROGRAM.format(root=str(tmp_path), compression=compression)
        + f"""
assert not child(root / "whole", lambda: at_operation(0, root / "whole"))
count = int((root / "count").read_text())
made = []
for number in range(1, count + 1, {every}):
    folder = root / f"prefix-{{number}}"
    assert child(folder, lambda: at_operation(number, folder)), number
    made.append(number)
print(json.dumps(made))
"""
    )
    numbers = json.loads(said.splitlines()[-1])
    assert len(numbers) >= 4
    for number in numbers:
        check(tmp_path / f"prefix-{number}", compression)
