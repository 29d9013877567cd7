"""Opening of a run: a new one from a run file, an old one resumed, or one that outlived the agent."""

import math
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from trainctl.node_agent.autopilot.policies import REGISTRY
from trainctl.node_agent.conductor.conductor import Conductor
from trainctl.node_agent.conductor.state import Progress, RunSums, rank_step
from trainctl.node_agent.planning import plans, share_edits
from trainctl.node_agent.planning.durable import (
    Carried,
    Durable,
    Gap,
    PolicyState,
    RankSetting,
    Rollback,
    Settings,
    Skipped,
)
from trainctl.node_agent.records import run_folders
from trainctl.node_agent.records.keys import DURABLE_KEY, decoded, settings_key
from trainctl.node_agent.records.run_db import LastState, RunDb, add_rank_records
from trainctl.node_agent.runs import checkpoint_source, preflight
from trainctl.node_agent.runs.checkpoint_source import Fork, Source
from trainctl.node_agent.runs.figures import close_times
from trainctl.node_agent.trainers.rank_ports import reports_after
from trainctl.protocol.batch.split import apportion
from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import RunFile, first_micro, is_auto
from trainctl.protocol.errors import DamagedError, InvalidInputError, RefusedError
from trainctl.protocol.files.durable_files import make_folder, write_file
from trainctl.protocol.messages import (
    BranchPoint,
    Command,
    Event,
    Generation,
    KeptCommand,
    Report,
    RunState,
    RunView,
    Severity,
    StepCommitted,
    StepPlan,
)
from trainctl.protocol.messages.events import RunStateChanged
from trainctl.protocol.record import checkpoints, salvage
from trainctl.protocol.record.paths import RunPaths, runs_directory
from trainctl.protocol.record.reader import VIEW_KEY, VIEW_KEYS, RecordReader
from trainctl.protocol.record.schema import RUN_SCHEMA, open_for_reading, open_for_writing, refusing_damage
from trainctl.protocol.wire.codec import decode_json, encode_json

CHECKED_BYTES = 1 << 28
"""Most bytes of a record that is searched for damage before it is used: SQLite reads some 500 MB/s."""
FIRST_GENERATION = Generation(1, 0)


@dataclass(frozen=True)
class Opening:
    """A run ready to be led."""

    conductor: Conductor
    paths: RunPaths
    recorder: RunDb
    resume_from: Path | None
    notices: tuple[str, ...] = ()  # what the run's events should say about it
    kept: tuple[Event, ...] = ()  # what they say already, and clients don't know yet
    remarks: tuple[str, ...] = ()  # as notices, of what was chosen and is as it should be


def new_run(
    config: RunFile,
    node: str,
    node_dir: Path,
    starter: str,
    by: str,
    *,
    term: int = 1,
    placement: preflight.Placement = preflight.Placement(),  # noqa: B008
    fork: Fork | None = None,
) -> Opening:
    """Make a run directory, marked as unstarted, and the conductor of its first generation. Raises
    InvalidInputError or RefusedError; leaves nothing then. `fork`: the checkpoint of another run that it starts from.

    Its ranks are numbered in the order of the run file's nodes; its first generation is of `term`, the highest that is
    known. `starter` is the id of the command that asked for it, by `by`; it is applied when the first step commits.
    """
    if node in config.nodes:
        preflight.check_on(config, node, placement=placement)
    run = f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    paths = RunPaths(runs_directory(node_dir) / run)
    durable = first_durable(config, term) if fork is None else fork.start(config, first_durable(config, term))
    carried = {starter: Carried("start-run", by, durable.first_step + 1, durable.settings.plan_version)}
    durable = msgspec.structs.replace(durable, carried=carried)
    run_folders.mark_unstarted(paths.directory)
    try:
        recorder = make_directory(paths, config)
        opening = Opening(Conductor(run, config, durable, _progress(None, durable)), paths, recorder, None)
        if fork is not None:
            try:
                folder, said = fork.take(paths, recorder, node, by)
            except RefusedError:
                recorder.close()
                shutil.rmtree(paths.directory, ignore_errors=True)
                raise
            opening = replace(opening, resume_from=folder, kept=(said,))
    except RefusedError:
        run_folders.unmark(paths.directory)
        raise
    _keep(recorder, durable)
    return opening


