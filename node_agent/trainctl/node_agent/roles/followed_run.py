"""A rank of a run that another node's agent leads: its record here, its trainer, and what is known of the run."""

import contextlib
import dataclasses
import time
from collections.abc import Sequence

from trainctl.node_agent.conductor.views import same_but_progress
from trainctl.node_agent.planning.durable import Durable
from trainctl.node_agent.records import replication
from trainctl.node_agent.records.agent_db import FollowedRun
from trainctl.node_agent.records.keys import DURABLE_KEY, GENERATION_KEY, HANDED_OVER_KEY, decoded
from trainctl.node_agent.records.run_db import RunDb
from trainctl.node_agent.runs.context import AgentContext
from trainctl.node_agent.trainers.rank_ports import Ending
from trainctl.protocol import messages
from trainctl.protocol.config.objectives import objective_of
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import VIEW_KEY
from trainctl.protocol.record.schema import refusing_damage
from trainctl.protocol.wire.codec import encode_json

RECLAIM_SECONDS = 10.0
"""Seconds after which this node leads a handed-over run again if its claimant hasn't begun to."""


class FollowedRank:
    """Passes orders down and keeps them; it decides nothing, and never leads."""

    def __init__(
        self,
        context: AgentContext,
        known: FollowedRun,
        config: RunFile,
        paths: RunPaths,
        recorder: RunDb,
        adopted_at: float | None = None,
    ) -> None:
        """`adopted_at`: when an agent before this one hosted the rank first; None: its trainer is still to be started.
        Raises InvalidInputError for a damaged record."""
        self.known, self.config, self.paths, self.recorder = known, config, paths, recorder
        self.port = context.rank(paths, known.rank)
        self._node, self._is_simulated = context.node, context.supervisor.is_simulated
        self.since_monotonic = time.monotonic()
        self.wanted: tuple[messages.RunState, str] | None = None  # what it is to end as, and why
        self.ending: Ending | None = None  # of its trainer's process
        self.told_ending = False
        self._started_at = adopted_at if adopted_at is not None else time.time()
        self._missed = adopted_at is not None
        state = recorder.last_state()
        kept, awaited = recorder.meta(GENERATION_KEY), recorder.meta(HANDED_OVER_KEY)
        generations = [state.generation] if state.generation is not None else []
        with refusing_damage(paths.record, ValueError, TypeError):
            generations += [messages.Generation(*map(int, kept.split(".")))] if kept is not None else []
            self._awaited_term = int(awaited or 0)
        self.generation = max(generations, default=messages.Generation(0, 0))
        self._awaited_since_monotonic = time.monotonic()
        self._plan, self._pid, self._ready = state.plan, self.port.look().pid if self._missed else None, False
        self._engine = "none"
        self.view = self.look()

    @property
    def run(self) -> str:
        return self.known.run

    @property
    def hosted(self) -> messages.HostedRank:
        return messages.HostedRank(self.run, self.known.rank, self._pid, *self.recorder.newest())

    @property
    def is_in_group(self) -> bool:
        """Return whether its rank takes part in the run's steps, by the newest state that its lead has sent."""
        text = self.recorder.meta(DURABLE_KEY)
        if text is None:
            return False
        with contextlib.suppress(InvalidInputError):
            return self.known.rank in decoded(text, Durable, self.paths.record).settings.live
        return False

    # ------------------------------------------------------------ down

    async def obey(self, order: messages.ToTrainer) -> bool:
        """Pass an order on, a plan once it is journaled; False if it is of a generation that has been left. The word on
        the lead's record may come that late, and is of no use then."""
        if isinstance(order, messages.ReferenceSlice):
            await self.port.tell(order)  # a trainer that isn't there asks again
            return True
        if not isinstance(order, messages.Leave):
            if order.generation < self.generation:
                return isinstance(order, messages.StepPlan) and order.recorded is True
            self.see(order.generation)
        if isinstance(order, messages.StepPlan) and not order.recorded:
            self.recorder.plan(order, time.time(), durable=bool(order.commands))
            self._plan = order
            await self.recorder.settled()
        elif isinstance(order, messages.Form):
            self._engine = order.engine
        if not await self.port.tell(order):
            self._missed = True
            if isinstance(order, messages.Leave):
                await self.port.end()
        return True

    def keep(self, items: Sequence[bytes]) -> list[messages.KeptCommand]:
        """Keep what its lead has kept; the commands among it, which are the agent's to keep. Raises ProtocolError."""
        return replication.keep_all(self.recorder, items)

    def beyond(self, other: messages.HostedRank) -> list[messages.Kept]:
        """Return what its record has beyond that of a node about to lead the run. Raises RefusedError if that is
        much."""
        return replication.beyond(self.recorder, self.paths, self.hosted, other)

    def follow(self, lead: str, address: str) -> None:
        """Another node's agent leads the run from here on, or the same one elsewhere."""
        self.told_ending = self.told_ending and lead == self.known.lead
        self.known = dataclasses.replace(self.known, lead=lead, address=address)

    async def end(self, state: messages.RunState, reason: str, *, checkpoint: bool = False) -> None:
        """Have the trainer end, after a `checkpoint` of its last step if that is wanted. `state` is the run's:
        "stopping" if the last one is not reported yet, "starting" if it never began and nothing of it is to be kept;
        where a plan was journaled that is taken for a failure."""
        never_began = state == "starting"
        if never_began and self._plan is not None:
            state, reason = "failed", f"{self.known.lead} no longer knows this run"
        if never_began or state not in messages.ACTIVE_RUN_STATES:
            self.wanted = (state, reason)
        if self.ending is not None:
            return
        leave = messages.Leave(run=self.run, reason=reason or state, checkpoint=checkpoint)
        if state == "starting" or not await self.port.tell(leave):
            await self.port.end()

    async def start_again(self) -> None:
        """Another trainer in place of one that has ended; whether that can't be started is an ending too."""
        try:
            await self.port.start_again()
        except RefusedError as error:
            self.ending = Ending(clean=False, why=f"could not be started: {error}")
        else:
            self.ending, self._ready, self._missed = None, False, False
        self.told_ending = False

    def see(self, generation: messages.Generation) -> None:
        """Obey no order of an older one from here on."""
        if generation > self.generation:
            self.generation = generation
            self.recorder.set_meta(GENERATION_KEY, f"{generation.term}.{generation.n}", own=True)

    # ------------------------------------------------------------ handed over

    def hand_over(self, term: int) -> None:
        """It was led here, and its new lead is to begin in this term."""
        self._awaited_term, self._awaited_since_monotonic = term, time.monotonic()
        self.recorder.set_meta(HANDED_OVER_KEY, str(term), own=True)

    @property
    def awaited_term(self) -> int:
        """In which the node that it was handed over to has not begun to lead it, 0 if it has or never was."""
        return self._awaited_term if self._awaited_term > self.generation.term else 0

    def is_to_be_reclaimed(self) -> bool:
        """Return whether its new lead has been waited for long enough; from then on it is waited for as long again."""
        if not self.awaited_term or time.monotonic() < self._awaited_since_monotonic + RECLAIM_SECONDS:
            return False
        self._awaited_since_monotonic = time.monotonic()
        return True

    # ------------------------------------------------------------ up

    def heard(self, answer: messages.FromTrainer, *, returned: bool) -> bool:
        """Return whether what its lead sent it before this answer may have been lost."""
        self._ready = (
            self._ready
            or isinstance(answer, messages.Ready)
            or (isinstance(answer, messages.Alive) and bool(answer.ready))
        )
        returned, self._missed = returned or self._missed, False
        return returned

    def missed(self) -> None:
        """The return of the trainer could not be reported to its lead; the next answer reports it."""
        self._missed = True

    def watch(self) -> None:
        """Look how the trainer is."""
        look = self.port.look()
        self._pid = look.pid
        if self.ending is None:
            self.ending = look.ending

    @property
    def is_steady(self) -> bool:
        """Return whether its trainer lives and has plans, and neither is to end."""
        is_ending = self.ending is not None or self.wanted is not None or bool(self.awaited_term)
        return self._pid is not None and self._plan is not None and not is_ending

    def refresh(self) -> bool:
        """Bring the view up to date; whether more than a step has changed in it."""
        before, self.view = self.view, self.look()
        changed = not same_but_progress(before, self.view)
        if changed:
            self._keep_view()
        return changed

    def look(self) -> messages.RunView:
        """The run as far as it is known here: its lead, and the rank on this node."""
        plan, config = self._plan, self.config
        objective = objective_of(config.objective, config.data.kind)
        work = next((work for work in plan.work if work.rank == self.known.rank), None) if plan else None
        share = sum(piece.count for piece in work.ranges) if work else 0
        state: messages.RankState = "done" if self.ending else "run" if plan else "ready" if self._ready else "starting"
        rank = messages.RankView(
            rank=self.known.rank,
            node=self._node,
            state=state,
            since_at=self._started_at,
            share=share,
            micro_batch=work.micro_batch if work else 0,
            pid=self._pid,
            why=self.ending.why if self.ending and not self.ending.clean else "",
        )
        return messages.RunView(
            run=self.run,
            name=config.run.name,
            state=self._state(),
            lead=self.known.lead,
            engine=self._engine,
            generation=self.generation,
            step=max(0, plan.step - (plan.kind == "train")) if plan else 0,
            steps=config.run.steps,
            plan_version=plan.plan_version if plan else 1,
            cursor=plan.cursor if plan else 0,
            global_batch=plan.global_batch if plan else config.batch.global_,
            samples=None,
            ranks=(rank,),
            learning_rate=plan.learning_rate if plan else 0.0,
            started_at=self._started_at,
            directory=str(self.paths.directory),
            reason=self.wanted[1] if self.wanted else "",
            weight_unit=objective.weight_unit,
            loss_unit=objective.loss_unit,
            simulated=self._is_simulated,
        )

    def _state(self) -> messages.RunState:
        if self.wanted is not None:
            return self.wanted[0] if self.ending is not None else "stopping"
        return "running" if self._plan is not None else "starting"

    def _keep_view(self) -> None:
        self.recorder.set_meta(VIEW_KEY, encode_json(self.view), own=True)

    def close(self) -> None:
        """Let the record go."""
        self.view = self.look()
        self._keep_view()
        self.recorder.close()
