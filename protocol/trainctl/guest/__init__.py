"""Any training loop on the screen and under control: attach it, call `step()` once a step, and close it.

    from trainctl import guest

    run = guest.attach("ppo", optimizer=opt, checkpoint=save)
    for batch in data:
        ...
        if run.step(loss=loss, kl=kl):
            break  # a stop was ordered
    run.close()

This package imports the standard library only, on Python 3.10 or newer. It never raises into the loop and never waits
for an agent.
"""

from trainctl.guest.run import Run, attach

__all__ = ["Run", "attach"]