def first_durable(config: RunFile, term: int = 1) -> Durable:
    """Return what a new run begins with. Raises InvalidInputError if its shares don't fit its global batch."""
    return Durable(_first_settings(config), max(FIRST_GENERATION, Generation(term, 0)), 0, probed=())


def make_directory(paths: RunPaths, config: RunFile, *, resumable: bool = True) -> RunDb:
    """A run directory with its run file and record, as `RunDb` opens it. Raises RefusedError; leaves nothing then."""
    made = not paths.directory.exists()
    try:
        make_folder(paths.logs)
        write_run_file(paths, config)
        return RunDb(paths, resumable=resumable)
    except (OSError, InvalidInputError, RefusedError) as error:
        if made:
            shutil.rmtree(paths.directory, ignore_errors=True)
        raise RefusedError(f"cannot make the run directory: {error}") from None


def write_run_file(paths: RunPaths, config: RunFile) -> None:
    """Raises RefusedError."""
    try:
        write_file(paths.run_file, tomli_w.dumps(run_file.to_dict(config)).encode())
    except OSError as error:
        raise RefusedError(f"cannot write {paths.run_file}: {error}") from None


def make_usable(paths: RunPaths) -> str:
    """Make what a run's record lacks of its tables, as after the loss of its log; make the whole record again if it is
    damaged, and return what an event says about that. Raises InvalidInputError."""
    try:
        open_for_writing(paths.record, RUN_SCHEMA).close()
        with closing(open_for_reading(paths.record)) as connection:
            is_sound = paths.record.stat().st_size > CHECKED_BYTES or salvage.is_sound(connection)
            with refusing_damage(paths.record):
                is_sound = is_sound and not _undecodable(paths, connection)
    except DamagedError:
        is_sound = False
    return "" if is_sound else _make_again(paths)


def kept_ranks(paths: RunPaths) -> dict[int, str]:
    """The node of each rank of an old run, by its record; empty if it never came to that."""
    durable = _read(paths)
    return {rank: setting.node for rank, setting in durable.settings.ranks.items()} if durable is not None else {}


def drained_ranks(paths: RunPaths) -> frozenset[int]:
    """Ranks of an old run that were drained, by its record."""
    durable = _read(paths)
    ranks = durable.settings.ranks if durable is not None else {}
    return frozenset(rank for rank, setting in ranks.items() if setting.out == "drained")


def kept_term(paths: RunPaths) -> int:
    """The term that a run of this node's own was last led in, by its record; 0 if it never came to that."""
    durable = _read(paths)
    return durable.generation.term if durable is not None else 0


def _read(paths: RunPaths) -> Durable | None:
    with RecordReader(paths) as reader:
        text = reader.meta(DURABLE_KEY)
    return decoded(text, Durable, paths.record) if text is not None else None


def rollback_step(paths: RunPaths) -> int | None:
    """The step that a pending rollback goes back to, if there is one."""
    durable = _read(paths)
    return durable.rollback.step if durable is not None and durable.rollback is not None else None


def call_rollback_off(paths: RunPaths) -> None:
    """Have a run that has ended go back no more. Raises InvalidInputError if its record can't be written."""
    durable = _read(paths)
    if durable is not None and durable.rollback is not None:
        with _recorder(paths) as recorder:
            _keep(recorder, msgspec.structs.replace(durable, rollback=None))
            recorder.close()


