"""docs/diagnosis.md, made from the rules of the diagnosis.

`python -m tools.diagnosis_page [--check] [FILE]` writes the page, or says whether it is up to date.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from tools.protocol_docs import generated
from trainctl.protocol.analysis.diagnosis.diagnose import fields
from trainctl.protocol.analysis.diagnosis.rule import Rule
from trainctl.protocol.analysis.diagnosis.rules.table import RULES

_PAGE = """# Diagnosis

This page is generated from the rules of the diagnosis.

A diagnosis says why a run is slow, stuck or unstable, what the cause costs, and what to do. It uses what the run
records anyway: the phases of each rank's steps, memory, readings of the machines, events, and calibrations.
`trainctl diagnose` and `D` in the full screen show it. A run that has ended is diagnosed from its record, on any
machine that has a copy.

## How to read it

```
run, step 150: node-1 is slow in backward

1. warning: node-1 is slow in backward
  evidence  backward takes 0.81 s, before 0.41 s
            node-0 waits 0.42 s in each step
            the best split of the batch takes 0.89 s, this one 1.04 s
  what if   without node-1's backward a step takes 0.64 s, not 1.04 s
  remedy 1  give each rank the share that its present speed allows
            trainctl send rebalance auto=true (key s)
  remedy 2  look at what else node-1 does
            trainctl doctor
  ruled out a machine swaps: swap 0 MB/s
            a disk is slow: I/O pressure 1 %, the disk is busy 3 % of the time
            ranks wait for data: data take 0.6 % of a step at most
```

More remedies and causes that were ruled out are left out here.

- **Evidence**: measurements of the newest steps with the present shares and micro-batches: 24, or as many
  as take 12 s, but at least 8. The first 2 steps of a group don't count, because devices compile and load. A rare long
  step doesn't count either.
- **What if**: what a step takes without the cause. Other ranks may then be the slowest, so it can gain less than the
  delay itself.
- **Ruled out**: causes that would explain it, with the figures that exclude them. "not known" names a reading that the
  machine doesn't have. A missing reading never counts as 0.
- **Remedies**: try the first one first. The command of a setting starts a new run, because a resumed run keeps its run
  file. `trainctl run --resume` is only offered if there is a checkpoint.

The rules are asked in the order of the table. If a cause explains a later one on the same node, only the cause is
reported: a disk that is slow makes its rank wait for data, and the other ranks wait for that rank.

A reading alone is rarely a cause. Ranks that share a machine's processors always wait for each other, so CPU pressure
counts only if it has risen and the passes have become slower. A rank is called slow only if another split of the batch
is 5 % faster and saves a fifth of the other ranks' wait, or if its own slowdown, beyond that of the other ranks,
explains half of it. It must have been the slower one for 10 s or 300 steps, in 80 % of them. At a CPU pressure of 25 %
these figures are 15 % and 90 %, and without a reading of it no rank is called slow while all processors are in use. A
link is blamed only if it is slower than before or than calibrated, or if the bytes of the sum explain its seconds;
between ranks of one machine it never is. A run that is paused or waits for a growing file doesn't hang. An evaluation
or a checkpoint isn't a slow step.

## Rules

{table}

## Remedies

A remedy is offered if it can help: not if it is already set, and only if its values are known.

{ladders}
"""


def _table() -> Iterator[str]:
    yield "| cause | what is wrong | what shows it | explains |"
    yield "| --- | --- | --- | --- |"
    for rule in RULES:
        follows = ", ".join(f"`{cause}`" for cause in rule.explains)
        yield f"| `{rule.cause}` | {rule.title} | {rule.sign} | {follows} |"


def _ladders() -> Iterator[str]:
    for rule in RULES:
        yield f"`{rule.cause}`\n\n{chr(10).join(_ladder(rule))}\n"


def _ladder(rule: Rule) -> Iterator[str]:
    for number, rung in enumerate(rule.ladder, 1):
        shown = {name: name.upper().replace("_", "-") for name in fields(rung)}
        command = f": `{rung.command.format_map(shown)}`" if rung.command else ""
        yield f"{number}. {rung.text.format_map(shown)}{command}"


def page() -> str:
    """docs/diagnosis.md."""
    made = _PAGE.format(table="\n".join(_table()), ladders="\n".join(_ladders()).rstrip())
    return made.rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(generated.main("tools.diagnosis_page", page, Path("docs/diagnosis.md")))
