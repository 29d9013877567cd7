"""The conductor's model test: any order of messages, commands and faults keeps every promise of the plan."""

from tests.node_agent.support import walks
from tests.tiers import scale

from trainctl.node_agent.conductor.validation import BrokenPromiseError

TRANSITIONS = scale("conductor transitions")


def test_a_step_that_is_finished_with_a_new_rank_waits_for_the_comparison_of_models():
    """A walk in which ranks return while another still holds a part of the step."""
    walks.walk(155)


def test_walks_by_chance_keep_every_promise():
    done, seed = 0, 0
    while done < TRANSITIONS:
        try:
            done += walks.walk(seed).strides
        except (AssertionError, BrokenPromiseError) as error:
            raise AssertionError(f"walk {seed}: {error}") from error
        seed += 1


def test_a_run_that_has_lost_a_node_for_good_still_stops():
    for seed in range(max(100, TRANSITIONS // 1000)):
        try:
            walks.walk_to_a_stop(seed)
        except (AssertionError, BrokenPromiseError) as error:
            raise AssertionError(f"walk {seed} to a stop: {error}") from error