def note_end(paths: RunPaths, state: RunState, reason: str, ordered: Command | None = None) -> None:
    """Have the record of a run that waited to go back say how it ended instead, and by which command.

    Raises InvalidInputError if it can't be written.
    """
    with _recorder(paths) as recorder:
        last = recorder.last_state()
        step = last.step.step if last.step is not None else 0
        change = RunStateChanged("going back", state, reason, step)
        about: dict[str, Any] = {"step": step, "generation": last.generation}
        if ordered is None:
            recorder.event(time.time(), change, "error", "auto", **about)
        else:
            about |= {"command": ordered.id, "verb": ordered.verb, "outcome": "applied"}
            recorder.event(time.time(), change, "info", ordered.by or "unknown", **about)
        for key in VIEW_KEYS:
            if (text := recorder.meta(key)) is not None:
                view = msgspec.structs.replace(decode_json(text, RunView), state=state, reason=reason)
                recorder.set_meta(key, encode_json(view), own=key == VIEW_KEY)
        recorder.close()


def own(paths: RunPaths, term: int) -> None:
    """Keep that a run which has ended is this node's own from `term` on. Raises InvalidInputError."""
    with _recorder(paths) as recorder:
        durable = _kept(recorder)
        if durable is not None:
            generation = max(durable.generation, Generation(term, 0))
            _keep(recorder, msgspec.structs.replace(durable, generation=generation))
        recorder.close()


def old_run(
    paths: RunPaths,
    node: str,
    cluster: Sequence[str],
    source: Source,
    starter: str | None,
    by: str = "auto",
    *,
    without: Collection[int] = (),
    term: int = 1,
    placement: preflight.Placement = preflight.Placement(),  # noqa: B008
    clock: Callable[[], float] = time.time,
    seen: Generation | None = None,
    starting: KeptCommand | None = None,
) -> Opening:
    """Take an ended run up again from a checkpoint, or from the start if it has none.

    `starter` is the id of the command that asked for it, if one did; the ranks in `without` are lost for now. `term` is
    the highest that is known, and `seen` the highest generation that this node has seen in any run; `starting` is the
    open command that started the run before it went back.

    Steps committed after that checkpoint are retracted: they stay in the record, marked. The settings are those that
    the first step to be done again was planned with, so that it is the same step; what commands changed later is undone
    with the steps they changed it at. If the record has lost the checkpoint's step, a notice says so. Raises
    InvalidInputError; changes nothing then.
    """
    config = preflight.with_nodes(run_file.read(paths.run_file), node, cluster)
    if node in config.nodes:
        preflight.check_on(config, node, str(paths.run_file), placement)
    step = source.step
    known = _read(paths)
    begun = known.first_step if known is not None else 0
    if step < begun:
        problem = f"started from a checkpoint of step {begun}, which is gone or unreachable, and has no newer one"
        raise InvalidInputError("resume", f"{paths.directory.name} {problem}")
    if step >= config.run.steps:
        raise InvalidInputError(
            "resume", f"{paths.directory.name} is at step {step:,}, and was to be trained to step {config.run.steps:,}"
        )
    with _recorder(paths) as recorder:
        durable = _kept(recorder)
        if durable is None:
            durable = Durable(_first_settings(config), FIRST_GENERATION, 0)
        _complete(recorder, paths, durable)
        before = recorder.last_state()
        last = before.step
        close_times(recorder, last.committed_at if last is not None else 0.0)
        done, kept = _step(paths, step), durable.settings
        gap = durable.gap if durable.gap is not None and durable.gap.step <= step else None
        lost = step > begun and done is None and (gap is None or gap.step < step)
        if lost:
            gap = Gap(step, _cursor_after(recorder, source, last, kept))
        settings = _with_source(_settings_after(recorder, step, done, kept), source.node)
        for rank in set(without) & settings.live.keys():
            if len(settings.live) > 1:
                settings = share_edits.lose(settings, rank).settings
        generation = max(_highest(durable, before, seen), Generation(term, 0))
        # First of all: checkpoints of later steps, on whichever node, were written before this event and don't count.
        going = _resumed(recorder, clock(), generation, step, last, "auto" if starter is None else by)
        recorder.retract_after(step)
        checkpoints.supersede(paths.checkpoints, step)
        state = recorder.last_state()
        durable = msgspec.structs.replace(durable, gap=gap)
        made = state.evaluation  # the newest of those that are not undone
        asked = durable.rollback
        skipped = _skips(durable, settings, _progress(state.step, durable).cursor, step)
        carried, left = {}, tuple(at for at in durable.checkpoints if at <= step)
        if lost:
            left = (*left, step)
        for id, sender in ((starter, by), (starting.id, starting.by) if starting is not None else (None, "")):
            if id is not None:
                carried[id] = Carried("start-run", sender, step + 1, settings.plan_version)
        durable = msgspec.structs.replace(
            durable,
            settings=settings,
            generation=generation,
            seq=state.seq,
            mode="paused" if starter is None and durable.mode == "paused" else "running",
            carried=carried,
            paused_ids=(),
            members=(),
            probed=(),
            retracted=0,
            writing=None,
            owes_checkpoint=False,
            policies=_policies_at(paths, config, durable.policies, step),
            rollback=None,
            skipped=skipped,
            departed=tuple(rank for rank in durable.departed if rank not in settings.live),
            checkpoints=left,
            written=max(left, default=min(durable.written, step)),
            went_back=generation,
            resumed=checkpoint_source.setups_of(paths, durable, step),
            eval_loss=made and made.loss,
            eval_step=made and made.step,
            eval_values=dict(made.values) if made else {},
        )
        _keep(recorder, durable)
        conductor = Conductor(paths.directory.name, config, durable, _progress(state.step, durable))
        notices: tuple[str, ...] = ()
        if settings != kept:
            notices = (f"settings restored to step {step + 1}; later changes are undone",)
        notices += _skips_in_words(skipped, step) + _gone_further_back(asked, step)
        if lost:
            first = state.step.step + 1 if state.step is not None else 1
            missing = f"step {step:,}" if first == step else f"steps {first:,} to {step:,}"
            why = f"as in a power cut; the run continues from its checkpoint of step {step:,}"
            notices += (f"the record has lost {missing}, {why}",)
        return Opening(conductor, paths, recorder, source.folder, notices, (going,))


