"""Runs of the simulation with commands and faults by chance, and what must hold at the end of each."""

import random

from tests.node_agent.support.simulated_ranks import RUN
from tests.node_agent.support.simulation import Simulation, check_ledger, config, durable

from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.conductor.deadlines import JOINS
from trainctl.node_agent.conductor.group import FAILURES

COMMANDS: tuple[tuple[str, dict], ...] = (
    ("resize-batch", {"micro": 1}), ("resize-batch", {"micro": 3}), ("resize-batch", {"micro": 9}),
    ("set-lr", {"value": 1e-4}), ("set-lr", {"value": 2e-4, "schedule": "set"}),
    ("set-global-batch", {"value": 6}), ("set-global-batch", {"value": 24, "schedule": "scale"}),
    ("set-global-batch", {"value": 3}), ("checkpoint", {}), ("evaluate", {}), ("pause", {}), ("resume", {}),
    ("sample", {"prompt": "x"}), ("profile", {"steps": 2}), ("profile", {"steps": 1, "nodes": ["b"]}),
    ("resume", {}), ("note", {"text": "here"}), ("rebalance", {"auto": True}), ("rebalance", {"shares": {"a": 3}}),
    ("rebalance", {"shares": {"b": "50%"}}), ("rebalance", {"shares": {"a": 8, "b": 4}}),
    ("rebalance", {"shares": {"d": "12.5%"}}), ("drain", {"node": "a"}), ("drain", {"node": "b"}),
    ("drain", {"node": "c"}), ("admit", {"node": "a"}), ("admit", {"node": "b"}), ("admit", {"node": "c"}),
    ("admit", {"node": "b"}), ("defragment", {}), ("defragment", {"node": "b"}),
    ("rollback", {"steps": 1}), ("rollback", {"steps": 3, "skip_batches": 2}), ("rollback", {"step": 5}),
    ("autopilot", {"name": "first-shares", "mode": "off"}),
    ("autopilot", {"name": "out-of-memory", "mode": "advise"}), ("autopilot", {"name": "out-of-memory", "mode": "on"}),
)  # fmt: skip
ENDINGS: tuple[tuple[str, dict], ...] = (("stop", {}), ("stop", {"checkpoint": False}))


def simulation(nodes: int, seed: int, steps: int = 25) -> Simulation:
    """A run of 1 to 4 nodes with all that a run file may want beside training; the data of every fourth grow."""
    grows = seed % 4 == 1
    tables = {
        "run": {"name": RUN, "steps": steps, "load_seconds": 20.0},
        "data": {"path": "/data.jsonl", "kind": "rows", "growing": grows},
        "evaluate": {"every_steps": 4},
        "checkpoint": {"every_steps": 5, "at_end": seed % 2 == 0, "copy_to": "/backup"},
        "samples": {"prompts": ["x"], "every_steps": 6},
        "group": {
            "sync_weights_every": 3, "first_shares": "timed" if seed % 3 == 0 else "even", "hung_seconds": 4.0,
        },
    }  # fmt: skip
    made = Simulation(config(steps, 12, **tables), durable(tuple("abcd"[:nodes]), 12), seed).begin()
    made.world.chunks = 0 if grows else None
    for number, rank in enumerate(made.ranks.values()):
        rank.speed = 100.0 / (1 + number)
        rank.background = seed % 2 == 1
    return made


