"""Proposals of policies in the conductor: each gets facts, and its proposal is sent, advised or ignored.

One policy acts at a time: no command is proposed while another policy's is open, or while the effect of the last one
is measured. Edits that must not wait for a step are no part of that.
"""

import copy
import dataclasses
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from trainctl.node_agent.autopilot.policies import REGISTRY
from trainctl.node_agent.autopilot.policy import Memory, Occasion, Policy, Proposal, RunFacts, Stepped, mode_of
from trainctl.node_agent.conductor.events import Commanded, CommandEnded, Proposed, caused
from trainctl.node_agent.conductor.state import ConductorState
from trainctl.node_agent.planning.durable import PolicyState
from trainctl.protocol.analysis.curve import CurveJudge, CurveLimits
from trainctl.protocol.config.policies import (
    AUTHOR,
    HELD_OUT_POLICIES,
    POLICIES,
    PolicyMode,
    PolicyName,
    impatience,
    policies_that_yield,
)
from trainctl.protocol.messages import Finding, PolicyStatus, verbs
from trainctl.protocol.messages.events import Change, PolicyActed, PolicyAdvised, PolicyModeChanged

EFFECT_STEPS = 20
"""Steps over which the effect of a policy's command is measured: as many as the screens compare."""
FAILURES = 3
"""Commands of a policy that failed in a row after which it only advises."""
ARRIVAL_STEPS = 3
"""Steps after which a proposed command that hasn't arrived was lost, as on a full disk."""
_NEW = PolicyState()
_NAMESPACE = uuid.UUID("9f0b9ab4-3c0e-4d5f-8a55-0d6b3a9d9c11")
"""Namespace of the ids of proposed commands."""