def _resumed(
    recorder: RunDb, at: float, generation: Generation, step: int, last: StepCommitted | None, by: str
) -> Event:
    """`last`: the last step before the run went back."""
    text = f"resumed from step {step:,}" + (
        ": later steps are repeated" if last is not None and last.step > step else ""
    )
    severity: Severity = "warning" if by == "auto" else "info"
    change = RunStateChanged("", "resumed", text)
    return recorder.event(at, change, severity, by, step=step, generation=generation)


def surviving_run(
    paths: RunPaths,
    open_commands: frozenset[str],
    term: int = 0,
    gone: Collection[str] = (),
    seen: Generation | None = None,
) -> Opening:
    """A run that was active when the agent ended, or is to be led by this one from `term` on: its conductor as
    the record left it. Nodes that are `gone`, with all their trainers, have taken part up to its last step. `seen`: the
    highest generation that this node has seen in any run. Raises InvalidInputError."""
    config = run_file.read(paths.run_file)
    with _recorder(paths) as recorder:
        durable = _kept(recorder)
        if durable is None:  # the power went, and all that the record had
            durable = msgspec.structs.replace(first_durable(config, term), generation=seen or FIRST_GENERATION)
            _keep(recorder, durable)
        _complete(recorder, paths, durable)
        state = recorder.last_state()
        close_times(recorder, state.step.committed_at if state.step is not None else 0.0, gone)
        carried = {id: command for id, command in durable.carried.items() if id in open_commands}
        recent = recent_plans(durable, state.plans)
        durable = msgspec.structs.replace(
            durable, generation=_highest(durable, state, seen), seq=state.seq, carried=carried
        )
        if durable.probed is None:  # a version without probes led it: its trainers know none
            durable = msgspec.structs.replace(durable, probed=durable.members)
        if term:
            durable = taken_over(durable, term, recent)
            _keep(recorder, durable)  # killed from here on, this node's agent comes back in that term
        conductor = Conductor(paths.directory.name, config, durable, _progress(state.step, durable), recent)
        return Opening(conductor, paths, recorder, None)


