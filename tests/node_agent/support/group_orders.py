"""Simulated groups, and what their ranks are ordered to do, in short words."""

from tests.node_agent.support.simulation import Simulation, config, durable


def group(names: str = "abc", batch: int = 12, steps: int = 20, **tables) -> Simulation:
    return Simulation(config(steps, batch, **tables), durable(tuple(names), batch))


def texts(simulation: Simulation) -> list[str]:
    return [happened.text for happened in simulation.happened]


def rows(simulation: Simulation, step: int) -> dict[int, int]:
    """Samples by rank of the plan that made a step."""
    plan = [plan for plan in simulation.sent_plans if (plan.kind, plan.step) == ("train", step)][-1]
    return {work.rank: sum(piece.count for piece in work.ranges) for work in plan.work}


def tick(simulation: Simulation, seconds: float) -> None:
    """Time passes as for an agent, which looks a few times a second."""
    for _ in range(int(seconds)):
        simulation.tick(1.0)
        simulation.run()


def hang(simulation: Simulation, rank: int) -> None:
    """It says that it is there, and does nothing."""
    simulation.ranks[rank].hung = True


def hang_in_its_part(simulation: Simulation, *ranks: int) -> None:
    """Before they have done their parts of the step in progress."""
    hung = [simulation.ranks[rank] for rank in ranks]
    step = simulation.conductor.progress
    simulation.until(lambda: all(rank.last_step == step.step and not rank.accumulated for rank in hung))
    for rank in ranks:
        hang(simulation, rank)


def go_on(simulation: Simulation, seconds: float = 90.0) -> Simulation:
    """To the end, in seconds as an agent's watch has them."""
    simulation.run()
    while simulation.ended is None and seconds > 0:
        seconds -= 1.0
        simulation.tick(1.0)
        simulation.run()
    return simulation
