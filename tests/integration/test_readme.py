"""The README's commands, read from the file and run as they are written, each block in a network of its own."""

import re
from pathlib import Path

import pytest
from tests.integration.support.documented import block, run

pytestmark = [pytest.mark.tier("test"), pytest.mark.needs("namespaces")]
UNTIL_SHOWN = """
for _ in $(seq 3000); do
  grep -q "step 1 " demo.out && break
  sleep 0.2
done
"""
END_AGENT = """
pid=$(grep -ho '"pid":[0-9]*' "$XDG_STATE_HOME"/trainctl/.agents/*.json | cut -d: -f2)
kill "$pid"
while kill -0 "$pid" 2>/dev/null; do sleep 0.2; done
"""


@pytest.mark.parametrize(
    ("minutes", "least_gain"),
    [(0.2, 0.0), pytest.param(5, 0.2, marks=[pytest.mark.tier("all"), pytest.mark.timeout(900)])],
)
def test_your_own_run_learns_in_the_time_that_it_is_given(tmp_path: Path, minutes: float, least_gain: float) -> None:
    *commands, screen = block("Your own run")
    assert screen.split("#")[0].strip() == "trainctl", "the last line opens the full screen"
    script = "\n".join(commands)
    assert "--minutes 5 " in script
    said = run(tmp_path, script.replace("--minutes 5 ", f"--minutes {minutes} ") + END_AGENT)
    losses = [float(loss) for loss in re.findall(r"held-out loss ([\d.]+)", said)]
    answers = re.findall(r"sample at step ([\d,]+) ", said)
    assert losses[-1] <= (1 - least_gain) * losses[0], losses
    assert answers[0] == "0" and int(answers[-1]) > 0, "an answer before and after"


def test_a_second_terminal_steers_the_demo(tmp_path: Path) -> None:
    activate, *commands = block("Demo", 1)
    assert activate == ". .venv/bin/activate" and len(commands) == 3
    demo = "trainctl demo --headless --steps 20000 > demo.out 2>&1 &\n" + UNTIL_SHOWN
    said = run(tmp_path, "\n".join([demo, *commands, "trainctl send stop checkpoint=false", "wait || true"]))
    applied = re.findall(r"^(\w[\w-]*) applied at step [\d,]+", said, re.MULTILINE)
    assert applied == ["rebalance", "resize-batch", "pause", "stop"]
