"""The dated history of what each version of the protocol added."""

from typing import Final

HISTORY: Final[tuple[tuple[int, str, str], ...]] = (
    (1, "2026-11-20", "Added attaching (snapshot, live messages, gap filling), commands, plans, groups and peers."),
    (1, "2026-11-22", "Added facts-request and digests-request for `trainctl doctor`."),
    (
        1,
        "2026-11-22",
        "Added keys: not-authorised refusals, other agents' keys (PeerView.key, Refusal.lead_key), and audit-request.",
    ),
    (
        1,
        "2026-11-22",
        "A different node can resume a run: start-run accepts a node and old_lead_is_off. Added claims in term 0,"
        " PeerClaim.resume, PeerConsent.takes_part and RunSummary.stale.",
    ),
    (1, "2026-11-22", "HostReading includes the disk size and the energy used by the devices."),
    (1, "2026-11-23", "Added probe plans and their report, Probed, to compare ranks before their first step."),
    (
        2,
        "2026-11-23",
        "Events are data: Event.data is one of a closed set of kinds. Event no longer has kind, text, before and after."
        " Added Command.undoes and Event.undoes, which name the undone command or event.",
    ),
    (
        2,
        "2026-11-23",
        "Added runs that other programs train: RunView.kind, RunSummary.kind, and RunView.verbs with the reasons for"
        " refused verbs. Values that such a run doesn't report are null: steps, global_batch, cursor, learning_rate,"
        " share, micro_batch, loss, grad_norm and weight. An agent can have several live runs (Snapshot.runs).",
    ),
    (
        2,
        "2026-11-23",
        "Added attach-run, run-steps, end-run and their reply run-kept, for programs that attach their own runs.",
    ),
    (
        2,
        "2026-11-23",
        "Added hosts-request, which returns recorded readings of a run's machines. HostReading.values has metrics by"
        " name, and a rank's part includes its machine's metrics by name. A peer-beat repeats the time of its ping, and"
        " a ping includes the last round trip.",
    ),
    (
        2,
        "2026-11-23",
        "Token counts include tokens without a loss; the weight divides the loss. In version 1, both were the"
        " weight. Added StepCommitted.tokens, weight_total and seconds_total, RankStep.weight, Report.tokens and"
        " own_tokens. Added the run's speed (RunSummary.rates) and units (RunView.weight_unit and loss_unit), and each"
        " rank's precision and kernels (Ready.compute and RankView.compute).",
    ),
    (
        2,
        "2026-11-23",
        "Added separate work, such as scoring rows with a checkpoint: open-work, work-rows, work-results-request and"
        " end-work from clients, host-work, work-file-request and slice-request between agents, and work-slice and"
        " work-ask between an agent and its worker. Its kinds are log-probabilities and answers. A node may only send"
        " slice-request and host-work in its own name.",
    ),
    (2, "2026-11-23", "Added Alive.detail. RankView.why has the progress of a rank that is starting."),
    (
        2,
        "2026-11-23",
        "Added the verb sample, plans of kind sample with their report, the live message sample, samples-request and"
        " kept-sample.",
    ),
    (2, "2026-11-24", "Added disk-request for `trainctl doctor`."),
    (2, "2026-11-24", "Added works-request, which returns the separate work of a node, and OpenWork.file."),
    (
        2,
        "2026-11-24",
        "Added evaluation-report, RunView.eval_values and KeptEvaluation.values: what an evaluation measures beside the"
        " loss. Added pairs-request, its reply pairs, and kept-pairs: held-out pairs with their rewards.",
    ),
    (2, "2026-11-24", "Added sealed, by which a trainer says how far a growing data file can be trained on."),
    (
        2,
        "2026-11-24",
        "Added reference-ask and reference-slice, by which ranks compute a reference's log-probabilities together.",
    ),
    (
        2,
        "2026-11-24",
        "Added RunView.cost and RunSummary.cost, what a run costs by its lead's prices, and RunSummary.cursor.",
    ),
    (
        2,
        "2026-11-25",
        "Added Ready.profile, the calibration that fits a rank, and calibrate-request and profiles-request.",
    ),
    (2, "2026-11-25", "Added RankView.passes, the curve of a rank's passes."),
    (2, "2026-11-25", "Added policies-request and policies: what the policies of an active run see and would do."),
    (
        2,
        "2026-11-25",
        "Added link-request between agents, its reply link-reply, and CalibrateRequest.lead: a calibration measures the"
        " link to the lead's node.",
    ),
    (2, "2026-11-26", "Added Facts.cpu_count and Facts.boot, by which nodes of one machine are known."),
    (2, "2026-11-26", "Added Facts.cpu_quota: cores that control groups leave to an agent."),
    (
        2,
        "2026-11-26",
        "Added CalibrateRequest.beside, stage and cancel, Calibration.waits, and DeviceProfile.forward and beside:"
        " nodes of one machine are calibrated at the same time.",
    ),
    (
        2,
        "2026-11-26",
        "Added diagnosis-request and its reply, why a run is slow or stuck, and GpuReading.others, other programs on a"
        " device.",
    ),
    (
        2,
        "2026-11-26",
        "Added PeerWelcome.devices, by which the lead chooses one precision for all ranks, and the form of the weights"
        " and the choice of kernels in Compute.",
    ),
    (
        2,
        "2026-11-26",
        "Added checkpoint-progress and checkpointed: a rank writes a checkpoint in the background, and the report of"
        " its plan means that the state has been copied. Added CheckpointInfo.write_seconds, kept and unpruned.",
    ),
    (
        2,
        "2026-11-26",
        "A new run can start from another run's checkpoint: start-run accepts branch and overrides. Added the event"
        " run-branched, RunView.branch and RunSummary.branch.",
    ),
    (
        2,
        "2026-11-26",
        "Added RankView.micro_set and micro_most, by which clients choose micro-batches with shares as the lead does.",
    ),
    (2, "2026-11-26", "Added the event setup-changed."),
    (
        2,
        "2026-11-26",
        "Added the verb profile and its plan, profile-written, the events profiled and profile-failed, traces-request"
        " and trace-request with their replies.",
    ),
    (2, "2026-11-26", "Added checkpoint-copy and the event checkpoint-copied: a node copies checkpoints elsewhere."),
    (
        2,
        "2026-11-26",
        "Added PeerBeat.leaving, PeerWelcome.leaving and PeerPing.yields, by which a node leaves a run before its"
        " machine goes; PeerBeat.slept_seconds and woke_at; and the state slept of node-state events.",
    ),
    (2, "2026-11-26", "Added Facts.compiler: the C++ compiler that torch.compile uses."),
    (2, "2026-11-27", "Added Facts.compile_lacks: what torch.compile needs for each kind of device and isn't there."),
    (2, "2026-11-27", "Added Compute.versions: the versions of what a rank computes with."),
    (2, "2026-11-27", "Added Compute.update: the library whose kernel updates the weights on CUDA."),
    (2, "2026-11-27", "Added PeerBeat.late and PeerPing.taken: events for the record of a run that another node led."),
    (
        2,
        "2026-11-28",
        "Added Probed.noise, layers and layer_noise, and Alive.preflight: ranks are judged by their own noise.",
    ),
    (
        2,
        "2026-11-28",
        "Added StepPlan.recorded, by which checkpoints wait for the lead's disk, and PeerConsent.checkpoint,"
        " checkpoint_generation and checkpoint_cursor: a claim in term 0 also asks for a node's newest checkpoint.",
    ),
)
"""(version, date, what it added), oldest first."""
