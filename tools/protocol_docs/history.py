"""The dated history of what each version of the protocol added."""

from typing import Final

HISTORY: Final[tuple[tuple[int, str, str], ...]] = (
    (1, "2026-11-20", "Attach (snapshot, live messages, gap filling), commands, plans and reports, groups, peers."),
    (1, "2026-11-22", "facts-request and digests-request, for the doctor."),
    (
        1,
        "2026-11-22",
        "Keys: not-authorised refusals, keys of other agents (PeerView.key, Refusal.lead_key), the audit.",
    ),
    (
        1,
        "2026-11-22",
        "Another node resumes a run: start-run takes a node and old_lead_is_off, PeerClaim.resume and term 0,"
        " PeerConsent.takes_part; RunSummary.stale.",
    ),
    (1, "2026-11-22", "HostReading: the disk's size, and the energy that the devices have drawn."),
    (1, "2026-11-23", "Plans of kind probe, and Probed, their report: ranks are compared before their first step."),
    (
        2,
        "2026-11-23",
        "Events are data: Event.data is one of a closed union of kinds; kind, text, before and after are gone from the"
        " wire. Command.undoes and Event.undoes say what a command undoes.",
    ),
    (
        2,
        "2026-11-23",
        "Runs that other programs train: RunView.kind and RunSummary.kind, and RunView.verbs, which says why a run"
        " refuses a verb. What such a run does not report is null: steps, global_batch, cursor, learning_rate, share,"
        " micro_batch, loss, grad_norm and weight. Several runs can be live on an agent: Snapshot.runs.",
    ),
    (
        2,
        "2026-11-23",
        "A program that trains a run by itself attaches it: attach-run, run-steps and end-run, answered by run-kept.",
    ),
    (
        2,
        "2026-11-23",
        "hosts-request: readings of a run's machines from its record. HostReading.values is keyed by name, and a rank's"
        " part includes its machine's metrics by name. A peer-beat says when its ping was sent, and a ping gives the"
        " last round trip.",
    ),
    (
        2,
        "2026-11-23",
        "Tokens are all that were processed, those without a loss too; weight is what the loss is divided by. In"
        " version 1 both were weight. StepCommitted.tokens, weight_total and seconds_total, RankStep.weight,"
        " Report.tokens and own_tokens are new. RunSummary.rates says how fast a run is; RunView.weight_unit and"
        " loss_unit are the units of its weight and its loss. Ready.compute and RankView.compute say with which"
        " precision and kernels a rank computes.",
    ),
)
"""(version, date, what it added), oldest first."""
