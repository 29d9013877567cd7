"""How fast a run is and how long it still takes, from its view and its last step: pure."""

import math

from trainctl.protocol import messages as m

_UNDER_WAY = ("starting", "running")


def run_rates(view: m.RunView, last: m.StepCommitted | None, step_seconds: float | None = None) -> m.RunRates:
    """What is known of it. `step_seconds`: what a step takes lately, by default what the last one took. The time left
    is the lead's own estimate, which its steps carry (eta.py); without one, as of a guest, it is the steps left times
    the seconds of one."""
    seconds = _positive(step_seconds if step_seconds is not None else last.step_seconds if last is not None else None)
    samples = view.global_batch if view.global_batch is not None else last.samples if last is not None else None
    step = last.step if last is not None else view.step
    left = max(view.steps - step, 0) if view.steps is not None else None
    per_sample = _ratio(seconds, samples)
    measured = last.values if last is not None and view.state in _UNDER_WAY else {}
    simple = _times(left, seconds) if view.state in _UNDER_WAY else None
    return m.RunRates(
        unit=view.rate_unit, average_per_second=_average(view, last), steps_per_second=_ratio(1.0, seconds),
        samples_per_second=_ratio(samples, seconds), seconds_per_sample=per_sample,
        seconds_per_epoch=_times(view.samples or None, per_sample),
        epochs_left=_ratio(_times(left, samples), view.samples),
        seconds_left=measured.get("time_left_seconds", simple),
        seconds_left_best=measured.get("time_left_best_seconds"),
        seconds_left_worst=measured.get("time_left_worst_seconds"),
    )  # fmt: skip


def _average(view: m.RunView, last: m.StepCommitted | None) -> float | None:
    """Of all steps that stand, by their own seconds."""
    if last is None:
        return None
    in_tokens = view.rate_metric == "tokens_per_second"
    if (last.tokens if in_tokens else last.weight) is None:
        return None  # its steps don't say
    whole = last.tokens_total if in_tokens else last.weight_total
    return _ratio(whole, last.seconds_total)


def _positive(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) and value > 0 else None


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _times(one: float | None, other: float | None) -> float | None:
    return one * other if one is not None and other is not None else None
