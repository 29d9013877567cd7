"""Commands on their whole way through db, journal, conductor and record: kills anywhere apply none twice, lose none."""

import random
import shutil
import tempfile
import uuid
from contextlib import closing
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.node_agent.support.journaled import JournaledAgent
from tests.tiers import scale

from trainctl.protocol import messages as m

KILLS = scale("command kills")
VERBS: tuple[tuple[str, dict[str, object]], ...] = (
    ("set-lr", {"value": 0.0}), ("set-lr", {"value": 0.0}), ("resize-batch", {"micro": 2}),
    ("resize-batch", {"micro": 3}), ("note", {"text": ""}), ("pause", {}), ("resume", {}), ("evaluate", {}),
    ("checkpoint", {}), ("set-lr", {"value": -1.0}), ("unheard-of", {}),
    ("autopilot", {"name": "out-of-memory", "mode": "off"}), ("autopilot", {"name": "out-of-memory", "mode": "on"}),
)  # fmt: skip
EDITS = ("set-lr", "resize-batch")


def in_memory() -> Path:
    """A folder that no disk makes slow, where there is one: nothing here is about power cuts."""
    return Path(tempfile.mkdtemp(prefix="trainctl-once-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))


class Sent:
    """The commands that one client has given an agent, and what must hold of it whatever happens to that agent."""

    def __init__(self, agent: JournaledAgent) -> None:
        self.agent, self.commands = agent, dict[str, m.Command]()
        self.finals: dict[str, m.CommandReply] = {}

    def command(self, verb: str, ttl: float = 600.0, if_plan: int | None = None, **args: object) -> m.Command:
        """A new one; its number is in what it asks for, so that no two are alike."""
        number = len(self.commands) + 1
        args = {**args, **({"value": 1e-3 + number * 1e-7} if args.get("value") == 0.0 else {})}
        args = {**args, **({"text": f"note {number}"} if "text" in args else {})}
        made = m.Command(
            rid="r", id=str(uuid.uuid4()), verb=verb, args=args, by="anna", ttl_seconds=ttl, if_plan=if_plan
        )
        self.commands[made.id] = made
        self.send(made)
        return made

    def send(self, command: m.Command) -> None:
        for reply in self.agent.take(command):
            assert reply.state != "conflict"
            self._keep(reply)  # even of another command, which this one has ended

    def send_another_body(self, command: m.Command) -> None:
        before = self.agent.db.find(command.id)
        other = msgspec.structs.replace(command, args={**command.args, "other": command.args.get("other", 0) + 1})
        replies = self.agent.take(other)
        if before is not None:
            assert [(reply.id, reply.state, reply.field) for reply in replies] == [(command.id, "conflict", "id")]
        else:  # it was killed before it had journaled the first, so that this is the first
            self.commands[other.id] = other

    def _keep(self, reply: m.CommandReply) -> None:
        if reply.state in m.FINAL_COMMAND_STATES:
            final = msgspec.structs.replace(reply, rid="")
            assert self.finals.setdefault(reply.id, final) == final, "another outcome than before"

    def finish(self) -> None:
        """No more kills: whatever was asked is asked again, ends, and has taken effect once or not at all."""
        agent = self.agent
        agent.life.left = None
        for command in self.commands.values():
            self.send(command)
        agent.until(lambda: not agent.db.open_commands())
        for command in self.commands.values():
            self.send(command)
        assert self.finals.keys() == self.commands.keys()
        self.check()

    def check(self) -> None:
        agent, notes = self.agent, self.agent.notes()
        assert len(notes) == len(set(notes)), f"a note was made twice: {notes}"
        for id, reply in self.finals.items():
            command, planned = self.commands[id], agent.planned_steps(id)
            if command.verb == "note" and reply.state == "applied":
                assert command.args["text"] in notes
            if reply.state != "applied":
                assert not planned, f"{command.verb} was {reply.state}, and is in the plan of {planned}"
            elif command.verb in EDITS:
                assert planned == {reply.step}, f"{command.verb} applied at {reply.step}, in the plans of {planned}"
        edits = [
            id for id, reply in self.finals.items() if reply.state == "applied" and self.commands[id].verb in EDITS
        ]
        versions = {self.finals[id].plan_version for id in edits}
        assert agent.session.conductor.durable.settings.plan_version == max(versions | {1})  # type: ignore[type-var]
        lr = [id for id in edits if self.commands[id].verb == "set-lr"]
        assert len({self.finals[id].plan_version for id in lr}) == len(lr), "two edits made one version"


class Asking(RuleBasedStateMachine):
    """A client that asks, and asks again, of agents that are killed."""

    @initialize(ranks=st.integers(1, 2), seed=st.integers(0, 2**16))
    def begin(self, ranks: int, seed: int) -> None:
        self.folder = in_memory()
        self.sent = Sent(JournaledAgent(self.folder, ranks, seed))

    @rule(verb=st.sampled_from(VERBS), ttl=st.sampled_from((600.0, 600.0, 1e-6)), strides=st.integers(0, 6))
    def ask(self, verb, ttl, strides):
        self.sent.command(verb[0], ttl, **verb[1])
        self.sent.agent.go_on(strides)

    @rule(verb=st.sampled_from(VERBS), moments=st.integers(0, 40))
    def ask_and_be_killed(self, verb, moments):
        self.sent.agent.doom(moments)
        self.sent.command(verb[0], **verb[1])

    @precondition(lambda self: self.sent.commands)
    @rule(data=st.data())
    def ask_again(self, data):
        self.sent.send(self._one(data))

    @precondition(lambda self: self.sent.commands)
    @rule(data=st.data())
    def ask_for_something_else(self, data):
        self.sent.send_another_body(self._one(data))

    @rule(strides=st.integers(1, 60))
    def go_on(self, strides):
        self.sent.agent.go_on(strides)

    @rule(moments=st.integers(0, 60), strides=st.integers(1, 40))
    def go_on_and_be_killed(self, moments, strides):
        self.sent.agent.doom(moments)
        self.sent.agent.go_on(strides)

    @rule()
    def kill(self):
        self.sent.agent.kill()

    @invariant()
    def one_outcome(self):
        if hasattr(self, "sent"):
            for id, final in self.sent.finals.items():
                assert self.sent.agent.row(id).reply("") == final

    def _one(self, data) -> m.Command:
        return data.draw(st.sampled_from(list(self.sent.commands.values())))

    def teardown(self):
        if hasattr(self, "sent"):
            try:
                self.sent.finish()
            finally:
                self.sent.agent.close()
                shutil.rmtree(self.folder)


TestAsking = Asking.TestCase
TestAsking.settings = settings(
    max_examples=max(6, KILLS // 4), stateful_step_count=25, deadline=None, phases=(Phase.explicit, Phase.generate)
)


def test_killed_between_journal_and_apply_nothing_is_applied_twice_or_stuck():
    """Each kill strikes a command that is in the db and has no outcome yet."""
    chance, seed, struck = random.Random(5), 0, 0
    while struck < KILLS:
        seed += 1
        folder = in_memory()
        sent = Sent(JournaledAgent(folder, chance.choice((1, 2)), seed))
        sent.agent.until(lambda agent=sent.agent: agent.step() >= 1)
        if seed % 2:  # commands to a paused run are applied when the plan that holds them is journaled
            sent.command("pause")
            sent.agent.go_on(60)
        for _ in range(8):
            verb, args = chance.choice(VERBS)
            before = sent.agent.kills
            sent.agent.doom(chance.randrange(2, 30))  # the first two are around its journaling
            command = sent.command(verb, **args)
            for _ in range(60):
                row = sent.agent.db.find(command.id)
                if sent.agent.kills > before or row is None or not row.is_open:
                    break
                sent.agent.stride()
            row = sent.agent.db.find(command.id)
            struck += sent.agent.kills > before and row is not None
            sent.agent.life.left = None
        sent.finish()
        sent.agent.close()
        shutil.rmtree(folder)


@pytest.mark.parametrize("moments", range(0, 40, 3))
def test_ranks_are_probed_before_their_first_step_wherever_the_agent_was_killed(moments):
    """Ranks refuse a step before a probe."""
    folder = in_memory()
    with closing(JournaledAgent(folder, 2, moments)) as agent:
        agent.doom(moments)
        agent.until(lambda: agent.kills)
        agent.until(lambda: agent.step() >= 1)
        assert agent.session.conductor.durable.probed == (0, 1)
    shutil.rmtree(folder)
