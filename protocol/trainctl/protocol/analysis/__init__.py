"""Pure analysis of a run's curves: rolling statistics and detectors of spikes, divergence, plateaus and slowdowns,
shared by agent, policies and screens.

`RollingStatistics` describes a window of steps. `SpikeDetector` and `DivergenceDetector` take the committed steps in
order, `PlateauDetector` takes the evaluations. Each can be rebuilt with `replay`. `SlowdownDetector` takes
a rank's durations.
"""