def recent_plans(durable: Durable, plans: Iterable[StepPlan]) -> tuple[StepPlan, ...]:
    """The train plans among these that stand: none from before the run last went back to a checkpoint."""
    train = (plan for plan in plans if plan.kind == "train")
    return tuple(plan for plan in train if durable.went_back is None or plan.generation > durable.went_back)


def taken_over(durable: Durable, term: int, recent: Sequence[StepPlan]) -> Durable:
    """Return what another node's conductor kept, for one that takes its place: that may have committed and shown a step
    that its own rank alone had made, so what was planned is made again just so; not what was to be planned again, for a
    command, and so was never begun."""
    newest = max(recent, key=lambda plan: (plan.generation, plan.seq), default=None)
    planned = newest.step if newest is not None and durable.mode != "paused" else 0
    if newest and any(step.step == planned and id not in newest.commands for id, step in durable.carried.items()):
        planned = 0
    return msgspec.structs.replace(
        durable,
        generation=max(durable.generation, Generation(term, 0)),
        retracted=max(planned, durable.retracted),
    )


def _step(paths: RunPaths, step: int) -> StepCommitted | None:
    with RecordReader(paths) as reader:
        rows, _ = reader.steps(step - 1, 1)
    return rows[0] if rows and rows[0].step == step else None


def _settings_after(recorder: RunDb, step: int, done: StepCommitted | None, latest: Settings) -> Settings:
    """Return what the step after `step` was planned with, if it was planned since, under a plan version of its own;
    else the latest. `done`: the row of `step`, None if the run started there.

    A plan of an older generation than that step's was made before the run went back behind it, and went another way."""
    plan = recorder.train_plan(step + 1)
    if plan is not None and done is not None and plan.generation < done.generation:
        plan = None
    text = recorder.meta(settings_key(plan.plan_version)) if plan is not None else None
    then = decoded(text, Settings, recorder.path) if text is not None else latest
    then = share_edits.as_memory_allows(then, latest)
    same = msgspec.structs.replace(then, plan_version=latest.plan_version) == latest
    return latest if same else msgspec.structs.replace(then, plan_version=latest.plan_version + 1)


def _cursor_after(recorder: RunDb, source: Source, last: StepCommitted | None, settings: Settings) -> int:
    """The first position after the step of a checkpoint that the record lacks: as the checkpoint says, or if the
    node that has it doesn't say, as the record's plans or else the batch size say."""
    if source.folder is not None:
        return checkpoints.read_cursor(source.folder)
    if source.cursor is not None:
        return source.cursor
    plan = recorder.train_plan(source.step)
    if plan is not None:
        return plan.cursor + plan.global_batch
    step, cursor = (last.step, last.cursor or 0) if last is not None else (0, 0)
    return cursor + (source.step - step) * settings.global_batch


def _skips(durable: Durable, settings: Settings, start: int, step: int) -> tuple[Skipped, ...]:
    """Return what is skipped up to `step`, and what the rollback to it asks to skip from the position `start` on. Skips
    at later steps are undone with these."""
    found, asked = [skip for skip in durable.skipped if skip.step <= step], durable.rollback
    if asked is None or asked.step != step or not asked.skip_batches:
        return tuple(found)
    before = [skip.start + skip.count for skip in found if skip.step == step]
    count = asked.skip_batches * settings.global_batch
    return (*found, Skipped(step, max([start, *before]), count))


