"""How fast a run is, as pieces of one line: for wide heads, Runs and `trainctl status`."""

from trainctl.protocol import messages as m
from trainctl.protocol.config.objectives import PAIRS, SAMPLES
from trainctl.tui.text import formatting as f
from trainctl.tui.text.figure_names import AVERAGE_RATE, LAST_STEP, Figure
from trainctl.tui.text.styled_line import Line, Piece, clean, line


def pieces(rates: m.RunRates, of: Figure = LAST_STEP) -> list[Line]:
    """The most important first: the average, then what is `of` the last step or of recent ones."""
    average, unit = f.compact(rates.average_per_second), clean(rates.unit)
    samples = samples_of(rates.unit)
    return [
        line(Piece(f"{AVERAGE_RATE.label} ", "label"), Piece(average, "strong"), Piece(f" {unit}", "label")),
        line(Piece(f"{of.label} ", "label"), _few(rates.steps_per_second), Piece(" steps/s", "label")),
        line(_few(rates.samples_per_second), Piece(f" {samples}/s", "label")),
        line(f.seconds(rates.seconds_per_sample), Piece(f" per {samples.removesuffix('s')}", "label")),
        line(f.duration(rates.seconds_per_epoch), Piece(" per epoch", "label")),
        line(f.figure(rates.epochs_left, "{:.2f}"), Piece(" epochs left", "label")),
    ]


def left(rates: m.RunRates) -> Line:
    """`left 1h 42m (1h 36m to 1h 55m)`; nothing of a run that has ended, or whose end isn't known."""
    if rates.seconds_left is None:
        return ()
    span = f.span(rates.seconds_left_best, rates.seconds_left_worst)
    return line(Piece("left ", "label"), f.duration(rates.seconds_left), Piece(f" ({span})" if span else "", "dim"))


def samples_of(unit: str) -> str:
    """What the samples of a run with this unit of its rate are called."""
    return PAIRS if unit == f"{PAIRS}/s" else SAMPLES


def _few(value: float | None) -> str:
    """Two decimals below ten."""
    return f.figure(value, "{:.2f}") if value is None or value < 9.995 else f.compact(value)
