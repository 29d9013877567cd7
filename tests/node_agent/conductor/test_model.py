"""The conductor's model test: any order of messages, commands and faults keeps every promise of the plan."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.node_agent.support import walks
from tests.tiers import scale

TRANSITIONS = scale("conductor transitions")
EXAMPLES = max(10, TRANSITIONS // 2000)  # of the state machine beside them, which shrinks what it finds


def test_a_step_that_is_finished_with_a_new_rank_waits_for_the_comparison_of_models():
    """A walk in which ranks return while another still holds a part of the step."""
    walks.walk(155)


def test_walks_by_chance_keep_every_promise():
    done, seed = 0, 0
    while done < TRANSITIONS:
        try:
            done += walks.walk(seed).strides
        except AssertionError as error:
            raise AssertionError(f"walk {seed}: {error}") from error
        seed += 1


def test_a_run_that_has_lost_a_node_for_good_still_stops():
    for seed in range(max(100, TRANSITIONS // 1000)):
        try:
            walks.walk_to_a_stop(seed)
        except AssertionError as error:
            raise AssertionError(f"walk {seed} to a stop: {error}") from error


class Conducting(RuleBasedStateMachine):
    """A group of ranks, what reaches them and what befalls them."""

    @initialize(nodes=st.integers(1, 4), seed=st.integers(0, 2**16))
    def begin(self, nodes, seed):
        self.run = walks.simulation(nodes, seed, steps=12)
        self.chances = walks.Chances(self.run, seed)

    @precondition(lambda self: self.run.ended is None)
    @rule(strides=st.integers(1, 60))
    def go_on(self, strides):
        self.run.run(strides)

    @precondition(lambda self: self.run.ended is None)
    @rule(command=st.sampled_from(walks.COMMANDS + walks.ENDINGS), ttl=st.sampled_from((0.5, 1e9)))
    def command(self, command, ttl):
        verb, args = command
        self.run.command(verb, ttl=ttl, **args)

    @precondition(lambda self: self.run.ended is None)
    @rule(decisions=st.integers(0, 6))
    def crash(self, decisions):
        self.run.crash_after = decisions

    @precondition(lambda self: self.run.ended is None)
    @rule(rank=st.integers(0, 3), kept=st.integers(0, 2))
    def disconnect(self, rank, kept):
        self.run.disconnect(self.run.ranks[rank % len(self.run.ranks)], kept)

    @precondition(lambda self: self.run.ended is None)
    @rule(rank=st.integers(0, 3))
    def reconnect(self, rank):
        self.run.reconnect(self.run.ranks[rank % len(self.run.ranks)])

    @precondition(lambda self: self.run.ended is None)
    @rule(rank=st.integers(0, 3))
    def break_group(self, rank):
        self.run.break_group(self.run.ranks[rank % len(self.run.ranks)])

    @precondition(lambda self: self.run.ended is None)
    @rule()
    def repeat(self):
        self.chances.repeat()

    @precondition(lambda self: self.run.ended is None)
    @rule(seconds=st.sampled_from((0.1, 12.0, 50.0)))
    def jump(self, seconds):
        self.run.jump(seconds)

    @precondition(lambda self: self.run.ended is not None)
    @rule()
    def look_again(self):
        """A run that is over stays so."""
        self.run.tick(1.0)

    def teardown(self):
        if hasattr(self, "run"):
            walks.end(self.run)


TestConducting = Conducting.TestCase
TestConducting.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