def _skips_in_words(skipped: Sequence[Skipped], step: int) -> tuple[str, ...]:
    return tuple(
        f"positions {skip.start:,} to {skip.start + skip.count - 1:,} are skipped: their samples aren't trained on"
        for skip in skipped
        if skip.step == step
    )


def _gone_further_back(asked: Rollback | None, step: int) -> tuple[str, ...]:
    """Return what the events say where the checkpoint that a rollback named couldn't be had."""
    if asked is None or asked.step == step:
        return ()
    what = f"rollback to step {asked.step:,}: its checkpoint is gone or unreachable; continued from step {step:,}"
    return (f"{what}, nothing is skipped" if asked.skip_batches else what,)


def _policies_at(
    paths: RunPaths, config: RunFile, policies: Mapping[str, PolicyState], step: int
) -> dict[str, PolicyState]:
    """Return what a run keeps of its policies when it continues from `step`: none of their commands is open any
    more."""
    with RecordReader(paths) as reader:
        done = [(made.step, math.nan if made.loss is None else made.loss) for made in reader.evaluations()]
    evaluations = [(at, loss) for at, loss in done if at <= step]
    return {
        name: msgspec.structs.replace(
            kept, sent=(), advised="", memory=dict(REGISTRY[name].gone_back(config, kept.memory, evaluations))
        )
        for name, kept in policies.items()
        if name in REGISTRY
    }


def _with_source(settings: Settings, node: str) -> Settings:
    """The node whose checkpoint is loaded takes part, even if the first step to be done again drained it."""
    out = [rank for rank, setting in settings.ranks.items() if setting.node == node and setting.out]
    if not out:
        return settings
    weights = {rank: float(setting.share) for rank, setting in settings.live.items()}
    evenly = sum(weights.values()) / len(weights)
    return share_edits.edit(settings, apportion(settings.global_batch, weights | dict.fromkeys(out, evenly))).settings


@contextmanager
def _recorder(paths: RunPaths) -> Iterator[RunDb]:
    """The run's recorder, left open unless what is done with it fails. Raises BusyError if another process has the
    record locked."""
    recorder = RunDb(paths)
    try:
        recorder.require()
        yield recorder
    except InvalidInputError:
        recorder.close()
        raise


def _complete(recorder: RunDb, paths: RunPaths, durable: Durable) -> None:
    """Commit what the trainers did after the agent's last word, from their own records.

    An agent and its trainer that die together leave steps that only the trainer's record has; their plans were
    journaled before they were passed on.
    """
    state = recorder.last_state()
    progress = _progress(state.step, msgspec.structs.replace(durable, skipped=()))
    least = state.step.generation if state.step is not None else FIRST_GENERATION
    for report in _kept_reports(paths, progress.step, least):
        plan = recorder.train_plan(report.step)
        if (
            plan is None
            or plan.generation != report.generation
            or report.step != progress.step + 1
            or recorder.is_retracted(report.step, report.generation)
        ):
            continue
        node = durable.settings.ranks[report.rank].node
        recorder.commit(progress.commit(plan, report), [rank_step(report, node)], report.finished_at)


def _kept_reports(paths: RunPaths, after_step: int, least: Generation) -> list[Report]:
    """Train reports of all ranks above `after_step`, in the order of their steps, each of the newest generation that
    reported it; those older than `least` are of steps that were retracted."""
    found: dict[int, Report] = {}
    for file in sorted(paths.directory.glob("rank-*.db")):
        reports = list[Report]()
        with suppress(DamagedError):  # its trainer makes it again
            reports = reports_after(file, after_step)
        for report in reports:
            known = found.get(report.step)
            if report.generation >= least and (known is None or report.generation > known.generation):
                found[report.step] = report
    return [found[step] for step in sorted(found)]