class Chances:
    """Faults and commands, each as something that one call does to a simulation."""

    def __init__(self, of: Simulation, seed: int) -> None:
        self.simulation, self.random = of, random.Random(seed)

    def _rank(self):
        return self.random.choice(list(self.simulation.ranks.values()))

    def command(self) -> None:
        """Some expire soon, some were computed against a plan that may have moved on."""
        verb, args = self.random.choice(COMMANDS if self.random.random() < 0.995 else ENDINGS)
        version = self.simulation.conductor.durable.settings.plan_version
        self.simulation.command(
            verb, if_plan=version if self.random.random() < 0.1 else None,
            ttl=self.random.choice((0.5, 1e9, 1e9)), **args,
        )  # fmt: skip

    def crash(self) -> None:
        """The agent dies after so many more of its decisions, between any two of them."""
        self.simulation.crash_after = self.random.randrange(6)

    def disconnect(self) -> None:
        self.simulation.disconnect(self._rank(), kept=self.random.randrange(3))

    def reconnect(self) -> None:
        self.simulation.reconnect(self._rank())

    def break_group(self) -> None:
        self.simulation.break_group(self._rank())

    def jump(self) -> None:
        self.simulation.jump(self.random.choice((0.1, 1.0, 12.0, 50.0)))

    def repeat(self) -> None:
        """A message arrives twice."""
        rank = self._rank()
        if rank.connected and rank.up:
            rank.up.appendleft(rank.up[0])

    def kill(self) -> None:
        self.simulation.kill(self._rank())

    def stop(self) -> None:
        self.simulation.stop(self._rank())

    def promote(self) -> None:
        self.simulation.promote(self._rank())

    def shut_down(self) -> None:
        """Some nodes are about to shut down, or none are any more."""
        some = self.random.sample(list(self.simulation.ranks), self.random.randrange(len(self.simulation.ranks) + 1))
        self.simulation.feed(d.Departing(dict.fromkeys(some, "its agent was terminated")))

    def come_back(self) -> None:
        """The node of a rank that left is there again."""
        self.simulation.feed(d.NodeReturned(self._rank().rank))

    def lack(self) -> None:
        self.simulation.lack("" if self.simulation.lacking else "1 of 3 nodes in reach")

    def append(self) -> None:
        """The file grows, or ends."""
        world = self.simulation.world
        if world.chunks is not None and not world.data_ended:
            world.chunks += self.random.randrange(4)
            world.data_ended = self.random.random() < 0.01 and world.chunks > 0

    def starve(self) -> None:
        self.simulation.starve(self._rank())

    def spoil(self) -> None:
        """The next process of a rank holds another model, or the right one again."""
        rank = self._rank()
        rank.next_model = 1.0 - rank.next_model

    def hang(self) -> None:
        """Its heartbeats go on, and it does nothing, for good or until it is thought to hang."""
        rank = self._rank()
        rank.hung = not rank.hung
        self.simulation.faults += int(JOINS) * rank.hung  # as many formations may fail by it until it is known


WEIGHTS = {
    Chances.command: 3.0, Chances.crash: 0.3, Chances.disconnect: 0.4, Chances.reconnect: 3.0,
    Chances.break_group: 0.5, Chances.jump: 1.0, Chances.repeat: 1.0, Chances.kill: 0.15, Chances.stop: 0.1,
    Chances.promote: 0.1, Chances.lack: 0.3, Chances.append: 1.0,
    Chances.shut_down: 0.2, Chances.come_back: 0.6, Chances.hang: 0.1, Chances.starve: 0.05, Chances.spoil: 0.1,
}  # fmt: skip


def walk(seed: int) -> Simulation:
    """One run from its first word to the end of its last rank, with something going wrong in every tenth stride."""
    chance = random.Random(seed)
    run = simulation(chance.choice((1, 2, 3, 3, 4)), seed)
    chances = Chances(run, seed)
    kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
    while (run.ended is None or run.take_up()) and run.strides < 6000:
        if chance.random() < 0.1 and run.choices():
            chance.choices(kinds, weights)[0](chances)
        elif not run.stride():
            _wait(run, chances)
    end(run)
    return run


def walk_to_a_stop(seed: int) -> Simulation:
    """A run one of whose nodes is lost for good on the way, and which is then stopped."""
    chance = random.Random(seed)
    run = simulation(chance.choice((2, 3, 4)), seed)
    chances = Chances(run, seed)
    _go_on(run, chances, chance.randrange(400))
    run.lose(chance.choice(list(run.ranks.values())))
    _go_on(run, chances, chance.randrange(100))
    if run.ended is None:
        verb, args = chance.choice(ENDINGS)
        run.command(verb, **args)
    end(run)
    return run


def _go_on(run: Simulation, chances: Chances, strides: int) -> None:
    kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
    for _ in range(strides):
        if run.ended is None and chances.random.random() < 0.1:
            chances.random.choices(kinds, weights)[0](chances)
        elif run.ended is None:
            run.stride()


def _wait(run: Simulation, chances: Chances) -> None:
    """Nothing moves: only a deadline, a link that comes back or an operator can change that."""
    run.strides += 1
    run.tick(5.0)
    if run.conductor.state == "paused":
        chances.command()
    if run.lacking:
        chances.lack()
    chances.append()
    for rank in run.ranks.values():
        run.reconnect(rank)


def end(run: Simulation) -> None:
    """Drive it to the end without more faults; nothing may be lost, done twice or left without an outcome."""
    run.finish()
    while run.take_up():
        run.finish()
    check_ledger(run)
    run.check_commands()
    run.check_periodic()
    run.check_writes()
    if run.conductor.goes_back and run.journal.rollback is not None:
        return  # a node is lost for good, which only a real agent can do without from the beginning
    if run.ended.state == "failed":  # nobody is left who has the state, or nothing could be formed
        hopeless = "formations failed in a row" in run.ended.reason and run.faults >= FAILURES
        gave_up = (
            "the last rank with the run's state, hung" in run.ended.reason
        )  # time was let pass in which it did nothing
        unlike = run.ended.reason.startswith("probe: ") and len({rank.model for rank in run.ranks.values()}) > 1
        assert run.nobody_left or hopeless or gave_up or unlike, (run.ended.reason, run.faults)
