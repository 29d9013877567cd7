"""Names of figures and words on the screens, and their meanings: one table, which Help is made from."""

from dataclasses import dataclass

LOSS_STEPS = 16
"""Steps that the average loss is the mean of."""
RATE_STEPS = 8
"""Steps that a recent rate is the median of."""


@dataclass(frozen=True)
class Figure:
    """`label` stands beside the figure."""

    label: str
    meaning: str


AVERAGE_LOSS = Figure("avg loss", f"mean of the last {LOSS_STEPS} steps; charts show each step's loss")
LAST_LOSS = Figure("last loss", "the last step's alone")
RECENT_RATE = Figure("recent", f"rates beside the loss and in tables: medians of the last {RATE_STEPS} steps")
AVERAGE_RATE = Figure("average", "rate since the run began, without its pauses")
LAST_STEP = Figure("last step", "the last step's alone, as in `trainctl status`")
EFFICIENCY = Figure("eff", "efficiency: the group's rate divided by the sum of the ranks' own rates")

FIGURES = (AVERAGE_LOSS, LAST_LOSS, RECENT_RATE, AVERAGE_RATE, LAST_STEP, EFFICIENCY)
WORDS = (
    Figure("micro", "8×3: micro-batch 8, so the rank's share takes three passes"),
    Figure("own t/s", "tokens / (data + forward + backward): the rank's own speed"),
    Figure("SLOW", "the others wait for it; its slow phase is in capitals"),
    Figure("n/a", "unknown; an old value is dimmed and shows its age"),
    Figure("7  12", "commands that were applied, numbered in charts and events"),
    Figure("g1.4", "generation: the group's fourth formation under its first lead"),
    Figure("parent", "a trainer's parent process: it outlives the agent and records how the trainer ended"),
    Figure("spare", "a process that is ready for the group's next formation"),
)
PROCESS_NAMES = {"keeper": "parent", "standby": "spare"}
"""Roles of processes that have another name on the screens."""
