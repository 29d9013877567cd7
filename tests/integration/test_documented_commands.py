"""The commands of README.md, docs/training.md and docs/operating.md, read from the pages and run as they are written.

Each block is run in order, by a node in a network of its own. Only what stands for something is put in its place.
"""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from tests.integration.support import screen_once
from tests.integration.support.documented import ROOT, block, run
from tests.trainer.support.chat_model import make_chat_model, questions, write_rows

PAGES = ("README.md", "docs/training.md", "docs/operating.md")
NOT_RUN = {
    ". .venv/bin/activate": "tests run in an environment already",
    "make demo": "installs: tests/tools/test_packages.py, and tests/integration/test_demo.py for the demo",
    "make watch-demo": "installs: tests/tools/test_packages.py, and tests/integration/test_demo.py for the demo",
    "pip install '.[torch]'": "installs: tests/integration/test_packages.py",
    "pip install '.[tui]'": "installs: tests/integration/test_packages.py",
    "pip install .": "installs: tests/integration/test_packages.py",
    "trainctl --connect tcp://studio:7474": "needs another machine: tests/integration/test_several_hosts.py",
    "there=/run/user/1000/trainctl-1000-5f0c1e2a/agent.sock": "needs an SSH host",
    "ssh -N -L /tmp/studio.sock:$there -L /tmp/studio.sock.live:$there.live studio &": "needs an SSH host",
    "trainctl --connect ipc:///tmp/studio.sock": "needs an SSH host",
    "trainctl demo": "trains 2,000 steps on the screen: tests/integration/test_demo_life.py",
}
"""Commands that these tests don't run, each with its reason."""
README_BLOCKS = (("Your own run", 0), ("Demo", 1))
"""Headings of blocks that are run."""
STEPS = 4
FEW_STEPS = f"s/^\\(steps\\|epochs\\) = .*/steps = {STEPS}/; s/^every_steps = .*/every_steps = {STEPS // 2}/"
AGENT = """
trainctl-agent run --name mbp --detach
trap 'kill $(grep -ho "\\"pid\\":[0-9]*" "$XDG_STATE_HOME"/trainctl/.agents/*.json | cut -d: -f2)' EXIT
"""
LONG = """
sed -i 's/^steps = .*/steps = 1000000/' run.toml
long=$(trainctl run run.toml)
for _ in $(seq 600); do
  trainctl status --json | grep -q '"last_step":{' && break
  sleep 0.2
done
"""


def commands(page: str) -> list[str]:
    """The page's command lines, without what explains them."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.DOTALL | re.MULTILINE)
    lines = [line for language, text in blocks if not language for line in text.splitlines()]
    known = re.compile(r"(trainctl|trainctl-agent|make|pip|ssh|\.)( |$)|there=")
    return [re.split(r"\s{2,}#", line)[0].strip() for line in lines if known.match(line)]


def run_here(page: str) -> list[str]:
    """The page's commands that a test runs; on a terminal, those that open the full screen."""
    screens = ("trainctl replay", "trainctl demo")
    look = shlex.join([sys.executable, screen_once.__file__])
    return [
        f"{look} {line}" if line == "trainctl" or line.startswith(screens) else line
        for line in commands(page)
        if line not in NOT_RUN
    ]


def test_every_command_of_the_pages_is_run_or_has_its_reason() -> None:
    of_readme = {re.split(r"\s{2,}#", line)[0].strip() for place in README_BLOCKS for line in block(*place)}
    everything = {line for page in PAGES for line in commands(page)}
    assert NOT_RUN.keys() <= everything
    readme = set(commands("README.md"))
    assert readme - of_readme - NOT_RUN.keys() == set()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the model and the rows that the pages name."""
    make_chat_model(tmp_path / "Qwen3-0.6B", hidden=64, intermediate=128)
    shutil.copytree(tmp_path / "Qwen3-0.6B", tmp_path / "Qwen" / "Qwen3-0.6B")
    write_rows(tmp_path / "answers.jsonl", questions(64))
    return tmp_path


@pytest.mark.needs("namespaces")
def test_the_commands_of_training(folder: Path) -> None:
    """The last ones ask a run under way."""
    lines = run_here("docs/training.md")
    first_asking = next(place for place, line in enumerate(lines) if line.startswith("trainctl send"))
    for place, line in enumerate(lines):
        if line.startswith("trainctl init"):
            lines[place] = f"{line}\nsed -i '{FEW_STEPS}' run.toml"
        elif line.startswith("trainctl model quantize"):
            path = 's/^path = .*Qwen3-0.6B"/path = "Qwen3-0.6B-mlx-4bit"\\nbase = "mlx-4bit"/'
            lines[place] = f"{line}\nsed '{path}' run.toml > qlora.toml"
        elif line.startswith("trainctl run qlora"):
            lines[place] = f"{line} --follow"
    script = "\n".join(
        [AGENT, *lines[:first_asking], LONG, *lines[first_asking:], "trainctl send stop checkpoint=false"]
    )
    said = run(folder, script)
    assert said.count("finished") >= 2, "the run and the one on the quantized base"
    assert '"after"' in said, "an answer"
    assert (folder / "Qwen3-0.6B-mlx-4bit" / "config.json").is_file()


@pytest.mark.needs("namespaces")
def test_the_commands_of_operating(folder: Path) -> None:
    """RUN stands for a run of a few steps, which is made first."""
    lines = [
        re.sub(r"\bRUN\b", "$RUN", re.sub(r"\bsft-1b-\S+@9000", f"RUN@{STEPS // 2}", line))
        for line in run_here("docs/operating.md")
    ]
    made = f"trainctl init --model Qwen3-0.6B --data answers.jsonl\nsed -i '{FEW_STEPS}' run.toml"
    begun = (
        "trainctl run run.toml --follow\nRUN=$(basename $(trainctl ls --json | grep -o '[^\"]*/runs/[^\"]*' | head -1))"
    )
    run(folder, "\n".join([AGENT, made, begun, *lines]))
    assert (folder / "ranks.csv").read_text().count("\n") > STEPS


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


@pytest.mark.tier("test")
@pytest.mark.needs("namespaces")
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


@pytest.mark.tier("test")
@pytest.mark.needs("namespaces")
def test_a_second_terminal_steers_the_demo(tmp_path: Path) -> None:
    activate, *commands = block("Demo", 1)
    assert activate == ". .venv/bin/activate" and len(commands) == 3
    demo = "trainctl demo --headless --steps 20000 > demo.out 2>&1 &\n" + UNTIL_SHOWN
    said = run(tmp_path, "\n".join([demo, *commands, "trainctl send stop checkpoint=false", "wait || true"]))
    applied = re.findall(r"^(\w[\w-]*) applied at step [\d,]+", said, re.MULTILINE)
    assert applied == ["rebalance", "resize-batch", "pause", "stop"]
