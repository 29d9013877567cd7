"""Proposals of policies in the conductor: each gets facts, and its proposal is sent, advised or ignored."""

import uuid

import msgspec

from trainctl.node_agent.autopilot.policy import Occasion, Proposal, RunFacts, mode_of
from trainctl.node_agent.autopilot.registry import REGISTRY
from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.conductor.state import ConductorState
from trainctl.node_agent.planning.durable import PolicyState
from trainctl.protocol.config.policies import AUTHOR, POLICIES, PolicyMode, PolicyName
from trainctl.protocol.messages import events as e
from trainctl.protocol.messages import verbs

_NAMESPACE = uuid.UUID("9f0b9ab4-3c0e-4d5f-8a55-0d6b3a9d9c11")
"""Namespace of the ids of proposed commands."""


class Proposals:
    """Asks the policies, and keeps their modes and memories with the conductor's state."""

    def __init__(self, state: ConductorState) -> None:
        self._state = state

    def mode(self, name: PolicyName) -> PolicyMode:
        return mode_of(self._state.config, self._state.durable, name)

    def is_pending(self, name: PolicyName) -> bool:
        """Whether a policy that isn't off may still have something to decide."""
        return self.mode(name) != "off" and not REGISTRY[name].is_over(self._facts(None))

    def ask(self, occasion: Occasion) -> None:
        """Whatever the policies propose now, one after another: each sees what those before it changed."""
        for name, policy in REGISTRY.items():
            mode, kept = self.mode(name), self._state.durable.policies.get(name, PolicyState())
            if mode == "off":
                continue
            memory = dict(kept.memory)
            proposal = policy.propose(self._facts(occasion), memory)
            if memory != kept.memory:
                self._keep(name, memory=memory)
            if proposal is not None:
                self._do(name, proposal) if mode == "on" else self._advise(name, proposal)

    def set_mode(self, command: d.Commanded, args: verbs.Autopilot) -> None:
        """At once, whatever the run is doing: no plan depends on it. Done again it changes nothing."""
        before, step = self.mode(args.name), self._state.progress.step
        self._keep(args.name, mode=args.mode)
        self._state.persist()
        made = e.PolicyModeChanged(args.name, before, args.mode)
        self._state.end(command.id, "applied", step, made=made)

    def yield_to(self, command: d.Commanded) -> None:
        """A person decides what a policy would have decided: from here on it only advises."""
        if command.by.startswith(AUTHOR):
            return
        for name, entry in POLICIES.items():
            if command.verb in entry.yields_to and self.mode(name) == "on" and self.is_pending(name):
                self._keep(name, mode="advise")
                self._state.persist()
                cause = f"{command.by or 'somebody'} sent {command.verb}"
                change = e.PolicyModeChanged(name, "on", "advise", cause)
                self._state.happen(change, by=AUTHOR + name, verb="autopilot")

    # ------------------------------------------------------------ proposals

    def _do(self, name: PolicyName, proposal: Proposal) -> None:
        by = AUTHOR + name
        if proposal.edit is not None:
            self._state.persist(settings=proposal.edit.settings)
            change = d.caused(proposal.edit.change, proposal.reason)
            self._state.happen(change, proposal.severity, by=by, verb=proposal.verb)
            return
        plan, command = self._state.settings.plan_version, self._written(proposal)
        id = str(uuid.uuid5(_NAMESPACE, f"{self._state.run} {name} {plan} {command}"))
        self._state.decide(
            d.Proposed(id, proposal.verb, proposal.args, by, proposal.node, plan, proposal.reason)
        )  # fmt: skip

    def _advise(self, name: PolicyName, proposal: Proposal) -> None:
        """Once for each plan version."""
        command = self._written(proposal)
        advised, kept = f"{self._state.settings.plan_version} {command}", self._state.durable.policies.get(name)
        if kept is not None and kept.advised == advised:
            return
        self._keep(name, advised=advised)
        self._state.persist()
        self._state.happen(e.PolicyAdvised(name, command, proposal.reason), proposal.severity, by=AUTHOR + name)

    @staticmethod
    def _written(proposal: Proposal) -> str:
        return verbs.written(proposal.verb, verbs.given(proposal.args), proposal.node)

    # ------------------------------------------------------------ what is kept

    def _facts(self, occasion: Occasion | None) -> RunFacts:
        state = self._state
        return RunFacts(state.config, state.durable, state.progress.step, occasion)

    def _keep(self, name: PolicyName, **changes: object) -> None:
        """The next decision that journals the durable state journals this."""
        policies = self._state.durable.policies
        kept = msgspec.structs.replace(policies.get(name, PolicyState()), **changes)
        self._state.keep(policies={**policies, name: kept})