def _first_settings(config: RunFile) -> Settings:
    tables = dict(enumerate(config.nodes.items()))
    wanted = {rank: table.share for rank, (_, table) in tables.items()}
    try:
        counts = plans.first_shares(config.batch.global_, wanted)
    except InvalidInputError as error:
        raise InvalidInputError(f"config: {error.where}", error.problem) from None
    ranks = {
        rank: RankSetting(node, counts[rank], first_micro(config, table), auto_micro=is_auto(config, table))
        for rank, (node, table) in tables.items()
    }
    return Settings(1, config.batch.global_, ranks)


def _progress(last: StepCommitted | None, durable: Durable) -> Progress:
    """Return how far the run has come by the last step in its record; positions that `durable` skips after that step
    count as passed."""
    skips, gap = durable.skipped, durable.gap
    if gap is not None and (last is None or last.step < gap.step):
        known = _progress(last, msgspec.structs.replace(durable, gap=None))
        return Progress(gap.step, _passed(skips, gap.step, gap.cursor), known.totals, known.before)
    if last is None:
        begun = durable.branch or BranchPoint("", 0)
        return Progress(begun.step, _passed(skips, begun.step, begun.cursor))
    assert last.cursor is not None  # a hosted run's always is
    own = RunSums(last.weight or 0.0, last.tokens or 0, last.step_seconds)
    totals = RunSums(last.weight_total or 0.0, last.tokens_total, last.seconds_total or 0.0)
    before = RunSums(totals.weight - own.weight, totals.tokens - own.tokens, totals.seconds - own.seconds)
    return Progress(last.step, _passed(skips, last.step, last.cursor), totals, before, last.loss)


def _passed(skips: Sequence[Skipped], step: int, cursor: int) -> int:
    """The first position after `step` that isn't skipped."""
    return max([cursor, *(skip.start + skip.count for skip in skips if skip.step == step)])


def _kept(recorder: RunDb) -> Durable | None:
    text = recorder.meta(DURABLE_KEY)
    return decoded(text, Durable, recorder.path) if text is not None else None


def _make_again(paths: RunPaths) -> str:
    """From what can be read of it and of its ranks' own. What its conductor kept and can't be decoded goes: the run
    continues from its newest step, as its file has it."""

    def fill(connection: sqlite3.Connection) -> None:
        add_rank_records(paths, connection)
        for key in _undecodable(paths, connection):
            connection.execute("DELETE FROM meta WHERE key = ?", (key,))

    aside = salvage.rebuild(paths.record, RUN_SCHEMA, fill)
    where = f"moved to {aside.name}" if aside is not None else "its file is gone"
    return f"{paths.record} was damaged: {where}, and made again from what could be read of it and the ranks' records"


def _undecodable(paths: RunPaths, connection: sqlite3.Connection) -> list[str]:
    """Keys of the conductor's values that aren't what it wrote."""
    found = []
    for key, value in connection.execute("SELECT key, value FROM meta").fetchall():
        is_settings = key.startswith(settings_key(0)[:-1])
        try:
            if is_settings or key == DURABLE_KEY:
                decoded(value, Settings if is_settings else Durable, paths.record)
        except DamagedError:
            found.append(key)
    return found


def _keep(recorder: RunDb, durable: Durable) -> None:
    """So that an agent that is killed before the first plan, or has its power cut, leaves a run that its successor can
    lead, and that doesn't stand where it has gone back from."""
    recorder.set_meta(DURABLE_KEY, msgspec.json.encode(durable).decode(), durable=True)
    recorder.flush()


def _highest(durable: Durable, state: LastState, seen: Generation | None) -> Generation:
    """The highest generation by the record, or as this node has `seen` it in the same term: the record may have lost
    the newest ones."""
    kept = max(durable.generation, state.generation or durable.generation)
    return max(kept, seen) if seen is not None and seen.term == kept.term else kept