class Proposals:
    """Asks the policies, and keeps their modes and memories with the conductor's state."""

    def __init__(self, state: ConductorState) -> None:
        self._state = state
        self.curve = CurveJudge(CurveLimits.of(state.config))
        self._evidence: dict[PolicyName, dict[str, Any]] = {}
        # With that evidence, for a policy to write to, and what is kept of it.
        self._memories: dict[PolicyName, tuple[Memory, Mapping[str, float]]] = {}
        self._generation = state.durable.generation  # that the evidence is of
        self._modes_kept: Mapping[str, PolicyState] | None = None  # what the known modes were worked out from
        self._modes_known: Mapping[PolicyName, PolicyMode] = {}
        self._asked_known: dict[type, list[tuple[PolicyName, PolicyMode]]] = {}  # from these, by type of occasion
        self._last: Stepped | None = None  # the last step of that generation
        self._expected: dict[str, int] = {  # commands that have been sent and not arrived: by id, since which step
            id: state.progress.step
            for kept in state.durable.policies.values()
            for id in kept.sent
            if id not in state.durable.carried
        }

    def mode(self, name: PolicyName) -> PolicyMode:
        return self._modes[name]

    @property
    def _modes(self) -> Mapping[PolicyName, PolicyMode]:
        """Modes of all policies; worked out again only when what is kept of one has changed."""
        kept, config = self._state.durable.policies, self._state.config
        if kept is not self._modes_kept:
            self._modes_kept = kept
            self._modes_known = {name: mode_of(config, self._state.durable, name) for name in POLICIES}
            self._asked_known = {}
        return self._modes_known

    def _asked(self, kind: type) -> list[tuple[PolicyName, PolicyMode]]:
        """The policies that are asked about occasions of a type, with their modes."""
        modes = self._modes
        if kind not in self._asked_known:
            asked = [(name, mode) for name, mode in modes.items() if mode != "off"]
            self._asked_known[kind] = [each for each in asked if issubclass(kind, REGISTRY[each[0]].occasions)]
        return self._asked_known[kind]

    def is_pending(self, name: PolicyName) -> bool:
        """Return whether a policy that isn't off may still have something to decide."""
        return self.mode(name) != "off" and not REGISTRY[name].is_over(self._facts(None))

    def ask(self, occasion: Occasion) -> None:
        """Ask the policies what they propose now, one after another: each sees what those before it changed."""
        self._forget_old()
        if isinstance(occasion, Stepped):
            self._last, report = occasion, occasion.report
            clip_scale = report.values.get("clip_scale")
            self.curve.add(self._state.progress.step, occasion.loss, report.grad_norm, report.skipped, clip_scale)
        facts = self._facts(occasion)
        for name, mode in self._asked(type(occasion)):
            if facts.durable is not self._state.durable:
                facts = self._facts(occasion)
            if name not in self._memories:
                own = self._kept(name).memory
                self._memories[name] = Memory(dict(own), self._evidence.setdefault(name, {})), own
            memory, kept = self._memories[name]
            found = REGISTRY[name].propose(facts, memory)
            if memory.kept != kept:
                self._keep(name, memory=memory.kept)
            if found is not None:
                self._react(name, mode, found)

    def _react(self, name: PolicyName, mode: PolicyMode, found: Proposal | Finding) -> None:
        proposal, finding = (found, found.finding(name)) if isinstance(found, Proposal) else (None, found)
        reaction = finding.reaction(mode)
        if reaction == "act" and proposal is not None:
            self._do(name, proposal)
        elif reaction == "advise" and (proposal is None or self._is_new_advice(name, proposal)):
            command = finding.remedies[0].command if finding.remedies else ""
            self._state.happen(PolicyAdvised(name, command, finding.title), finding.severity, by=AUTHOR + name)

    def set_mode(self, command: Commanded, args: verbs.Autopilot) -> None:
        """At once, whatever the run is doing: no plan depends on it. Done again it changes nothing."""
        modes = {name: args.mode if name == args.name else self.mode(name) for name in HELD_OUT_POLICIES}
        if problem := impatience(self._state.config.policy, *modes.values()):
            self._state.end(command.id, "rejected", reason=f"policy.early-stop.patience: {problem}", field="mode")
            return
        change = PolicyModeChanged(args.name, self.mode(args.name), args.mode)
        self._keep(args.name, mode=args.mode, failures=0)
        self._state.persist()
        self._state.end(command.id, "applied", self._state.progress.step, made=change)

    def yield_to(self, command: Commanded) -> None:
        """A person decides what a policy would have decided: from here on it only advises."""
        if command.by.startswith(AUTHOR):
            return
        is_auto = isinstance(command.args, verbs.Rebalance) and command.args.auto
        for name in policies_that_yield(command.verb, auto=is_auto, is_new=True):
            if self.mode(name) == "on" and self.is_pending(name):
                self._turn_to_advise(name, f"{command.by or 'somebody'} sent {command.verb}")

    def goes_back(self, command: Commanded) -> None:
        """A rollback is accepted: what it leaves of the policies is journaled with it, since its outcome comes last."""
        self.yield_to(command)
        for name in POLICIES:
            kept = self._kept(name)
            if command.id in kept.sent:
                self._keep(name, memory={**kept.memory, **kept.pending}, pending={})

    def _turn_to_advise(self, name: PolicyName, cause: str) -> None:
        change = PolicyModeChanged(name, self.mode(name), "advise", cause)
        self._keep(name, mode="advise", failures=0)
        self._state.persist()
        self._state.happen(change, by=AUTHOR + name, verb="autopilot")

    def policy_statuses(self) -> tuple[PolicyStatus, ...]:
        """Return what each policy sees, and would do next. Costs as much as some steps: ask it only for a person."""
        self._forget_old()
        return tuple(self._status_of(name, policy) for name, policy in REGISTRY.items())

    def _status_of(self, name: PolicyName, policy: Policy) -> PolicyStatus:
        mode = self.mode(name)
        if mode == "off":
            return PolicyStatus(name, mode)
        memory = Memory(dict(self._kept(name).memory), copy.deepcopy(self._evidence.get(name, {})))
        sight = policy.sees(self._facts(self._last), memory)
        waits = self._waits() if sight.command and mode == "on" and not sight.acts_at_once else ""
        return PolicyStatus(name, mode, sight.figures, sight.command, sight.why, waits)

    def _waits(self) -> str:
        """Return what a command that isn't urgent waits for."""
        waited = next((name for name, kept in self._state.durable.policies.items() if kept.sent), None)
        if waited is not None:
            return f"the outcome of {waited}'s command"
        left = self._measured_steps_left
        return f"{left} more steps that measure the effect of the last change" if left else ""

    # ------------------------------------------------------------ commands on their way

    def arrived(self, command: Commanded) -> Commanded:
        """A command as the conductor handles it: one that a policy sent has its reason, also from before a restart."""
        self._expected.pop(command.id, None)
        if command.reason or not command.by.startswith(AUTHOR):
            return command
        sent = (kept.reason for kept in self._state.durable.policies.values() if command.id in kept.sent)
        return dataclasses.replace(command, reason=next(sent, ""))

    def note_ends(self) -> None:
        """Outcomes of commands that policies sent, among what has just been decided."""
        open_ids = {id: name for name in POLICIES for id in self._kept(name).sent}
        for ended in [*self._state.ends]:
            if ended.id in open_ids:
                self._note_end(open_ids[ended.id], ended)

    def _note_end(self, name: PolicyName, ended: CommandEnded) -> None:
        kept, failures, memory = self._kept(name), self._kept(name).failures, self._kept(name).memory
        left = tuple(id for id in kept.sent if id != ended.id)
        if ended.state == "applied":
            failures, memory = 0, {**memory, **kept.pending}
        elif ended.field != "if_plan" and self._state.stage not in ("leaving", "over"):  # else it was never tried
            failures += 1
        self._keep(name, sent=left, failures=failures, memory=memory, pending=kept.pending if left else {})
        if ended.state == "applied" and isinstance(ended.made, Change):
            self._state.keep(changed_at=ended.step or self._state.progress.step)
        self._state.persist()
        if failures >= FAILURES and self.mode(name) == "on":
            self._turn_to_advise(name, f"{failures} commands in a row failed, the last one: {ended.reason}")

    def _forget_old(self) -> None:
        """Evidence about the ranks of an earlier generation, and commands that were lost on their way."""
        if self._generation != self._state.durable.generation:
            self._generation, self._last, self._evidence = self._state.durable.generation, None, {}
            self._memories.clear()
        step = self._state.progress.step
        lost = [id for id, since in self._expected.items() if step >= since + ARRIVAL_STEPS]
        for name in POLICIES if lost else ():
            left = tuple(id for id in self._kept(name).sent if id not in lost)
            self._keep(name, sent=left, pending=self._kept(name).pending if left else {})
        for id in lost:
            del self._expected[id]

    def _is_busy(self, name: PolicyName, proposal: Proposal) -> bool:
        """Return whether another command must end, or have its effect measured, before this one."""
        if proposal.is_urgent:
            return bool(self._kept(name).sent)
        return bool(self._measured_steps_left) or any(kept.sent for kept in self._state.durable.policies.values())

    @property
    def _measured_steps_left(self) -> int:
        """Steps until the effect of the last change has been measured; 0 if it has, or the run went back before it."""
        changed_at = self._state.durable.changed_at
        passed = self._state.progress.step - changed_at if changed_at is not None else EFFECT_STEPS
        return EFFECT_STEPS - passed if 0 <= passed < EFFECT_STEPS else 0

    # ------------------------------------------------------------ proposals

    def _do(self, name: PolicyName, proposal: Proposal) -> None:
        if proposal.edit is not None:
            if proposal.remember:
                self._keep(name, memory={**self._kept(name).memory, **proposal.remember})
            self._state.persist(settings=proposal.edit.settings, changed_at=self._state.progress.step)
            change = caused(proposal.edit.change, proposal.reason)
            self._state.happen(change, proposal.severity, by=AUTHOR + name, verb=proposal.verb)
        elif not self._is_busy(name, proposal):
            each = [proposal] if proposal.before is None else [proposal.before, proposal]
            kept = self._kept(name)
            proposed = [self._proposed(name, one, kept.actions + number) for number, one in enumerate(each)]
            sent = tuple(command.id for command in proposed)
            pending, actions = dict(proposal.remember), kept.actions + len(each)
            self._keep(name, sent=sent, reason=proposal.reason, pending=pending, actions=actions)
            self._state.persist()
            for command in proposed:
                self._expected[command.id] = self._state.progress.step
                self._state.decide(command)
                if verbs.VERBS[command.verb].scope != "edit":  # the change of an edit has the reason itself
                    written = verbs.written(command.verb, verbs.given(command.args), command.node)
                    acted = PolicyActed(name, written, command.reason)
                    self._state.happen(acted, proposal.severity, by=AUTHOR + name)

    def _proposed(self, name: PolicyName, proposal: Proposal, number: int) -> Proposed:
        """`number`: of the commands that the policy has sent before. An id has one outcome, so each has its own."""
        plan = self._state.settings.plan_version
        id = str(uuid.uuid5(_NAMESPACE, f"{self._state.run} {name} {number} {plan} {proposal.command}"))
        return Proposed(id, proposal.verb, proposal.args, AUTHOR + name, proposal.node, plan, proposal.reason)

    def _is_new_advice(self, name: PolicyName, proposal: Proposal) -> bool:
        """Keep that a command is advised: once for each plan version, verb and node, even if the arguments differ; or
        as often as the policy waits."""
        kept = self._kept(name)
        advised = f"{self._state.settings.plan_version} {proposal.verb} {proposal.node or ''}"
        if kept.advised == advised and not proposal.quiet:
            return False
        self._keep(name, advised=advised, memory={**kept.memory, **proposal.quiet})
        self._state.persist()
        return True

    # ------------------------------------------------------------ what is kept

    def _facts(self, occasion: Occasion | None) -> RunFacts:
        state = self._state
        return RunFacts(state.config, state.durable, state.progress.step, occasion, self.curve)

    def _kept(self, name: PolicyName) -> PolicyState:
        return self._state.durable.policies.get(name, _NEW)

    def _keep(self, name: PolicyName, **changes: object) -> None:
        """The next decision that journals the durable state journals this."""
        self._memories.pop(name, None)
        kept = msgspec.structs.replace(self._kept(name), **changes)
        self._state.keep(policies={**self._state.durable.policies, name: kept})
