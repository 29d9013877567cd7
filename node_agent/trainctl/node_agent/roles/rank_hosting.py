"""The rank that this node hosts for another node's agent: begun, resumed, let go of, and what is kept of it."""

import asyncio
import contextlib
import shutil
import time
from pathlib import Path

from trainctl.node_agent.records import run_folders
from trainctl.node_agent.records.agent_db import FollowedRun, KnownRun
from trainctl.node_agent.records.keys import HANDED_OVER_KEY
from trainctl.node_agent.records.run_db import RunDb
from trainctl.node_agent.roles.followed_run import FollowedRank
from trainctl.node_agent.roles.role import AgentRole
from trainctl.node_agent.runs import checkpoint_source, preflight, restore
from trainctl.node_agent.runs.context import AgentContext
from trainctl.protocol import messages
from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.record.paths import RunPaths, runs_directory
from trainctl.protocol.security import received_names

NO_RANK = -1
"""Stands for the rank in a run that this node led without hosting one."""
ENDING_SECONDS = 8.0
"""Seconds to wait for an ending rank before another is hosted; the lead waits a little longer."""


class RankHosting:
    """At most one rank of one run."""

    def __init__(self, context: AgentContext, role: AgentRole) -> None:
        self._context, self._node, self._db, self._role = context, context.node, context.db, role

    async def host(self, lead: str, address: str, wanted: messages.PeerHost) -> tuple[str, str]:
        """Start the rank's trainer; gives the field that stands against it and what is wrong, or two empty strings."""
        known = FollowedRun(wanted.run, wanted.rank, lead, address)
        ending = self._role.followed
        if ending is not None and ending.wanted is not None:
            await self._role.wait_while(lambda: self._role.followed is ending, ENDING_SECONDS)
        if self._role.followed is not None and self._role.followed.known.is_same(known):
            return "", ""  # asked again, for the answer was lost
        try:
            self._check_free()
            config = run_file.parse(wanted.config, "config")
            if self._node not in config.nodes:
                raise InvalidInputError("config: nodes", f"{self._node} is not in it")
            await asyncio.to_thread(preflight.check_on, config, self._node, placement=self._context.placement)
            self._check_free()  # an operator may have started a run meanwhile
            self._begin(known, config, wanted)
        except InvalidInputError as error:
            return error.where, f"{error.problem}{_hint(error.where)}"
        except RefusedError as error:
            return "run", str(error)
        return "", ""

    def _check_free(self) -> None:
        self._role.check_no_work()
        if self._role.followed is not None:
            text = f"hosts {self._role.followed.run} for {self._role.followed.known.lead}; one run at a time"
            raise InvalidInputError("run", text)
        if self._role.is_busy:
            raise InvalidInputError("run", f"leads {self._role.run or 'a run that is starting'}; one run at a time")

    def _begin(self, known: FollowedRun, config: RunFile, wanted: messages.PeerHost) -> None:
        """Raises InvalidInputError or RefusedError; then it leaves no more than there was."""
        paths = RunPaths(received_names.id_folder(runs_directory(self._context.directory), known.run))
        row = self._db.known_run(known.run)
        own = row is not None and self._db.followed(known.run) is None
        if own and wanted.generation.term <= restore.kept_term(paths):
            raise InvalidInputError("resume", f"{known.run} was led by {self._node}; resume it there")
        if wanted.generation.term < (newer := self._db.consented_term(known.run)):
            text = f"{self._node} has agreed to a different lead for {known.run} in term {newer}; use --node"
            raise InvalidInputError("resume", f"{text} {known.lead} to resume it on {known.lead} in a newer term")
        self._db.saw(wanted.generation)
        checkpoint = checkpoint_source.whole(paths, wanted.resume_step) if wanted.resume_step is not None else None
        if row is None:
            _check_is_of_run(paths, config)
        is_made = row is None and not paths.directory.exists()
        if is_made:
            run_folders.mark_unstarted(paths.directory)
        before = self._db.followed(known.run)
        try:
            followed = self._start(known, config, paths, checkpoint, is_new=row is None)
        except (OSError, InvalidInputError, RefusedError) as error:
            self._put_back(known.run, before, paths, is_new=row is None, is_made=is_made)
            raise RefusedError(str(error)) from None
        run_folders.unmark(paths.directory)
        self._db.set_run_state(known.run, "starting")
        self._take_up(followed)

    def _start(
        self, known: FollowedRun, config: RunFile, paths: RunPaths, checkpoint: Path | None, *, is_new: bool
    ) -> FollowedRank:
        recorder = restore.make_directory(paths, config, resumable=False)
        with contextlib.ExitStack() as undo:
            undo.callback(recorder.close)
            if recorder.meta(HANDED_OVER_KEY):
                recorder.set_meta(HANDED_OVER_KEY, "", own=True)  # the node that asks for a rank leads the run
            if is_new:
                self._db.add_run(known.run, config.run.name, time.time())
            self._db.follow(known)
            followed = FollowedRank(self._context, known, config, paths, recorder)
            followed.port.start(checkpoint)
            undo.pop_all()
        return followed

    def _put_back(self, run: str, before: FollowedRun | None, paths: RunPaths, *, is_new: bool, is_made: bool) -> None:
        """After a rank that couldn't be started: what this node knew of the run, and none of what was made for it."""
        if is_new:
            self._db.forget_run(run)
        elif before is not None:
            self._db.follow(before)
        else:
            self._db.unfollow(run)
        if is_made:
            shutil.rmtree(paths.directory, ignore_errors=True)
            run_folders.unmark(paths.directory)

    def adopt(self, row: KnownRun, known: FollowedRun) -> None:
        """Follow again what the last agent of this node followed. Raises InvalidInputError if its files are no use."""
        paths = RunPaths(row.directory)
        config, recorder = run_file.read(paths.run_file), RunDb(paths, resumable=False)
        try:
            followed = FollowedRank(self._context, known, config, paths, recorder, row.started_at)
        except InvalidInputError:
            recorder.close()
            raise
        self._take_up(followed)

    def _take_up(self, followed: FollowedRank) -> None:
        self._role.follow(followed)
        self._context.publisher.publish(followed.view)

    def release(self) -> tuple[KnownRun, FollowedRun]:
        """Let go of the rank that is followed, for this agent is to lead its run; the trainer stays as it is."""
        followed = self._role.followed
        assert followed is not None
        row = self._db.known_run(followed.run)
        assert row is not None
        followed.close()
        self._role.let_go()
        return row, followed.known

    def finish(self, followed: FollowedRank, state: messages.RunState, reason: str) -> None:
        """Keep that a rank's trainer has ended as it should; of one that never began ("starting") nothing is kept."""
        followed.close()
        self._context.link.forget(followed.run)
        if state == "starting":
            self._forget(followed.run, followed.paths)
        else:
            self._db.set_run_state(followed.run, state, reason)
            self._context.publisher.publish(followed.view)
        self._role.let_go()

    def _forget(self, run: str, paths: RunPaths) -> None:
        run_folders.mark_unstarted(paths.directory)
        self._db.forget_run(run)
        shutil.rmtree(paths.directory, ignore_errors=True)
        run_folders.unmark(paths.directory)

    def close(self) -> None:
        """Let the record go; the trainer stays as it is, for the next agent of this node."""
        if self._role.followed is not None:
            self._role.followed.close()

    def hosted_for(self, lead: str) -> tuple[messages.HostedRank, ...]:
        """Return what that node's agent is given of it."""
        followed = self._role.followed
        return (followed.hosted,) if followed is not None and followed.known.lead == lead else ()


def _check_is_of_run(paths: RunPaths, config: RunFile) -> None:
    """Refuse a folder that is there, though this node doesn't know its run, and holds a run of another name. It may
    hold this one: a person copied it, or the agent's database was lost. Raises InvalidInputError."""
    try:
        name = run_file.read(paths.run_file).run.name
    except InvalidInputError:
        return  # none, or one that a power cut has left
    if name != config.run.name:
        raise InvalidInputError("run", f"{paths.directory} holds another run, {name}: move it away")


def _hint(field: str) -> str:
    """Return what helps if this node lacks the files that a field names."""
    is_path = field.endswith((".path", ".model_path", ".data_path", ".held_out_path"))
    return "; to copy the files to this node, run trainctl cluster sync RUN.toml" if is_path else ""
